"""The memory plan: what will be taken is added up and checked before anything is taken."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from residency.policies.base import Conflict
from residency.policies.errors import CapacityError, ConfigError
from residency.policies.step import IdSpace
from residency.runtime.architecture import Architecture

if TYPE_CHECKING:
    from residency.runtime.offload import Policies

GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in rows (one expert each) and bytes.

    staging_rows: the ring's buffers; decode also reads experts there that the policy declines.
    batch: most sequences that are decoded together. kv_bytes: theirs; where there are several, also
    those of the one that is prefilled before it joins.
    """

    num_slots: int
    group_size: int
    ring: int
    staging_rows: int
    row_bytes: int
    bank_bytes: int
    weight_bytes: int  # all that is not experts
    dequantised_bytes: int  # of weight_bytes: stored quantised, held in the model's dtype
    kv_bytes: int
    workspace_bytes: int  # activations of the longest chunk
    batch: int = 1
    table_bytes: int = 0  # host tables
    mapped_tables: bool = False  # in the checkpoint's files, so that they take no memory

    @property
    def num_rows(self) -> int:
        return self.num_slots + self.staging_rows

    @property
    def pool_bytes(self) -> int:
        return self.num_slots * self.row_bytes

    @property
    def staging_bytes(self) -> int:
        return self.staging_rows * self.row_bytes

    @property
    def device_bytes(self) -> int:
        return (
            self.pool_bytes
            + self.staging_bytes
            + self.weight_bytes
            + self.kv_bytes
            + self.workspace_bytes
        )

    @property
    def _read_table_bytes(self) -> int:
        return 0 if self.mapped_tables else self.table_bytes

    def with_checkpoint_tables(self, device: torch.device) -> MemoryPlan:
        """Tables of a checkpoint stay in its files on the CPU, and where no memory is left."""
        fits = self.bank_bytes + self.table_bytes <= free_host_bytes()
        return replace(self, mapped_tables=device.type != "cuda" or not fits)

    def as_dict(self) -> dict[str, int]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"device_bytes": self.device_bytes}

    def check(self, device: torch.device, *, loaded: bool = False) -> None:
        """Raises CapacityError when host or device memory does not suffice.

        loaded: banks and other weights are there already, only the rest must still fit.
        """
        on_device = self.device_bytes - (self.weight_bytes if loaded else 0)
        host = 0 if loaded else self.bank_bytes + self._read_table_bytes
        host += on_device if device.type == "cpu" else 0
        lower = f"{self.terms()}; lower cache.slots, prefill.ring or model.context"
        lower += ", or decode fewer sequences at once" if self.batch > 1 else ""
        smaller = f"{lower}, or choose a smaller model"
        _require("host", host, free_host_bytes(), smaller)
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            _require("device", on_device, free, f"{lower}; {device_use(device)}")

    def terms(self) -> str:
        """The sum, in words."""
        terms = {
            "banks": self.bank_bytes,
            **({"host tables": self._read_table_bytes} if self.table_bytes else {}),
            f"{self.num_slots} slots": self.pool_bytes,
            "staging": self.staging_bytes,
            "other weights": self.weight_bytes - self.dequantised_bytes,
            "dequantised weights": self.dequantised_bytes,
            "KV cache" if self.batch == 1 else f"KV cache of {self.batch}": self.kv_bytes,
            "workspace": self.workspace_bytes,
        }
        return " + ".join(f"{name} {size / GIB:.2f} GiB" for name, size in terms.items() if size)


def memory_plan(
    architecture: Architecture,
    *,
    num_slots: int,
    groups: int,
    ring: int,
    chunk_tokens: int,
    context: int,
    dequantised_bytes: int,
    batch: int = 1,
) -> MemoryPlan:
    """chunk_tokens: of the longest chunk of a prompt. context: most tokens of a sequence.
    batch: most sequences that are decoded together; each has its own keys and values, and so has
    the one that is prefilled before it joins several.
    dequantised_bytes: of the other weights, those that the checkpoint stores quantised.
    """
    space, element = architecture.space, architecture.dtype.itemsize
    row_bytes, group_size = architecture.layout.row_bytes, -(-space.num_experts // groups)
    return MemoryPlan(
        num_slots=num_slots,
        group_size=group_size,
        ring=ring,
        # Decode reads experts that the policy declines from staging as well.
        staging_rows=max(ring * group_size, most_experts(space, batch)),
        row_bytes=row_bytes,
        bank_bytes=space.num_ids * row_bytes,
        weight_bytes=architecture.num_other_parameters * element,
        dequantised_bytes=dequantised_bytes,
        kv_bytes=architecture.cache_bytes(context) * (1 if batch == 1 else batch + 1),
        workspace_bytes=architecture.workspace_elements(min(chunk_tokens, context)) * element,
        batch=batch,
        table_bytes=sum(table.num_elements for table in architecture.tables) * element,
    )


def most_experts(space: IdSpace, batch: int) -> int:
    """Distinct experts of a layer that a decode step of `batch` sequences can need at once."""
    return min(batch * space.top_k, space.num_experts)


def row_faults(
    space: IdSpace, num_slots: int, groups: int, batch: int = 1, shares: int = 1
) -> Iterator[Conflict]:
    """Why a model of this shape cannot run with so many slots, or be cut into so many groups.

    shares: equal parts of the slots, each of which has to hold a decode step's experts.
    """
    key = (f"cache.slots={num_slots}",)
    if num_slots > space.num_ids:
        reason = (
            f"the model has {space.num_ids} experts ({space.num_layers} layers x "
            f"{space.num_experts}) and cannot fill so many slots"
        )
        yield Conflict(key, reason, "cache.slots=all")
    if 0 < num_slots < (needed := most_experts(space, batch) * shares):
        step = "one decode step" if batch == 1 else f"a decode step of {batch} sequences"
        reason = f"{step} needs {needed // shares} experts in slots at once"
        reason += f", in each of {shares} layers' slots" if shares > 1 else ""
        yield Conflict(key, reason, f"cache.slots={needed}")
    if groups > space.num_experts:
        reason = f"a layer has only {space.num_experts} experts to cut into groups"
        yield Conflict((f"prefill.groups={groups}",), reason, f"prefill.groups={space.num_experts}")


def _require(where: str, needed: int, free: int, how: str) -> None:
    if needed > free:
        raise CapacityError(
            f"{where} memory: {needed / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free ({how})"
        )


def device_use(device: torch.device | None) -> str:
    """Who holds a GPU's memory, in words; nothing of a device that no one else could hold."""
    if device is None or device.type != "cuda":
        return ""
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # it answers nothing any more
        return ""
    own = torch.cuda.memory_reserved(device)
    others = max(0, total - free - own)
    return (
        f"of its {total / GIB:.2f} GiB this process holds {own / GIB:.2f} and other processes and "
        f"CUDA itself {others / GIB:.2f}"
    )


def free_host_bytes() -> int:
    """What the kernel says can be taken without swapping, or physical memory where it is silent."""
    try:
        with open("/proc/meminfo") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_memory(
    architecture: Architecture,
    policies: Policies,
    context: int,
    batch: int = 1,
    dequantised_bytes: int = 0,
) -> MemoryPlan:
    """batch: most sequences that are decoded together.
    dequantised_bytes: of the other weights, those that the checkpoint stores quantised.

    Raises ConfigError for slots or groups that the model cannot use.
    """
    space, prefill = architecture.space, policies.prefill.config
    cache = policies.cache
    num_slots = cache.num_slots(space)
    for fault in row_faults(space, num_slots, prefill.groups, batch, cache.num_shares(space)):
        raise ConfigError(str(fault))
    for fault in cache.shape_faults(space):
        raise ConfigError(str(fault))
    for fault in policies.decode.layer_faults(space.num_layers):
        raise ConfigError(str(fault))
    return memory_plan(
        architecture,
        num_slots=num_slots,
        groups=prefill.groups,
        ring=prefill.ring,
        chunk_tokens=prefill.chunk_tokens,
        context=context,
        batch=batch,
        dequantised_bytes=dequantised_bytes,
    )

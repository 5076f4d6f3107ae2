"""The memory plan: what will be taken is added up and checked before anything is taken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from residency.policies.base import Conflict
from residency.policies.errors import CapacityError, ConfigError
from residency.policies.step import IdSpace
from residency.runtime.architecture import Architecture
from residency.runtime.cache_sizes import capacity_for
from residency.runtime.free_memory import Room, device_use, free_device_bytes, free_host_bytes
from residency.runtime.rules import Call

if TYPE_CHECKING:
    from residency.runtime.offload import Policies

GIB = 1 << 30
CPU = torch.device("cpu")
# Of a GPU: what libraries take when they are first used (their workspaces, one for each stream, and
# the kernels' code), what the driver notes for each node of a captured graph, the buffers of short
# chunks' graphs, and what the allocator's blocks leave unused. Little of it can be computed; half a
# GiB is stated instead. The context itself is there before free memory is asked for.
RESERVE_BYTES = GIB // 2


@dataclass(frozen=True)
class MemoryPlan:
    """Sizes in rows (one expert each) and bytes.

    staging_rows: the ring's buffers; decode also reads experts there that the policy declines.
    batch: most sequences that are decoded together. kv_bytes: theirs; where there are several, also
    those of the one that is prefilled before it joins. snapshot_bytes: of earlier moments of a
    conversation, where a state cannot be cut back to them.
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
    snapshot_bytes: int = 0
    policy_bytes: int = 0  # the cache policy's state, and the maps between experts and slots
    graph_bytes: int = 0  # the captured decode steps' own pool
    reserve_bytes: int = 0  # of a GPU, for its libraries and driver
    pinned: bool = False  # whether banks, and tables that are read, are registered with CUDA

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
            + self.snapshot_bytes
            + self.workspace_bytes
            + self.policy_bytes
            + self.graph_bytes
            + self.reserve_bytes
        )

    @property
    def pinned_bytes(self) -> int:
        """Host memory that no other process can have, and that is never swapped."""
        return self.bank_bytes + self.read_table_bytes if self.pinned else 0

    @property
    def read_table_bytes(self) -> int:
        return 0 if self.mapped_tables else self.table_bytes

    def with_checkpoint_tables(self, device: torch.device) -> MemoryPlan:
        """Tables of a checkpoint stay in its files on the CPU, and where no memory is left."""
        fits = self.bank_bytes + self.table_bytes <= free_host_bytes()
        return replace(self, mapped_tables=device.type != "cuda" or not fits)

    def as_dict(self) -> dict[str, int]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"device_bytes": self.device_bytes, "pinned_bytes": self.pinned_bytes}

    def check(self, device: torch.device, *, loaded: bool = False, held: int = 0) -> None:
        """Raises CapacityError when host or device memory does not suffice.

        loaded: banks and other weights are there already, only the rest must still fit.
        held: bytes where the slots are that will be free by then.
        """
        room = free_room(device).with_freed(held)
        for where, needed, free in self.demands(room, loaded=loaded):
            if needed > free:
                used = device_use(device) if where == "device" else ""
                raise CapacityError(self.shortage(where, needed, free, used))

    def demands(self, room: Room, *, loaded: bool = False) -> Iterator[tuple[str, int, int]]:
        """Where memory is needed, how many bytes, and how many are free."""
        on_device = self.device_bytes - (self.weight_bytes if loaded else 0)
        host = 0 if loaded else self.bank_bytes + self.read_table_bytes
        if room.device is None:
            yield "host", host + on_device, room.host
        else:
            yield "host", host, room.host
            yield "device", on_device, room.device

    def shortage(self, where: str, needed: int, free: int, used: str = "") -> str:
        """One line on memory that does not suffice; the key that may give most comes first.

        used: who holds it, as `device_use` says.
        """
        sizes = {
            "cache.slots": self.pool_bytes,
            "prefill.chunk_tokens": self.workspace_bytes,
            "prefill.ring": self.staging_bytes,
            "model.context": self.kv_bytes,
        }
        *keys, last = sorted(sizes, key=lambda key: -sizes[key])
        lower = f"lower {', '.join(keys)} or {last}"
        lower += ", or decode fewer sequences at once" if self.batch > 1 else ""
        lower += ", or workload.snapshots" if self.snapshot_bytes else ""
        lower += ", or choose a smaller model" if where == "host" else ""
        lower += f"; {used}" if used else ""
        return (
            f"{where} memory: {needed / GIB:.2f} GiB needed, {free / GIB:.2f} GiB free "
            f"({self.terms()}; {lower})"
        )

    def terms(self) -> str:
        """The sum, in words."""
        terms = {
            "banks": self.bank_bytes,
            **({"host tables": self.read_table_bytes} if self.table_bytes else {}),
            f"{self.num_slots} slots": self.pool_bytes,
            "staging": self.staging_bytes,
            "other weights": self.weight_bytes - self.dequantised_bytes,
            "dequantised weights": self.dequantised_bytes,
            "KV cache" if self.batch == 1 else f"KV cache of {self.batch}": self.kv_bytes,
            "snapshots": self.snapshot_bytes,
            "workspace": self.workspace_bytes,
            "policy state": self.policy_bytes,
            "graphs": self.graph_bytes,
            "reserve": self.reserve_bytes,
        }
        return " + ".join(f"{name} {size / GIB:.2f} GiB" for name, size in terms.items() if size)


def free_room(device: torch.device) -> Room:
    """What is free now."""
    return Room(free_host_bytes(), free_device_bytes(device))


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
    snapshots: int = 0,
    state_bytes: int = 0,
    device: torch.device = CPU,
) -> MemoryPlan:
    """chunk_tokens: of the longest chunk of a prompt. context: most tokens of a sequence.
    batch: most sequences that are decoded together; each has its own keys and values, and so has
    the one that is prefilled before it joins several.
    dequantised_bytes: of the other weights, those that the checkpoint stores quantised.
    snapshots: most of them that a conversation keeps.
    state_bytes: of the cache policy. device: a GPU captures graphs, and keeps some memory back.
    """
    space, element = architecture.space, architecture.dtype.itemsize
    steps, on_gpu = architecture.workspace, device.type == "cuda"
    decode_bytes = steps.num_bytes(1, context, batch, on_gpu=on_gpu)
    chunk_bytes = steps.num_bytes(min(chunk_tokens, context), context, on_gpu=on_gpu)
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
        kv_bytes=architecture.cache_bytes(capacity_for(context)) * (1 if batch == 1 else batch + 1),
        workspace_bytes=max(chunk_bytes, decode_bytes),
        batch=batch,
        snapshot_bytes=snapshots * architecture.snapshot_bytes(context),
        table_bytes=sum(table.num_elements for table in architecture.tables) * element,
        policy_bytes=_policy_bytes(space, num_slots, state_bytes),
        graph_bytes=decode_bytes if on_gpu else 0,
        reserve_bytes=RESERVE_BYTES if on_gpu else 0,
        pinned=on_gpu,
    )


def _policy_bytes(space: IdSpace, num_slots: int, state_bytes: int) -> int:
    """The state, and once more as it was in the beginning; two maps of int32; a quota for each
    number of a layer's experts.
    """
    return 2 * state_bytes + 4 * (space.num_ids + 1 + num_slots + 2 * space.num_ids)


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


def plan_memory(
    architecture: Architecture,
    policies: Policies,
    context: int,
    batch: int = 1,
    dequantised_bytes: int = 0,
    *,
    snapshots: int = 0,
    device: torch.device = CPU,
) -> MemoryPlan:
    """batch: most sequences that are decoded together. snapshots: that a conversation keeps.
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
    with Call(cache, "allocate"):
        state_bytes = cache.state_bytes(space)
    return memory_plan(
        architecture,
        num_slots=num_slots,
        groups=prefill.groups,
        ring=prefill.ring,
        chunk_tokens=prefill.chunk_tokens,
        context=context,
        batch=batch,
        dequantised_bytes=dequantised_bytes,
        snapshots=snapshots,
        state_bytes=state_bytes,
        device=device,
    )

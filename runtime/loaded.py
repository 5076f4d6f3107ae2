"""What is loaded once: a model without experts, its experts in banks, and how they are computed.

Runtimes come and go over it (`Engine.reconfigured`); nothing is read twice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from residency.policies.decode import DecodeTarget
from residency.policies.errors import CapacityError
from residency.runtime.architecture import Architecture
from residency.runtime.capture import reason_against_capture
from residency.runtime.host_experts import HostExperts, open_host_experts
from residency.runtime.host_tables import install
from residency.runtime.loading import Progress
from residency.runtime.pinning import Pinned
from residency.runtime.weights import Weights

if TYPE_CHECKING:
    from residency.runtime.kernels.formats import ExpertShape
    from residency.runtime.replacements.seam import Seam


class Loaded:
    """A model on its device and all its experts on the host, pinned where there is a link.

    notes: lines for a report, where something was not as asked for. load_s: wall clock by part.
    """

    def __init__(
        self,
        architecture: Architecture,
        weights: Weights,
        device: torch.device,
        *,
        kernels: bool,
        allow_pageable: bool,
        progress: Progress | None,
        mapped_tables: bool = False,
        verify_banks: bool = False,
    ) -> None:
        """mapped_tables: leave host tables in the checkpoint's files. verify_banks: remember what
        was loaded, so that it can be verified.

        Raises CheckpointError, or CapacityError when memory cannot be pinned.
        """
        self.architecture = architecture
        self.device = device
        self.notes: list[str] = []
        self.load_s: dict[str, float] = {}
        self.tokenizer = weights.tokenizer()
        with self._timed("model"):
            self.model: PreTrainedModel = weights.model(device)
        self.notes += weights.notes()
        with self._timed("banks"):
            self.banks = weights.banks(device, progress)
        if verify_banks:
            with self._timed("checksums"):
                self.banks.remember()
        with self._timed("tables"):
            self.tables = weights.tables(mapped_tables, progress)
            install(self.model, self.tables)
        self._mapped_tables = bool(self.tables) and mapped_tables
        with self._timed("pin"):
            self._pinned = self._pin(allow_pageable, progress)
        self.capturable = False
        self.takes_masks = True  # whether a batch's rows are told apart by attention masks
        self._fusible = kernels and device.type == "cuda"
        with self.closed_on_failure():
            self.shape = self._kernel_shape() if kernels else None
            self._read_tables_on_device()

    def _read_tables_on_device(self) -> None:
        readable = self._fusible and self._pinned is not None and not self._mapped_tables
        for table in self.tables:
            table.on_device = readable
        if self.tables and self._fusible and not readable:
            self.notes.append(
                "host tables are not pinned, so the host gathers their rows and decode runs "
                "without a graph"
            )

    @cached_property
    def host_experts(self) -> HostExperts:
        """Experts computed in their banks; made when first asked for, since they keep threads."""
        experts = self.model.get_submodule(self.architecture.expert_modules[0])
        made = open_host_experts(self.banks, experts, self.architecture.dtype)
        if made.reason is not None:
            self.notes.append(f"experts on the host are computed by torch: {made.reason}")
        return made

    def host_for(self, target: DecodeTarget) -> HostExperts | None:
        """What computes the experts that `target` leaves to the host; None for plain torch. On the
        CPU all is plain torch, the experts of the host too: equal bit for bit.
        """
        beside = target.computes_on_host(self.architecture.space.num_layers)
        return self.host_experts if beside and self.device.type == "cuda" else None

    def fuse_layers(self, seam: Seam) -> None:
        """Let fused forms stand for the layers around the experts, where they are declared; then
        it is known whether the model's decode step may be captured.
        """
        replaced: list[str] = []
        if self._fusible:
            from residency.runtime.replacements import apply

            replaced = apply(self.model, seam)
        self.takes_masks = not replaced
        self.notes += replaced
        reason = reason_against_capture(self.model, replaced=bool(replaced))
        self.capturable = reason is None and all(table.on_device for table in self.tables)
        if reason is not None and self.shape is not None:
            self.notes.append(f"decode steps are not captured as a graph: {reason}")

    def close(self) -> None:
        """Let go of everything; memory stays pinned until the device is done with it."""
        if self._pinned is not None:
            with suppress(RuntimeError):  # a device that failed is done with it
                torch.cuda.synchronize(self.device)
            self._pinned.release()
        self.__dict__.pop("host_experts", None)
        del self.model, self.banks

    @contextmanager
    def closed_on_failure(self) -> Iterator[None]:
        """Around what is built over it: pages that stay registered cannot be registered again."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.load_s[part] = time.perf_counter() - start

    def _pin(self, allow_pageable: bool, progress: Progress | None) -> Pinned | None:
        if self.device.type != "cuda":
            return None
        try:
            tables = [] if self._mapped_tables else [table.memory for table in self.tables]
            return Pinned([*self.banks.layers, *tables], progress)
        except CapacityError as error:
            if not allow_pageable:
                raise
            self.notes.append(f"banks are pageable, not pinned: {error}")
            return None

    def _kernel_shape(self) -> ExpertShape | None:
        """The kernels' view of an expert, or None to compute in plain torch; says why in notes."""
        if self._pinned is None:
            return None
        from residency.runtime.fused import kernel_shape

        experts = self.model.get_submodule(self.architecture.expert_modules[0])
        shape = kernel_shape(self.architecture.layout, experts)
        if shape is None:
            self.notes.append("experts are computed in plain torch: no kernel for their layout")
        return shape

"""Quotas: the decode target's answer, where the admission of a step reads it."""

from __future__ import annotations

import torch

from residency.policies.decode import DecodeTarget, Quotas
from residency.policies.step import IdSpace
from residency.runtime.rates import WINDOW, KnownRates, Rates, StepTimes
from residency.runtime.rules import Call

ROW_MULTIPLE = 4  # rows of the table are 16 bytes apart or a multiple, as kernels like them


class QuotaTable:
    """How many of a layer's missing experts a step fetches, kept up to date between steps.

    table_LM: int32 [L, M] on the device, M above E; of m missing experts it lets table_LM[l, m] be
    fetched.
    """

    def __init__(
        self,
        target: DecodeTarget,
        space: IdSpace,
        device: torch.device,
        known: KnownRates | None = None,
    ) -> None:
        """known: rates to begin with, of a target that splits; None begins with none."""
        self.target = target
        self.space = space
        self.host_layers = target.host_layers(space.num_layers)
        self._began_known = known is not None and target.splits
        self.rates = Rates(space.num_layers, known if target.splits else None, space.top_k)
        self._most = space.top_k  # experts that a step asks for
        self._steps: list[StepTimes] = []  # not taken in yet
        self._asked_after = 1  # steps
        width = -(-(space.num_experts + 1) // ROW_MULTIPLE) * ROW_MULTIPLE
        everything = torch.arange(width, dtype=torch.int32)
        self._host_LM = everything.repeat(space.num_layers, 1)
        self._host_LM[sorted(self.host_layers)] = 0
        if device.type == "cuda":
            self._host_LM = self._host_LM.pin_memory()
        self.table_LM = self._host_LM.to(device)
        if self._began_known:
            self._ask()

    def of(self, layer: int, num_ids: int) -> torch.Tensor | None:
        """The layer's row, int32 [M], for steps of `num_ids` experts; None: all are fetched."""
        self._most = max(self._most, min(num_ids, self.space.num_experts))
        if self.target.splits or layer in self.host_layers:
            return self.table_LM[layer]
        return None

    def notes(self) -> list[str]:
        """For a report: seconds an expert takes on either side, over the layers' medians."""
        if not self.target.splits:
            return []
        measured = self.rates.measured()
        sides = {"fetched": measured.fetched_beside, "computed": measured.computed_beside}
        each = {name: line.each_s[~line.each_s.isnan()] for name, line in sides.items()}
        told = [f"{s.median() * 1e6:.0f} us {name}" for name, s in each.items() if len(s)]
        if not told:
            return [f"decode={self.target.name}: no step has run on both sides yet"]
        began = "; it began with the machine's profile" if self._began_known else ""
        return [f"decode={self.target.name}, side by side, an expert: {', '.join(told)}{began}"]

    def observe(self, step: StepTimes) -> None:
        """Take in what a step took; the device must be done with it."""
        if not self.target.splits:
            return
        placed = sorted(self.host_layers)
        step.fetched[placed] = step.computed[placed] = 0  # there is nothing to split
        self._steps.append(step)
        due = len(self._steps) >= self._asked_after
        if due or len(self._steps) == WINDOW:
            self.rates.observe(self._steps)
            self._asked_after -= len(self._steps)
            self._steps.clear()
        if due:
            self._ask()

    def _ask(self) -> None:
        call = Call(self.target, "quotas")
        with call:
            quotas = self.target.quotas(self.rates.measured(), self._most)
        self._require_quotas(call, quotas)
        self._asked_after = quotas.steps
        self._host_LM[:, : self._most + 1] = quotas.table_LM
        self._host_LM[sorted(self.host_layers)] = 0
        self.table_LM.copy_(self._host_LM, non_blocking=True)

    def _require_quotas(self, call: Call, quotas: Quotas) -> None:
        call.require(isinstance(quotas, Quotas), f"answers a {type(quotas).__name__}")
        table_LM, shape = quotas.table_LM, (self.space.num_layers, self._most + 1)
        is_table = isinstance(table_LM, torch.Tensor) and table_LM.device.type == "cpu"
        call.require(is_table and table_LM.shape == shape, f"answers no table of {list(shape)}")
        call.require(not table_LM.is_floating_point(), f"answers a table of {table_LM.dtype}")
        most_M = torch.arange(self._most + 1)
        fits = bool(((table_LM >= 0) & (table_LM <= most_M)).all())
        call.require(fits, "answers more experts to fetch than are missing, or fewer than none")
        is_count = isinstance(quotas.steps, int) and quotas.steps >= 1
        call.require(is_count, f"wants to be asked after {quotas.steps} steps")

"""Expert computation in plain torch: the readable definition of the grouped GEMM.

Shapes: T tokens, K experts per token, H hidden. Experts are addressed by row, whether the row is a
slot, a staging place or a place in a bank. A token's experts are summed in ascending expert id, in
the model's dtype, as transformers' eager loop does, so a result depends neither on where an expert
lay nor on the order in which groups of experts arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional

from residency.runtime.layout import RowLayout


class Call(NamedTuple):
    """What transformers hands to an experts implementation, and what a fused layer adds to it.

    residual_TH, where given, is added to the experts' sum.
    """

    module: Any
    x_TH: torch.Tensor
    ids_TK: torch.Tensor  # int64, distinct within a token
    weights_TK: torch.Tensor
    residual_TH: torch.Tensor | None = None


class Work:
    """One call of one experts module: inputs, and a place for each (token, choice) result."""

    def __init__(self, call: Call) -> None:
        self.call = call
        num_tokens, top_k = call.ids_TK.shape
        self.results_TKH = call.x_TH.new_zeros(num_tokens, top_k, call.x_TH.shape[1])

    def to(self, device: torch.device) -> Work:
        """The same work with its inputs on another device."""
        module, *tensors = self.call[:4]
        return Work(Call(module, *(tensor.to(device) for tensor in tensors)))

    def combined(self) -> torch.Tensor:
        """[T, H]: each token's results, summed in ascending expert id."""
        order_TK = self.call.ids_TK.argsort(dim=1)
        sorted_TKH = self.results_TKH.gather(1, order_TK[..., None].expand_as(self.results_TKH))
        out_TH = torch.zeros_like(self.call.x_TH)
        for choice_TH in sorted_TKH.unbind(1):
            out_TH = out_TH + choice_TH
        residual_TH = self.call.residual_TH
        return out_TH if residual_TH is None else residual_TH + out_TH


class PartialSum(Protocol):
    """A call whose experts are computed part by part."""

    def combined(self) -> torch.Tensor:
        """[T, H], when every routed expert has been run."""


class Maths(Protocol):
    """Computes experts by row: in plain torch (ExpertMath), or by kernels of the device."""

    def begin(self, call: Call, slots_E: torch.Tensor | None = None) -> Any:
        """Work in which the routed residents are computed already: before the host knows the
        routes, it is busy with them while the device computes.

        slots_E, int32 [E] on the CPU, tells where residents lie, -1 where absent; None for none.
        """

    def run(self, work: Any, experts: Sequence[int], rows: Sequence[int]) -> None: ...


class ExpertMath:
    """Computes experts that lie in `rows` (uint8 [R, row_bytes]), with the module's own gate."""

    def __init__(self, layout: RowLayout, rows: torch.Tensor) -> None:
        self._views = layout.views(rows)
        self._format = layout.format
        self._suffixes = {name: layout.suffixes(name) for name in ("gate_up_proj", "down_proj")}

    def begin(self, call: Call, slots_E: torch.Tensor | None = None) -> Work:
        work = Work(call)
        if slots_E is not None:
            residents = slots_E.ge(0).nonzero().flatten()
            self.run(work, residents.tolist(), slots_E[residents].tolist())
        return work

    def run(self, work: Work, experts: Sequence[int], rows: Sequence[int]) -> None:
        """Fill the results of every token routed to `experts`, which lie in `rows`."""
        for expert, row in zip(experts, rows, strict=True):
            self._run_one(work, expert, row)

    def _run_one(self, work: Work, expert: int, row: int) -> None:
        # Choice-major order, as in the eager loop: a GEMM's bits may depend on the order of rows.
        call = work.call
        choice, token = torch.where(call.ids_TK.T == expert)
        if len(token) == 0:
            return
        module = call.module
        gate_up = self._linear(module, call.x_TH[token], row, "gate_up_proj")
        y = self._linear(module, module._apply_gate(gate_up), row, "down_proj")
        y = y * call.weights_TK[token, choice, None]
        work.results_TKH[token, choice] = y.to(work.results_TKH.dtype)

    def _linear(self, module: Any, x: torch.Tensor, row: int, name: str) -> torch.Tensor:
        weight = self._matrix(row, name, x.dtype)
        bias = self._views[f"{name}_bias"][row] if module.has_bias else None
        if not module.is_transposed:
            return functional.linear(x, weight, bias)
        y = x @ weight.mT
        return y if bias is None else y + bias

    def _matrix(self, row: int, name: str, dtype: torch.dtype) -> torch.Tensor:
        """[n, k], dequantised where the format has to: one matrix at a time."""
        parts = self._suffixes[name].items()
        stored = {suffix: self._views[part][row] for suffix, part in parts}
        return self._format.dequantise(stored, dtype)

"""The kernels' view of a row: an expert's extent, its format and where its parts begin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from residency.runtime.formats import ExpertFormat
from residency.runtime.kernels.loads import Loads, loads_of
from residency.runtime.layout import RowLayout

GATE_UP, DOWN = "gate_up_proj", "down_proj"


@dataclass(frozen=True)
class ExpertShape:
    """One expert: gate_up [2I, H], down [H, I], and biases [2I] and [H] where the layout has them.

    interleaved: gate and up rows alternate, gate first; else all gate rows come before up's.
    """

    hidden: int
    width: int
    layout: RowLayout
    interleaved: bool = False

    @classmethod
    def of(
        cls,
        hidden: int,
        width: int,
        format: ExpertFormat,
        dtype: torch.dtype = torch.bfloat16,
        *,
        interleaved: bool = False,
        has_bias: bool = False,
        transposed: bool = False,
    ) -> ExpertShape:
        """An expert of these sizes alone. dtype: of the biases; transposed as `RowLayout.of`."""
        matrices = {GATE_UP: (2 * width, hidden), DOWN: (hidden, width)}
        shapes: dict[str, tuple[int, ...]] = {
            name: (k, n) if transposed else (n, k) for name, (n, k) in matrices.items()
        }
        if has_bias:
            shapes |= {f"{name}_bias": (n,) for name, (n, _) in matrices.items()}
        layout = RowLayout.of(shapes, format, dtype, transposed=transposed)
        return cls(hidden, width, layout, interleaved)

    @property
    def format(self) -> ExpertFormat:
        return self.layout.format

    @property
    def loads(self) -> Loads:
        loads = loads_of(self.format)
        assert loads is not None, f"no kernel reads {self.format}"
        return loads

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    @cached_property
    def _offsets(self) -> dict[str, int]:
        return {part.name: part.offset for part in self.layout.parts}

    @property
    def gate_up_offset_bytes(self) -> int:
        return self._offsets[GATE_UP]

    @property
    def down_offset_bytes(self) -> int:
        return self._offsets[DOWN]

    @property
    def has_bias(self) -> bool:
        return f"{GATE_UP}_bias" in self._offsets

    @property
    def bias_bytes(self) -> tuple[int, int]:
        """Offsets of both biases; zero without them."""
        return self._offsets.get(f"{GATE_UP}_bias", 0), self._offsets.get(f"{DOWN}_bias", 0)

    @property
    def gate_step(self) -> int:
        """Rows from one gate row to the next."""
        return 2 if self.interleaved else 1

    @property
    def up_offset(self) -> int:
        """Rows from a gate row to its up row."""
        return 1 if self.interleaved else self.width

    def gate_up(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [..., row_bytes] -> [..., 2I, H]."""
        return self._matrix(rows, GATE_UP, dtype)

    def down(self, rows: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 [..., row_bytes] -> [..., H, I]."""
        return self._matrix(rows, DOWN, dtype)

    def gate_and_up(self, product: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A product of gate_up [..., 2I], the bias of the one row [row_bytes] added, in two."""
        product = product + self._bias(rows, GATE_UP, product)
        if self.interleaved:
            return product[..., ::2], product[..., 1::2]
        gate, up = product.chunk(2, dim=-1)
        return gate, up

    def with_bias(self, product: Tensor, rows: Tensor) -> Tensor:
        """A product of down [..., H], the bias of the one row [row_bytes] added."""
        return product + self._bias(rows, DOWN, product)

    def pack(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """[R, 2I, H], [R, H, I], biases [R, 2I], [R, H] -> uint8 [R, row_bytes]; gaps are zero."""
        rows = gate_up.new_zeros(len(gate_up), self.row_bytes, dtype=torch.uint8)
        views = self.layout.views(rows)
        for name, matrix in ((GATE_UP, gate_up), (DOWN, down)):
            for suffix, stored in self.format.quantise(matrix).items():
                views[self.layout.suffixes(name)[suffix]].copy_(stored)
        for name, bias in ((GATE_UP, gate_up_bias), (DOWN, down_bias)):
            if bias is not None:
                views[f"{name}_bias"].copy_(bias)
        return rows

    def _matrix(self, rows: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        views = self.layout.views(rows.reshape(-1, self.row_bytes))
        stored = {suffix: views[part] for suffix, part in self.layout.suffixes(name).items()}
        matrices = self.format.dequantise(stored, dtype)
        return matrices.reshape(*rows.shape[:-1], *matrices.shape[1:])

    def _bias(self, rows: Tensor, name: str, like: Tensor) -> Tensor:
        if not self.has_bias:
            return like.new_zeros(())
        return self.layout.views(rows.reshape(1, -1))[f"{name}_bias"][0].to(like.dtype)

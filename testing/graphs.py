"""A CUDA graph, emulated on the CPU: what a captured step does when it is replayed.

Capturing notes every operation with the very tensors it read and wrote. A replay runs the same
operations on the same tensors: whatever Python decided or computed while capturing stays as it
was. So a step that reads a Python integer that should have moved on, or that asks the device for
a value, is found without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
NEEDS_HOST = {
    aten._local_scalar_dense: "the value of a tensor",
    aten.is_nonzero: "the value of a tensor",
    aten.equal: "the value of a tensor",
    aten.nonzero: "a shape that depends on values",
    aten.masked_select: "a shape that depends on values",
    aten._unique2: "a shape that depends on values",
    aten.unique_dim: "a shape that depends on values",
    aten.repeat_interleave: "a shape that depends on values",
    aten.lift_fresh: "a tensor made from Python numbers",
}


class NotCapturableError(Exception):
    """An operation that would end a capture, or fix what must not be fixed."""


def _reason(func: Any, args: Any) -> str | None:
    packet = func.overloadpacket
    if func in (aten.repeat_interleave.self_int, aten.repeat_interleave.self_Tensor):
        return None  # a count that Python knows, or one that is split before it gets here
    if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        indices = [i for i in args[1] if i is not None]
        if any(i.dtype in (torch.bool, torch.uint8) for i in indices):
            return "a shape that depends on values"
    return NEEDS_HOST.get(packet)


class Capture(TorchDispatchMode):  # type: ignore[misc]
    """Inside, operations run and are noted; NotCapturableError at one that needs the host."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (reason := _reason(func, args)) is not None:
            raise NotCapturableError(f"{func}: {reason}")
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            again = tree_flatten(func(*args, **kwargs))[0]
            for old, new in zip(tree_flatten(out)[0], again, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

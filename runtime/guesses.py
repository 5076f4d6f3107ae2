"""Guesses of the next MoE layer's routes: its own router, asked before its layer is reached.

The residual stream changes little from one layer to the next, so what the next router says of this
layer's input names many of the experts that it chooses later (speculative loading: Eliseev and
Mazur, arXiv:2312.17238). `benchmarks/router_guess.py` measures how many.

In transformers the routing is a module beside the experts, `gate` or `router`, that returns
(logits, weights, ids); what else it needs it takes from the block that holds both. It is called
alone: the block would compute its shared experts too, in some models before the routes are known.
T tokens, H hidden, K experts per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from residency.policies.errors import CheckpointError

ROUTER_NAMES = ("gate", "router")


class RouterGuess:
    """Asks the router of MoE layer l + 1 about the input of MoE layer l.

    It touches nothing but the routers' parameters: no hooks, counters, slots or replaced routes.
    """

    def __init__(self, model: PreTrainedModel, expert_modules: Sequence[str]) -> None:
        """expert_modules: the experts modules' names, in the order of the MoE layers.

        Raises CheckpointError for a layer behind the first whose router cannot be asked alone.
        """
        self._routers = [_Router(model, name) for name in expert_modules[1:]]

    @torch.inference_mode()
    def guess(self, layer: int, x_TH: Tensor) -> Tensor | None:
        """int64 [T, K]: what the router of MoE layer `layer` + 1 chooses for x_TH; None behind the
        last layer.

        x_TH: the input of layer `layer`'s block, behind its norm. Fixed shapes, no host
        synchronisation.
        """
        return self._routers[layer].ids(x_TH) if layer < len(self._routers) else None


class _Router:
    """The router beside one experts module."""

    def __init__(self, model: PreTrainedModel, experts: str) -> None:
        parent = experts.rpartition(".")[0]
        self._block: Any = model.get_submodule(parent)
        found = [name for name in ROUTER_NAMES if hasattr(self._block, name)]
        if not found:
            raise CheckpointError(f"{parent}: no gate or router there that routes can be asked of")
        self._router: Any = getattr(self._block, found[0])
        self._extra = _required(self._router.forward)[1:]
        missing = [name for name in self._extra if not hasattr(self._block, name)]
        if missing:
            raise CheckpointError(
                f"{parent}.{found[0]}: its routes need {', '.join(missing)}, "
                "so they cannot be asked of it alone"
            )

    def ids(self, x_TH: Tensor) -> Tensor:
        # `forward`, not a call: hooks that collect the routers' logits are to hear of real steps.
        extra = {name: getattr(self._block, name) for name in self._extra}
        ids_TK: Tensor = self._router.forward(x_TH, **extra)[2]
        return ids_TK


def _required(function: Any) -> list[str]:
    """Names of the parameters without a default."""
    parameters = inspect.signature(function).parameters.values()
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in named and p.default is p.empty]

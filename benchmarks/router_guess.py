"""How well a layer's input names the next layer's experts, on real text and trained weights.

python benchmarks/router_guess.py --out FOLDER [OVERRIDE ...]     (default: model=demo device=cpu)

For each MoE layer but the first: the share of a token's experts that the guess names, and of the
distinct experts of a whole chunk how many the guess names (recall), and how many of those named are
routed (precision). Beside each stands the same for as many experts, those most popular in earlier
text: the first half of each text is counted, the second is measured. The texts are this
repository's own pages and modules, in windows of WINDOW tokens, each a prompt of its own.

T tokens of a call, N of a text, C chunks, E experts of a layer, K of a token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from residency.conf import build_engine, compose
from residency.policies.errors import ConfigError, ResidencyError
from residency.runtime.engine import Engine
from residency.runtime.environment import ROOT, environment
from residency.runtime.experts import Call
from residency.runtime.guesses import RouterGuess
from residency.runtime.route_tables import MODEL

TEXTS = {"prose": "docs/*.md", "code": "runtime/*.py"}
CHUNKS = (1, 8, 16, 64, 256)
WINDOW = 1024
WINDOWS = 16  # of a text, counted and measured ones together


class Layer(NamedTuple):
    """What one layer did and was guessed to do, bool [N, E]; how popular its experts were, [E]."""

    routed_NE: Tensor
    guessed_NE: Tensor
    popularity_E: Tensor


class Watch:
    """Notes the routes of every layer and the guesses made one layer before."""

    def __init__(self, engine: Engine) -> None:
        self._space = engine.architecture.space
        self._guesses = RouterGuess(engine.model, engine.architecture.expert_modules)
        self._layer = engine.runtime.layer
        self.clear()
        engine.runtime.layer = self  # type: ignore[method-assign,assignment]

    def clear(self) -> None:
        self.routed: list[list[Tensor]] = [[] for _ in range(self._space.num_layers)]
        self.guessed: list[list[Tensor]] = [[] for _ in range(self._space.num_layers)]

    def __call__(self, layer: int, call: Call) -> Tensor:
        self.routed[layer].append(self._marks(call.ids_TK))
        guess_TK = self._guesses.guess(layer, call.x_TH)
        if guess_TK is not None:
            self.guessed[layer + 1].append(self._marks(guess_TK))
        return self._layer(layer, call)

    def _marks(self, ids_TK: Tensor) -> Tensor:
        return one_hot(ids_TK, self._space.num_experts).sum(1).bool().cpu()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True, help="where result.json goes")
    options.add_argument("--windows", type=int, default=WINDOWS, help="most of a text")
    options.add_argument("overrides", nargs="*", default=["model=demo", "device=cpu"])
    chosen = options.parse_args()
    try:
        result = measured(chosen.overrides, chosen.windows)
    except ResidencyError as error:
        raise SystemExit(f"error: {error}") from error
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")


def measured(overrides: list[str], most_windows: int) -> dict[str, Any]:
    if most_windows < 2:
        raise ConfigError(f"--windows={most_windows}: it must be 2 or more, half of them to count")
    config = compose(overrides)
    if config.model.weights().made_up:
        raise ConfigError(
            f"model={config.model.name}: its weights are made up, so guesses of its routes mean "
            "nothing; take model=demo or model=folder"
        )
    if (routing := config.model.config.routing) != MODEL:
        raise ConfigError(
            f"model.routing={routing}: guesses are of the model's own routes; "
            f"set model.routing={MODEL}"
        )
    with build_engine(config) as engine:
        watch, space = Watch(engine), engine.architecture.space
        texts = [measured_text(engine, watch, name, most_windows) for name in TEXTS]
        return {
            "kind": "router-guess",
            "overrides": overrides,
            "num_experts": space.num_experts,
            "top_k": space.top_k,
            "texts": texts,
            "environment": environment(engine.device),
        }


def measured_text(engine: Engine, watch: Watch, name: str, most_windows: int) -> dict[str, Any]:
    windows = windows_of(engine, TEXTS[name])[:most_windows]
    watch.clear()
    for window in windows:
        engine.generate(window, max_new_tokens=1)
    earlier = len(windows) // 2 * WINDOW
    layers = list(layers_of(watch, earlier))
    return {
        "text": name,
        "files": TEXTS[name],
        "earlier_tokens": earlier,
        "tokens": len(layers[0].routed_NE),
        "chunks": [row_of(layers, size) for size in CHUNKS],
    }


def windows_of(engine: Engine, pattern: str) -> list[list[int]]:
    """Whole windows of the text of all files of a pattern, in order of their names."""
    text = "".join(file.read_text() for file in sorted(ROOT.glob(pattern)))
    ids = engine.tokenizer(text, verbose=False)["input_ids"]
    return [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW + 1, WINDOW)]


def layers_of(watch: Watch, earlier: int) -> Iterator[Layer]:
    for routed, guessed in zip(watch.routed[1:], watch.guessed[1:], strict=True):
        all_NE = torch.cat(routed)
        popularity_E = all_NE[:earlier].sum(0)
        yield Layer(all_NE[earlier:], torch.cat(guessed)[earlier:], popularity_E)


def row_of(layers: list[Layer], size: int) -> dict[str, Any]:
    """Over all chunks of `size` tokens: means over the layers, and the guess's recall by layer."""
    found = [shares_of(layer, size) for layer in layers]
    means = torch.tensor([list(shares.values()) for shares in found]).mean(0).tolist()
    row = {name: round(mean, 4) for name, mean in zip(found[0], means, strict=True)}
    by_layer = [round(shares["recall"], 4) for shares in found]
    return {"tokens": size, **row, "recall_by_layer": by_layer}


def shares_of(layer: Layer, size: int) -> dict[str, float]:
    """Of one layer: distinct experts of a chunk, and how guess and popularity name them."""
    routed_CE = layer.routed_NE.unflatten(0, (-1, size)).any(1)
    guessed_CE = layer.guessed_NE.unflatten(0, (-1, size)).any(1)
    rank_E = layer.popularity_E.argsort(descending=True, stable=True).argsort()
    popular_CE = rank_E < guessed_CE.sum(1, keepdim=True)
    named, routed = guessed_CE.sum().item(), routed_CE.sum().item()
    hits, popular_hits = ((some & routed_CE).sum().item() for some in (guessed_CE, popular_CE))
    return {
        "routed": routed / len(routed_CE),
        "named": named / len(routed_CE),
        "recall": hits / routed,
        "precision": hits / named,
        "popular_recall": popular_hits / routed,
        "popular_precision": popular_hits / named,
    }


if __name__ == "__main__":
    main()

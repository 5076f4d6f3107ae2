"""Measure freetoken on the turns of one of our conversation benchmarks, with made-up weights.

python benchmarks/peers/freetoken_conversation.py MODEL --like OURS/result.json --slots N
    --out FOLDER [--routing model]

From our result.json come the numbers of tokens of each turn (cached, new, answered), the routes
and their seed. A prompt is what the peer has heard and said in this session, cut to as many tokens
as our cache kept, and random new ones. Its own prefix cache finds what it has of that;
`cached_tokens` is what it says it took from there. New tokens are drawn anew for each run of a
turn, so that no run finds those of the one before. The last run answers, the others end with the
first token. Slots are emptied where a session begins, as ours are.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import common
import torch
from freetoken_bench import (
    CONTEXT,
    VOCABULARY,
    add_engine_options,
    expert_cache,
    fill_quickly,
    load,
    title,
)
from table_routes import TableRoutes, install

MODEL = "model"  # routing: its own routers


class Turn(NamedTuple):
    """What is asked of the peer. shift: how far our run's clock is ahead of the positions."""

    session: str
    turn: int  # from 1
    new: int
    cached: int
    answer: int
    shift: int


class Heard(NamedTuple):
    """One run. ids: of the answer; steps_s: from each of its tokens to the next."""

    cached: int
    ttft_s: float
    steps_s: list[float]
    ids: list[int]


def main() -> None:
    options = arguments()
    like = json.loads(options.like.read_text())
    if like["kind"] != "conversation" or like["plan"]["room"] > CONTEXT:
        raise SystemExit(f"{options.like}: no conversations, or longer than {CONTEXT} tokens")
    options.routing = options.routing or like["config"]["model"]["routing"]
    fill_quickly()
    with common.model_folder(options.model, options.layers, options.bfloat16) as folder:
        routes, note = table(folder, options.routing, like["config"]["model"].get("seed", 0))
        if routes is not None:
            install(routes)
        llm = load(folder, options)
        peer = Peer(llm, options, routes)
        peer.say(common.prompt(64, random.Random(options.seed), VOCABULARY), 8)  # compiles
        asked = turns_of(like)
        turns = list(peer.turns(asked))
        pages = llm.config.page_size
    write(options, like, turns, [note, f"prefix cache: {llm.config.cache_type}, pages of {pages}"])


def arguments() -> argparse.Namespace:
    parser = common.base_parser(__doc__)
    add_engine_options(parser)
    parser.add_argument("--like", type=Path, required=True, help="our result.json")
    parser.add_argument("--routing", default="", help="model, even or skewed; empty: our run's")
    return parser.parse_args()


def turns_of(like: Mapping[str, Any]) -> list[Turn]:
    """Those of our result. Our clock runs from where a session begins and never goes back."""
    turns, clock = [], 0
    for entry in like["turns"]:
        if entry["turn"] == 1:
            clock = 0
        new, cached, answer = (entry[f"{what}_tokens"] for what in ("new", "cached", "answer"))
        turns.append(Turn(entry["session"], entry["turn"], new, cached, answer, clock - cached))
        clock += new + entry["schedule"]["decode_steps"]
    return turns


def table(folder: Path, routing: str, seed: int) -> tuple[TableRoutes | None, str]:
    """The table that our run had, and what a report says of it."""
    if routing == MODEL:
        return None, "routing: model (routers are made up too)"
    from residency.policies.step import IdSpace
    from residency.runtime.route_tables import routes_of

    config = json.loads((folder / "config.json").read_text())
    sizes = ("num_hidden_layers", "num_experts", "num_experts_per_tok")
    drawn = routes_of(routing, IdSpace(*(config[name] for name in sizes)), seed)
    assert drawn is not None, "only model has no table"
    return TableRoutes(drawn.table_NLK), drawn.note


class Peer:
    """The engine, and what it is told about each request while that runs."""

    def __init__(self, llm: Any, options: argparse.Namespace, routes: TableRoutes | None) -> None:
        self._llm = llm
        self._options = options
        self._routes = routes
        self._draw = random.Random(options.seed)
        self._slots = expert_cache(llm)
        self._runs = 0
        self._cached = 0
        self._times: list[float] = []
        self._send = llm.send_result
        llm.send_result = self._hear

    def turns(self, asked: list[Turn]) -> Iterator[dict[str, Any]]:
        """Entries of the result, one after another."""
        history: list[int] = []
        for turn in asked:
            if turn.turn == 1:
                history = []
                self._empty_slots()
            if self._routes is not None:
                self._routes.start(turn.shift)
            runs: list[Heard] = []
            count = self._options.warmups + self._options.repeats
            for number in range(1, count + 1):
                prompt = history[: turn.cached] + self._new(turn.new)
                assert len(prompt) == turn.cached + turn.new, "more is cached than was said"
                self._reset_counters()
                runs.append(self.say(prompt, turn.answer if number == count else 1))
            history = (prompt + runs[-1].ids)[: len(prompt) + turn.answer - 1]
            found = entry(turn, runs[self._options.warmups :], self._miss_rate(turn))
            print(
                f"{turn.session}, turn {turn.turn}: {found['new_tokens']} new behind "
                f"{found['cached_tokens']}: TTFT ms {found['ttft_s']['median'] * 1e3:.1f}",
                flush=True,
            )
            yield found

    def _new(self, count: int) -> list[int]:
        """Random tokens, of which the first is none that an earlier run began its own with: by
        chance some would, and find one token more in the prefix cache.
        """
        self._runs += 1
        first = 2 + self._runs % (VOCABULARY - 2)
        return [first, *common.prompt(count - 1, self._draw, VOCABULARY)]

    def say(self, prompt: list[int], answer: int) -> Heard:
        """One request: a second one for the answer would prefill once more, all experts streamed.

        A token counts as there when the engine sends it, on the host, as a server would stream it.
        """
        from freetoken.core import SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self._times = []
        torch.cuda.synchronize()
        start = time.perf_counter()
        (said,) = self._llm.generate([prompt], sampling)
        torch.cuda.synchronize()
        times = self._times
        assert len(times) == answer, f"{len(times)} tokens came, not {answer}"
        steps = [after - before for before, after in pairwise(times)]
        return Heard(self._cached, times[0] - start, steps, said["token_ids"])

    def _hear(self, messages: list[Any]) -> None:
        now = time.perf_counter()
        for message in messages:
            if hasattr(message, "cached_tokens"):  # a prompt was admitted
                self._cached = message.cached_tokens
            elif hasattr(message, "next_token"):
                self._times.append(now)
        self._send(messages)

    @torch.inference_mode()
    def _empty_slots(self) -> None:
        if self._slots is not None:
            self._slots.reset()

    @torch.inference_mode()
    def _reset_counters(self) -> None:
        if self._slots is not None:
            self._slots.reset_stats()

    def _miss_rate(self, turn: Turn) -> float | None:
        """Of the last run's decode steps, as the engine counts them."""
        if self._slots is None or turn.answer == 1:
            return None
        return self._slots.decode_miss_stats()["miss_rate"]


def entry(turn: Turn, runs: list[Heard], miss_rate: float | None) -> dict[str, Any]:
    """One turn of the result. asked: our run's numbers, which cached_tokens may fall short of."""
    last = runs[-1]
    return {
        "session": turn.session,
        "turn": turn.turn,
        "new_tokens": turn.cached + turn.new - last.cached,
        "cached_tokens": last.cached,
        "answer_tokens": turn.answer,
        "asked": {"new_tokens": turn.new, "cached_tokens": turn.cached},
        "ttft_s": common.spread([run.ttft_s for run in runs]),
        "tpot_s": statistics.median(last.steps_s) if last.steps_s else None,
        "decode_s": sum(last.steps_s),
        "decode_miss_rate": miss_rate,
        "runs": [{"seconds": run.ttft_s, "cached_tokens": run.cached} for run in runs],
    }


def write(
    options: argparse.Namespace, like: Mapping[str, Any], turns: list[dict[str, Any]], notes: Any
) -> None:
    fewer = sum(turn["cached_tokens"] < turn["asked"]["cached_tokens"] for turn in turns)
    counted = ("new_tokens", "cached_tokens", "answer_tokens", "decode_s")
    sums = {name: sum(turn[name] for turn in turns) for name in counted}
    common.write(
        options,
        title(options),
        ("freetoken",),
        kind="peer_conversation",
        turns=turns,
        sums={"ttft_s": sum(turn["ttft_s"]["median"] for turn in turns), **sums},
        like={"title": like["title"], "commit": like["environment"].get("commit")},
        notes=[
            "weights: made up",
            *notes,
            f"of {len(turns)} turns, {fewer} found fewer tokens in its prefix cache than ours kept",
            "answers: its own greedy ones, as long as ours, which are recorded",
        ],
    )


if __name__ == "__main__":
    main()

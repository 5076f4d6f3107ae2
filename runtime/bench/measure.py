"""Timed prompts and decodes on an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from residency.runtime.bench.samples import Sample, Samples
from residency.runtime.engine import Engine
from residency.runtime.report import Report

COLD, WARM = "cold", "warm"


@dataclass(frozen=True)
class Plan:
    """What is run. pool: cold, slots are emptied before each prompt, or warm, a decode fills them.

    A decode is decode_tokens steps of `batch` sequences, each behind decode_context tokens.
    """

    lengths: tuple[int, ...]
    decode_tokens: int
    decode_context: int
    batch: int
    repeats: int
    warmups: int
    pool: str
    seed: int

    @property
    def context(self) -> int:
        """Tokens that the longest run needs room for."""
        return max(max(self.lengths) + 1, self.decode_context + 1 + self.decode_tokens)


class RandomPrompts:
    """Token ids drawn from a model's vocabulary, no two prompts alike."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._vocabulary = int(engine.model.config.get_text_config().vocab_size)

    def prompt(self, length: int) -> list[int]:
        ids: list[int] = torch.randint(
            self._vocabulary, (length,), generator=self._generator
        ).tolist()
        return ids


class Meter:
    """Runs a plan's prompts, all of random tokens and no two alike."""

    def __init__(self, engine: Engine, plan: Plan) -> None:
        self.engine = engine
        self.plan = plan
        self._prompts = RandomPrompts(engine, plan.seed)

    def decode(self) -> Samples:
        """Decodes one after another, each in the slots that the one before left.

        Run before long prompts: decode attends over the whole capacity of the sequence.
        """
        runs = [self.decode_once() for _ in range(self.plan.warmups + self.plan.repeats)]
        return Samples(self.plan.decode_tokens, tuple(runs[self.plan.warmups :]), self.plan.batch)

    def prefills(self, told: Callable[[Samples], None]) -> Iterator[Samples]:
        """Prompts of each length, shortest first, each behind what `plan.pool` asks for."""
        before = self.engine.runtime.forget if self.plan.pool == COLD else self.decode_once
        for length in sorted(self.plan.lengths):
            samples = self._prefill(length, before)
            told(samples)
            yield samples

    def resident_prefill(self, length: int) -> Samples:
        """Prompts whose experts are all in slots already."""
        return self._prefill(length, lambda: None)

    def _prefill(self, length: int, before: Callable[[], object]) -> Samples:
        runs = []
        for _ in range(self.plan.warmups + self.plan.repeats):
            before()
            runs.append(Sample.prefill(*timed_prefill(self.engine, self.prompt(length))))
        return Samples(length, tuple(runs[self.plan.warmups :]))

    def decode_once(self) -> Sample:
        """One decode, in the slots as they are."""
        prompts = [self.prompt(self.plan.decode_context) for _ in range(self.plan.batch)]
        new = self.plan.decode_tokens + 1  # the first is prefill's
        return Sample.decode(
            self.engine.generate_batch(prompts, max_new_tokens=new, ignore_eos=True)
        )

    def prompt(self, length: int) -> list[int]:
        return self._prompts.prompt(length)


def timed_prefill(
    engine: Engine, prompt: list[int], *, continued: bool = False
) -> tuple[Report, float | None]:
    """A prompt to its first token, and its time by CUDA events where there are any.

    continued: as `Engine.generate_batch` takes it.
    """
    if engine.device.type != "cuda":
        report = engine.generate(prompt, max_new_tokens=1, ignore_eos=True, continued=continued)
        return report, None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    report = engine.generate(
        prompt,
        max_new_tokens=1,
        ignore_eos=True,
        on_logits=lambda _: end.record(),
        continued=continued,
    )
    end.synchronize()
    return report, begin.elapsed_time(end) / 1e3

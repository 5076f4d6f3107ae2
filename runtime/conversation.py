"""A conversation: token ids whose keys and values are cached, and turns that build on them.

A turn is said as the whole prompt. What it has in common with the cached tokens, from the first
on, is kept; the cache goes back to there, and only the rest is prefilled. So the next message, a
branch from an earlier turn, and a chat template that drops earlier reasoning are all one rule.

Where every layer can be cut, the cache goes back to any token. Where some cannot (recurrent
states, windows that are shorter than the sequence), it goes back to the newest snapshot within the
common part. There are two a turn: behind its prompt, which holds whatever a template or a tokenizer
makes of the answer's text, and behind its answer, where another next message begins. Going back
drops those of the turns that are left.

The newest token of an answer is not in the cache: no step has seen it. Where it is part of the
next prompt it is prefilled with that. At least one token of a prompt is, for its logits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import torch

from residency.runtime.engine import Engine
from residency.runtime.report import Report
from residency.runtime.sampling import Sampling
from residency.runtime.sequence import Sequence
from residency.runtime.snapshots import Snapshot, cut_back


@dataclass(frozen=True)
class Turn:
    """One turn as it was run: the schedule of its steps, and their report.

    cached: tokens that were there before. chunks: lengths of the chunks of the prompt's rest.
    """

    cached: int
    chunks: tuple[int, ...]
    report: Report

    @property
    def new(self) -> int:
        """Tokens that were prefilled."""
        return self.report.prompt_tokens

    @property
    def decode_steps(self) -> int:
        return len(self.report.step_s)


class Conversation:
    """One line of turns on an engine. Another generation there between turns only costs its cache.

    tokens: ids of what is cached, in order.
    """

    def __init__(self, engine: Engine, *, room: int = 0) -> None:
        """room: tokens that the longest turn will have, answer included; 0 for the whole context.
        Keeps as many snapshots as the engine has planned memory for, the newest ones.
        """
        self.engine = engine
        self.room = room or engine.context
        self.tokens: list[int] = []
        self._snapshots: list[Snapshot] = []  # of the tokens above, ascending
        self._sequence: Sequence | None = None
        self._generation = 0  # of the sequence: the one that left the tokens above

    def say(
        self,
        prompt: Ids[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop_tokens: Ids[int] = (),
        ignore_eos: bool = False,
        answer: Ids[int] = (),
        on_text: Callable[[str], None] | None = None,
        on_logits: Callable[[torch.Tensor], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> Turn:
        """Answer `prompt`, all of the conversation so far and the new message as token ids.

        The keys are those of `Engine.generate`. A turn that breaks off leaves nothing cached.
        Raises WorkloadError for a prompt that is empty or, with its answer, longer than the
        context.
        """
        cached = self.go_back(common_prefix(self.tokens, prompt[:-1]))
        rest = list(prompt[cached:])
        try:
            report = self.engine.generate(
                rest,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop_tokens=stop_tokens,
                ignore_eos=ignore_eos,
                answer=answer,
                on_text=on_text,
                on_logits=on_logits,
                on_prefilled=self._keep,
                interrupted=interrupted,
                continued=cached > 0,
                room=self.room,
            )
        except BaseException:
            if self._is_stale():  # it broke off; a refusal comes before any step
                self._forget()
            raise
        self._own_sequence()
        self.tokens = [*prompt, *report.token_ids[: len(report.step_s)]]
        if report.step_s:
            self._keep()
        size = self.engine.policies.prefill.config.chunk_tokens
        chunks = [min(size, len(rest) - begin) for begin in range(0, len(rest), size)]
        return Turn(cached, tuple(chunks), report)

    def go_back(self, num_tokens: int) -> int:
        """Forget all but the first `num_tokens`, or as few more as must be; how many are left."""
        if self._is_stale():
            self._forget()
        sequence = self._sequence
        if num_tokens >= len(self.tokens) or sequence is None:
            return len(self.tokens)
        if sequence.can_cut:
            if num_tokens:
                cut_back(sequence, num_tokens)
            left = num_tokens
        else:
            self._snapshots = [s for s in self._snapshots if s.num_tokens <= num_tokens]
            if self._snapshots:
                self._snapshots[-1].put_back(sequence)
            left = self._snapshots[-1].num_tokens if self._snapshots else 0
        del self.tokens[left:]
        return left

    def _keep(self) -> None:
        """Snapshot what is cached now; the oldest go first."""
        sequence = self.engine.sequence
        assert sequence is not None, "a prompt was prefilled somewhere"
        if self.engine.snapshots and not sequence.can_cut:
            if len(self._snapshots) == self.engine.snapshots:
                del self._snapshots[0]  # first, so that there is never one too many
            self._snapshots.append(Snapshot(sequence))

    def _own_sequence(self) -> None:
        self._sequence = self.engine.sequence
        assert self._sequence is not None, "a generation has ended"
        self._generation = self._sequence.generations

    def _is_stale(self) -> bool:
        """Whether the sequence is gone, or another generation ran in it."""
        sequence = self._sequence
        if sequence is None or sequence is not self.engine.sequence:
            return True
        return sequence.generations != self._generation

    def _forget(self) -> None:
        self.tokens, self._snapshots, self._sequence = [], [], None


def common_prefix(one: Ids[int], other: Ids[int]) -> int:
    """How many of the first tokens are the same in both."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))

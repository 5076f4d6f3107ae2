"""One generation: prompts prefilled in chunks, then decoded side by side, a token each a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from residency.policies.step import Phase
from residency.runtime.profile import DECODE_STEP
from residency.runtime.sampling import Forced, Sampler
from residency.runtime.sequence import Rows


@dataclass
class Continuation:
    """The new tokens of one sequence.

    ttft_s: seconds of prefill, those of earlier prompts included, to its first token. stopped: a
    stop token ended it, not its limit.
    """

    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    stopped: bool = False

    @property
    def done(self) -> bool:
        return self.stopped or len(self.token_ids) >= self.max_new_tokens

    @property
    def finish(self) -> str:
        """stop at a stop token, length at its limit, or interrupted before either."""
        if self.stopped:
            return "stop"
        return "length" if self.done else "interrupted"


@dataclass
class Generation:
    """Prefills and decodes sequences; afterwards holds their tokens and times (seconds).

    continued: the one prompt follows on the tokens that the rows hold.
    on_prefilled: hears that a prompt is in the cache and its first token chosen, before any step.
    interrupted: asked before each step; where it says so, all answers end there.
    """

    rows: Rows
    sampler: Sampler | Forced
    chunk_tokens: int
    stop_tokens: frozenset[int]
    continued: bool = False
    continuations: list[Continuation] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    prefill_s: float = 0.0
    prefill_copy_s: float = 0.0
    decode_copy_s: float = 0.0
    on_logits: Callable[[int, torch.Tensor], None] | None = None  # [V], behind each token
    on_prefilled: Callable[[], None] | None = None
    interrupted: Callable[[], bool] | None = None

    @torch.inference_mode()
    def tokens(
        self, prompts: list[list[int]], max_new_tokens: list[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield (sequence, token) as each is chosen, stop tokens excepted."""
        lanes = self.rows.runtime.lanes
        self.continuations = [Continuation(limit) for limit in max_new_tokens]
        self.rows.clear()
        lanes.take_copy_seconds()
        live: list[int] = []  # by row, the sequence in it
        last: list[int] = []  # by row, its last token
        for index, prompt in enumerate(prompts):
            token = self._prefill(index, prompt)
            if self.on_prefilled is not None:
                self.on_prefilled()
            if not self.continuations[index].stopped:
                yield index, token
            if not self.continuations[index].done:
                self.rows.join()
                live.append(index)
                last.append(token)
        self.prefill_copy_s = lanes.take_copy_seconds()
        profiled = min(DECODE_STEP, max(max_new_tokens) - 2)  # the first token took no step
        while live and not (self.interrupted is not None and self.interrupted()):
            start = time.perf_counter()
            ids_B1 = torch.tensor(last, device=lanes.device)[:, None]
            with self.rows.runtime.profile.step(Phase.DECODE, len(self.step_s) == profiled):
                last = self._chosen(self.rows.decode(ids_B1), live)
            self.step_s.append(time.perf_counter() - start)
            yield from [
                (index, token)
                for index, token in zip(live, last, strict=True)
                if not self.continuations[index].stopped
            ]
            self._leave(live, last)
        self.decode_copy_s = lanes.take_copy_seconds()
        self.rows.finish()

    def _prefill(self, index: int, prompt: list[int]) -> int:
        """The first token of a sequence."""
        start = time.perf_counter()
        if not self.continued:
            self.rows.restart()
        ids_1T = torch.tensor([prompt], device=self.rows.runtime.lanes.device)
        behind = len(prompt)
        for chunk in ids_1T.split(self.chunk_tokens, dim=1):
            behind -= chunk.shape[1]
            newest = behind == 0 and index == len(self.continuations) - 1
            with self.rows.runtime.profile.step(Phase.PREFILL, newest):
                logits_V = self.rows.prefill(chunk, behind)
        (token,) = self._chosen(logits_V[None], [index])
        self.prefill_s += time.perf_counter() - start
        self.continuations[index].ttft_s = self.prefill_s
        return token

    def _chosen(self, logits_BV: torch.Tensor, sequences: list[int]) -> list[int]:
        """The next token of each sequence, noted unless it is a stop token."""
        if self.on_logits is not None:
            for index, logits_V in zip(sequences, logits_BV.clone(), strict=True):
                self.on_logits(index, logits_V)
        tokens: list[int] = self.sampler(logits_BV, sequences).tolist()
        for index, token in zip(sequences, tokens, strict=True):
            if token in self.stop_tokens:
                self.continuations[index].stopped = True
            else:
                self.continuations[index].token_ids.append(token)
        return tokens

    def _leave(self, live: list[int], last: list[int]) -> None:
        """Free the rows of sequences that are done; from behind, so that rows move but once."""
        for row in reversed(range(len(live))):
            if self.continuations[live[row]].done:
                self.rows.leave(row)
                for by_row in (live, last):
                    by_row[row] = by_row[-1]
                    by_row.pop()


def eos_of(model: Any) -> frozenset[int]:
    """The tokens that end a text, by the model's own generation config."""
    eos = model.generation_config.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


class TextStream:
    """Decodes tokens piece by piece, holding back characters that are not complete yet."""

    def __init__(self, tokenizer: Any | None) -> None:
        """tokenizer: None for a model that has none; its text is empty."""
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self.text = ""

    def push(self, token: int) -> str:
        """The text that the next token completes."""
        self._ids.append(token)
        text = self._decoded()
        return "" if text.endswith("�") else self._shown(text)

    def finish(self) -> str:
        """What was held back."""
        return self._shown(self._decoded())

    def _decoded(self) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return text

    def _shown(self, text: str) -> str:
        piece = text[len(self.text) :]
        self.text = text
        return piece


def decoded_texts(
    tokenizer: Any | None,
    tokens: Iterable[tuple[int, int]],
    count: int,
    on_text: Callable[[int, str], None] | None,
) -> list[str]:
    """The texts of `count` sequences, told to `on_text` piece by piece, from (sequence, token)."""
    texts = [TextStream(tokenizer) for _ in range(count)]
    told = on_text or (lambda index, piece: None)
    for index, token in tokens:
        if piece := texts[index].push(token):
            told(index, piece)
    for index, text in enumerate(texts):
        if piece := text.finish():
            told(index, piece)
    return [text.text for text in texts]

"""Prompts: text or token ids in, token ids out, or a clear refusal."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import Any

from residency.policies.errors import CheckpointError, WorkloadError


class PromptReader:
    """Reads prompts for one model. tokenizer: None where the model has none, source names it.

    context: most tokens of a prompt and its answer together.
    """

    def __init__(self, tokenizer: Any | None, source: str, context: int) -> None:
        self.tokenizer = tokenizer
        self.source = source
        self.context = context

    def ids(self, prompt: str | Ids[int], max_new_tokens: int, held: int = 0) -> list[int]:
        """The prompt's token ids. Raises WorkloadError or CheckpointError where it cannot run.

        held: tokens that it follows on.
        """
        if max_new_tokens < 1:
            raise WorkloadError(f"workload.max_new_tokens={max_new_tokens}: it must be at least 1")
        ids = self._read(prompt)
        if not ids:
            raise WorkloadError("the prompt is empty; give at least one token of text")
        if held + len(ids) + max_new_tokens > self.context:
            behind = f" behind the {held} that it continues" if held else ""
            raise WorkloadError(
                f"the prompt has {len(ids)} tokens{behind} and "
                f"workload.max_new_tokens={max_new_tokens} "
                f"asks for more than the context of {self.context} has room for; shorten either"
            )
        return ids

    def _read(self, prompt: str | Ids[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise CheckpointError(
                f"{self.source}: no tokenizer there, so text cannot be read; give token ids"
            )
        ids: list[int] = self.tokenizer(prompt)["input_ids"]
        return ids


def check_number(num_prompts: int, batch: int, *, recording: bool) -> None:
    """Raises WorkloadError for more prompts at once than can be."""
    if num_prompts == 0:
        raise WorkloadError("there is no prompt; give at least one")
    if num_prompts > batch:
        raise WorkloadError(
            f"{num_prompts} prompts at once, and memory was planned for {batch}; give fewer, or "
            "build the engine with a larger batch"
        )
    if num_prompts > 1 and recording:
        raise WorkloadError(
            f"{num_prompts} prompts at once: a recording is of one sequence; record one prompt"
        )

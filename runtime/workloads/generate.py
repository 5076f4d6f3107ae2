"""generate: continue one prompt, or several side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from residency.policies.base import Capability, Conflict, Need
from residency.runtime.engine import Engine
from residency.runtime.report import BatchReport, Report
from residency.runtime.sampling import Sampling
from residency.runtime.workloads.base import Workload

DEFAULT_PROMPT = "ROMEO:\n"


class Generate(Workload):
    """A continuation of each prompt."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """prompt: the text to continue.
        prompts: several texts instead, decoded together, a token of each a step.
        max_new_tokens: decode at most so many tokens of each.
        temperature: 0 is greedy, higher is more varied.
        top_p: draw from the smallest set of tokens with this probability together.
        seed: of the draws.
        stop_tokens: token ids that end a text, beside the model's own.
        ignore_eos: do not stop at the model's own end-of-text tokens.
        """

        prompt: str = DEFAULT_PROMPT
        prompts: list[str] = field(default_factory=list)
        max_new_tokens: int = 128
        temperature: float = 0.7
        top_p: float = 1.0
        seed: int = 0
        stop_tokens: list[int] = field(default_factory=list)
        ignore_eos: bool = False

    needs: ClassVar[tuple[Need, ...]] = (
        Need(
            Capability.READS_TEXT,
            because="its prompt is text, and this model's weights are made up: no tokenizer reads "
            "it and nothing sensible follows; `residency bench` measures such models",
            mend="model=demo",
        ),
    )
    config: Config

    @property
    def sampling(self) -> Sampling:
        c = self.config
        return Sampling(temperature=c.temperature, top_p=c.top_p, seed=c.seed)

    @property
    def prompts(self) -> list[str]:
        """All prompts, one or more."""
        return list(self.config.prompts) or [self.config.prompt]

    @property
    def batch(self) -> int:
        return len(self.prompts)

    def faults(self) -> Iterator[Conflict]:
        yield from self.sampling.faults()
        if self.config.max_new_tokens < 1:
            key, reason = (
                f"workload.max_new_tokens={self.config.max_new_tokens}",
                "it must be at least 1",
            )
            yield Conflict((key,), reason, "workload.max_new_tokens=128")
        if self.config.prompts and self.config.prompt != DEFAULT_PROMPT:
            reason = "one says what the other says; prompt would have no effect"
            yield Conflict(("workload.prompt", "workload.prompts"), reason, "workload.prompts=[]")

    def run(
        self, engine: Engine, told: Callable[[str], None] | None = None
    ) -> Report | BatchReport:
        """Generate on `engine`; `told` gets the text of one prompt piece by piece, and nothing of
        several. Raises WorkloadError.
        """
        config = self.config
        batch = engine.generate_batch(
            self.prompts,
            max_new_tokens=config.max_new_tokens,
            sampling=self.sampling,
            stop_tokens=config.stop_tokens,
            ignore_eos=config.ignore_eos,
            on_text=(lambda _, piece: told(piece)) if told and self.batch == 1 else None,
        )
        return batch if self.batch > 1 else batch.alone()

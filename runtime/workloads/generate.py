"""generate: continue one prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from residency.policies.base import Capability, Conflict, Need
from residency.runtime.engine import Engine
from residency.runtime.report import Report
from residency.runtime.sampling import Sampling
from residency.runtime.workloads.base import Workload


class Generate(Workload):
    """One prompt, one continuation."""

    @dataclass(frozen=True, kw_only=True, slots=True)
    class Config:
        """prompt: the text to continue.
        max_new_tokens: decode at most so many tokens.
        temperature: 0 is greedy, higher is more varied.
        top_p: draw from the smallest set of tokens with this probability together.
        seed: of the draws.
        stop_tokens: token ids that end the text, beside the model's own.
        ignore_eos: do not stop at the model's own end-of-text tokens.
        """

        prompt: str = "ROMEO:\n"
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

    def faults(self) -> Iterator[Conflict]:
        yield from self.sampling.faults()
        if self.config.max_new_tokens < 1:
            key, reason = (
                f"workload.max_new_tokens={self.config.max_new_tokens}",
                "it must be at least 1",
            )
            yield Conflict((key,), reason, "workload.max_new_tokens=128")

    def run(self, engine: Engine, told: Callable[[str], None] | None = None) -> Report:
        """Generate on `engine`; `told` gets the text piece by piece. Raises WorkloadError."""
        return engine.generate(
            self.config.prompt,
            max_new_tokens=self.config.max_new_tokens,
            sampling=self.sampling,
            stop_tokens=self.config.stop_tokens,
            ignore_eos=self.config.ignore_eos,
            on_text=told,
        )

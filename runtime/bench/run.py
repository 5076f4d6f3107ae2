"""Measures one engine: decode, prompts, and the limits of the machine, in one process."""

from __future__ import annotations

from collections.abc import Callable

from residency.runtime.bench.limits import Floor, LinkRate, Resident, link_rate, resident
from residency.runtime.bench.measure import Meter, Plan
from residency.runtime.bench.report import BenchReport, Decode, Point
from residency.runtime.bench.samples import Samples
from residency.runtime.engine import Engine
from residency.runtime.environment import environment

COPY_REPEATS = 5


def measure(engine: Engine, plan: Plan, told: Callable[[str], None]) -> BenchReport:
    """`told` hears a line of each thing measured."""
    runtime_plan, policies = engine.runtime.plan, engine.policies
    link = link_rate(engine, COPY_REPEATS)
    told(f"link: {link.rate.median / 1e9:.1f} GB/s")
    meter = Meter(engine, plan)
    decode = meter.decode()
    each = "token" if plan.batch == 1 else f"step of {plan.batch} sequences"
    told(f"decode: {decode.per_token.median * 1e3:.2f} ms a {each}")
    runtime_notes = engine.runtime.notes()
    prefill = tuple(meter.prefills(lambda samples: told(_line(samples))))
    told("all resident")
    compute = resident(engine, meter)
    judge = Judge(engine, link, compute)
    return BenchReport(
        title=f"cache={policies.cache.name} prefill={policies.prefill.name} "
        f"decode={policies.decode.name}, {runtime_plan.num_slots} slots, {plan.pool} pool",
        made_up=engine.made_up,
        plan=plan,
        prefill=tuple(judge.point(samples) for samples in prefill),
        decode=judge.decode(decode),
        link=link,
        resident=compute,
        whole_stream_s=runtime_plan.bank_bytes / link.rate.median,
        load_s=engine.load_s,
        memory=runtime_plan.as_dict(),
        environment=environment(engine.device),
        notes=[*engine.notes, *runtime_notes],
    )


class Judge:
    """Puts the floor beside each measurement."""

    def __init__(self, engine: Engine, link: LinkRate, compute: Resident) -> None:
        self._engine = engine
        self._rate = link.rate.median
        self._compute = compute
        self._num_layers = engine.architecture.space.num_layers
        plan = engine.runtime.plan
        self._group_s = plan.group_size * plan.row_bytes / self._rate

    def point(self, samples: Samples) -> Point:
        return Point(
            samples, samples.waits, self.floor(samples, self._compute.compute_s(samples.tokens))
        )

    def floor(self, samples: Samples, compute_s: float | None) -> Floor | None:
        """Of prompts whose all-resident time is known."""
        if compute_s is None:
            return None
        link_s = samples.link_bytes / self._rate
        return Floor.of(link_s, compute_s, self._group_s, samples.waits)

    def decode(self, samples: Samples) -> Decode:
        """A decode step always waits for its router."""
        compute_s = self._compute.decode_s
        if compute_s is None or self._engine.policies.decode.computes_on_host(self._num_layers):
            return Decode(samples, None)
        link_s = samples.link_bytes / samples.tokens / self._rate
        return Decode(samples, Floor.of(link_s, compute_s, self._group_s, waits=True))


def _line(samples: Samples) -> str:
    return f"{samples.tokens} tokens: TTFT {samples.seconds.median * 1e3:.1f} ms"

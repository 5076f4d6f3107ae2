"""`residency plan`: the combination to recommend, composed; what fits and what it is to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from residency.conf.commands import model_overrides
from residency.conf.compose import Config, compose
from residency.conf.resources import Asked, Resources
from residency.policies.base import Capability, Conflict
from residency.policies.errors import CapacityError, ConfigError, ResidencyError
from residency.runtime.forecast.advice import (
    Advice,
    DecodeTimes,
    PromptTimes,
    decode_times,
    prompt_times,
    shape_of,
    warnings_of,
)
from residency.runtime.forecast.budget import Cut, Fitted, fit
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.model_routes import routes_of_model
from residency.runtime.forecast.routes import Routes
from residency.runtime.inspection import USUAL_CONTEXT
from residency.runtime.memory import GIB

TARGETS = ("gpu", "hybrid", "cpu")
WORTH_A_HOST = 0.95  # of gpu's time, what another target must stay below to be chosen
LENGTHS = "workload.lengths"


@dataclass(frozen=True)
class Candidate:
    """One combination to compare. config: before its sizes were chosen."""

    overrides: list[str]
    config: Config
    fitted: Fitted


class Planner:
    """One question."""

    def __init__(self, asked: Asked) -> None:
        """Raises ConfigError or CheckpointError for what cannot be planned."""
        self.asked = asked
        self.overrides = [text for word in asked.words for text in model_overrides(word)]
        self.base = compose(self.overrides)
        if Capability.READS_TEXT not in self.base.model.provides and not self._asks("workload"):
            self.overrides.append("workload=bench")  # nothing else takes a model without text
            self.base = compose(self.overrides)
        _refuse(self.base.faults("model", "cache", "prefill", "decode"))
        self.model = self.base.model
        self.architecture = self.model.architecture
        self.resources = Resources(asked, self.base.device, self.architecture)
        self.on_gpu, self.budget = self.resources.on_gpu, self.resources.budget
        self.context = self.model.config.context or min(
            self.architecture.max_context, USUAL_CONTEXT
        )
        self.dequantised_bytes = self.model.weights().dequantised_bytes
        self.routes: Routes = routes_of_model(self.model)

    def advise(self) -> tuple[Advice, Config]:
        """Raises CapacityError where nothing fits, and ConfigError for what conflicts."""
        constants, unknown = self.resources.constants()
        found = self._candidates(1 if constants is None else len(TARGETS))
        times = [self._decode(one, constants) for one in found]
        at = _best(times)
        fitted, config = found[at].fitted, self._final(found[at])
        needs_slots = _keeps(config)
        hit_rate = self._hit_rate(found[at])
        prompts: tuple[PromptTimes, ...] = ()
        if constants is not None:
            prompts = prompt_times(
                config.policies.prefill,
                self.routes,
                shape_of(self.architecture, fitted.memory),
                constants,
                self.context,
                welcome=needs_slots,
            )
        space = self.architecture.space
        cycle = space.num_layers * space.top_k
        return Advice(
            model=self.architecture.source,
            budget=self.budget,
            memory=fitted.memory,
            context=self.context,
            cycle=cycle,
            routes=self.routes.note,
            hit_rate=hit_rate,
            choices=tuple(self._choices(config, fitted, times, at)),
            prompts=prompts,
            decodes=tuple(one for one in times if one is not None),
            sources=() if constants is None else constants.sources,
            exact=constants is not None and constants.exact,
            measured_tokens=0 if constants is None else constants.chunk_s[-1][0],
            unknown=unknown,
            warnings=warnings_of(fitted.memory, cycle, needs_slots),
        ), config

    def _targets(self) -> list[str]:
        """Decode targets to compare: all, unless one was asked for; on the CPU the host itself."""
        if self._asks("decode") or not self.on_gpu:
            return [self.base.policies.decode.name]
        return list(TARGETS)

    def _candidates(self, enough: int) -> list[Candidate]:
        """Of the targets, in order, the first `enough` that fit.

        Raises CapacityError, or ConfigError, of the first target where none does.
        """
        found, reasons = list[Candidate](), list[ResidencyError]()
        for target in self._targets():
            try:
                found.append(self._candidate(target))
            except (CapacityError, ConfigError) as error:
                reasons.append(error)
            if len(found) == enough:
                break
        if not found:
            raise reasons[0]
        return found

    def _candidate(self, target: str) -> Candidate:
        """The combination with this target, and what fits for it.

        Raises CapacityError, and ConfigError where it conflicts with what was asked for.
        """
        own = list(self.overrides)
        if not self._asks("decode"):
            own.append(f"decode={target}")
        config = compose(own if self._asks("prefill") else [*own, "prefill=auto"])
        if not self._asks("prefill"):
            if any(self._faults(config)):  # without slots: the target brings a mode along
                config = compose(own)
            else:
                own.append("prefill=auto")
        _refuse(self._faults(config))
        return Candidate(own, config, self._fitted(config))

    def _fitted(self, config: Config) -> Fitted:
        prefill, cache = config.policies.prefill.config, config.policies.cache
        keeps, space = _keeps(config), self.architecture.space
        return fit(
            self.architecture,
            self.budget,
            context=self.context,
            usual_chunk=prefill.chunk_tokens,
            dequantised_bytes=self.dequantised_bytes,
            cut=Cut(
                prefill.groups if self._asks("prefill.groups") else None,
                prefill.ring if self._asks("prefill.ring") else None,
                prefill.chunk_tokens if self._asks("prefill.chunk_tokens") else None,
            ),
            slots=cache.num_slots(space) if keeps and self._asks_slots(config) else None,
            needs_slots=keeps,
            shares=cache.num_shares(space),
            batch=config.workload.batch,
            snapshots=config.workload.snapshots,
            state_bytes=cache.state_bytes(space),
        )

    def _asks_slots(self, config: Config) -> bool:
        """For a number of them; auto leaves it to the plan."""
        return self._asks("cache.slots") and not config.policies.cache.fills_memory

    def _final(self, candidate: Candidate) -> Config:
        """With the sizes that fit."""
        fitted = candidate.fitted
        sizes = {
            "model.context": self.context,
            "prefill.groups": fitted.groups,
            "prefill.ring": fitted.ring,
            "prefill.chunk_tokens": fitted.chunk_tokens,
        }
        if _keeps(candidate.config) and not self._asks_slots(candidate.config):
            sizes["cache.slots"] = fitted.memory.num_slots
        words = [*candidate.overrides, *(f"{k}={v}" for k, v in sizes.items())]
        final = compose(words)
        if mends := [each.mend for each in final.conflicts() if self._is_ours(each)]:
            final = compose([*words, *mends])
        _refuse(self._faults(final))
        return final

    def _faults(self, config: Config) -> list[Conflict]:
        """But for a device that is not here, and what the plan mends itself."""
        faults = [each for each in config.conflicts() if not self._is_ours(each)]
        return [each for each in faults if not each.concerns(("device",))]

    def _is_ours(self, conflict: Conflict) -> bool:
        """A bench of the usual lengths, for some of which the context has no room."""
        return conflict.keys[0].startswith(LENGTHS) and not self._asks(LENGTHS)

    def _hit_rate(self, candidate: Candidate) -> float:
        keeps = _keeps(candidate.config)
        return self.routes.hit_rate(candidate.fitted.memory.num_slots) if keeps else 0.0

    def _decode(self, candidate: Candidate, constants: Constants | None) -> DecodeTimes | None:
        if constants is None:
            return None
        return decode_times(
            candidate.config.policies.decode,
            self.routes,
            shape_of(self.architecture, candidate.fitted.memory),
            constants,
            self._hit_rate(candidate),
            candidate.config.workload.batch,
        )

    def _choices(
        self, config: Config, fitted: Fitted, times: Sequence[DecodeTimes | None], at: int
    ) -> list[tuple[str, str]]:
        given = "asked for"
        memory, policies = fitted.memory, config.policies
        found = []
        if _keeps(config):
            most = "most that fit beside the rest"
            every = "every expert fits" if self._share(fitted) == 1 else most
            reason = given if self._asks_slots(config) else every
            found.append((f"cache.slots={memory.num_slots}", reason))
        decode = given if self._asks("decode") else _why(times, at, self.on_gpu)
        found.append((f"decode={policies.decode.name}", decode))
        why = "chooses for each chunk by measured costs"
        if not _keeps(config):
            why = "without slots every layer is streamed"
        found.append((f"prefill={policies.prefill.name}", given if self._asks("prefill") else why))
        staging = f"staging {memory.staging_bytes / GIB:.2f} GiB"
        found.append((f"prefill.groups={fitted.groups} prefill.ring={fitted.ring}", staging))
        workspace = f"workspace {memory.workspace_bytes / GIB:.2f} GiB"
        found.append((f"prefill.chunk_tokens={fitted.chunk_tokens}", workspace))
        context = given if self.model.config.context else "usual; more takes slots"
        found.append((f"model.context={self.context}", context))
        return found

    def _share(self, fitted: Fitted) -> float:
        return fitted.memory.num_slots / self.architecture.space.num_ids

    def _asks(self, key: str) -> bool:
        """Whether overrides say this group or key."""
        return any(text.lstrip("+").partition("=")[0] == key for text in self.overrides)


def _keeps(config: Config) -> bool:
    """Whether experts stay in slots."""
    return Capability.RETAINS in config.policies.cache.provides


def _best(times: Sequence[DecodeTimes | None]) -> int:
    """The target to recommend: the first, unless another is clearly faster."""
    at = 0
    for index, one in enumerate(times):
        best = times[at]
        if one is None or one.estimated is None or best is None or best.estimated is None:
            continue
        if one.estimated.seconds < WORTH_A_HOST * best.estimated.seconds:
            at = index
    return at


def _why(times: Sequence[DecodeTimes | None], at: int, on_gpu: bool) -> str:
    if not on_gpu:
        return "the device is the host itself"
    told = [
        f"{one.target} {one.estimated.seconds * 1e3:.2f} ms"
        for one in times
        if one is not None and one.estimated is not None
    ]
    if not told:
        return "nothing is measured that would speak for another"
    unknown = [f"{one.target}: {one.why_not}" for one in times if one is not None and one.why_not]
    return "; ".join([f"predicted: {', '.join(told)} a token", *unknown])


def _refuse(faults: Any) -> None:
    for conflict in faults:
        raise ConfigError(str(conflict))

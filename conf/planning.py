"""`residency plan`: the combination to recommend, composed; what fits and what it is to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from residency.conf.commands import model_overrides
from residency.conf.compose import Config, compose
from residency.policies.base import Capability, Conflict
from residency.policies.errors import CapacityError, ConfigError
from residency.runtime.environment import environment
from residency.runtime.forecast.advice import (
    Advice,
    DecodeTimes,
    decode_times,
    prompt_times,
    shape_of,
    warnings_of,
)
from residency.runtime.forecast.budget import Budget, Cut, Fitted, fit, parse_size
from residency.runtime.forecast.constants import Constants
from residency.runtime.forecast.decode import Unknown
from residency.runtime.forecast.machine_constants import machine_constants
from residency.runtime.forecast.measured import bench_constants, read_bench
from residency.runtime.forecast.model_routes import routes_of_model
from residency.runtime.forecast.routes import Routes
from residency.runtime.inspection import USUAL_CONTEXT
from residency.runtime.machine.facts import usable_host_bytes
from residency.runtime.machine.profile import machine_path, read_machine, require_machine
from residency.runtime.memory import GIB

TARGETS = ("gpu", "hybrid", "cpu")
WORTH_A_HOST = 0.95  # of gpu's time, what another target must stay below to be chosen


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    words: Sequence[str]
    gpu_memory: str | None = None
    host_memory: str | None = None
    measured: Sequence[Path] = ()
    machine: Path | None = None


class Planner:
    """One question."""

    def __init__(self, asked: Asked) -> None:
        """Raises ConfigError or CheckpointError for what cannot be planned."""
        self.asked = asked
        self.overrides = [text for word in asked.words for text in model_overrides(word)]
        self.base = compose(self.overrides)
        if Capability.READS_TEXT not in self.base.model.provides and not self._chosen("workload"):
            self.overrides.append("workload=bench")  # nothing else takes a model without text
            self.base = compose(self.overrides)
        _refuse(self.base.faults("model", "cache", "prefill", "decode"))
        self.model = self.base.model
        self.architecture = self.model.architecture
        self.on_gpu = self._on_gpu()
        self.budget = self._budget()
        self.context = self.model.config.context or min(
            self.architecture.max_context, USUAL_CONTEXT
        )
        self.dequantised_bytes = self.model.weights().dequantised_bytes
        self.routes: Routes = routes_of_model(self.model)

    def advise(self) -> tuple[Advice, Config]:
        """Raises CapacityError where nothing fits, and ConfigError for what conflicts."""
        constants, unknown = self._constants()
        found = self._candidates()
        times = [self._decode(config, fitted, constants) for config, fitted in found]
        at = _best(times)
        config, fitted = found[at]
        needs_slots = _keeps(config)
        hit_rate = self.routes.hit_rate(fitted.memory.num_slots) if needs_slots else 0.0
        prompts = ()
        if constants is not None:
            streams = compose([*self.overrides, "prefill=always_stream"]).policies.prefill
            modes = {m.name: m for m in (config.policies.prefill, streams)}
            shape = shape_of(self.architecture, fitted.memory)
            prompts = prompt_times(
                list(modes.values()),
                self.routes,
                shape,
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

    # What is there.

    def _on_gpu(self) -> bool:
        device = self.base.device
        if device.name == "cpu":
            if self.asked.gpu_memory is not None:
                raise ConfigError(
                    f"--gpu-memory {self.asked.gpu_memory}: with device=cpu there is no GPU; "
                    "leave one of both out"
                )
            return False
        return self.asked.gpu_memory is not None or torch.cuda.is_available()

    def _budget(self) -> Budget:
        host, told_host = usable_host_bytes(), "free here"
        if self.asked.host_memory is not None:
            host, told_host = parse_size(self.asked.host_memory, "--host-memory"), "given"
        told = f"host memory {host / GIB:.1f} GiB ({told_host})"
        if not self.on_gpu:
            return Budget(None, host, told)
        if self.asked.gpu_memory is not None:
            device, told_device = parse_size(self.asked.gpu_memory, "--gpu-memory"), "given"
        else:
            device, told_device = torch.cuda.mem_get_info(self.base.device.resolve())[0], "free"
        return Budget(device, host, f"GPU memory {device / GIB:.1f} GiB ({told_device}), {told}")

    def _constants(self) -> tuple[Constants | None, str]:
        """Or why there are none."""
        space, row_bytes = self.architecture.space, self.architecture.layout.row_bytes
        if self.asked.measured:
            results = [(str(folder), read_bench(folder)) for folder in self.asked.measured]
            return bench_constants(results, space, row_bytes), ""
        kind = "cuda" if self.on_gpu else "cpu"
        if self.asked.machine is not None:
            profile = require_machine(self.asked.machine, "--machine")
            if not str(profile.environment.get("device", "")).startswith(kind):
                raise ConfigError(
                    f"--machine {self.asked.machine}: it is of {profile.device_name}, device "
                    f"{profile.environment.get('device')}, and this plan is for device={kind}"
                )
        else:
            found = self._own_machine(kind)
            if found is None:
                return None, (
                    f"no {'GPU' if self.on_gpu else 'machine'} was measured here: run `residency "
                    "doctor` on the machine, or name its file with --machine or a bench of this "
                    "model with --measured"
                )
            profile = found
        try:
            return machine_constants(profile, self.architecture), ""
        except Unknown as why:
            return None, str(why)

    def _own_machine(self, kind: str) -> Any:
        if kind == "cuda" and not torch.cuda.is_available():
            return None
        device = torch.device("cpu") if kind == "cpu" else self.base.device.resolve()
        profile = read_machine(machine_path(environment(device)["device_name"]))
        if profile is None or not profile.environment.get("device", "").startswith(kind):
            return None
        return profile

    # What is chosen.

    def _targets(self) -> list[str]:
        """Decode targets to compare: all, unless one was asked for; on the CPU the host itself."""
        if self._chosen("decode") or not self.on_gpu:
            return [self.base.policies.decode.name]
        return list(TARGETS)

    def _candidates(self) -> list[tuple[Config, Fitted]]:
        """Raises CapacityError, of the first target, where none fits."""
        found, reasons = [], []
        for target in self._targets():
            try:
                if (candidate := self._candidate(target)) is not None:
                    found.append(candidate)
            except CapacityError as error:
                reasons.append(error)
        if not found:
            raise reasons[0]
        return found

    def _candidate(self, target: str) -> tuple[Config, Fitted] | None:
        """The combination with this target and what fits for it; None where it conflicts with what
        was asked for. The first target's conflicts are errors.
        """
        own = list(self.overrides)
        if not self._chosen("decode"):
            own.append(f"decode={target}")
        if not self._chosen("prefill"):
            keeps = _keeps(compose(own))
            own.append("prefill=auto" if keeps else "prefill=always_stream")
        config = compose(own)
        if (faults := self._faults(config)) and target != self._targets()[0]:
            return None
        _refuse(faults)
        return self._fitted(config, own)

    def _fitted(self, config: Config, own: list[str]) -> tuple[Config, Fitted]:
        prefill, cache = config.policies.prefill.config, config.policies.cache
        keeps, space = _keeps(config), self.architecture.space
        asked_slots = self._asks("cache.slots")
        fitted = fit(
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
            slots=cache.num_slots(space) if keeps and asked_slots else None,
            needs_slots=keeps,
            shares=cache.num_shares(space),
            batch=config.workload.batch,
        )
        sizes = {
            "model.context": self.context,
            "prefill.groups": fitted.groups,
            "prefill.ring": fitted.ring,
            "prefill.chunk_tokens": fitted.chunk_tokens,
        }
        if keeps and not asked_slots:
            sizes["cache.slots"] = fitted.memory.num_slots
        final = compose([*own, *(f"{key}={value}" for key, value in sizes.items())])
        _refuse(self._faults(final))
        return final, fitted

    def _faults(self, config: Config) -> list[Conflict]:
        """But for a device that is not here."""
        return [conflict for conflict in config.conflicts() if not conflict.concerns(("device",))]

    def _decode(
        self, config: Config, fitted: Fitted, constants: Constants | None
    ) -> DecodeTimes | None:
        if constants is None:
            return None
        hit_rate = self.routes.hit_rate(fitted.memory.num_slots) if _keeps(config) else 0.0
        return decode_times(
            config.policies.decode,
            self.routes,
            shape_of(self.architecture, fitted.memory),
            constants,
            hit_rate,
            config.workload.batch,
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
            reason = given if self._asks("cache.slots") else every
            found.append((f"cache.slots={memory.num_slots}", reason))
        decode = given if self._chosen("decode") else _why(times, at, self.on_gpu)
        found.append((f"decode={policies.decode.name}", decode))
        why = "chooses for each chunk by measured costs"
        if not _keeps(config):
            why = "without slots every layer is streamed"
        found.append((f"prefill={policies.prefill.name}", given if self._chosen("prefill") else why))
        staging = f"staging {memory.staging_bytes / GIB:.2f} GiB"
        found.append((f"prefill.groups={fitted.groups} prefill.ring={fitted.ring}", staging))
        workspace = f"workspace {memory.workspace_bytes / GIB:.2f} GiB"
        found.append((f"prefill.chunk_tokens={fitted.chunk_tokens}", workspace))
        context = given if self.model.config.context else "usual; more takes slots"
        found.append((f"model.context={self.context}", context))
        return found

    def _share(self, fitted: Fitted) -> float:
        return fitted.memory.num_slots / self.architecture.space.num_ids

    def _chosen(self, group: str) -> bool:
        return any(text.lstrip("+").partition("=")[0] == group for text in self.overrides)

    _asks = _chosen


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

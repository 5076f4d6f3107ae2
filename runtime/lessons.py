"""Lessons: what prefill modes can learn from one model on one device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel

from residency.policies.errors import ConfigError
from residency.policies.prefill import Costs, PrefillMode
from residency.runtime.architecture import Architecture
from residency.runtime.cost_profile import copied_profile, profile_path, read_profile
from residency.runtime.environment import environment
from residency.runtime.guesses import RouterGuess
from residency.runtime.layout import RowLayout
from residency.runtime.learning import Learning
from residency.runtime.machine.profile import MachineProfile, machine_path, read_machine
from residency.runtime.machine.starts import assumed_costs, known_rates
from residency.runtime.rates import KnownRates
from residency.runtime.results import require_writable


@dataclass(frozen=True)
class Lessons:
    """made_up: whether weights are. replaced: whether routes are not the model's own.
    fixed_costs: a folder of copied cost profiles; all begin with these, and none is kept.
    """

    model: PreTrainedModel
    architecture: Architecture
    device: torch.device
    made_up: bool
    replaced: bool
    fixed_costs: Path | None = None

    @property
    def why_senseless(self) -> str | None:
        """Why guesses of the model's routers say nothing; None where they do."""
        if self.made_up:
            return "weights are made up"
        return "routes are replaced" if self.replaced else None

    def of(self, mode: PrefillMode) -> Learning:
        """A start for `mode`. Raises CheckpointError for routers that cannot be asked early."""
        return Learning(
            self.architecture.space,
            mode,
            self._router(mode),
            self._profile(mode),
            keeps=self.fixed_costs is None,
            copies_beside=self._copies_beside,
            assumed=self._assumed,
        )

    @property
    def _copies_beside(self) -> bool:
        return self.device.type == "cuda"

    @cached_property
    def known_rates(self) -> KnownRates | None:
        """Of experts fetched and computed, by the machine's profile; None where it has none."""
        return None if self._machine is None else known_rates(self._machine, self._layout)

    @property
    def _assumed(self) -> Costs | None:
        return None if self._machine is None else assumed_costs(self._machine, self._layout)

    @property
    def _layout(self) -> RowLayout:
        return self.architecture.layout

    @cached_property
    def _machine(self) -> MachineProfile | None:
        """What `residency doctor` has measured of this device."""
        return read_machine(machine_path(self._device_name))

    @property
    def _device_name(self) -> str:
        return environment(self.device)["device_name"]

    def notes(self, mode: PrefillMode) -> list[str]:
        """Lines for a report."""
        notes = []
        if mode.learns and self._assumed is not None and read_profile(self._profile(mode)) is None:
            notes.append(f"prefill={mode.name} began with the machine's profile")
        if mode.asks_router and self.why_senseless is not None:
            notes.append(f"routers asked early say nothing here: {self.why_senseless}")
        return notes

    def _router(self, mode: PrefillMode) -> RouterGuess | None:
        """Who asks for `mode`. A mode that learns would only learn that it says nothing, or that
        there is no time in which something could be fetched ahead.
        """
        in_vain = self.why_senseless is not None or not self._copies_beside
        if not mode.asks_router or (mode.learns and in_vain):
            return None
        return RouterGuess(self.model, self.architecture.expert_modules)

    def _profile(self, mode: PrefillMode) -> Path:
        """The file of measured costs, or its copy."""
        path = self._own_profile(mode)
        return path if self.fixed_costs is None else copied_profile(path, self.fixed_costs)

    def _own_profile(self, mode: PrefillMode) -> Path:
        if mode.profile:
            return Path(mode.profile).expanduser()
        layout = self.architecture.layout
        what = f"{layout.format.name} {layout.row_bytes} bytes"
        return profile_path(self._device_name, what)


def check_profile(mode: PrefillMode) -> None:
    """Raises ConfigError or OutputError for a file that the user names, if it holds no costs or
    none could be written there.
    """
    if not mode.profile:
        return
    path = Path(mode.profile).expanduser()
    if path.exists() and read_profile(path) is None:
        raise ConfigError(
            f"prefill.profile={path}: holds no measured costs; name another file, or none"
        )
    require_writable(path, "prefill.profile")

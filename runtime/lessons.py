"""Lessons: what prefill modes can learn from one model on one device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from residency.policies.errors import ConfigError
from residency.policies.prefill import PrefillMode
from residency.runtime.architecture import Architecture
from residency.runtime.cost_profile import copied_profile, profile_path, read_profile
from residency.runtime.environment import environment
from residency.runtime.guesses import RouterGuess
from residency.runtime.learning import Learning
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
            copies_beside=self.device.type == "cuda",
        )

    def notes(self, mode: PrefillMode) -> list[str]:
        """Lines for a report."""
        if not mode.asks_router or self.why_senseless is None:
            return []
        return [f"routers asked early say nothing here: {self.why_senseless}"]

    def _router(self, mode: PrefillMode) -> RouterGuess | None:
        """Who asks for `mode`. A mode that learns would only learn that it says nothing."""
        if not mode.asks_router or (mode.learns and self.why_senseless is not None):
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
        return profile_path(environment(self.device)["device_name"], what)


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

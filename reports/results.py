"""One result folder: the checked content of its result.json and of the config beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from residency.policies.errors import ConfigError
from residency.reports.measures import KINDS, RUN, Crossing, Measure, crossings_of, measures_of
from residency.reports.nodes import Node
from residency.runtime.report import VERSION
from residency.runtime.results import CONFIG_NAME, RESULT_NAME

ROUTING = "routing: "
GAUGES = {
    "the link's rate": ("link", "bytes_per_s", "median"),
    "decode with every expert resident": ("resident", "tpot_s", "median"),
}


@dataclass(frozen=True)
class Result:
    """What a result says. measures: by prefill mode, "" where it has one.

    config: the composed tree, empty where none was kept. notes: of the run, as they stand.
    """

    file: Path
    kind: str
    title: str
    measures: Mapping[str, list[Measure]]
    crossings: list[Crossing]
    config: dict[str, Any]
    plan: dict[str, Any]
    environment: dict[str, str]
    memory: dict[str, int]
    notes: list[str]
    made_up: bool
    gauges: dict[str, float]  # what a job of any configuration should find alike, by its name
    finished: float  # seconds since the epoch at which the file was written

    @property
    def num_slots(self) -> int | None:
        return self.memory.get("num_slots")

    @property
    def num_experts(self) -> int | None:
        """Of all layers together."""
        row, bank = self.memory.get("row_bytes", 0), self.memory.get("bank_bytes", 0)
        return bank // row if row and bank else None

    @property
    def routing(self) -> str:
        """Which routes were taken, in short, where they are not the model's own."""
        said = [note for note in self.notes if note.startswith(ROUTING)]
        return said[0].removeprefix(ROUTING).partition(" (")[0] if said else ""

    @property
    def model(self) -> str:
        model = self.config.get("model")
        if isinstance(model, Mapping):
            return option(model)
        return str(model) if model else "a model whose config was not kept"


def read_result(folder: Path) -> Result:
    """Raises ConfigError for a file that is damaged, of another kind or of another version."""
    file = folder / RESULT_NAME
    node = Node.read(file)
    kind = kind_of(node)
    if kind not in KINDS:
        raise ConfigError(f"{file}: its kind is {kind!r}, of which a report shows nothing")
    version = node.at("version")
    if version.value != VERSION:
        version.refuse(f"{VERSION}, the version that this residency reads")
    config, memory = node.get("config"), node.get("memory")
    environment, plan, title = node.at("environment"), node.get("plan"), node.get("title")
    made_up, notes = node.get("made_up_weights"), node.at("notes").texts()
    return Result(
        file,
        kind,
        folder.name if title is None else title.text(),
        measures_of(node, kind),
        crossings_of(node, kind),
        _config(folder) if config is None else dict(config.mapping()),
        {} if plan is None else dict(plan.mapping()),
        {name: each.text() for name, each in environment.items()},
        {} if memory is None else {name: _size(each) for name, each in memory.items()},
        notes,
        made_up=any(note.startswith("weights: made up") for note in notes)
        or (made_up is not None and made_up.value is True),
        gauges=_gauges(node),
        finished=file.stat().st_mtime,
    )


def _gauges(node: Node) -> dict[str, float]:
    """The link's rate, and decode with every expert resident, where they were measured."""
    found = {}
    for name, keys in GAUGES.items():
        below: Node | None = node.get("limits")
        for key in keys:
            below = below if below is None or isinstance(below.value, list) else below.get(key)
        if below is not None and not isinstance(below.value, list):
            found[name] = below.seconds()
    return found


def kind_of(node: Node) -> str:
    kind = node.get("kind")
    return RUN if kind is None else kind.text()


def _size(node: Node) -> int:
    return int(node.value) if isinstance(node.value, bool) else node.count()


def _config(folder: Path) -> dict[str, Any]:
    """What a run keeps beside its result; empty where there is none."""
    file = folder / CONFIG_NAME
    if not file.is_file():
        return {}
    try:
        tree = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file}: damaged, not a composed config ({error})") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: damaged, not a composed config")
    return {str(key): value for key, value in tree.items()}


def option(node: Mapping[str, Any]) -> str:
    """The name of the option that a node of a config is: its module's."""
    target = str(node.get("_target_", ""))
    return target.rpartition(".")[0].rpartition(".")[2] or target or "?"

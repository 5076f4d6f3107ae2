"""What one run leaves: its result, the composed config and, of a measurement, a picture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from residency.conf.compose import Config
from residency.runtime.bench import CHART_NAME
from residency.runtime.results import ResultFolder
from residency.runtime.workloads import Measurement


def result_of(config: Config, report: Any) -> dict[str, Any]:
    """What result.json holds: the report of the workload, and the config behind it."""
    result: dict[str, Any] = report.as_dict() | {"config": config.tree}
    return result


def write_outcome(
    config: Config,
    report: Any,
    folder: ResultFolder,
    others: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write all that `config`'s workload left, and `others` by name. Raises OutputError."""
    files = dict(others)
    if isinstance(config.workload, Measurement):
        files[CHART_NAME] = config.workload.chart(report)
    folder.write(result_of(config, report), config.yaml(), files)

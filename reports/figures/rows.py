"""Names of rows in pictures that have one for each configuration."""

from __future__ import annotations

from residency.reports.contests import Entrant
from residency.reports.figures.style import label


def row_label(entrant: Entrant) -> str:
    """With the job's number, by which the tables name it as well."""
    return label(f"{entrant.label}  [{entrant.number}]")

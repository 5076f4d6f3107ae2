"""The files of a report: the page, its pictures, Markdown and every number with its origin."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

from residency.policies.errors import OutputError
from residency.reports.markdown import page_markdown
from residency.reports.page import page_html, relative
from residency.reports.report import Report
from residency.runtime.results import require_writable, write_whole

PAGE, MARKDOWN, DATA = "index.html", "report.md", "data.csv"
OPTION = "--out"
HEADER = (
    *("job", "configuration", "quantity", "pool", "prefix", "tokens", "runs"),
    *("number", "unit", "value", "file", "pointer"),
)
PICTURE = re.compile(r"(ttft|decode|bytes|hits|replay|curves)(-\d+)+\.png")
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a spreadsheet would compute


class ReportFolder:
    """Where a report is written. Checked before the work starts."""

    def __init__(self, path: Path, force: bool = False) -> None:
        """Creates the folder. Raises OutputError where it cannot be written or holds a report."""
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{OPTION} {path}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        require_writable(path / PAGE, OPTION)
        if (path / PAGE).exists() and not force:
            raise OutputError(
                f"{OPTION} {path}: there is a report already; choose another folder or add --force"
            )

    def write(self, report: Report) -> list[Path]:
        """All files, the page last; pictures of an earlier report that are no more go away."""
        content = {picture.file: picture.png for picture in report.pictures}
        content[DATA] = data_csv(report, self.path).encode()
        content[MARKDOWN] = page_markdown(report, self.path).encode()
        content[PAGE] = page_html(report, self.path).encode()
        write_whole({self.path / name: data for name, data in content.items()}, OPTION)
        for file in self.path.glob("*.png"):
            if PICTURE.fullmatch(file.name) and file.name not in content:
                file.unlink(missing_ok=True)
        return [self.path / name for name in content]


def data_csv(report: Report, out: Path) -> str:
    """A row a number: its job, what it is, and where it stands in which result.json."""
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(HEADER)
    for section in report.sections:
        for entrant in section.contest.entrants:
            file = relative(entrant.result.file, out)
            for at, measure in entrant.measures.items():
                what = (at.quantity, at.pool, at.prefix, at.tokens or "", measure.num_runs)
                for field in measure.fields:
                    number = (field.name, field.unit, repr(field.node.value))
                    row = (entrant.number, entrant.label, *what, *number, file, field.node.pointer)
                    writer.writerow([_cell(value) for value in row])
    return table.getvalue()


def _cell(value: object) -> str:
    text = str(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(FORMULA) else text

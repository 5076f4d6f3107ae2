"""What all figures share: colours, axes, and how they become pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter, NullLocator

# Okabe and Ito's colours, which remain distinct to the colour-blind.
COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7"),
    *("#000000", "#e69f00", "#56b4e9", "#7f7f7f"),
)
MARKERS = "osD^vPX*"
GREY, GRID = "#777777", "#e4e4e4"
DPI = 115
SMALL = 8
WIDTHS = {1: 7.4, 2: 11.8}  # inches, by columns of panels
CAP = 90  # characters of a label
# $ would begin a formula.
PLAIN = str.maketrans({"$": r"\$"})


@dataclass(frozen=True)
class Picture:
    """A figure with its words. caption: how to read it. alt: what it shows, for who cannot see."""

    name: str
    title: str
    caption: str
    alt: str
    figure: Any

    @property
    def file(self) -> str:
        return f"{self.name}.png"

    @cached_property
    def png(self) -> bytes:
        content = io.BytesIO()
        self.figure.savefig(
            content, format="png", dpi=DPI, facecolor="white", pil_kwargs={"optimize": True}
        )
        return content.getvalue()


def new_figure(width: float, height: float) -> Any:
    return Figure(figsize=(width, height), layout="constrained")


def columns_of(panels: int) -> int:
    """One below the other, which a phone can show, unless there are many."""
    return 1 if panels <= 3 else 2


def label(text: str) -> str:
    """Text of a result as matplotlib shows it: plain, on one line, not too long."""
    plain = " ".join(text.split())
    plain = plain if len(plain) <= CAP else f"{plain[: CAP - 3]}..."
    # A label that begins with _ would be left out of the legend.
    return (f" {plain}" if plain.startswith("_") else plain).translate(PLAIN)


def color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def marker(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def log_tokens(axes: Any, tokens: Sequence[int]) -> None:
    """The x axis of chunk lengths, each of them a tick unless they are crowded."""
    axes.set_xscale("log", base=2)
    shown = tokens if len(tokens) <= 12 else tokens[:: -(-len(tokens) // 12)]
    axes.xaxis.set_major_locator(FixedLocator(list(shown)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(labelsize=SMALL)
    if len(tokens) == 1:
        axes.set_xlim(tokens[0] / 2, tokens[0] * 2)


def log_times(axes: Any) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def legend_below(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """Outside the axes, so that it hides nothing."""
    longest = max(map(len, names), default=0)
    columns = 1 if longest > 55 else 2 if longest > 26 else 3
    where = "outside lower center"
    figure.legend(handles, names, loc=where, ncols=columns, fontsize=SMALL, frameon=False)

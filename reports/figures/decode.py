"""Time per decoded token: over the pool's size, or side by side where there is one size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from residency.reports.contests import SLOTS, Contest, Entrant, facets, label_of, without
from residency.reports.figures.rows import row_label
from residency.reports.figures.style import (
    GREY,
    GRID,
    SMALL,
    WIDTHS,
    Picture,
    color,
    columns_of,
    label,
    legend_below,
    marker,
    new_figure,
)
from residency.reports.measures import DECODE, At, Measure

AT = At(DECODE)
OVER_POOL = (
    "Lower is better; whiskers are the range of the timed runs. Lines join configurations that "
    "differ in the pool's size alone; they are drawn a little apart. "
)
CYCLE = (
    "The dotted line is the token cycle, the experts that one step needs: with fewer slots a "
    "global LRU lets each go before the next token wants it."
)
SIDE_BY_SIDE = (
    "Lower is better; a dot is the median of the timed runs, the whisker their range, the tick the "
    "floor of that configuration, where it could be had. Fastest on top."
)
APART = 0.008  # of two lines at one size, of the largest
Y_LABEL = "time per decoded token (ms)"


def picture(contest: Contest, name: str) -> Picture | None:
    """None where fewer than two have decoded."""
    timed = [entrant for entrant in contest.entrants if AT in entrant.measures]
    if len(timed) < 2:
        return None
    sizes = {entrant.result.num_slots for entrant in timed}
    if len(sizes) < 2 or None in sizes:
        return _side_by_side(timed, name)
    return _over_pool(timed, name)


def _side_by_side(timed: Sequence[Entrant], name: str) -> Picture:
    ordered = sorted(timed, key=lambda entrant: entrant.measures[AT].median, reverse=True)
    figure = new_figure(7.2, 1.1 + 0.3 * len(ordered))
    axes = figure.add_subplot()
    for y, entrant in enumerate(ordered):
        measure = entrant.measures[AT]
        axes.errorbar(measure.median * 1e3, y, xerr=_range(measure), color=color(0), **_DOT)
        if measure.floor_s is not None:
            axes.plot(measure.floor_s * 1e3, y, "|", color=GREY, ms=12, mew=1.5)
    axes.set_yticks(range(len(ordered)), [row_label(each) for each in ordered], fontsize=SMALL)
    axes.set_ylim(-0.6, len(ordered) - 0.4)
    axes.set_xlim(0, max(entrant.measures[AT].most for entrant in timed) * 1.08e3)
    axes.tick_params(labelsize=SMALL)
    axes.set_xlabel(Y_LABEL, fontsize=SMALL + 1)
    axes.grid(True, axis="x", color=GRID, lw=0.5)
    alt = f"Milliseconds per decoded token of {len(ordered)} configurations; the table has them"
    return Picture(name, "Decode", SIDE_BY_SIDE, alt, figure)


def _over_pool(timed: Sequence[Entrant], name: str) -> Picture:
    groups = facets_of_lines(timed)
    columns = columns_of(len(groups))
    rows = -(-len(groups) // columns)
    figure = new_figure(WIDTHS[columns], 3.7 * rows + 0.9)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    cells = [cell for row in grid for cell in row]
    handles: dict[str, Any] = {}
    most = max(entrant.result.num_slots or 0 for entrant in timed)
    cycle = max((m.step_lookups or 0 for m in (each.measures[AT] for each in timed)), default=0)
    for axes, (title, lines) in zip(cells, groups, strict=False):
        for number, (text, line) in enumerate(lines):
            shift = most * APART * (number - (len(lines) - 1) / 2)
            handles.setdefault(label(text), _draw(axes, line, number, shift))
        if cycle:
            drawn = axes.axvline(cycle, color=GREY, ls=":", lw=1.2)
            handles.setdefault(f"token cycle ({cycle:.0f} slots)", drawn)
        axes.set_title(label(title), fontsize=9)
        _axes(axes, timed)
    for axes in cells[len(groups) :]:
        axes.remove()
    legend_below(figure, list(handles.values()), list(handles))
    alt = f"Milliseconds per decoded token over slots, {len(timed)} configurations"
    caption = OVER_POOL + (CYCLE if cycle else "")
    return Picture(name, "Decode over the size of the pool", caption, alt, figure)


def facets_of_lines(
    timed: Sequence[Entrant],
) -> list[tuple[str, list[tuple[str, list[Entrant]]]]]:
    """Lines of entrants that differ in their slots alone, in panels of a few lines."""
    lines: dict[str, list[Entrant]] = {}
    for entrant in timed:
        lines.setdefault(label_of(without(entrant.choice, [SLOTS])), []).append(entrant)
    found = []
    for title, heads in facets([line[0] for line in lines.values()]):
        key = title.partition("=")[0]
        found.append(
            (
                title,
                [
                    (
                        label_of(without(head.choice, [SLOTS, key])) or "all else is equal",
                        lines[label_of(without(head.choice, [SLOTS]))],
                    )
                    for head in heads
                ],
            )
        )
    return found


def _draw(axes: Any, line: Sequence[Entrant], number: int, shift: float) -> Any:
    ordered = sorted(line, key=lambda each: each.result.num_slots or 0)
    measures = [each.measures[AT] for each in ordered]
    slots = [(each.result.num_slots or 0) + shift for each in ordered]
    ranges = [_range(measure) for measure in measures]
    spread = [[low[0][0] for low in ranges], [high[1][0] for high in ranges]]
    style = {"marker": marker(number), "ms": 8 - 0.55 * number, "capsize": 2.5, "lw": 1.3}
    medians = [measure.median * 1e3 for measure in measures]
    return axes.errorbar(slots, medians, yerr=spread, color=color(number), **style)


def _axes(axes: Any, timed: Sequence[Entrant]) -> None:
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("pool size (slots)", fontsize=SMALL + 1)
    axes.set_ylabel(Y_LABEL, fontsize=SMALL + 1)
    axes.tick_params(labelsize=SMALL, labelbottom=True, labelleft=True)
    axes.grid(True, color=GRID, lw=0.5)
    experts = {each.result.num_experts for each in timed}
    if len(experts) == 1 and (number := experts.pop()):
        shares = (lambda x: x / number * 100, lambda x: x * number / 100)
        above = axes.secondary_xaxis("top", functions=shares)
        above.set_xlabel("pool size (% of all experts)", fontsize=SMALL)
        above.tick_params(labelsize=SMALL)


def _range(measure: Measure) -> list[list[float]]:
    below, above = measure.median - measure.least, measure.most - measure.median
    return [[below * 1e3], [above * 1e3]]


_DOT = {"fmt": "o", "ms": 6, "capsize": 3, "lw": 1.3}

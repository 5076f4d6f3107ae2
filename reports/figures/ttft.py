"""Time to first token over the chunk's length: a panel a pool, a prefix and a group of lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from residency.reports.contests import Contest, Entrant, facets, label_of, without
from residency.reports.crossings import Meeting
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
    log_times,
    log_tokens,
    marker,
    new_figure,
)
from residency.reports.measures import TTFT, Measure, place_text

APART = 0.035  # of two lines at one length, in powers of two
MOST_WRITTEN = 40  # characters
MOST_FLOORS = 4  # lines that each have a floor of their own drawn
CAPTION = (
    "Both axes are logarithmic; lower is better. A marker is the median of the timed runs, its "
    "whisker their range; lines are drawn a little apart, so that none hides another. Dashed: the "
    "floor, which no plan that moves the same bytes beside the same compute can beat; it is "
    "computed from link and compute times measured in the same run, so on a noisy machine a run "
    "can lie below it. "
)
CROSSED = "A vertical line marks the length at which another becomes the fastest."


def picture(contest: Contest, meetings: Sequence[Meeting], name: str) -> Picture:
    """All panels of a contest."""
    groups = facets(contest.entrants)
    places = contest.places
    columns = columns_of(len(groups))
    rows = len(places) * -(-len(groups) // columns)
    height = 3.5 * rows + 0.2 * max(len(group) for _, group in groups) + 0.4
    figure = new_figure(WIDTHS[columns], height)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    cells = [cell for row in grid for cell in row]
    handles: dict[str, Any] = {}
    used = 0
    for place in places:
        for title, group in groups:
            axes = cells[used]
            used += 1
            said = ", ".join(word for word in (title, place_text(place) or _pool(place)) if word)
            _draw(axes, group, place, _shown(group, title), handles)
            _draw_meetings(axes, group, place, meetings)
            axes.set_title(label(said), fontsize=9)
        used += used % columns
    for axes in cells:
        if not axes.has_data():
            axes.remove()
            continue
        axes.set_xlabel("chunk length (tokens)", fontsize=SMALL + 1)
        axes.set_ylabel("time to first token (ms)", fontsize=SMALL + 1)
        axes.tick_params(labelbottom=True, labelleft=True)
    legend_below(figure, list(handles.values()), list(handles))
    crossed = CROSSED if any(meeting.tokens for meeting in meetings) else ""
    alt = f"Time to first token in milliseconds over chunk length in tokens, {_alt(contest)}"
    return Picture(name, "Time to first token over chunk length", CAPTION + crossed, alt, figure)


def _pool(place: tuple[str, int]) -> str:
    return f"{place[0]} pool" if place[0] else ""


def _alt(contest: Contest) -> str:
    return f"one line for each of {len(contest.entrants)} configurations; the table has the values"


def _shown(group: Sequence[Entrant], title: str) -> list[str]:
    """Labels without what the panel's title says."""
    key = title.partition("=")[0]
    return [label_of(without(each.choice, [key])) or each.label for each in group]


def _draw(
    axes: Any,
    group: Sequence[Entrant],
    place: tuple[str, int],
    names: Sequence[str],
    handles: dict[str, Any],
) -> None:
    tokens: set[int] = set()
    floors: dict[int, float] = {}
    for number, (entrant, name) in enumerate(zip(group, names, strict=True)):
        line = _line(entrant, place)
        if not line:
            continue
        tokens |= {measure.at.tokens for measure in line}
        apart = 2 ** (APART * (number - (len(group) - 1) / 2))
        handles.setdefault(label(name), _draw_line(axes, line, number, apart))
        for measure in line:
            if measure.floor_s is not None:
                least = floors.get(measure.at.tokens, measure.floor_s)
                floors[measure.at.tokens] = min(least, measure.floor_s)
        if len(group) <= MOST_FLOORS:
            _draw_floor(axes, line, color(number))
    if floors and len(group) > MOST_FLOORS:
        xs = sorted(floors)
        times = [floors[x] * 1e3 for x in xs]
        (drawn,) = axes.plot(xs, times, color="#222222", ls="--", lw=1)
        handles.setdefault("least floor of these", drawn)
    elif floors:
        handles.setdefault("floor of the line of that colour", axes.plot([], [], "--", c=GREY)[0])
    if tokens:
        log_tokens(axes, sorted(tokens))
        log_times(axes)
    axes.grid(True, which="both", color=GRID, lw=0.5)


def _line(entrant: Entrant, place: tuple[str, int]) -> list[Measure]:
    own = [m for at, m in entrant.measures.items() if at.quantity == TTFT and at.place == place]
    return sorted(own, key=lambda measure: measure.at.tokens)


def _draw_line(axes: Any, line: Sequence[Measure], number: int, apart: float) -> Any:
    tokens = [measure.at.tokens * apart for measure in line]
    below = [(measure.median - measure.least) * 1e3 for measure in line]
    above = [(measure.most - measure.median) * 1e3 for measure in line]
    # Each marker a little smaller than the one before, so that none is hidden.
    style = {"color": color(number), "marker": marker(number), "ms": 8 - 0.55 * number}
    medians = [measure.median * 1e3 for measure in line]
    return axes.errorbar(tokens, medians, yerr=[below, above], capsize=2.5, lw=1.3, **style)


def _draw_floor(axes: Any, line: Sequence[Measure], shade: str) -> None:
    floors = [(m.at.tokens, m.floor_s * 1e3) for m in line if m.floor_s is not None]
    if floors:
        axes.plot(*zip(*floors, strict=True), color=shade, ls="--", lw=0.8)


def _pair(meeting: Meeting) -> str:
    """Who meets, where their names are short enough to be written within the axes."""
    one, other = meeting.pair
    differing = [key for key in one.choice if one.choice.get(key) != other.choice.get(key)]
    names = [" ".join(each.choice.get(key, "") for key in differing) for each in meeting.pair]
    text = label(" = ".join(names))
    return text if 3 < len(text) <= MOST_WRITTEN else "crossing"


def _draw_meetings(
    axes: Any, group: Sequence[Entrant], place: tuple[str, int], meetings: Sequence[Meeting]
) -> None:
    """Where the panel's lines cross; one beside the other is written at another height."""
    own = [m for m in meetings if m.place == place and m.before in group and m.after in group]
    met = [(meeting, tokens) for meeting in own if (tokens := meeting.tokens) is not None]
    for height, (meeting, tokens) in enumerate(met):
        axes.axvline(tokens, color=GREY, lw=0.9, ls="-.")
        low, high = axes.get_xlim()
        on_left = tokens**2 > low * high
        axes.annotate(
            f"{_pair(meeting)} at {tokens:.0f} tokens",
            (tokens, 0.02 + 0.06 * height),
            xycoords=("data", "axes fraction"),
            xytext=(-4 if on_left else 4, 0),
            textcoords="offset points",
            ha="right" if on_left else "left",
            fontsize=SMALL,
            color="#333333",
        )

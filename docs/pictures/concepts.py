"""The picture of docs/concepts.md: `python docs/pictures/concepts.py` draws it anew.

Units are twelfths of an inch of the page; y grows upwards. An expert is a square everywhere.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

FILE = Path(__file__).with_suffix(".svg")
PAPER, INK, SOFT, LINE = "#ffffff", "#22272e", "#5d6673", "#c3c9d1"
HOST, DEVICE = "#f3efe6", "#e8eff5"
HIT, MISS, IDLE, GONE = "#2f8f6b", "#d9722e", "#d5d9df", "#9aa2ad"
HOST_MADE = "#6a57a8"
SIDE, STEP = 2.1, 2.6  # an expert's square, and from one to the next
WIDTH, HEIGHT, UNITS = 126, 97.5, 12  # UNITS in an inch


def main() -> None:
    plt.rcParams |= {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "x"}
    figure = plt.figure(figsize=(WIDTH / UNITS, HEIGHT / UNITS), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT))
    axes.axis("off")
    prefill(axes, 57)
    decode(axes, 9.5)
    legend(axes)
    figure.savefig(FILE, metadata={"Date": None, "Creator": None})


def prefill(axes: Axes, y: float) -> None:
    """A chunk of a prompt: y is the bottom of the row."""
    heading(
        axes, y + 37.6, "Prefill", "a chunk of many tokens, so many experts of a layer are wanted"
    )
    frames(axes, y, 35)
    banks(axes, 6, y + 14.5, "mhmm.mh.mmhm")
    note(
        axes,
        5,
        y + 7,
        "in this layer the chunk is routed to ten\nexperts: three lie in slots, seven do not",
    )

    title(axes, 56, y + 29.7, "staging", "a ring of group buffers, for what passes through")
    for buffer, kinds in enumerate(("mmm", "mmm", "   ")):
        left = 57 + 12 * buffer
        box(axes, left - 1, y + 22.9, 9.9, 4.5, PAPER, LINE)
        squares(axes, left + 0.1, y + 24.1, kinds)
    title(axes, 56, y + 10.7, "slots", "the pool: what stays, by the cache policy")
    box(axes, 56, y + 3.9, 34, 4.5, PAPER, LINE)
    squares(axes, 57.1, y + 5.1, "h.h..h..m...")

    compute(axes, y + 12.2)
    arrow(axes, (38.4, y + 21.4), (55.4, y + 25.1), MISS)
    label(axes, y + 28.6, "stream", "groups of a layer", MISS)
    arrow(axes, (38.4, y + 19.9), (55.4, y + 6.2), MISS)
    label(axes, y + 7.4, "fetch", "one expert, to stay", MISS)
    arrow(axes, (60.5, y + 13.8), (60.5, y + 22.2), HIT)
    note(axes, 62, y + 17.6, "copy on the device (hit_d2d)", HIT)
    arrow(axes, (91.2, y + 25.1), (99.6, y + 20.4), INK)
    arrow(axes, (90.6, y + 6.2), (99.6, y + 14), HIT)
    note(axes, 98, y + 8, "read in place", HIT)


def decode(axes: Axes, y: float) -> None:
    """A step of decode: y is the bottom of the row."""
    heading(axes, y + 39.6, "Decode", "one token, so the few experts of its top-k in each layer")
    frames(axes, y, 37)
    banks(axes, 6, y + 16.5, "h..m...h...c")
    box(axes, 5.3, y + 3, 32.2, 5.4, PAPER, HOST_MADE)
    squares(axes, 7.4, y + 4.65, "c")
    text(axes, 11.2, y + 5.7, "computed where it lies", 8.6, HOST_MADE)
    arrow(
        axes, (6 + 11 * STEP + SIDE / 2, y + 20.9), (6 + 11 * STEP + SIDE / 2, y + 8.8), HOST_MADE
    )
    note(axes, 16.6, y + 12.4, "decode=cpu, hybrid", HOST_MADE)

    title(axes, 56, y + 31.6, "slots", "hits are read; a miss is fetched over the lowest key")
    box(axes, 56, y + 24.8, 34, 4.5, PAPER, LINE)
    squares(axes, 57.1, y + 26, "h...h..m....")
    evicted = 57.1 + 7 * STEP
    squares(axes, evicted, y + 18.2, "x")
    arrow(axes, (evicted + SIDE / 2, y + 24.4), (evicted + SIDE / 2, y + 20.9), GONE)
    note(axes, evicted + 3.2, y + 19.2, "evicted: not copied back,\nthe bank has it still")
    note(axes, 56.4, y + 19.2, "touch: the policy moves\nthe keys of those used")

    compute(axes, y + 11.6)
    arrow(axes, (38.4, y + 22.8), (55.4, y + 27), MISS)
    label(axes, y + 30.4, "fetch", "decode=gpu, hybrid", MISS)
    arrow(axes, (90.6, y + 27), (99.6, y + 20.4), HIT)
    arrow(axes, (38, y + 5.7), (99.6, y + 13.6), HOST_MADE, bend=0.06)
    label(axes, y + 12, "activations", "a token's, to and fro", HOST_MADE)
    note(axes, 62, y + 4.6, "added to what the device has computed", HOST_MADE)


def frames(axes: Axes, y: float, height: float) -> None:
    box(axes, 3, y, 37, height, HOST, LINE)
    text(axes, 5, y + height - 2.2, "HOST MEMORY", 8.4, SOFT, weight="bold")
    box(axes, 54, y, 69, height, DEVICE, LINE)
    text(axes, 56, y + height - 2.2, "DEVICE", 8.4, SOFT, weight="bold")
    axes.plot([47, 47], [y + 0.6, y + height - 4], color=LINE, lw=1, ls=(0, (2, 3)), zorder=0)
    text(axes, 47, y + height - 2.2, "THE LINK", 8.4, SOFT, weight="bold", ha="center")


def banks(axes: Axes, x: float, y: float, wanted: str) -> None:
    """Four layers of twelve experts, the second in flight; y is the bottom of the lowest."""
    text(axes, x - 1, y + 13.2, "banks", 10.5, INK, weight="bold")
    text(axes, x + 7.4, y + 13.2, "every expert of every layer", 8.6, SOFT)
    for layer in range(4):
        bottom = y + (3 - layer) * STEP
        squares(axes, x, bottom, wanted if layer == 1 else "." * 12)
    box(axes, x - 0.7, y + 2 * STEP - 0.55, 12 * STEP + 1, SIDE + 1.1, "none", INK, lw=1.1)


def squares(axes: Axes, x: float, y: float, kinds: str) -> None:
    """h hit, m miss, c computed by the host, x evicted, . another; a blank is an empty place."""
    colours = {"h": HIT, "m": MISS, "c": HOST_MADE, ".": IDLE, "x": PAPER}
    for place, kind in enumerate(kinds):
        left = x + place * STEP
        if kind == " ":
            axes.add_patch(Rectangle((left, y), SIDE, SIDE, fc="none", ec=LINE, lw=0.8))
        elif kind == "x":
            axes.add_patch(Rectangle((left, y), SIDE, SIDE, fc=PAPER, ec=GONE, lw=0.9))
            axes.plot([left, left + SIDE], [y, y + SIDE], color=GONE, lw=0.9)
            axes.plot([left, left + SIDE], [y + SIDE, y], color=GONE, lw=0.9)
        else:
            axes.add_patch(Rectangle((left, y), SIDE, SIDE, fc=colours[kind], ec="none"))


def compute(axes: Axes, y: float) -> None:
    box(axes, 100, y, 20.6, 10.6, PAPER, INK, lw=1.1)
    text(axes, 110.3, y + 7.5, "the experts' layer", 9.4, INK, weight="bold", ha="center")
    text(axes, 110.3, y + 3.4, "reads each expert\nwherever its row is", 8.6, SOFT, ha="center")


def legend(axes: Axes) -> None:
    entries = (
        ("h", "in a slot: a hit"),
        ("m", "in no slot: a miss"),
        ("c", "a miss, computed by the host"),
        (".", "not routed to"),
        ("x", "evicted"),
    )
    x = 3.6
    for kind, words in entries:
        squares(axes, x, 3.4, kind)
        text(axes, x + 3, 4.45, words, 8.4, INK)
        x += 6 + 0.77 * len(words)


def heading(axes: Axes, y: float, name: str, words: str) -> None:
    text(axes, 3, y, name, 14, INK, weight="bold")
    text(axes, 15, y - 0.1, words, 10, SOFT)


def title(axes: Axes, x: float, y: float, name: str, words: str) -> None:
    text(axes, x, y, name, 10.5, INK, weight="bold")
    text(axes, x + (10 if name == "staging" else 7), y, words, 8.6, SOFT)


def label(axes: Axes, y: float, name: str, words: str, colour: str) -> None:
    """What crosses the link, and of what."""
    for line, size, down in ((name, 9.4, 0.0), (words, 7.4, 2.2)):
        weight = "bold" if line == name else "normal"
        text(axes, 47, y - down, line, size, colour, weight=weight, ha="center", backed=True)


def note(axes: Axes, x: float, y: float, words: str, colour: str = SOFT) -> None:
    text(axes, x, y, words, 8.6, colour)


def text(
    axes: Axes,
    x: float,
    y: float,
    words: str,
    size: float,
    colour: str,
    weight: str = "normal",
    ha: str = "left",
    backed: bool = False,
) -> None:
    back = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8} if backed else None
    axes.text(
        x, y, words, fontsize=size, color=colour, weight=weight, ha=ha, va="center", bbox=back
    )


def box(
    axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str, lw: float = 1
) -> None:
    shape = "round,pad=0,rounding_size=0.8"
    patch = FancyBboxPatch((x, y), width, height, boxstyle=shape, fc=fill, ec=edge, lw=lw)
    axes.add_patch(patch)


def arrow(
    axes: Axes,
    begin: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    bend: float = 0.0,
) -> None:
    style = "-|>,head_length=5,head_width=2.6"
    axes.add_patch(
        FancyArrowPatch(
            begin,
            end,
            arrowstyle=style,
            connectionstyle=f"arc3,rad={bend}",
            color=colour,
            lw=1.8,
            shrinkA=0,
            shrinkB=0,
            zorder=3,
        )
    )


if __name__ == "__main__":
    main()

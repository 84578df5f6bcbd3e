"""Size against KL divergence, with the frontier, the noise floor and other tools' files."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from quantry.report.content import Content, FileRow, frontier, plain
from quantry.report.drawing import (
    SMALL,
    WIDE,
    Plot,
    legend,
    name_room,
    one_axes,
    round_numbers,
    shortened,
    spare,
    text_width,
)
from quantry.report.ink import light
from quantry.report.labels import Box, leader, nearest, place
from quantry.report.sizes import counted, human, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RADIUS = 4.5  # of a mark
NAME = 170  # pixels of a name on a phone


def pareto(content: Content, width: int) -> Plot | None:
    """Draws size against KL for at least two files; one alone leaves no choice."""
    rows = [row for row in content.rows if row.judged is not None]
    if len(rows) < 2:
        return None
    height = 470 if width == WIDE else 400
    figure, axes = one_axes(width, height, (62, 14, 30, 46))
    bottom, top = _kl_limits(rows, content.noise_floor)
    size, unit = unit_of(max(row.bytes for row in rows))
    _size_axis(axes, [row.bytes / size for row in rows], f"size, {unit}")
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    _kl_ticks(axes, bottom, top)
    if content.noise_floor is not None and content.noise_floor > bottom:
        axes.axhspan(bottom, content.noise_floor, color=light("noise"), lw=0, zorder=0)
    ours = [row for row in rows if not row.peer]
    best = frontier(ours or rows)
    spots = {id(row): (row.bytes / size, max(row.judged or 0.0, bottom)) for row in rows}
    line = np.array([spots[id(row)] for row in best])
    axes.step(
        line[:, 0], line[:, 1], where="post", color=light("ours" if ours else "peer"), lw=1.4, alpha=0.55, zorder=2
    )
    _whiskers(axes, rows, spots, bottom)
    for row in rows:
        _mark(axes, row, spots[id(row)], row is content.chosen)
    left_out = _names(axes, rows, spots, best, content.chosen, max(name_room(width), NAME))
    _legend(figure, width, rows, content, bool(ours))
    words, caption = _pareto_words(rows, best), _pareto_caption(rows, left_out, bottom)
    return Plot("pareto", "Size against KL divergence", words, figure, caption)


def _kl_limits(rows: Sequence[FileRow], noise: float | None) -> tuple[float, float]:
    """Returns the range of the axis: down to a tenth of the noise floor, or six decades without one."""
    values = [row.judged or 0.0 for row in rows]
    most = max(*values, noise or 0.0, 1e-12)
    floor_ = noise / 10 if noise and noise > 0 else most / 1e6
    least = max(min(values), floor_)
    return 10 ** (floor(log10(least) * 4 - 0.8) / 4), 10 ** (ceil(log10(most) * 4 + 0.8) / 4)


def _kl_ticks(axes: "Axes", bottom: float, top: float) -> None:
    axes.yaxis.set_major_locator(FixedLocator(round_numbers(bottom, top, 10)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}" if value >= 1e-4 else f"{value:.0e}"))
    axes.grid(axis="y", lw=0.8)


def _size_axis(axes: "Axes", sizes: Sequence[float], label: str) -> None:
    """Scales by powers if the largest is over twice the smallest: 16-bit files would crowd the others otherwise."""
    low, high = min(sizes), max(sizes)
    if low > 0 and high > 2 * low:
        margin = (high / low) ** 0.06
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        axes.xaxis.set_major_locator(FixedLocator(round_numbers(low, high, 6)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = (high - low) * 0.08 or max(high * 0.1, 1e-9)
        axes.set_xlim(max(low - margin, 0), high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    spare(axes)
    axes.set_axisbelow(True)
    axes.set_xlabel(label, fontsize=SMALL)
    axes.set_ylabel("KL divergence, nats", fontsize=SMALL)


def _whiskers(axes: "Axes", rows: Sequence[FileRow], spots: Mapping[int, tuple[float, float]], bottom: float) -> None:
    for row in rows:
        if row.judged_interval is not None and row.judged_interval[1] > bottom:
            low, high = (max(bound, bottom) for bound in row.judged_interval)
            axes.vlines(spots[id(row)][0], low, high, color=light(row.role), lw=1.2, alpha=0.6, zorder=3)


def _mark(axes: "Axes", row: FileRow, spot: tuple[float, float], chosen: bool) -> None:
    """Draws a disc for ours and an open diamond for others', so that both show on one spot; the chosen has a ring."""
    style: dict[str, Any] = {"clip_on": False, "zorder": 5}
    if row.peer:
        axes.plot(*spot, "D", ms=2 * RADIUS, mfc="none", mec=light("peer"), mew=1.6, **style)
    else:
        axes.plot(*spot, "o", ms=2 * RADIUS, color=light("ours"), mec=light("surface"), mew=1, **style)
    if chosen:
        axes.plot(*spot, "o", ms=2 * RADIUS + 8, mfc="none", mec=light(row.role), mew=1.8, **style)


def _names(
    axes: "Axes",
    rows: Sequence[FileRow],
    spots: Mapping[int, tuple[float, float]],
    best: Sequence[FileRow],
    chosen: FileRow | None,
    most: float,
) -> int:
    """Writes the names at their marks, at most `most` pixels, important ones first; returns how many found no room."""
    order = sorted(rows, key=lambda row: (row is not chosen, row not in best, row.bytes))
    at = {id(row): tuple(axes.transData.transform(spots[id(row)])) for row in rows}
    words = [shortened(row.name, most, "bold" if row is chosen else "normal") for row in order]
    sizes = [
        (text_width(text, SMALL, "bold" if row is chosen else "normal") + 2, SMALL * 1.3)
        for row, text in zip(order, words, strict=True)
    ]
    window = axes.get_window_extent()
    frame = (window.x0, window.y0 + 2, window.x1 + 12, window.y1)
    marks: list[Box] = []
    for row in rows:
        (x, y), reach = at[id(row)], RADIUS + (5 if row is chosen else 4 if row.peer else 2)
        marks.append((x - reach, y - reach, x + reach, y + reach))
    boxes = place([at[id(row)] for row in order], sizes, frame, marks, _step_boxes([at[id(row)] for row in best]))
    for row, text, box in zip(order, words, boxes, strict=True):
        if box is not None:
            _name(axes, row, text, at[id(row)], box, row is chosen)
    return sum(box is None for box in boxes)


def _name(axes: "Axes", row: FileRow, text: str, point: tuple[float, float], box: Box, chosen: bool) -> None:
    """Writes a name in its box, with a line to a distant mark, in offsets from the mark so that it scales."""
    style: dict[str, Any] = {"xycoords": "data", "textcoords": "offset points", "annotation_clip": False, "zorder": 6}
    spot = tuple(axes.transData.inverted().transform(point))
    middle = ((box[0] + box[2]) / 2 - point[0], (box[1] + box[3]) / 2 - point[1])
    if leader(box, point):
        end = nearest(box, point)
        offset = (end[0] - point[0], end[1] - point[1])
        line = {"arrowstyle": "-", "color": light("muted"), "lw": 0.6, "shrinkA": 0, "shrinkB": RADIUS + 1}
        axes.annotate("", spot, offset, arrowprops=line, **{**style, "zorder": 4})
    axes.annotate(
        text,
        spot,
        middle,
        ha="center",
        va="center",
        fontsize=SMALL,
        gid="name",
        weight="bold" if chosen else "normal",
        color=light(row.role if chosen or row.peer else "ink"),
        **style,
    )


def _step_boxes(corners: Sequence[tuple[float, ...]]) -> list[Box]:
    boxes: list[Box] = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        boxes += [(x0, y0 - 1, x1, y0 + 1), (x1 - 1, min(y0, y1), x1 + 1, max(y0, y1))]
    return boxes


def _legend(figure: Figure, width: int, rows: Sequence[FileRow], content: Content, ours: bool) -> None:
    def line(role: str, mark: str, label: str, style: str = "none") -> Line2D:
        fill = "none" if mark == "D" else light(role)
        return Line2D([], [], color=light(role), marker=mark, ls=style, label=label, ms=7, lw=1.4, mfc=fill, mew=1.4)

    handles: list[Any] = [line("ours", "o", "Quantry")] if ours else []
    if any(row.peer for row in rows):
        handles.append(line("peer", "D", "other tools"))
    handles.append(line("ours" if ours else "peer", "", "frontier", "-"))
    if content.noise_floor is not None:
        handles.append(
            Patch(color=light("noise"), label="noise floor" + (" (16-bit against itself)" if width == WIDE else ""))
        )
    legend(figure, handles, 4, handlelength=1.2, handletextpad=0.5, columnspacing=1.2 if width == WIDE else 0.8)


def _pareto_words(rows: Sequence[FileRow], best: Sequence[FileRow]) -> str:
    names = ", ".join(f"{plain(row.name)} ({human(row.bytes)}, KL {row.judged:.3g})" for row in best)
    return f"{counted(len(rows), 'file')} by size and KL divergence from the 16-bit model. On the frontier: {names}."


def _pareto_caption(rows: Sequence[FileRow], left_out: int, bottom: float) -> str:
    served = sum(row.served_kl is not None for row in rows)
    under = sum((row.judged or 0.0) < bottom for row in rows)
    words = ["Lower and further left is better."]
    if served:
        words.append(
            "KL as served by the engine." if served == len(rows) else "KL as served where an engine was asked."
        )
    if under:
        words.append(f"{under} below the scale {'stands' if under == 1 else 'stand'} at its lower edge.")
    if left_out:
        words.append(f"{left_out} {'name' if left_out == 1 else 'names'} found no room; the table has all.")
    return " ".join(words)

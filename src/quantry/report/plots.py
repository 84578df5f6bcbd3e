"""The plots of a report: each a figure with a title, words for it, and a name. Nothing here has state.

All lengths are pixels of the page. Axes are put in place by hand, from the measured width of the labels, so that a
drawing is the same on every machine. Each is drawn twice for a page: wide, and narrow for a phone.
"""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import ceil, exp, floor, log, log10
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import Affine2D

from quantry.report.content import BlockMap, Content, Memory, Row, modules_of, plain
from quantry.report.ink import DPI, STEPS, light, pixels, settings
from quantry.report.labels import Box, leader, nearest, place

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

WIDE, NARROW = 760, 350
SMALL = 10  # size of the letters at marks and ticks
MARGIN = 40  # of the picture, in its own pixels
BAR = 22  # height of a bar and its gap
DWARFS = 3  # times the reference: perplexities beyond are drawn by powers
FLOAT_MOST = 1e307  # an axis ends there
LONGEST = 160  # letters of a name that are looked at
RADIUS = 4.5  # of a mark
UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "bytes"))
PARTS = {  # of memory: what it is called, and its colour
    "weights": ("weights", "ours"),
    "kv_cache": ("KV cache", "second"),
    "activations": ("activations", "third"),
    "compute": ("compute", "third"),
    "overhead": ("overhead", "fourth"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """A figure, and what it shows in words."""

    name: str
    title: str
    about: str
    figure: Figure
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Steps:
    """How the values of a map fall into the steps of its colours."""

    low: float
    high: float
    logarithmic: bool

    def of(self, value: float) -> int:
        if self.high <= self.low:
            return STEPS // 2
        if self.logarithmic:
            share = log(max(value, self.low) / self.low) / log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(int(share * STEPS), STEPS - 1)


def plots(content: Content, width: int) -> dict[str, Plot]:
    """Every plot that the content has figures for, by name, in the order of the page. Call it within `settings()`."""
    found: list[Plot | None] = [
        pareto(content, width),
        quality(content, width),
        heat(content.sensitivity, width, "sensitivity", "Predicted damage by block and module", "warm"),
        heat(content.bits, width, "bits", "Bits a weight by block and module", "cool"),
        heat(content.outliers, width, "outliers", "Largest channel over the median one", "warm"),
        memory(content.memory, width) if content.memory else None,
    ]
    return {plot.name: plot for plot in found if plot is not None}


def poster(content: Content) -> bytes:
    """All plots below each other, with their titles, as a PNG."""
    from matplotlib.image import imsave

    with settings():
        under = " · ".join(part for part in (content.model, content.date, _verdict(content)) if part)
        parts = [_heading(content.title, 20, under)]
        for plot in plots(content, WIDE).values():
            parts += [_heading(plot.title, 13, plot.caption), pixels(plot.figure)]
        whole = np.pad(np.vstack(parts), ((MARGIN, MARGIN), (MARGIN, MARGIN), (0, 0)), constant_values=255)
        stored, nothing = io.BytesIO(), cast(dict[str, str], {"Software": None})  # no version, so the same bytes
        imsave(stored, whole, format="png", metadata=nothing)
    return stored.getvalue()


def frontier(rows: Sequence[Row]) -> list[Row]:
    """The files that no other one beats in both size and KL, smallest first."""
    best: list[Row] = []
    for row in sorted((row for row in rows if row.judged is not None), key=lambda row: (row.bytes, row.judged or 0.0)):
        if not best or (row.judged or 0.0) < (best[-1].judged or 0.0):
            best.append(row)
    return best


def steps_of(values: Sequence[float]) -> Steps:
    """By powers where the values span more than a factor of 20, of which at most six decades are told apart."""
    positive = [value for value in values if value > 0]
    high = max(values)
    if positive and high / min(positive) > 20:
        return Steps(max(min(positive), high / 1e6), high, True)
    return Steps(min(values), high, False)


def unit_of(most: float) -> tuple[int, str]:
    return next((size, unit) for size, unit in UNITS if most >= size or size == 1)


def human(count: float) -> str:
    """Bytes for people."""
    size, unit = unit_of(count)
    return f"{count:,.0f} bytes" if size == 1 else f"{count / size:,.{1 if count >= 100 * size else 2}f} {unit}"


def pareto(content: Content, width: int) -> Plot | None:
    """Size against KL. Two files at least: one alone is no choice."""
    rows = [row for row in content.rows if row.judged is not None]
    if len(rows) < 2:
        return None
    height = 470 if width == WIDE else 400
    figure, axes = _figure(width, height, (62, 14, 30, 46))
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
    left_out = _names(axes, rows, spots, best, content.chosen)
    _legend(figure, width, rows, content, bool(ours))
    return Plot(
        "pareto",
        "Size against KL divergence",
        _pareto_words(rows, best),
        figure,
        _pareto_caption(rows, left_out, bottom),
    )


def quality(content: Content, width: int) -> Plot | None:
    """Perplexity and same first token. Bars begin at the reference: what is seen is what was lost."""
    rows = sorted(
        (row for row in content.rows if row.perplexity is not None or row.top1 is not None), key=lambda row: row.bytes
    )
    if not rows:
        return None
    panels = [name for name in ("perplexity", "top1") if any(getattr(row, name) is not None for row in rows)]
    beside = width == WIDE
    each = BAR * len(rows) + 62
    height = each if beside else each * len(panels)
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    room = min(max(_width(_label(row.name), SMALL) for row in rows) + 12, width * 0.34)
    across = (width - room - 14 * len(panels)) / len(panels) if beside else width - room - 14
    for at, name in enumerate(panels):
        left = room + at * (across + 14) if beside else room
        base = 34 if beside else 34 + (len(panels) - 1 - at) * each
        axes = figure.add_axes((left / width, base / height, across / width, (each - 62) / height))
        _bars(axes, rows, name, content.reference_perplexity, across)
        _bar_names(axes, rows, room if not (beside and at) else 0, content.chosen)
    about = f"Bars for {len(rows)} files, smallest first. " + "; ".join(_quality_words(row) for row in rows) + "."
    return Plot(
        "quality",
        "Perplexity and same first token",
        about,
        figure,
        "Bars begin at the 16-bit model: shorter is better.",
    )


def heat(found: BlockMap, width: int, name: str, title: str, ramp: str) -> Plot | None:
    """Blocks from left to right, modules from top to bottom."""
    cells = {(block, module): float(value) for block, row in found.items() for module, value in row.items()}
    if not cells:
        return None
    blocks, modules = list(found), modules_of(found)
    tall = min(520 / len(modules), 22.0)
    height = ceil(tall * len(modules)) + 84
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    room = min(max(_width(_label(module), SMALL) for module in modules) + 12, width * 0.34)
    axes = figure.add_axes((room / width, 34 / height, (width - room - 14) / width, tall * len(modules) / height))
    steps = steps_of(list(cells.values()))
    _cells(axes, cells, blocks, modules, steps, ramp)
    _map_axes(axes, blocks, modules, (width - room - 14) / len(blocks), tall, room)
    if name == "bits":
        _cell_words(axes, cells, blocks, modules, steps, (width - room - 14) / len(blocks), tall)
    _scale(figure, steps, ramp, width, height, room)
    worst = max(cells, key=lambda cell: cells[cell])
    about = (
        f"A map of {len(blocks)} blocks by {len(modules)} modules,"
        f" from {min(cells.values()):.3g} to {cells[worst]:.3g}; the most is block {worst[0]}, {worst[1]}."
    )
    return Plot(name, title, about, figure)


def memory(found: Memory, width: int) -> Plot | None:
    """Stacked parts, predicted above measured, beside the capacity of the device."""
    sides = [(side, parts) for side, parts in (("predicted", found.predicted), ("measured", found.measured)) if parts]
    if not sides:
        return None
    names = list(dict.fromkeys(name for _, parts in sides for name in parts))
    lines = _legend_lines(names, width)
    height = 46 * len(sides) + 62 + 18 * lines
    figure, axes = _figure(width, height, (72, 20, 24 + 18 * lines, 40))
    most = max(*(sum(parts.values()) for _, parts in sides), found.capacity or 0)
    size, unit = unit_of(most)
    limit = max(most / size, 1e-9) * (1.04 if found.capacity else 1.16)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(sides) - 0.5, -0.5)
    inside = width - 92
    for at, (_, parts) in enumerate(sides):
        _stack(axes, at, parts, size, inside / limit)
    if found.capacity:
        _capacity(axes, found, size, limit, inside)
    _spare(axes)
    axes.set_yticks(range(len(sides)), [side for side, _ in sides], fontsize=11, color=light("ink"))
    axes.xaxis.set_major_locator(MaxNLocator(6 if width == WIDE else 4))
    axes.set_xlabel(unit, fontsize=SMALL)
    handles = [Patch(color=light(_part(name)[1]), label=_part(name)[0]) for name in names]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=ceil(len(names) / lines),
        frameon=False,
        fontsize=SMALL,
        borderaxespad=0,
        handlelength=1,
        columnspacing=1.2,
    )
    return Plot(
        "memory", "Memory" + (f" on {found.device}" if found.device else ""), _memory_words(found, sides), figure
    )


def _part(name: str) -> tuple[str, str]:
    return PARTS.get(name, (plain(name).replace("_", " ")[:24], "fifth"))


def _legend_lines(names: Sequence[str], width: int) -> int:
    return ceil(sum(len(_part(name)[0]) * 6.5 + 34 for name in names) / width)


def _stack(axes: "Axes", at: int, parts: Mapping[str, int], size: int, scale: float) -> None:
    """One bar; the words of a part stand in it where they have room. `scale` is pixels for a unit."""
    left = 0.0
    for name, value in parts.items():
        part = value / size
        axes.barh(at, part, left=left, height=0.56, color=light(_part(name)[1]), edgecolor=light("surface"), lw=1)
        words = human(value)
        if part * scale > _width(words, SMALL) + 8:
            axes.text(left + part / 2, at, words, ha="center", va="center", fontsize=SMALL, color=light("surface"))
        left += part
    total = human(sum(parts.values()))
    fits = (axes.get_xlim()[1] - left) * scale > _width(total, SMALL) + 12
    axes.annotate(
        total,
        (left, at),
        (5, 0) if fits else (-5, 19),
        textcoords="offset points",
        ha="left" if fits else "right",
        va="center",
        fontsize=SMALL,
        weight="bold",
    )


def _capacity(axes: "Axes", found: Memory, size: int, limit: float, inside: float) -> None:
    spot = (found.capacity or 0) / size
    axes.axvline(spot, color=light("ink"), lw=1.5, ls=(0, (3, 2)), zorder=4)
    words = f"capacity {human(found.capacity or 0)}"
    right = spot / limit * inside > _width(words, SMALL)
    axes.annotate(
        words,
        (spot, 1),
        (0, 3),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        ha="right" if right else "left",
        va="bottom",
        fontsize=SMALL,
    )


def _memory_words(found: Memory, sides: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    words = [
        f"{side}: {', '.join(f'{_part(name)[0]} {human(value)}' for name, value in parts.items())},"
        f" {human(sum(parts.values()))} in all"
        for side, parts in sides
    ]
    return "; ".join(words) + (f"; the device has {human(found.capacity)}." if found.capacity else ".")


def _figure(width: int, height: int, margins: tuple[float, float, float, float]) -> tuple[Figure, "Axes"]:
    """A figure with one pair of axes; margins are left, right, top, bottom."""
    left, right, top, bottom = margins
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def _spare(axes: "Axes") -> None:
    """Only the ink that says something."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    axes.set_facecolor("none")


@lru_cache(maxsize=4096)
def _width(text: str, size: float, weight: str = "normal") -> float:
    """Of a text in pixels of the page."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0])


def _label(text: str) -> str:
    """A name in one line, of a length that can be measured."""
    text = " ".join(plain(text).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"


def _shortened(text: str, room: float, weight: str = "normal") -> str:
    """A name that fits, without its middle: beginnings and ends tell files apart."""
    text = _label(text)
    for kept in range(len(text), 3, -1):
        shown = text if kept == len(text) else f"{text[: ceil(kept / 2)]}…{text[len(text) - kept // 2 :]}"
        if _width(shown, SMALL, weight) <= room:
            return shown
    return text[:3]


def _kl_limits(rows: Sequence[Row], noise: float | None) -> tuple[float, float]:
    """Below a tenth of the noise floor nothing is told apart; without one, six decades are shown."""
    values = [row.judged or 0.0 for row in rows]
    most = max(*values, noise or 0.0, 1e-12)
    floor_ = noise / 10 if noise and noise > 0 else most / 1e6
    least = max(min(values), floor_)
    return 10 ** (floor(log10(least) * 4 - 0.8) / 4), 10 ** (ceil(log10(most) * 4 + 0.8) / 4)


def _kl_ticks(axes: "Axes", bottom: float, top: float) -> None:
    axes.yaxis.set_major_locator(FixedLocator(_round_numbers(bottom, top, 10)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}" if value >= 1e-4 else f"{value:.0e}"))
    axes.grid(axis="y", lw=0.8)


def _size_axis(axes: "Axes", sizes: Sequence[float], label: str) -> None:
    """By powers where the largest is more than twice the smallest: 16-bit files would crowd the others otherwise."""
    low, high = min(sizes), max(sizes)
    if low > 0 and high > 2 * low:
        margin = (high / low) ** 0.06
        axes.set_xscale("log")
        axes.set_xlim(low / margin, high * margin)
        axes.xaxis.set_major_locator(FixedLocator(_round_numbers(low, high, 6)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        margin = (high - low) * 0.08 or max(high * 0.1, 1e-9)
        axes.set_xlim(max(low - margin, 0), high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    _spare(axes)
    axes.set_axisbelow(True)
    axes.set_xlabel(label, fontsize=SMALL)
    axes.set_ylabel("KL divergence, nats", fontsize=SMALL)


def _round_numbers(low: float, high: float, most: int) -> list[float]:
    """Numbers for an axis by powers: of the finest of these ladders that has no more than `most` of them."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ladders = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 4, 7), (1, 2, 5), (1, 3), (1,))
    found: list[float] = []
    for ladder in ladders:
        found = [step * 10.0**power for power in powers for step in ladder if low <= step * 10.0**power <= high]
        if len(found) <= most:
            return found
    return found[:: ceil(len(found) / most)]


def _whiskers(axes: "Axes", rows: Sequence[Row], spots: Mapping[int, tuple[float, float]], bottom: float) -> None:
    for row in rows:
        if row.judged_interval is not None and row.judged_interval[1] > bottom:
            low, high = (max(bound, bottom) for bound in row.judged_interval)
            axes.vlines(spots[id(row)][0], low, high, color=light(_role(row)), lw=1.2, alpha=0.6, zorder=3)


def _mark(axes: "Axes", row: Row, spot: tuple[float, float], chosen: bool) -> None:
    """A disc for ours and an open diamond for others', so that both are seen on one spot; a ring around the chosen."""
    style: dict[str, Any] = {"clip_on": False, "zorder": 5}
    if row.peer:
        axes.plot(*spot, "D", ms=2 * RADIUS, mfc="none", mec=light("peer"), mew=1.6, **style)
    else:
        axes.plot(*spot, "o", ms=2 * RADIUS, color=light("ours"), mec=light("surface"), mew=1, **style)
    if chosen:
        axes.plot(*spot, "o", ms=2 * RADIUS + 8, mfc="none", mec=light(_role(row)), mew=1.8, **style)


def _role(row: Row) -> str:
    return "peer" if row.peer else "ours"


def _names(
    axes: "Axes",
    rows: Sequence[Row],
    spots: Mapping[int, tuple[float, float]],
    best: Sequence[Row],
    chosen: Row | None,
) -> int:
    """Writes the names at their marks, the important ones first, and says how many found no room."""
    order = sorted(rows, key=lambda row: (row is not chosen, row not in best, row.bytes))
    at = {id(row): tuple(axes.transData.transform(spots[id(row)])) for row in rows}
    words = [_shortened(row.name, 170, "bold" if row is chosen else "normal") for row in order]
    sizes = [
        (_width(text, SMALL, "bold" if row is chosen else "normal") + 2, SMALL * 1.3)
        for row, text in zip(order, words, strict=True)
    ]
    window = axes.get_window_extent()
    frame = (window.x0, window.y0 + 2, window.x1 + 12, window.y1)
    marks = [_around(at[id(row)], RADIUS + (5 if row is chosen else 4 if row.peer else 2)) for row in rows]
    boxes = place([at[id(row)] for row in order], sizes, frame, marks, _step_boxes([at[id(row)] for row in best]))
    for row, text, box in zip(order, words, boxes, strict=True):
        if box is not None:
            _name(axes, row, text, at[id(row)], box, row is chosen)
    return sum(box is None for box in boxes)


def _name(axes: "Axes", row: Row, text: str, point: tuple[float, float], box: Box, chosen: bool) -> None:
    """A name in its box, with a line to a mark that is not next to it. In offsets of the mark, so that it scales."""
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
        color=light(_role(row) if chosen or row.peer else "ink"),
        **style,
    )


def _around(point: tuple[float, ...], reach: float) -> Box:
    return point[0] - reach, point[1] - reach, point[0] + reach, point[1] + reach


def _step_boxes(corners: Sequence[tuple[float, ...]]) -> list[Box]:
    boxes: list[Box] = []
    for (x0, y0), (x1, y1) in pairwise(corners):
        boxes += [(x0, y0 - 1, x1, y0 + 1), (x1 - 1, min(y0, y1), x1 + 1, max(y0, y1))]
    return boxes


def _legend(figure: Figure, width: int, rows: Sequence[Row], content: Content, ours: bool) -> None:
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
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        fontsize=SMALL,
        borderaxespad=0,
        handlelength=1.2,
        handletextpad=0.5,
        columnspacing=1.2 if width == WIDE else 0.8,
    )


def _pareto_words(rows: Sequence[Row], best: Sequence[Row]) -> str:
    names = ", ".join(f"{plain(row.name)} ({human(row.bytes)}, KL {row.judged:.3g})" for row in best)
    return f"{len(rows)} files by size and KL divergence from the 16-bit model. On the frontier: {names}."


def _pareto_caption(rows: Sequence[Row], left_out: int, bottom: float) -> str:
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


def _bars(axes: "Axes", rows: Sequence[Row], name: str, reference: float | None, across: float) -> None:
    """One panel. `across` is its width in pixels, of which the figures at the tips get their share."""
    base = 1.0 if name == "top1" else reference or 0.0
    shown = [(at, row, getattr(row, name)) for at, row in enumerate(rows) if getattr(row, name) is not None]
    span = _bar_axis(axes, [value for _, _, value in shown], _bounds(rows, name), base, across)
    axes.barh(
        [at for at, _, _ in shown],
        [value - base for _, _, value in shown],
        left=base,
        height=0.62,
        zorder=2,
        color=[light(_role(row)) for _, row, _ in shown],
    )
    for at, row, value in shown:
        tip = _whisker(axes, at, value, getattr(row, f"{name}_interval"), base)
        side = -1 if tip < base or (tip == base and name == "top1") else 1
        style: dict[str, Any] = {"ha": "left" if side > 0 else "right", "va": "center", "fontsize": SMALL}
        words = f"{value:.1%}" if name == "top1" else _short(value)
        axes.annotate(words, (tip, at), (4 * side, 0), textcoords="offset points", **style)
    axes.axvline(base, color=light("muted"), lw=1, zorder=3)
    digits = 0 if span > 0.05 else 1
    style_of = {"perplexity": lambda value, _: _short(value), "top1": lambda value, _: f"{value:.{digits}%}"}
    axes.xaxis.set_major_formatter(FuncFormatter(style_of[name]))
    title = (
        "same first token" if name == "top1" else "perplexity" + (f" (16 bit: {reference:.4g})" if reference else "")
    )
    axes.set_title(title, fontsize=11, loc="left", color=light("ink"), pad=6)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _bounds(rows: Sequence[Row], name: str) -> list[float]:
    return [bound for row in rows for bound in getattr(row, f"{name}_interval") or ()]


def _bar_axis(axes: "Axes", values: Sequence[float], bounds: Sequence[float], base: float, across: float) -> float:
    """Room for all bars, intervals and figures; by powers where one bar would dwarf the others. Gives what it spans."""
    low, high = min(*values, *bounds, base), max(*values, *bounds, base)
    powers = base > 0 and high > DWARFS * base
    to, back = (log, exp) if powers else (float, float)
    span = (to(high) - to(low)) or max(abs(base) * 0.05, 0.01)
    room, gap = span * 50 / max(across - 100, 40), span * 0.02
    begin, end = to(low) - (room if low < base else gap), to(high) + (room if high > base else gap)
    if powers:
        end = min(end, log(FLOAT_MOST))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_round_numbers(low, back(end), 4)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlim(back(begin), back(end))
    _spare(axes)
    axes.grid(axis="x", lw=0.8, zorder=0)
    return span


def _whisker(axes: "Axes", at: int, value: float, interval: tuple[float, float] | None, base: float) -> float:
    """Draws the interval, and gives the outermost point of bar and interval."""
    if interval is None:
        return value
    axes.hlines(at, *interval, color=light("ink"), lw=1.2, zorder=4)
    return min(value, interval[0]) if value < base else max(value, interval[1])


def _bar_names(axes: "Axes", rows: Sequence[Row], room: float, chosen: Row | None) -> None:
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = [_shortened(row.name, room - 8) if room else "" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=SMALL)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set_color(light("peer" if row.peer else "ink"))
        tick.set_fontweight("bold" if row is chosen else "normal")


def _quality_words(row: Row) -> str:
    parts = [
        f"perplexity {row.perplexity:.4g}" if row.perplexity is not None else "",
        f"same first token {row.top1:.1%}" if row.top1 is not None else "",
    ]
    return f"{plain(row.name)}: {', '.join(part for part in parts if part)}"


def _cells(
    axes: "Axes",
    cells: Mapping[tuple[str, str], float],
    blocks: Sequence[str],
    modules: Sequence[str],
    steps: Steps,
    ramp: str,
) -> None:
    """One shape for all cells of a step: hundreds of blocks stay a small page."""
    columns, lines = ({name: at for at, name in enumerate(names)} for names in (blocks, modules))
    groups: dict[int, list[tuple[int, int]]] = {}
    for (block, module), value in cells.items():
        groups.setdefault(steps.of(value), []).append((columns[block], lines[module]))
    for step, spots in sorted(groups.items()):
        squares = [Path.unit_rectangle().transformed(_shift(*spot)) for spot in spots]
        axes.add_patch(
            PathPatch(Path.make_compound_path(*squares), fc=light(f"{ramp}-{step}"), ec=light("surface"), lw=0.5)
        )
    axes.set_xlim(0, len(blocks))
    axes.set_ylim(len(modules), 0)


def _shift(x: float, y: float) -> Any:
    return Affine2D().translate(x, y)


def _map_axes(
    axes: "Axes", blocks: Sequence[str], modules: Sequence[str], across: float, tall: float, room: float
) -> None:
    """Names at every cell, or at every second, fifth, ... where they would touch."""
    _spare(axes)
    axes.spines["bottom"].set_visible(False)
    widest = max(_width(plain(block)[:12], SMALL) for block in blocks) + 6
    every = next((step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50) if step * across >= widest), len(blocks))
    shown = list(range(0, len(blocks), every))
    axes.set_xticks([at + 0.5 for at in shown], [plain(blocks[at])[:12] for at in shown])
    skip = max(1, ceil(12 / tall))
    lines = list(range(0, len(modules), skip))
    axes.set_yticks([at + 0.5 for at in lines], [_shortened(modules[at], room - 8) for at in lines])
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_xlabel("block", fontsize=SMALL)


def _cell_words(
    axes: "Axes",
    cells: Mapping[tuple[str, str], float],
    blocks: Sequence[str],
    modules: Sequence[str],
    steps: Steps,
    across: float,
    tall: float,
) -> None:
    """The figures in the cells, if all of them fit."""
    widest = max(_width(f"{value:.3g}", 8) for value in set(cells.values()))
    if widest + 2 > across or tall < 12:
        return
    columns, lines = ({name: at for at, name in enumerate(names)} for names in (blocks, modules))
    for (block, module), value in cells.items():
        colour = light("surface" if steps.of(value) >= STEPS // 2 else "ink")
        axes.text(
            columns[block] + 0.5,
            lines[module] + 0.5,
            f"{value:.3g}",
            ha="center",
            va="center",
            fontsize=8,
            color=colour,
        )


def _scale(figure: Figure, steps: Steps, ramp: str, width: int, height: int, room: float) -> None:
    """The colours with the least and the most, above the map."""
    low, high = f"{steps.low:.3g}", f"{steps.high:.3g}"
    step = 18 if width == WIDE else 12
    begin = room + _width(low, SMALL) + 8
    y = height - 24
    for at in range(STEPS if steps.high > steps.low else 0):
        spot = ((begin + at * step) / width, y / height)
        figure.add_artist(
            Rectangle(
                spot, step / width, 12 / height, fc=light(f"{ramp}-{at}"), ec="none", transform=figure.transFigure
            )
        )
    end = begin + step * STEPS + 8
    if steps.high > steps.low:
        figure.text(
            (begin - 8) / width, (y + 6) / height, low, ha="right", va="center", fontsize=SMALL, color=light("muted")
        )
        high += ", by powers" if steps.logarithmic else ""
        figure.text(end / width, (y + 6) / height, high, ha="left", va="center", fontsize=SMALL, color=light("muted"))
    else:
        figure.text(room / width, (y + 6) / height, f"all {high}", va="center", fontsize=SMALL, color=light("muted"))


def _verdict(content: Content) -> str:
    words = {"pass": "passes", "fail": "FAILS"}.get(content.verdict, "")
    return f"{words} the gate {content.gate}".strip() if words else ""


def _heading(text: str, size: float, under: str = "") -> "NDArray[np.uint8]":
    """A strip with a title, and a smaller line below it."""
    height = round(size * 1.4 + (26 if under else 12) + 12)
    figure = Figure(figsize=(WIDE / DPI, height / DPI), dpi=DPI)
    figure.text(0, 1 - 14 / height, _cut(text, size), va="top", fontsize=size, weight="bold")
    if under:
        figure.text(0, 8 / height, _cut(under, 11), va="bottom", fontsize=11, color=light("muted"))
    return pixels(figure)


def _cut(text: str, size: float) -> str:
    text = _label(text)
    kept: Iterator[str] = (text if at == len(text) else text[:at] + "…" for at in range(len(text), 0, -1))
    return next((shown for shown in kept if _width(shown, size, "bold") <= WIDE), "")

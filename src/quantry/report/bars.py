"""Perplexity and same first token as bars that start at the 16-bit model."""

from collections.abc import Sequence
from math import exp, log
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from quantry.report.content import Content, FileRow, plain
from quantry.report.drawing import SMALL, WIDE, Plot, figure_of, name_width, round_numbers, shortened, spare
from quantry.report.ink import light
from quantry.report.sizes import counted, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR = 22  # height of a bar and its gap
DWARFS = 3  # times the reference: larger perplexities need a logarithmic axis
FLOAT_MOST = 1e307  # the end of an axis


def quality(content: Content, width: int) -> Plot | None:
    """Draws perplexity and same first token; bars start at the reference, so their length is the loss."""
    rows = sorted(
        (row for row in content.rows if row.perplexity is not None or row.top1 is not None), key=lambda row: row.bytes
    )
    if not rows:
        return None
    panels = [name for name in ("perplexity", "top1") if any(getattr(row, name) is not None for row in rows)]
    side_by_side = width == WIDE
    each = BAR * len(rows) + 62
    height = each if side_by_side else each * len(panels)
    figure = figure_of(width, height)
    room = name_width((row.name for row in rows), width)
    across = (width - room - 14 * len(panels)) / len(panels) if side_by_side else width - room - 14
    for at, name in enumerate(panels):
        left = room + at * (across + 14) if side_by_side else room
        base = 34 if side_by_side else 34 + (len(panels) - 1 - at) * each
        axes = figure.add_axes((left / width, base / height, across / width, (each - 62) / height))
        _bars(axes, rows, name, content.reference_perplexity, across)
        _bar_names(axes, rows, room if not (side_by_side and at) else 0, content.chosen)
    about = (
        f"Bars for {counted(len(rows), 'file')}, smallest first. "
        + "; ".join(_quality_words(row) for row in rows)
        + "."
    )
    caption = "Bars begin at the 16-bit model: shorter is better."
    return Plot("quality", "Perplexity and same first token", about, figure, caption)


def _bars(axes: "Axes", rows: Sequence[FileRow], name: str, reference: float | None, across: float) -> None:
    """Draws one panel; `across` is its width in pixels, including the figures at the tips."""
    base = 1.0 if name == "top1" else reference or 0.0
    shown = [(at, row, getattr(row, name)) for at, row in enumerate(rows) if getattr(row, name) is not None]
    bounds = [bound for row in rows for bound in getattr(row, f"{name}_interval") or ()]
    span = _bar_axis(axes, [value for _, _, value in shown], bounds, base, across)
    for at, row, value in shown:
        axes.barh(at, value - base, left=base, height=0.62, zorder=2, color=light(row.role))
        tip = _whisker(axes, at, value, getattr(row, f"{name}_interval"), base)
        side = -1 if tip < base or (tip == base and name == "top1") else 1
        style: dict[str, Any] = {"ha": "left" if side > 0 else "right", "va": "center", "fontsize": SMALL}
        words = f"{value:.1%}" if name == "top1" else short(value)
        axes.annotate(words, (tip, at), (4 * side, 0), textcoords="offset points", **style)
    axes.axvline(base, color=light("muted"), lw=1, zorder=3)
    digits = 0 if span > 0.05 else 1
    style_of = {"perplexity": lambda value, _: short(value), "top1": lambda value, _: f"{value:.{digits}%}"}
    axes.xaxis.set_major_formatter(FuncFormatter(style_of[name]))
    title = (
        "same first token" if name == "top1" else "perplexity" + (f" (16 bit: {reference:.4g})" if reference else "")
    )
    axes.set_title(title, fontsize=11, loc="left", color=light("ink"), pad=6)


def _bar_axis(axes: "Axes", values: Sequence[float], bounds: Sequence[float], base: float, across: float) -> float:
    """Fits the axis to bars, intervals and figures, by powers if one bar would dwarf the others; returns its span."""
    low, high = min(*values, *bounds, base), max(*values, *bounds, base)
    powers = base > 0 and high > DWARFS * base
    to, back = (log, exp) if powers else (float, float)
    span = (to(high) - to(low)) or max(abs(base) * 0.05, 0.01)
    room, gap = span * 50 / max(across - 100, 40), span * 0.02
    begin, end = to(low) - (room if low < base else gap), to(high) + (room if high > base else gap)
    if powers:
        end = min(end, log(FLOAT_MOST))
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(round_numbers(low, back(end), 4)))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlim(back(begin), back(end))
    spare(axes)
    axes.grid(axis="x", lw=0.8, zorder=0)
    return span


def _whisker(axes: "Axes", at: int, value: float, interval: tuple[float, float] | None, base: float) -> float:
    """Draws the interval; returns the outermost point of bar and interval."""
    if interval is None:
        return value
    axes.hlines(at, *interval, color=light("ink"), lw=1.2, zorder=4)
    return min(value, interval[0]) if value < base else max(value, interval[1])


def _bar_names(axes: "Axes", rows: Sequence[FileRow], room: float, chosen: FileRow | None) -> None:
    axes.set_ylim(len(rows) - 0.5, -0.5)
    names = [shortened(row.name, room - 8) if room else "" for row in rows]
    axes.set_yticks(range(len(rows)), names, fontsize=SMALL)
    for row, tick in zip(rows, axes.get_yticklabels(), strict=True):
        tick.set_color(light("peer" if row.peer else "ink"))
        tick.set_fontweight("bold" if row is chosen else "normal")


def _quality_words(row: FileRow) -> str:
    parts = [
        f"perplexity {row.perplexity:.4g}" if row.perplexity is not None else "",
        f"same first token {row.top1:.1%}" if row.top1 is not None else "",
    ]
    return f"{plain(row.name)}: {', '.join(part for part in parts if part)}"

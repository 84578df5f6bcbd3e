"""Memory as stacked bars, predicted above measured, with the capacity of the device."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING

from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from quantry.report.content import Memory, plain
from quantry.report.drawing import SMALL, WIDE, Plot, legend, one_axes, spare, text_width
from quantry.report.ink import light
from quantry.report.sizes import human, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = {  # part of memory -> its name and its colour
    "weights": ("weights", "ours"),
    "kv_cache": ("KV cache", "second"),
    "activations": ("activations", "third"),
    "compute": ("compute", "third"),
    "overhead": ("overhead", "fourth"),
}


def memory_bars(memory: Memory, width: int) -> Plot | None:
    """Draws the parts of memory, or returns None if there are none."""
    sides = memory.sides
    if not sides:
        return None
    names = list(dict.fromkeys(name for _, parts in sides for name in parts))
    lines = ceil(sum(len(_part(name)[0]) * 6.5 + 34 for name in names) / width)  # of the legend
    height = 46 * len(sides) + 62 + 18 * lines
    figure, axes = one_axes(width, height, (72, 20, 24 + 18 * lines, 40))
    most = max(*(sum(parts.values()) for _, parts in sides), memory.capacity or 0)
    size, unit = unit_of(most)
    limit = max(most / size, 1e-9) * (1.04 if memory.capacity else 1.16)
    axes.set_xlim(0, limit)
    axes.set_ylim(len(sides) - 0.5, -0.5)
    inside = width - 92
    for at, (_, parts) in enumerate(sides):
        _stack(axes, at, parts, size, inside / limit)
    if memory.capacity:
        _capacity(axes, memory, size, limit, inside)
    spare(axes)
    axes.set_yticks(range(len(sides)), [side for side, _ in sides], fontsize=11, color=light("ink"))
    axes.xaxis.set_major_locator(MaxNLocator(6 if width == WIDE else 4))
    axes.set_xlabel(unit, fontsize=SMALL)
    handles = [Patch(color=light(_part(name)[1]), label=_part(name)[0]) for name in names]
    legend(figure, handles, ceil(len(names) / lines), handlelength=1, columnspacing=1.2)
    return Plot(
        "memory", "Memory" + (f" on {memory.device}" if memory.device else ""), _memory_words(memory, sides), figure
    )


def _part(name: str) -> tuple[str, str]:
    return PARTS.get(name, (plain(name).replace("_", " ")[:24], "fifth"))


def _stack(axes: "Axes", at: int, parts: Mapping[str, int], size: int, scale: float) -> None:
    """Draws one bar, with words in each part that has room for them; `scale` is pixels per unit."""
    left = 0.0
    for name, value in parts.items():
        part = value / size
        axes.barh(at, part, left=left, height=0.56, color=light(_part(name)[1]), edgecolor=light("surface"), lw=1)
        words = human(value)
        if part * scale > text_width(words, SMALL) + 8:
            axes.text(left + part / 2, at, words, ha="center", va="center", fontsize=SMALL, color=light("surface"))
        left += part
    total = human(sum(parts.values()))
    fits = (axes.get_xlim()[1] - left) * scale > text_width(total, SMALL) + 12
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


def _capacity(axes: "Axes", memory: Memory, size: int, limit: float, inside: float) -> None:
    spot = (memory.capacity or 0) / size
    axes.axvline(spot, color=light("ink"), lw=1.5, ls=(0, (3, 2)), zorder=4)
    words = f"capacity {human(memory.capacity or 0)}"
    right = spot / limit * inside > text_width(words, SMALL)
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


def _memory_words(memory: Memory, sides: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    words = [
        f"{side}: {', '.join(f'{_part(name)[0]} {human(value)}' for name, value in parts.items())},"
        f" {human(sum(parts.values()))} in all"
        for side, parts in sides
    ]
    return "; ".join(words) + (f"; the device has {human(memory.capacity)}." if memory.capacity else ".")

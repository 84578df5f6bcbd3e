"""Shared by all plots: a figure with its description, measures, and names that fit.

All lengths are pixels of the page. Code places the axes by the measured width of the labels, so that a drawing is the
same on every machine. A page has each drawing twice: wide, and narrow for a phone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log10
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from quantry.report.content import plain
from quantry.report.ink import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 760, 350
SMALL = 10  # font size at marks and ticks
LONGEST = 160  # letters of a name that are measured


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """A figure, and a description in words."""

    name: str
    title: str
    about: str
    figure: Figure
    caption: str = ""


def figure_of(width: int, height: float) -> Figure:
    """Returns an empty figure of a size in pixels."""
    return Figure(figsize=(width / DPI, height / DPI), dpi=DPI)


def one_axes(width: int, height: int, margins: tuple[float, float, float, float]) -> tuple[Figure, "Axes"]:
    """Returns a figure with one pair of axes; margins are left, right, top, bottom."""
    left, right, top, bottom = margins
    figure = figure_of(width, height)
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def spare(axes: "Axes") -> None:
    """Removes all lines that carry no information."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    axes.set_facecolor("none")


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Returns the width of a text in pixels of the page."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0])


def one_line(text: str) -> str:
    """Returns a name in one line, short enough to measure."""
    line = " ".join(plain(text).split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]}…{line[-LONGEST // 2 :]}"


def name_width(names: Iterable[str], width: int) -> float:
    """Returns the room for names at the left of a plot: as wide as the longest, up to `name_room`."""
    return min(max(text_width(one_line(name), SMALL) for name in names) + 12, name_room(width))


def name_room(width: int) -> float:
    """Returns the most that a name may take: some 55 letters, or 18 on a phone, where the tables have it whole."""
    return width * (0.45 if width == WIDE else 0.34)


def legend(figure: Figure, handles: Sequence[Any], columns: int, **style: Any) -> None:
    """Draws a legend at the upper left of a figure."""
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        frameon=False,
        fontsize=SMALL,
        borderaxespad=0,
        **style,
    )


def shortened(text: str, room: float, weight: str = "normal") -> str:
    """Returns a name that fits, without its middle: beginnings and ends distinguish files."""
    line = one_line(text)
    for kept in range(len(line), 3, -1):
        shown = line if kept == len(line) else f"{line[: ceil(kept / 2)]}…{line[len(line) - kept // 2 :]}"
        if text_width(shown, SMALL, weight) <= room:
            return shown
    return line[:3]


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Returns numbers for a logarithmic axis, from the finest ladder with at most `most` of them."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ladders = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 4, 7), (1, 2, 5), (1, 3), (1,))
    numbers: list[float] = []
    for ladder in ladders:
        numbers = [step * 10.0**power for power in powers for step in ladder if low <= step * 10.0**power <= high]
        if len(numbers) <= most:
            return numbers
    return numbers[:: ceil(len(numbers) / most)]

"""What all plots share: a figure with words for it, its measures, and names that fit.

All lengths are pixels of the page. Axes are put in place by hand, from the measured width of the labels, so that a
drawing is the same on every machine. Each is drawn twice for a page: wide, and narrow for a phone.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, floor, log10
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

from quantry.report.content import Row, plain
from quantry.report.ink import DPI

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDE, NARROW = 760, 350
SMALL = 10  # size of the letters at marks and ticks
LONGEST = 160  # letters of a name that are looked at


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """A figure, and what it shows in words."""

    name: str
    title: str
    about: str
    figure: Figure
    caption: str = ""


def one_axes(width: int, height: int, margins: tuple[float, float, float, float]) -> tuple[Figure, "Axes"]:
    """A figure with one pair of axes; margins are left, right, top, bottom."""
    left, right, top, bottom = margins
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    box = (left / width, bottom / height, (width - left - right) / width, (height - top - bottom) / height)
    return figure, figure.add_axes(box)


def spare(axes: "Axes") -> None:
    """Only the ink that says something."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0, labelsize=SMALL)
    axes.set_facecolor("none")


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, weight: str = "normal") -> float:
    """Of a text in pixels of the page."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    return float(text_to_path.get_text_width_height_descent(text, font, False)[0])


def one_line(text: str) -> str:
    """A name in one line, of a length that can be measured."""
    text = " ".join(plain(text).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…{text[-LONGEST // 2 :]}"


def shortened(text: str, room: float, weight: str = "normal") -> str:
    """A name that fits, without its middle: beginnings and ends tell files apart."""
    text = one_line(text)
    for kept in range(len(text), 3, -1):
        shown = text if kept == len(text) else f"{text[: ceil(kept / 2)]}…{text[len(text) - kept // 2 :]}"
        if text_width(shown, SMALL, weight) <= room:
            return shown
    return text[:3]


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Numbers for an axis by powers: of the finest of these ladders that has no more than `most` of them."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    ladders = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 4, 6, 8), (1, 2, 4, 7), (1, 2, 5), (1, 3), (1,))
    found: list[float] = []
    for ladder in ladders:
        found = [step * 10.0**power for power in powers for step in ladder if low <= step * 10.0**power <= high]
        if len(found) <= most:
            return found
    return found[:: ceil(len(found) / most)]


def role_of(row: Row) -> str:
    return "peer" if row.peer else "ours"

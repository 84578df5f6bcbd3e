"""Heat maps: blocks (or positions) from left to right, modules (or types of cache) from top to bottom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING, Literal

from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from quantry.report.content import BlockMap, modules_of, plain
from quantry.report.drawing import SMALL, WIDE, Plot, name_width, one_axes, shortened, spare, text_width
from quantry.report.ink import STEPS, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOP, BOTTOM, RIGHT = 50, 34, 14  # margins of a map
WRITTEN = ("bits", "caches")  # maps whose cells show their figures


@dataclass(frozen=True, slots=True)
class ColourSteps:
    """The colour step of each value of a map."""

    low: float
    high: float
    logarithmic: bool

    def of(self, value: float) -> int:
        """Returns the step of a value, from 0 on."""
        if self.high <= self.low:
            return STEPS // 2
        if self.logarithmic:
            share = log(max(value, self.low) / self.low) / log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(int(share * STEPS), STEPS - 1)


@dataclass(frozen=True, slots=True)
class _HeatMap:
    """The cells of a map, and its measures in pixels."""

    cells: Mapping[tuple[str, str], float]
    blocks: Sequence[str]
    modules: Sequence[str]
    steps: ColourSteps
    ramp: str
    room: float  # for the names of modules, at the left
    across: float  # width of a cell
    tall: float  # height of a cell

    def spots(self) -> list[tuple[int, int, float]]:
        """Returns the column, the line and the value of every cell."""
        columns, lines = ({name: at for at, name in enumerate(names)} for names in (self.blocks, self.modules))
        return [(columns[block], lines[module], value) for (block, module), value in self.cells.items()]


def steps_of(values: Sequence[float]) -> ColourSteps:
    """Returns steps by powers if the values span more than a factor of 20, over at most six decades."""
    positive = [value for value in values if value > 0]
    high = max(values)
    if positive and high / min(positive) > 20:
        return ColourSteps(max(min(positive), high / 1e6), high, True)
    return ColourSteps(min(values), high, False)


def heat(
    values: BlockMap, width: int, name: str, title: str, ramp: str, axes_names: tuple[str, str] = ("block", "module")
) -> Plot | None:
    """Draws a map, or returns None if it has no cells. `axes_names` say what a column and a line are."""
    cells = {(block, module): float(value) for block, row in values.items() for module, value in row.items()}
    if not cells:
        return None
    blocks, modules = list(values), modules_of(values)
    tall = min(520 / len(modules), 22.0)
    height = ceil(tall * len(modules)) + TOP + BOTTOM
    room = name_width(modules, width)
    figure, axes = one_axes(width, height, (room, RIGHT, height - BOTTOM - tall * len(modules), BOTTOM))
    drawn = _HeatMap(
        cells, blocks, modules, steps_of(list(cells.values())), ramp, room, (width - room - RIGHT) / len(blocks), tall
    )
    _cells(axes, drawn)
    _map_axes(axes, drawn, axes_names[0])
    if name in WRITTEN:
        _cell_words(axes, drawn)
    _scale(figure, drawn, width, height)
    worst = max(cells, key=lambda cell: cells[cell])
    about = (
        f"A map of {len(blocks)} {axes_names[0]}s by {len(modules)} {axes_names[1]}s,"
        f" from {min(cells.values()):.3g} to {cells[worst]:.3g}; the most is {axes_names[0]} {worst[0]}, {worst[1]}."
    )
    return Plot(name, title, about, figure)


def _cells(axes: "Axes", drawn: _HeatMap) -> None:
    """Draws one shape for all cells of a step: hundreds of blocks stay a small page."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for column, line, value in drawn.spots():
        groups.setdefault(drawn.steps.of(value), []).append((column, line))
    for step, spots in sorted(groups.items()):
        squares = [Path.unit_rectangle().transformed(Affine2D().translate(*spot)) for spot in spots]
        colour = light(f"{drawn.ramp}-{step}")
        axes.add_patch(PathPatch(Path.make_compound_path(*squares), fc=colour, ec=light("surface"), lw=0.5))
    axes.set_xlim(0, len(drawn.blocks))
    axes.set_ylim(len(drawn.modules), 0)


def _map_axes(axes: "Axes", drawn: _HeatMap, below: str) -> None:
    """Writes names at every cell, or at every second, fifth, ... if they would touch."""
    spare(axes)
    axes.spines["bottom"].set_visible(False)
    names = [plain(block)[:12] for block in drawn.blocks]
    widest = max(text_width(name, SMALL) for name in names) + 6
    every = next((step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50) if step * drawn.across >= widest), len(names))
    shown = range(0, len(names), every)
    axes.set_xticks([at + 0.5 for at in shown], [names[at] for at in shown])
    lines = range(0, len(drawn.modules), max(1, ceil(12 / drawn.tall)))
    axes.set_yticks([at + 0.5 for at in lines], [shortened(drawn.modules[at], drawn.room - 8) for at in lines])
    axes.tick_params(axis="y", labelcolor=light("ink"))
    axes.set_xlabel(below, fontsize=SMALL)


def _cell_words(axes: "Axes", drawn: _HeatMap) -> None:
    """Writes the figures into the cells, if all of them fit."""
    widest = max(text_width(f"{value:.3g}", 8) for value in set(drawn.cells.values()))
    if widest + 2 > drawn.across or drawn.tall < 12:
        return
    for column, line, value in drawn.spots():
        colour = light("surface" if drawn.steps.of(value) >= STEPS // 2 else "ink")
        axes.text(column + 0.5, line + 0.5, f"{value:.3g}", ha="center", va="center", fontsize=8, color=colour)


def _scale(figure: "Figure", drawn: _HeatMap, width: int, height: int) -> None:
    """Draws the colours with the least and the most, above the map."""
    steps, y = drawn.steps, height - 24

    def write(x: float, words: str, side: Literal["left", "right"]) -> None:
        figure.text(x / width, (y + 6) / height, words, ha=side, va="center", fontsize=SMALL, color=light("muted"))

    low, high = f"{steps.low:.3g}", f"{steps.high:.3g}"
    if steps.high <= steps.low:
        write(drawn.room, f"all {high}", "left")
        return
    step = 18 if width == WIDE else 12
    begin = drawn.room + text_width(low, SMALL) + 8
    for at in range(STEPS):
        spot, colour = ((begin + at * step) / width, y / height), light(f"{drawn.ramp}-{at}")
        box = Rectangle(spot, step / width, 12 / height, fc=colour, ec="none", transform=figure.transFigure)
        figure.add_artist(box)
    write(begin - 8, low, "right")
    write(begin + step * STEPS + 8, high + (", by powers" if steps.logarithmic else ""), "left")

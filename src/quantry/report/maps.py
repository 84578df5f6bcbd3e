"""Heat maps: blocks from left to right, modules from top to bottom."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.transforms import Affine2D

from quantry.report.content import BlockMap, modules_of, plain
from quantry.report.drawing import SMALL, WIDE, Plot, one_line, shortened, spare, text_width
from quantry.report.ink import DPI, STEPS, light

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def steps_of(values: Sequence[float]) -> Steps:
    """By powers where the values span more than a factor of 20, of which at most six decades are told apart."""
    positive = [value for value in values if value > 0]
    high = max(values)
    if positive and high / min(positive) > 20:
        return Steps(max(min(positive), high / 1e6), high, True)
    return Steps(min(values), high, False)


def heat(found: BlockMap, width: int, name: str, title: str, ramp: str) -> Plot | None:
    """Blocks from left to right, modules from top to bottom."""
    cells = {(block, module): float(value) for block, row in found.items() for module, value in row.items()}
    if not cells:
        return None
    blocks, modules = list(found), modules_of(found)
    tall = min(520 / len(modules), 22.0)
    height = ceil(tall * len(modules)) + 84
    figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI)
    room = min(max(text_width(one_line(module), SMALL) for module in modules) + 12, width * 0.34)
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
    spare(axes)
    axes.spines["bottom"].set_visible(False)
    widest = max(text_width(plain(block)[:12], SMALL) for block in blocks) + 6
    every = next((step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 50) if step * across >= widest), len(blocks))
    shown = list(range(0, len(blocks), every))
    axes.set_xticks([at + 0.5 for at in shown], [plain(blocks[at])[:12] for at in shown])
    skip = max(1, ceil(12 / tall))
    lines = list(range(0, len(modules), skip))
    axes.set_yticks([at + 0.5 for at in lines], [shortened(modules[at], room - 8) for at in lines])
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
    widest = max(text_width(f"{value:.3g}", 8) for value in set(cells.values()))
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
    begin = room + text_width(low, SMALL) + 8
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

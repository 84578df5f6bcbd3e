"""Scales that are fixed before serving, for a layer's input and for the KV cache, from calibration statistics.

A fit sees every value that it will round. Here only the largest magnitudes and counts over 2048 equal steps are known,
and later values will differ. The range that a scale covers is

- minmax: up to the largest magnitude seen,
- percentile: up to the magnitude that 99.99 % of all values stay below,
- mse: the one whose rounding, clipping included, has the least mean square error on the counts.

The error over the counts is exact for values that are spread evenly within a step: an integral of squares, in closed
form between the points where rounding switches to the next value. Sampling would alias with fine grids.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantry import registry
from quantry.errors import RecipeError
from quantry.numerics.grids import FLOAT8, LARGEST, code_range
from quantry.numerics.scales import NVFP4_OUTER, stored
from quantry.types import Grid, Stats

PERCENT = 99.99
NOISE = 0.03  # of the square of a typical channel: more than that a stored scale may not cost
SHRINKING = tuple(2 ** (-step / 24) for step in range(24 * 8))  # of the largest magnitude, down to 1/256 of it


def input_scale(stats: Stats, grid: Grid, method: str = "minmax") -> Tensor:
    """Returns the scale, (1,), of an input that is rounded to `grid` with one scale, in the dtype the grid names.

    For NVFP4, whose groups have scales too, it is the float32 divisor that keeps those in E4M3's range. Raises
    UnknownNameError for an unknown method, RecipeError if the method cannot work with the grid or the statistics.
    """
    registry.check("method of input scales", method, METHODS)
    if grid.kind != "e2m1":
        return stored(METHODS[method](stats, grid) / largest_code(grid), grid).reshape(1)
    if method == "mse":
        raise RecipeError(
            "mse cannot choose the input scale of nvfp4, because each of its groups has a scale", fix="use minmax"
        )
    top = METHODS[method](stats, grid)
    return torch.where(top > 0, NVFP4_OUTER / top, 1.0).float().reshape(1)


def outlying(stats: Stats, grid: Grid) -> bool:
    """Says if outliers stretch a stored scale so far that it would drown the rest of the input.

    A scale that covers the range rounds with an error of a twelfth of its square, which is compared with the mean
    square of the channel in the middle: a few channels or tokens do not move that. Floats have steps that shrink with
    the values, and do not suffer.
    """
    if grid.kind != "int":
        return False
    scale = stats.absmax.max().double() / largest_code(grid)
    return bool(scale.square() / 12 > NOISE * stats.mean_square.double().median())


def cache_scale(largest: Tensor, grid: Grid) -> Tensor:
    """Returns the scale of keys or values from the largest magnitude of each head: (1,), or (heads, 1, 1) per head."""
    top = largest.reshape(-1, 1, 1) if grid.block == (1, 0) else largest.max().reshape(1)
    return stored(top.float() / largest_code(grid), grid)


def largest_code(grid: Grid) -> float:
    """Returns the divisor of the largest magnitude: 127 for int8, 448 for E4M3."""
    return LARGEST[grid.kind] if grid.kind in LARGEST else float(code_range(grid)[1])


def percentile(stats: Stats, percent: float = PERCENT) -> Tensor:
    """Returns the magnitude that `percent` % of all values stay below, with values even within a step of the counts."""
    counts = _counts(stats)
    wanted = counts.sum() * (percent / 100)
    below = counts.cumsum(0)
    index = int(torch.searchsorted(below, wanted).clamp(max=len(counts) - 1))
    inside = (wanted - (below[index] - counts[index])) / counts[index].clamp(min=1)
    return ((index + inside) * (_top(stats) / len(counts))).float()


def squared_error(stats: Stats, grid: Grid, scale: Tensor) -> Tensor:
    """Returns the sum of squared errors of the counted magnitudes, rounded to a grid with this scale."""
    counts, values = _counts(stats), _magnitudes(grid)
    edges = torch.linspace(0, 1, len(counts) + 1, dtype=torch.float64) * (_top(stats) / scale.double().cpu())
    means = _integral(edges, values).diff() / edges[1]
    return (means * counts).sum() * scale.double().cpu().square()


def _minmax(stats: Stats, grid: Grid) -> Tensor:
    return stats.absmax.max().float()


def _percentile(stats: Stats, grid: Grid) -> Tensor:
    return percentile(stats).to(stats.absmax.device)


def _least_error(stats: Stats, grid: Grid) -> Tensor:
    """Returns the range with the least rounding error, tried with the scales that the file would hold."""
    top = _minmax(stats, grid)
    if not top > 0:
        return top
    trials = [top * fraction for fraction in SHRINKING]
    errors = [squared_error(stats, grid, stored(trial / largest_code(grid), grid)) for trial in trials]
    return trials[int(torch.stack(errors).argmin())]


METHODS: dict[str, Callable[[Stats, Grid], Tensor]] = {
    "minmax": _minmax,
    "percentile": _percentile,
    "mse": _least_error,
}


def _counts(stats: Stats) -> Tensor:
    if stats.histogram is None:
        raise RecipeError(
            "percentile and mse need counts of this input, and calibration kept none",
            fix="use minmax, or a preset that does not scale the inputs first",
        )
    return stats.histogram.cpu().double()


def _top(stats: Stats) -> Tensor:
    return stats.absmax.max().cpu().double()


def _magnitudes(grid: Grid) -> Tensor:
    """Returns the magnitudes of a grid before scaling, rising from 0."""
    if grid.kind == "int":
        return torch.arange(code_range(grid)[1] + 1, dtype=torch.float64)
    values = torch.arange(128, dtype=torch.uint8).view(FLOAT8[grid.kind]).double()
    return values[values.isfinite()]


def _integral(points: Tensor, values: Tensor) -> Tensor:
    """Returns the integral from 0 to each point of the squared distance to the nearest of the values.

    Around each value v, from one middle m to the next, the distance is x - v, so the integral is a cube there.
    """
    middles = (values[1:] + values[:-1]) / 2
    begin = torch.cat([values[:1], middles])
    whole = ((middles - values[:-1]) ** 3 - (begin[:-1] - values[:-1]) ** 3) / 3
    before = torch.cat([torch.zeros(1, dtype=torch.float64), whole.cumsum(0)])
    cell = torch.searchsorted(middles, points)
    return before[cell] + ((points - values[cell]) ** 3 - (begin[cell] - values[cell]) ** 3) / 3

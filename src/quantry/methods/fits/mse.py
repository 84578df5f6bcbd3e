"""The cheapest range: shrinks the scale of every block to where its squared rounding error is smallest.

With statistics of the inputs, the error of a column is weighted by the mean square of the channel it reads.
"""

import torch
from torch import Tensor

from quantry.numerics.blocks import cut
from quantry.numerics.scale_search import Cost, search
from quantry.types import Grid, Params, Stats

NEEDS_STATISTICS = False
SMALLEST = 0.68
STEPS = 9
CHUNK = 1 << 20  # weights searched at a time: two buffers of 4 MiB, read 9 times; smaller ones cost more in calls


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Returns the parameters for `weight`."""
    cost = _norm if stats is None else _weighted(stats, grid)
    return search(weight, grid, whole, torch.linspace(1.0, SMALLEST, STEPS).tolist(), cost, CHUNK)


def _norm(error: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(error, dim=(1, 3))
    return norm


def _weighted(stats: Stats, grid: Grid) -> Cost:
    wide = Grid(grid.kind, grid.bits, (1, grid.block[1]))
    root = cut(stats.mean_square.float().sqrt()[None], wide)
    return lambda error: _norm(error.mul_(root))

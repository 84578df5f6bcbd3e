"""The range that costs least: every block's scale is shrunk to where its squared rounding error is smallest.

With the statistics of the inputs, an error counts as much as the mean square of the channel it is multiplied with.
"""

import torch
from torch import Tensor

from quantry.numerics.blocks import cut
from quantry.numerics.scale_search import Cost, search
from quantry.types import Grid, Params, Stats

SMALLEST = 0.68
STEPS = 9
CHUNK = 1 << 20  # weights searched at a time: two buffers of 4 MiB, gone over 9 times; smaller ones cost more in calls


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Parameters for `weight`; `whole` is the largest magnitude of all weights that must share a per-tensor scale."""
    cost = _norm if stats is None else _weighted(stats, grid)
    return search(weight, grid, whole, torch.linspace(1.0, SMALLEST, STEPS).tolist(), cost, CHUNK)


def _norm(error: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(error, dim=(1, 3))
    return norm


def _weighted(stats: Stats, grid: Grid) -> Cost:
    wide = Grid(grid.kind, grid.bits, (1, grid.block[1]))
    root = cut(stats.mean_square.float().sqrt()[None], wide)
    return lambda error: _norm(error.mul_(root))

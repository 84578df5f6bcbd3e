"""AWQ's clipping: every block's range is shrunk to where the error of its outputs is smallest.

The error of a block's part of an output is d G d', with d the rounding error of a row of the block and G the Gram
matrix of the channels that the block's columns are multiplied with. Unlike a sum of squares it sees that errors of
channels which move together add up or cancel.
"""

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.numerics.blocks import block_of
from quantry.numerics.scale_search import diagonal_blocks, output_error, search
from quantry.types import Grid, Params, Stats

SMALLEST = 0.5
STEPS = 20
CHUNK = 1 << 20  # weights searched at a time, as in mse.py


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Parameters for `weight`; `whole` is the largest magnitude of all weights that must share a per-tensor scale."""
    if stats is None:
        raise RecipeError("the fit clip needs statistics of the layers' inputs", fix="calibrate, or use the fit mse")
    columns = block_of(grid, (weight.shape[0], weight.shape[1]))[1]
    cost = output_error(diagonal_blocks(stats.gram.float(), columns))
    return search(weight, grid, whole, torch.linspace(1.0, SMALLEST, STEPS).tolist(), cost, CHUNK)

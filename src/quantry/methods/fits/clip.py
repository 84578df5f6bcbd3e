"""AWQ's clipping: shrinks the range of every block to where the error of the layer's output is smallest.

The error of a block's share of an output is d G d', with d the rounding error of one row of the block and G the Gram
matrix of the channels that the block's columns read. Unlike a sum of squares it accounts for errors of correlated
channels that add up or cancel.
"""

import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.numerics.blocks import block_of
from quantry.numerics.scale_search import diagonal_blocks, output_error, search
from quantry.types import Grid, Params, Stats

NEEDS_STATISTICS = True
SMALLEST = 0.5
STEPS = 20
CHUNK = 1 << 20  # weights searched at a time, as in mse.py


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Returns the parameters for `weight`. Raises RecipeError without statistics."""
    if stats is None:
        raise RecipeError("the fit clip needs statistics of the layers' inputs", fix="calibrate, or use the fit mse")
    columns = block_of(grid, (weight.shape[0], weight.shape[1]))[1]
    cost = output_error(diagonal_blocks(stats.gram.float(), columns))
    return search(weight, grid, whole, torch.linspace(1.0, SMALLEST, STEPS).tolist(), cost, CHUNK)

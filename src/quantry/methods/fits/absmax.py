"""The full range: the scale of every block just reaches its extremes."""

from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import absmax
from quantry.numerics.scales import affine, extremes, symmetric
from quantry.types import Grid, Params, Stats

NEEDS_STATISTICS = False


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Returns the parameters for `weight`; statistics change nothing."""
    if not grid.symmetric:
        return affine(*extremes(weight, grid), grid)
    if grid.kind in codebooks.BOOKS:
        top = codebooks.flat_blocks(weight, grid.block[1]).abs().amax(dim=1).float()
    else:
        top = absmax(weight, grid)
    largest = top.max() if whole is None else whole
    return symmetric(largest.reshape(top.shape) if grid.block == (0, 0) else top, grid, largest)

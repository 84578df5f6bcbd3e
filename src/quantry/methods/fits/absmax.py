"""The range that is there: every block's scale just reaches its extremes."""

from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import absmax
from quantry.numerics.scales import affine, extremes, symmetric
from quantry.types import Grid, Params, Stats


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None, stats: Stats | None = None) -> Params:
    """Parameters for `weight`; `whole` is the largest magnitude of all weights that must share a per-tensor scale."""
    if not grid.symmetric:
        return affine(*extremes(weight, grid), grid)
    if grid.kind in codebooks.BOOKS:
        top = codebooks.flat_blocks(weight, grid.block[1]).abs().amax(dim=1).float()
    else:
        top = absmax(weight, grid)
    whole = top.max() if whole is None else whole
    return symmetric(whole.reshape(top.shape) if grid.block == (0, 0) else top, grid, whole)

"""The range that costs least: every block's scale is shrunk to where its squared rounding error is smallest.

Clipping a few extreme weights lets all others sit on a finer grid. The search tries `STEPS` fractions of the full range
for each block and keeps the best, in float32, in chunks of rows.
"""

import torch
from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import absmax, block_of, cut
from quantry.numerics.grids import CHUNK, decode, encode
from quantry.numerics.scales import affine, extremes, symmetric
from quantry.types import Grid, Params

SMALLEST = 0.6  # of the full range; int4 blocks of 32 to 128 normal weights have their optimum between 0.75 and 1
STEPS = 17


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None) -> Params:
    """Parameters for `weight`; `whole` is the largest magnitude of all weights that must share a per-tensor scale."""
    if grid.kind in codebooks.BOOKS:
        raise ValueError(f"{grid.kind} scales are absolute maxima by definition")
    whole = weight.abs().max().float() if whole is None else whole
    if grid.block[0] == 0:
        return _search(weight, grid, whole)
    tall = block_of(grid, (weight.shape[0], weight.shape[1]))[0]
    step = tall * max(1, CHUNK // (weight.shape[1] * tall))
    parts = [_search(weight[start : start + step], grid, whole) for start in range(0, weight.shape[0], step)]
    zeros = [part.zero for part in parts if part.zero is not None]
    return Params(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None, parts[0].outer)


def _search(weight: Tensor, grid: Grid, whole: Tensor) -> Params:
    weight = weight.float()
    low, high = (None, None) if grid.symmetric else extremes(weight, grid)
    top = whole.reshape(1, 1) if grid.block == (0, 0) else absmax(weight, grid)
    best: Params | None = None
    least = torch.full_like(top, float("inf"))
    for fraction in torch.linspace(1.0, SMALLEST, STEPS).tolist():
        if low is None or high is None:
            trial = symmetric(top * fraction, grid, whole)
        else:
            trial = affine(low * fraction, high * fraction, grid)
        error = cut(decode(encode(weight, grid, trial), grid, trial).sub_(weight).square_(), grid).sum(dim=(1, 3))
        better = error < least
        least = torch.where(better, error, least)
        best = trial if best is None else _choose(better, trial, best)
    assert best is not None
    return best


def _choose(better: Tensor, trial: Params, best: Params) -> Params:
    """The trial's parameters where they are better, else those found before."""
    scale = best.scale.clone()
    scale.view(torch.uint8 if scale.itemsize == 1 else scale.dtype)[better] = trial.scale.view(
        torch.uint8 if scale.itemsize == 1 else scale.dtype
    )[better]
    zero = None if trial.zero is None or best.zero is None else torch.where(better, trial.zero, best.zero)
    return Params(scale, zero, best.outer)

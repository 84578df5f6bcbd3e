"""The range that costs least: every block's scale is shrunk to where its squared rounding error is smallest.

Clipping a few extreme weights lets all others sit on a finer grid. The search tries `STEPS` fractions of the full range
for each block and keeps the best, in float32, in chunks of rows small enough to stay in the cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import absmax, block_of, cut, spread
from quantry.numerics.grids import GPU_CHUNK, effective_scale, snap
from quantry.numerics.scales import affine, extremes, symmetric
from quantry.types import Grid, Params

SMALLEST = 0.68
STEPS = 9
CHUNK = 1 << 20  # weights searched at a time: two buffers of 4 MiB, gone over 9 times; smaller ones cost more in calls


def fit(weight: Tensor, grid: Grid, whole: Tensor | None = None) -> Params:
    """Parameters for `weight`; `whole` is the largest magnitude of all weights that must share a per-tensor scale."""
    if grid.kind in codebooks.BOOKS:
        raise ValueError(f"{grid.kind} scales are absolute maxima by definition")
    if whole is None:
        whole = absmax(weight, Grid(grid.kind, grid.bits, (0, 0))).max() if grid.spans_tensor else weight.new_zeros(())
    if grid.block[0] == 0:
        return _search(weight, grid, whole)
    chunk = GPU_CHUNK if weight.is_cuda else CHUNK
    tall = block_of(grid, (weight.shape[0], weight.shape[1]))[0]
    step = tall * max(1, chunk // (weight.shape[1] * tall))
    parts = [_search(weight[start : start + step], grid, whole) for start in range(0, weight.shape[0], step)]
    zeros = [part.zero for part in parts if part.zero is not None]
    return Params(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None, parts[0].outer)


def _search(weight: Tensor, grid: Grid, whole: Tensor) -> Params:
    weight = weight.float()
    low, high = (None, None) if grid.symmetric else extremes(weight, grid)
    top = whole.reshape(1, 1) if grid.block == (0, 0) else absmax(weight, grid)
    blocks, nearest = cut(weight, grid), snap(grid)
    work = torch.empty_like(blocks)
    best: Params | None = None
    least = torch.full_like(top, float("inf"))
    for fraction in torch.linspace(1.0, SMALLEST, STEPS).tolist():
        if low is None or high is None:
            trial = symmetric(top * fraction, grid, whole)
        else:
            trial = affine(low * fraction, high * fraction, grid)
        error = _error(blocks, grid, trial, nearest, work)
        better = error < least
        least = torch.where(better, error, least)
        best = trial if best is None else _choose(better, trial, best)
    assert best is not None
    return best


def _error(blocks: Tensor, grid: Grid, params: Params, nearest: Callable[[Tensor], Tensor], work: Tensor) -> Tensor:
    """The norm of the rounding error of each block; `work` is overwritten."""
    scale = spread(effective_scale(grid, params))
    torch.div(blocks, scale, out=work)
    if params.zero is None:
        rounded = nearest(work)
    else:
        zero = spread(params.zero.float())
        rounded = nearest(work.add_(zero)).sub_(zero)
    norm: Tensor = torch.linalg.vector_norm(rounded.mul_(scale).sub_(blocks), dim=(1, 3))
    return norm


def _choose(better: Tensor, trial: Params, best: Params) -> Params:
    """The trial's parameters where they are better, else those found before."""
    as_stored = torch.uint8 if best.scale.itemsize == 1 else best.scale.dtype  # torch cannot select among float8
    scale = torch.where(better, trial.scale.view(as_stored), best.scale.view(as_stored)).view(best.scale.dtype)
    zero = None if trial.zero is None or best.zero is None else torch.where(better, trial.zero, best.zero)
    return Params(scale, zero, best.outer)

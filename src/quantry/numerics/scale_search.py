"""The search that fits and transforms share: the fraction of each block's range with the least error.

Clipping a few extreme weights gives all others a finer grid. The search tries every fraction on all blocks, and each
block keeps its best, in float32, in chunks of rows small enough to stay in the cache.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quantry.numerics import codebooks
from quantry.numerics.blocks import absmax, block_of, cut, spread
from quantry.numerics.grids import GPU_CHUNK, effective_scale, snap
from quantry.numerics.scales import affine, extremes, symmetric
from quantry.types import Grid, Params

# errors (row blocks, r, column blocks, c), which may be overwritten -> cost of blocks (row blocks, column blocks)
Cost = Callable[[Tensor], Tensor]


def search(
    weight: Tensor, grid: Grid, whole: Tensor | None, fractions: Sequence[float], cost: Cost, chunk: int
) -> Params:
    """Returns parameters for `weight`; `whole` is the largest magnitude of all weights that share a per-tensor scale.

    The CPU searches `chunk` weights at a time; a cost that depends on the row needs all rows in one chunk.
    """
    if grid.kind in codebooks.BOOKS:
        raise ValueError(f"{grid.kind} scales are absolute maxima by definition")
    if whole is None:
        whole = absmax(weight, Grid(grid.kind, grid.bits, (0, 0))).max() if grid.spans_tensor else weight.new_zeros(())
    if grid.block[0] == 0:
        return _search(weight, grid, whole, fractions, cost)
    chunk = GPU_CHUNK if weight.is_cuda else chunk
    tall = block_of(grid, (weight.shape[0], weight.shape[1]))[0]
    step = tall * max(1, chunk // (weight.shape[1] * tall))
    starts = range(0, weight.shape[0], step)
    parts = [_search(weight[start : start + step], grid, whole, fractions, cost) for start in starts]
    zeros = [part.zero for part in parts if part.zero is not None]
    return Params(torch.cat([part.scale for part in parts]), torch.cat(zeros) if zeros else None, parts[0].outer)


def _search(weight: Tensor, grid: Grid, whole: Tensor, fractions: Sequence[float], cost: Cost) -> Params:
    weight = weight.float()
    low, high = (None, None) if grid.symmetric else extremes(weight, grid)
    top = whole.reshape(1, 1) if grid.block == (0, 0) else absmax(weight, grid)
    blocks = cut(weight, grid)
    work = torch.empty_like(blocks)
    best: Params | None = None
    least = torch.full_like(top, float("inf"))
    for fraction in fractions:
        if low is None or high is None:
            trial = symmetric(top * fraction, grid, whole)
        else:
            trial = affine(low * fraction, high * fraction, grid)
        paid = cost(error_of(blocks, grid, trial, work))
        better = paid < least
        least = torch.where(better, paid, least)
        best = trial if best is None else _choose(better, trial, best)
    assert best is not None
    return best


def error_of(blocks: Tensor, grid: Grid, params: Params, work: Tensor) -> Tensor:
    """Returns the error of rounding each weight to nearest, (row blocks, r, column blocks, c); overwrites `work`."""
    nearest = snap(grid)
    scale = spread(effective_scale(grid, params))
    torch.div(blocks, scale, out=work)
    if params.zero is None:
        rounded = nearest(work)
    else:
        zero = spread(params.zero.float())
        rounded = nearest(work.add_(zero)).sub_(zero)
    return rounded.mul_(scale).sub_(blocks)


def _choose(better: Tensor, trial: Params, best: Params) -> Params:
    as_stored = torch.uint8 if best.scale.itemsize == 1 else best.scale.dtype  # torch cannot select among float8
    scale = torch.where(better, trial.scale.view(as_stored), best.scale.view(as_stored)).view(best.scale.dtype)
    zero = None if trial.zero is None or best.zero is None else torch.where(better, trial.zero, best.zero)
    return Params(scale, zero, best.outer)


def diagonal_blocks(gram: Tensor, size: int) -> Tensor:
    """Cuts (channels, channels) into (blocks, size, size), the last block filled up with zeros."""
    count = -(-len(gram) // size)
    gram = torch.nn.functional.pad(gram, (0, count * size - len(gram)) * 2)
    return gram.view(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def output_error(grams: Tensor) -> Cost:
    """Returns the cost d G d' of each block, with G the Gram matrix of the inputs of its columns."""

    def cost(error: Tensor) -> Tensor:
        high, tall, wide, size = error.shape
        rows = error.view(high * tall, wide, size).transpose(0, 1)
        paid: Tensor = torch.linalg.vecdot(torch.bmm(rows, grams), rows)
        return paid.view(wide, high, tall).sum(dim=2).T

    return cost

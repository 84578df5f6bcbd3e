"""The expensive parts of IQ4's search in torch, for many blocks at once: for a GPU, or a CPU without llvmlite.

The nearest level comes from a table: all midpoints between levels are multiples of a half, so the whole part of twice a
scaled weight decides. Tensors are elements first, (32, sub-blocks).
"""

from bisect import bisect_right
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from quantry.numerics.ggml.exact import TINY, add_up, aligned, extreme, over, reciprocal, root
from quantry.numerics.ggml.layout import IQ4
from quantry.numerics.threads import buffer

SUB = 32  # weights that are searched together
FIRST = -IQ4[0]  # the largest weight is first scaled to this,
TRIED = tuple(IQ4[0] + step for step in range(-7, 8))  # then on and around the lowest level
TILE = 1 << 16  # weights searched at a time on the CPU: five buffers of 256 KiB
REACH = 2 * 135  # more than twice any scaled weight: the widest try scales to 134


def fit(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the scale (blocks, sub-blocks) whose nearest levels fit each 32 weights best."""
    scale = weight.new_empty(weight.shape[0], weight.shape[1] // SUB)
    for part in _tiles(weight):
        x, errors = _tile(weight[part], None if importance is None else importance[part])
        scale[part] = _scales(x, errors)[: scale[part].numel()].view(-1, scale.shape[1])
    return scale


def nearest(weight: Tensor, inverse: Tensor) -> Tensor:
    """Returns the code of the level nearest to each weight times the inverse of its scale."""
    codes = torch.empty_like(weight, dtype=torch.uint8)
    for part in _tiles(weight):
        x, twice = weight[part].view(-1, SUB), inverse[part].reshape(-1, 1) * 2
        scaled = torch.mul(x, twice, out=buffer("iq4 a", tuple(x.shape), x))
        scaled.floor_().clamp_(-REACH, REACH - 1).add_(REACH)
        index = buffer("iq4 index", tuple(x.shape), x, torch.int32).copy_(scaled)
        torch.index_select(_table(x.device)[1], 0, index.view(-1), out=codes[part].view(-1))
    return codes


def _tiles(weight: Tensor) -> list[slice]:
    """Returns the blocks searched at a time; a GPU takes all at once."""
    most = TILE // weight.shape[1] if weight.device.type == "cpu" else max(1, weight.shape[0])
    return [slice(start, start + most) for start in range(0, weight.shape[0], most)]


def _tile(weight: Tensor, importance: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns weights, and the weight of a squared error in each."""
    count = weight.numel() // SUB
    shape = (SUB, aligned(count, weight.device))
    x, errors = buffer("iq4 x", shape, weight), buffer("iq4 errors", shape, weight)
    x[:, :count] = weight.view(-1, SUB).t()
    x[:, count:] = 0
    torch.mul(x, x, out=errors)
    if importance is not None:
        errors[:, :count] += _power(weight).repeat_interleave(weight.shape[1] // SUB)
        root(errors)[:, :count] *= importance.view(-1, SUB).t()
    return x, errors


def _power(weight: Tensor) -> Tensor:
    blocks, size = weight.shape
    squares = buffer("iq4 squares", (size, aligned(blocks, weight.device)), weight)
    torch.square(squares[:, :blocks].copy_(weight.t()), out=squares[:, :blocks])
    return add_up(squares, weight.new_empty(squares.shape[1]))[:blocks].mul_(2.0 / size)


def _scales(x: Tensor, errors: Tensor) -> Tensor:
    top = extreme(x)
    empty = top.abs() < TINY
    top.masked_fill_(empty, 1.0)
    best = torch.zeros(2, x.shape[1], device=x.device)  # the gain of a scale, and the scale
    trial, qq, qx = torch.empty_like(best), torch.empty_like(top), torch.empty_like(top)
    for number, inverse in enumerate([reciprocal(top / FIRST)] + [over(tried, top) for tried in TRIED]):
        _sums(x, errors, inverse, qx, qq)
        torch.div(qx, qq, out=trial[1])
        torch.mul(trial[1], qx, out=trial[0])
        better = (qq > 0) & (qx * qx > best[0] * qq) if number else qq > 0
        torch.where(better, trial, best, out=best)
    return best[1].masked_fill_(empty, 0.0)


def _sums(x: Tensor, errors: Tensor, inverse: Tensor, qx: Tensor, qq: Tensor) -> None:
    """Returns the weighted sums of level * weight and level * level over each sub-block."""
    shape = tuple(x.shape)
    a, levels = buffer("iq4 a", shape, x), buffer("iq4 levels", shape, x)
    index = buffer("iq4 index", shape, x, torch.int32)
    index.copy_(torch.addcmul(torch.tensor(float(REACH), device=x.device), x, inverse * 2, out=a))
    torch.index_select(_table(x.device)[0], 0, index.view(-1), out=levels.view(-1))
    torch.mul(errors, levels, out=a)
    add_up(levels.mul_(a), qq)
    add_up(a.mul_(x), qx)


@cache
def _table(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns level and code of twice a scaled weight, from -REACH on; halfway the upper level wins."""
    middles = [a + b for a, b in pairwise(IQ4)]  # doubled
    codes = torch.tensor([bisect_right(middles, twice) for twice in range(-REACH, REACH)])
    return torch.tensor(IQ4, dtype=torch.float32)[codes].to(device), codes.to(torch.uint8).to(device)

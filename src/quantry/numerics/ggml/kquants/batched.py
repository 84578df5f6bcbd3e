"""The heavy steps of the searches in torch, for many sub-blocks at once: what a GPU runs, or a CPU without llvmlite.

Values lie elements first, (elements of a sub-block, sub-blocks), so that a sum over a sub-block is a sum of rows. Every
float32 operation is the one ggml does, in its order, so that candidates that nearly tie are decided as there. Large
buffers are kept and written over: on a CPU, fresh memory costs far more than the arithmetic. Nothing waits for a GPU.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from quantry.numerics.ggml.kquants.rules import ROUNDS, SUPER, TINY, Fit, Rule, Steps, beside
from quantry.numerics.threads import buffer

TILE = 1 << 18  # weights searched at a time on the CPU
ORDERED = 16  # rows that torch adds strictly one after another on the CPU


class Tile:
    """Buffers for the sub-blocks searched together, each (elements, sub-blocks)."""

    def __init__(self, values: Tensor) -> None:
        buffers = buffer("tile", (7, *values.shape), values)
        self.values, self.codes = buffers[0].copy_(values), buffers[1]
        self.weights = buffers[2:4]  # what an error counts, and that times the value
        self.products = buffers[4:7]


def fit_affine(rule: Rule, steps: Steps, weight: Tensor, importance: Tensor | None) -> Fit:
    """Scale and minimum (at least 0) of each sub-block with the least weighted error of scale * code - minimum.

    Each step size in turn is laid from the lowest value so far, the codes are rounded, scale and minimum follow by
    least squares (or the scale alone, where the minimum would be negative) and are kept if their error is smaller.
    """
    found = weight.new_empty(5, weight.shape[0] * rule.groups)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None if importance is None else importance[blocks])
        _fit_affine(tile, rule.top, steps, found[:, lanes])
    scale, low, inverse, start, total = _by_super_block(rule, found)
    return Fit(scale, low.neg_(), inverse.masked_fill_(inverse.isinf(), 0), start, total)


def fit_symmetric(rule: Rule, weight: Tensor, importance: Tensor | None) -> Fit:
    """The scale of each sub-block with the least weighted error of scale * code, where codes are -top to top - 1.

    The largest value becomes -top, or up to 0.9 of a code more or less; the codes are rounded and the scale follows by
    least squares.
    """
    found = weight.new_empty(3, weight.shape[0] * rule.groups)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None if importance is None else importance[blocks])
        _fit_symmetric(tile, rule.top, found[:, lanes])
    scale, inverse, total = _by_super_block(rule, found)
    zero = inverse == 0
    start = torch.zeros_like(scale).masked_fill_(zero, torch.inf)
    return Fit(scale, torch.zeros_like(scale), inverse.masked_fill_(zero, 1), start, total)


def fit_improving(rule: Rule, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The scale of each sub-block, and its stored codes: the largest value becomes -top, then codes are improved."""
    scale, codes = weight.new_empty(1, weight.shape[0] * rule.groups), torch.empty_like(weight, dtype=torch.uint8)
    limits = (-rule.top, rule.top - 1)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None)
        most, zero = _largest_or_one(tile.values)
        torch.mul(tile.values, _ratio(-rule.top, most), out=tile.codes).round_().clamp_(*limits)
        scale[0, lanes] = _improve(tile, limits).masked_fill_(zero, 0)
        codes[blocks].view(-1, rule.sub).T.copy_(tile.codes.add_(rule.top).masked_fill_(zero, 0))
    return _by_super_block(rule, scale)[0], codes


def share_largest(values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """A number for each super-block, and what multiples of it (0 to top) its values (groups, blocks) are.

    The largest value becomes top.
    """
    most = values.amax(0).clamp_(min=0).add_(0)  # + 0: never -0
    inverse = _ratio(top, most)
    multiples = (values * inverse.masked_fill_(inverse.isinf(), 0)).round_().clamp_(0, top)
    return most / torch.full_like(most, top), multiples  # a GPU would multiply with the reciprocal of a number


def share_signed(values: Tensor, top: int, floor: float, code: int) -> tuple[Tensor, Tensor]:
    """The same with multiples from -top to top - 1: the largest magnitude becomes -top.

    Where it is 0 or below the floor, the number is 0 and all multiples are `code`.
    """
    most = _largest(values)
    dead = (most == 0) | (most.abs() < floor)
    inverse = _ratio(-top, most.masked_fill_(dead, 1))
    multiples = (values * inverse).round_().clamp_(-top, top - 1)
    return _ratio(1, inverse).masked_fill_(dead, 0), multiples.masked_fill_(dead, code)


def share_positive(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The same as `share_largest` with care: nine step sizes by weighted error, then codes improved one by one."""
    tile = _shared(values, weight)
    most = values.amax(0).clamp_(min=0)
    zero = most < TINY
    most.masked_fill_(zero, 1)
    best = torch.empty(0)
    for divisor in beside(top, 4):
        inverse = _ratio(divisor, most)
        torch.mul(values, inverse, out=tile.codes).round_().clamp_(max=top)
        difference = values - tile.codes * _ratio(1, inverse)
        trial = torch.stack((_total((weight * difference * difference).unsqueeze(0))[0], inverse))
        best = torch.where(trial[0] < best[0], trial, best) if len(best) else trial
    torch.mul(values, best[1], out=tile.codes).round_().clamp_(max=top)
    scale = _improve(tile, (0, top))
    return scale.masked_fill_(zero, 0), tile.codes.masked_fill(zero, 0)


def share_symmetric(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The same with multiples from -top to top - 1, by the search of `fit_symmetric`."""
    tile = _shared(values, weight)
    scale, inverse, _ = found = values.new_empty(3, values.shape[1])
    _fit_symmetric(tile, top, found)
    multiples = (values * inverse).round_().clamp_(-top, top - 1)
    return scale, multiples.masked_fill_(inverse == 0, -top)


def round_affine(rule: Rule, weight: Tensor, fit: Fit, step: Tensor, offset: Tensor) -> Tensor:
    """Codes (weight + offset) / step, given these for each sub-block; those of the search where the step is 0."""
    lost = step == 0
    shift, factor = torch.where(lost, -fit.start, offset), torch.where(lost, fit.inverse, 1.0)
    return _round(rule, weight, (shift, factor, step.masked_fill(lost, 1)), (0, rule.top))


def round_symmetric(rule: Rule, weight: Tensor, fit: Fit, step: Tensor) -> Tensor:
    """Stored codes weight / step + top, given the step of each sub-block; those of the search where it is 0."""
    lost = step == 0
    shift, factor = torch.where(lost, -fit.start, 0.0), torch.where(lost, fit.inverse, 1.0)
    return _round(rule, weight, (shift, factor, step.masked_fill(lost, 1)), (-rule.top, rule.top - 1))


def round_over(rule: Rule, weight: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    """The same, where the codes of the search are given; they may be written over."""
    lost = step == 0
    none = torch.zeros_like(step)
    new = _round(rule, weight, (none, none + 1, step.masked_fill(lost, 1)), (-rule.top, rule.top - 1))
    parts = (-1, rule.groups, rule.sub)
    return torch.where(lost.T.unsqueeze(2), codes.view(parts), new.view(parts)).reshape(weight.shape)


def _fit_affine(tile: Tile, top: int, steps: Steps, found: Tensor) -> None:
    """(scale, low = -minimum, inverse step, start, sum of weights)."""
    tile.products[0].copy_(tile.weights[0])
    torch.mul(tile.weights[0], tile.values, out=tile.products[1])
    sums = _total(tile.products[:2])
    low, high = tile.values.amin(0).clamp_(max=0), tile.values.amax(0)
    flat = high == low
    inverse = _ratio(top, high.masked_fill_(flat, 1) - low)
    scale = _ratio(1, inverse)
    _codes(tile, low, inverse, top)
    best = torch.stack((_error(tile, scale, low, steps.absolute), scale, low, inverse, low))
    trial = torch.empty_like(best)
    for divisor in steps.divisors(top):
        error, scale, low, inverse, start = trial
        start.copy_(best[2])
        torch.div(_constant(divisor), torch.sub(high, start, out=inverse), out=inverse)
        _codes(tile, start, inverse, top)
        usable = _solve(tile, sums, scale, low)
        error.copy_(_error(tile, scale, low, steps.absolute))
        torch.where(usable & (error < best[0]), trial, best, out=best)
    found[:4], found[4] = best[1:], sums[0]
    found[0].masked_fill_(flat, 0)


def _solve(tile: Tile, sums: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Fills in scale and low (at most 0) of the least weighted squares for the codes; gives where there are any."""
    products, (sum_w, sum_x) = tile.products, sums
    torch.mul(tile.weights[0], tile.codes, out=products[0])
    torch.mul(products[0], tile.codes, out=products[1])
    torch.mul(products[0], tile.values, out=products[2])
    sum_l, sum_l2, sum_xl = _total(products)
    spread = sum_w * sum_l2 - sum_l * sum_l
    torch.div(sum_w * sum_xl - sum_x * sum_l, spread, out=scale)
    torch.div(sum_l2 * sum_x - sum_l * sum_xl, spread, out=low)
    torch.where(low > 0, sum_xl / sum_l2, scale, out=scale)
    low.clamp_(max=0)
    usable: Tensor = spread > 0
    return usable


def _codes(tile: Tile, start: Tensor, inverse: Tensor, top: int) -> None:
    """Codes 0 to top: how many steps above the start each value lies."""
    torch.sub(tile.values, start, out=tile.codes).mul_(inverse).round_().clamp_(0, top)


def _error(tile: Tile, scale: Tensor, low: Tensor, absolute: bool) -> Tensor:
    """The weighted error of each sub-block."""
    difference = torch.mul(tile.codes, scale, out=tile.products[0]).add_(low).sub_(tile.values)
    size = difference.abs_() if absolute else difference.square_()
    return _total(size.mul_(tile.weights[0]).unsqueeze(0))[0]


def _fit_symmetric(tile: Tile, top: int, found: Tensor) -> None:
    """(scale, inverse step, 0 where all is zero; sum of weights)."""
    x, weights, codes, products = tile.values, tile.weights, tile.codes, tile.products
    torch.mul(weights[0], x, out=weights[1])
    most, zero = _largest_or_one(x)
    best = torch.zeros(3, x.shape[1], device=x.device)
    trial = torch.empty_like(best)
    gain, scale, inverse = trial
    for number, divisor in enumerate(beside(top, 9)):
        torch.div(_constant(-divisor), most, out=inverse)
        torch.mul(x, inverse, out=codes).round_().clamp_(-top, top - 1)
        torch.mul(weights, codes, out=products[:2])
        products[0].mul_(codes)
        sum_l2, sum_xl = _total(products[:2])
        torch.div(sum_xl, sum_l2, out=scale)
        torch.mul(scale, sum_xl, out=gain)
        if number == 0:
            torch.where(sum_l2 != 0, trial, best, out=best)
            best[2] = inverse
        else:
            torch.where(sum_xl * sum_xl > best[0] * sum_l2, trial, best, out=best)
    found[:2] = best[1:].masked_fill_(zero, 0)
    found[2] = _total(products[:1].copy_(weights[0]))[0]


def _improve(tile: Tile, limits: tuple[int, int]) -> Tensor:
    """Changes one code after another to what the others' scale asks for, where that lowers the weighted error.

    The scale of least weighted error is sum(weight * value * code) / sum(weight * code^2); gives the one in the end.
    """
    torch.mul(tile.weights[0], tile.values, out=tile.weights[1])
    torch.mul(tile.weights, tile.codes, out=tile.products[:2])
    tile.products[0].mul_(tile.codes)
    sum_l2, sum_xl = _total(tile.products[:2])
    for _ in range(ROUNDS):
        for x, weight, weighted, code in zip(tile.values, *tile.weights, tile.codes, strict=True):
            rest_xl = sum_xl - weighted * code
            rest_l2 = sum_l2 - weight * code * code
            new = (x * rest_l2 / rest_xl).round_().clamp_(*limits)
            new_xl = rest_xl + weighted * new
            new_l2 = rest_l2 + weight * new * new
            better = new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2
            better &= (rest_xl > 0) & (new != code)
            better &= (new_l2 if limits[0] < 0 else rest_l2) > 0
            code.copy_(torch.where(better, new, code))
            sum_xl = torch.where(better, new_xl, sum_xl)
            sum_l2 = torch.where(better, new_l2, sum_l2)
    return torch.where(sum_l2 > 0, sum_xl / sum_l2, 0)


def _round(rule: Rule, weight: Tensor, parts: tuple[Tensor, Tensor, Tensor], limits: tuple[int, int]) -> Tensor:
    """(weight + shift) * factor / step, rounded, within limits and counted from the lower one."""
    codes = torch.empty_like(weight, dtype=torch.uint8)
    shift, factor, step = (part.T.reshape(-1) for part in parts)
    for tile, blocks, lanes in _tiles(rule, weight):
        tile.values.add_(shift[lanes]).mul_(factor[lanes]).div_(step[lanes]).round_().clamp_(*limits).sub_(limits[0])
        codes[blocks].view(-1, rule.sub).T.copy_(tile.values)
    return codes


def _weigh(rule: Rule, tile: Tile, weight: Tensor, importance: Tensor | None) -> None:
    """Fills in what an error in each value counts."""
    x, weights, square = tile.values, tile.weights[0], tile.products[0]
    if importance is not None:
        weights.copy_(importance.view(-1, rule.sub).T)
        if rule.spread is not None:
            mean = _total(weight.T.contiguous().square_().unsqueeze(0))[0] * (rule.spread / SUPER)
            weights.mul_(_root(torch.mul(x, x, out=square).add_(mean.repeat_interleave(rule.groups))))
    elif rule.plain is None:
        torch.mul(x, x, out=weights)
    elif rule.plain.absolute:
        torch.abs(x, out=weights)
    else:
        mean = _total(torch.mul(x, x, out=square).unsqueeze(0))[0] * (1 / rule.sub)
        torch.abs(x, out=weights).add_(_root(mean))


def _shared(values: Tensor, weight: Tensor) -> Tile:
    """A tile whose sub-blocks are the scales of super-blocks."""
    tile = Tile(values)
    tile.weights[0].copy_(weight)
    return tile


def _tiles(rule: Rule, weight: Tensor) -> Iterator[tuple[Tile, slice, slice]]:
    """Tiles with their values, and which super-blocks and sub-blocks they hold; a GPU takes all at once."""
    blocks = weight.shape[0]
    most = TILE // SUPER if weight.device.type == "cpu" else max(1, blocks)
    for start in range(0, blocks, most):
        end = min(blocks, start + most)
        tile = Tile(weight[start:end].view(-1, rule.sub).T)
        yield tile, slice(start, end), slice(start * rule.groups, end * rule.groups)


def _total(rows: Tensor) -> Tensor:
    """Sums (kinds, rows, lanes) over the rows, one after another as a plain loop does; overwrites its argument."""
    count = rows.shape[1]
    if rows.device.type != "cpu":
        for i in range(1, count):
            rows[:, 0].add_(rows[:, i])
        return rows[:, 0].clone()
    total = rows[:, :ORDERED].sum(1)
    for start in range(ORDERED, count, ORDERED):
        rows[:, start].add_(total)
        torch.sum(rows[:, start : start + ORDERED], 1, out=total)
    return total


def _root(values: Tensor) -> Tensor:
    """The square root in place, correctly rounded: on a CPU torch's own is an ulp off for one value in five."""
    if values.device.type != "cpu":
        return values.sqrt_()
    np.sqrt(values.numpy(), out=values.numpy())
    return values


def _by_super_block(rule: Rule, found: Tensor) -> Tensor:
    """Numbers of sub-blocks (kinds, sub-blocks) as (kinds, sub-blocks of a super-block, super-blocks)."""
    return found.view(found.shape[0], -1, rule.groups).transpose(1, 2).contiguous()


def _largest(rows: Tensor) -> Tensor:
    """The value of the largest magnitude over the rows, the first of equals."""
    while rows.shape[0] > 1:
        even, odd = rows[0::2], rows[1::2]
        rows = torch.where(odd.abs() > even.abs(), odd, even)
    return rows[0]


def _ratio(number: float, below: Tensor) -> Tensor:
    """number / below, rounded once (torch's own operator multiplies with the reciprocal)."""
    return torch.div(_constant(number), below)


def _largest_or_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value, but 1 where all are zero; and where they are."""
    most = _largest(rows)
    zero = most.abs() < TINY
    return most.masked_fill_(zero, 1), zero


def _constant(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)

"""The expensive steps of the searches in torch, for many sub-blocks at once: for a GPU, or a CPU without llvmlite.

Tensors are elements first, (elements of a sub-block, sub-blocks), so a sum over a sub-block is a sum of rows. Every
float32 operation is ggml's, in its order, so that candidates that nearly tie are decided as there. Large buffers are
used again: on a CPU, fresh memory costs far more than the arithmetic. Nothing waits for a GPU.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quantry.numerics.ggml.exact import TINY, add_up, over, root
from quantry.numerics.ggml.kquants.rules import ROUNDS, SUPER, BlockFit, SearchRule, StepSizes, around
from quantry.numerics.threads import buffer

TILE = 1 << 18  # weights searched at a time on the CPU


class Tile:
    """Buffers for the sub-blocks searched together, each (elements, sub-blocks)."""

    def __init__(self, values: Tensor) -> None:
        buffers = buffer("tile", (7, *values.shape), values)
        self.values, self.codes = buffers[0].copy_(values), buffers[1]
        self.weights = buffers[2:4]  # the weight of an error, and that times the value
        self.products = buffers[4:7]


def fit_affine(rule: SearchRule, steps: StepSizes, weight: Tensor, importance: Tensor | None) -> BlockFit:
    """Finds scale and minimum (at least 0) of each sub-block with the least weighted error of scale * code - minimum.

    Each step size in turn starts at the lowest value so far; codes are rounded, scale and minimum follow by least
    squares (or the scale alone, where the minimum would be negative), and are kept if their error is smaller.
    """
    fits = weight.new_empty(5, weight.shape[0] * rule.groups)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None if importance is None else importance[blocks])
        _fit_affine(tile, rule.top, steps, fits[:, lanes])
    scale, low, inverse, start, total = _by_super_block(rule, fits)
    return BlockFit(scale, low.neg_(), inverse.masked_fill_(inverse.isinf(), 0), start, total)


def fit_symmetric(rule: SearchRule, weight: Tensor, importance: Tensor | None) -> BlockFit:
    """Finds the scale of each sub-block with the least weighted error of scale * code, codes from -top to top - 1.

    The largest value becomes -top, or up to 0.9 of a code more or less; the codes are rounded and the scale follows by
    least squares.
    """
    fits = weight.new_empty(3, weight.shape[0] * rule.groups)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None if importance is None else importance[blocks])
        _fit_symmetric(tile, rule.top, fits[:, lanes])
    scale, inverse, total = _by_super_block(rule, fits)
    zero = inverse == 0
    start = torch.zeros_like(scale).masked_fill_(zero, torch.inf)
    return BlockFit(scale, torch.zeros_like(scale), inverse.masked_fill_(zero, 1), start, total)


def fit_improving(rule: SearchRule, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Finds the scale and the stored codes of each sub-block: the largest value becomes -top, then codes improve."""
    scale, codes = weight.new_empty(1, weight.shape[0] * rule.groups), torch.empty_like(weight, dtype=torch.uint8)
    limits = (-rule.top, rule.top - 1)
    for tile, blocks, lanes in _tiles(rule, weight):
        _weigh(rule, tile, weight[blocks], None)
        most, zero = _largest_or_one(tile.values)
        torch.mul(tile.values, over(-rule.top, most), out=tile.codes).round_().clamp_(*limits)
        scale[0, lanes] = _improve(tile, limits).masked_fill_(zero, 0)
        codes[blocks].view(-1, rule.sub).T.copy_(tile.codes.add_(rule.top).masked_fill_(zero, 0))
    return _by_super_block(rule, scale)[0], codes


def share_largest(values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Returns a number for each super-block, and the values (groups, blocks) as multiples of it, 0 to top.

    The largest value becomes top.
    """
    most = values.amax(0).clamp_(min=0).add_(0)  # + 0: never -0
    inverse = over(top, most)
    multiples = (values * inverse.masked_fill_(inverse.isinf(), 0)).round_().clamp_(0, top)
    return most / torch.full_like(most, top), multiples  # a GPU would multiply with the reciprocal of a number


def share_signed(values: Tensor, top: int, floor: float, code: int) -> tuple[Tensor, Tensor]:
    """Does the same with multiples from -top to top - 1: the largest magnitude becomes -top.

    If it is 0 or below the floor, the number is 0 and all multiples are `code`.
    """
    most = _largest(values)
    dead = (most == 0) | (most.abs() < floor)
    inverse = over(-top, most.masked_fill_(dead, 1))
    multiples = (values * inverse).round_().clamp_(-top, top - 1)
    return over(1, inverse).masked_fill_(dead, 0), multiples.masked_fill_(dead, code)


def share_positive(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Does the same as `share_largest` with care: nine step sizes by weighted error, then codes improved one by one."""
    tile = _shared(values, weight)
    most = values.amax(0).clamp_(min=0)
    zero = most < TINY
    most.masked_fill_(zero, 1)
    best = torch.empty(0)
    for divisor in around(top, 4):
        inverse = over(divisor, most)
        torch.mul(values, inverse, out=tile.codes).round_().clamp_(max=top)
        difference = values - tile.codes * over(1, inverse)
        trial = torch.stack((add_up((weight * difference * difference)), inverse))
        best = torch.where(trial[0] < best[0], trial, best) if len(best) else trial
    torch.mul(values, best[1], out=tile.codes).round_().clamp_(max=top)
    scale = _improve(tile, (0, top))
    return scale.masked_fill_(zero, 0), tile.codes.masked_fill(zero, 0)


def share_symmetric(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Does the same with multiples from -top to top - 1, by the search of `fit_symmetric`."""
    tile = _shared(values, weight)
    scale, inverse, _ = fits = values.new_empty(3, values.shape[1])
    _fit_symmetric(tile, top, fits)
    multiples = (values * inverse).round_().clamp_(-top, top - 1)
    return scale, multiples.masked_fill_(inverse == 0, -top)


def round_affine(rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor, offset: Tensor) -> Tensor:
    """Returns codes (weight + offset) / step of each sub-block; those of the search where the step is 0."""
    lost = step == 0
    shift, factor = torch.where(lost, -fit.start, offset), torch.where(lost, fit.inverse, 1.0)
    return _round(rule, weight, (shift, factor, step.masked_fill(lost, 1)), (0, rule.top))


def round_symmetric(rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor) -> Tensor:
    """Returns stored codes weight / step + top of each sub-block; those of the search where the step is 0."""
    lost = step == 0
    shift, factor = torch.where(lost, -fit.start, 0.0), torch.where(lost, fit.inverse, 1.0)
    return _round(rule, weight, (shift, factor, step.masked_fill(lost, 1)), (-rule.top, rule.top - 1))


def round_over(rule: SearchRule, weight: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    """Does the same, given the codes of the search, which it may overwrite."""
    lost = step == 0
    none = torch.zeros_like(step)
    new = _round(rule, weight, (none, none + 1, step.masked_fill(lost, 1)), (-rule.top, rule.top - 1))
    parts = (-1, rule.groups, rule.sub)
    return torch.where(lost.T.unsqueeze(2), codes.view(parts), new.view(parts)).reshape(weight.shape)


def _fit_affine(tile: Tile, top: int, steps: StepSizes, fits: Tensor) -> None:
    """Fills `found` with scale, low = -minimum, inverse step, start and sum of weights."""
    tile.products[0].copy_(tile.weights[0])
    torch.mul(tile.weights[0], tile.values, out=tile.products[1])
    sums = add_up(tile.products[:2])
    low, high = tile.values.amin(0).clamp_(max=0), tile.values.amax(0)
    flat = high == low
    inverse = over(top, high.masked_fill_(flat, 1) - low)
    scale = over(1, inverse)
    _codes(tile, low, inverse, top)
    best = torch.stack((_error(tile, scale, low, steps.absolute), scale, low, inverse, low))
    trial = torch.empty_like(best)
    for divisor in steps.divisors(top):
        error, scale, low, inverse, start = trial
        start.copy_(best[2])
        over(divisor, torch.sub(high, start, out=inverse), out=inverse)
        _codes(tile, start, inverse, top)
        usable = _solve(tile, sums, scale, low)
        error.copy_(_error(tile, scale, low, steps.absolute))
        torch.where(usable & (error < best[0]), trial, best, out=best)
    fits[:4], fits[4] = best[1:], sums[0]
    fits[0].masked_fill_(flat, 0)


def _solve(tile: Tile, sums: Tensor, scale: Tensor, low: Tensor) -> Tensor:
    """Fills in scale and low (at most 0) of the least weighted squares for the codes; returns where they exist."""
    products, (sum_w, sum_x) = tile.products, sums
    torch.mul(tile.weights[0], tile.codes, out=products[0])
    torch.mul(products[0], tile.codes, out=products[1])
    torch.mul(products[0], tile.values, out=products[2])
    sum_l, sum_l2, sum_xl = add_up(products)
    spread = sum_w * sum_l2 - sum_l * sum_l
    torch.div(sum_w * sum_xl - sum_x * sum_l, spread, out=scale)
    torch.div(sum_l2 * sum_x - sum_l * sum_xl, spread, out=low)
    torch.where(low > 0, sum_xl / sum_l2, scale, out=scale)
    low.clamp_(max=0)
    usable: Tensor = spread > 0
    return usable


def _codes(tile: Tile, start: Tensor, inverse: Tensor, top: int) -> None:
    """Fills in codes 0 to top: the steps from the start to each value."""
    torch.sub(tile.values, start, out=tile.codes).mul_(inverse).round_().clamp_(0, top)


def _error(tile: Tile, scale: Tensor, low: Tensor, absolute: bool) -> Tensor:
    difference = torch.mul(tile.codes, scale, out=tile.products[0]).add_(low).sub_(tile.values)
    size = difference.abs_() if absolute else difference.square_()
    return add_up(size.mul_(tile.weights[0]))


def _fit_symmetric(tile: Tile, top: int, fits: Tensor) -> None:
    """Fills `found` with scale, inverse step (0 where all is zero) and sum of weights."""
    x, weights, codes, products = tile.values, tile.weights, tile.codes, tile.products
    torch.mul(weights[0], x, out=weights[1])
    most, zero = _largest_or_one(x)
    best = torch.zeros(3, x.shape[1], device=x.device)
    trial = torch.empty_like(best)
    gain, scale, inverse = trial
    for number, divisor in enumerate(around(top, 9)):
        over(-divisor, most, out=inverse)
        torch.mul(x, inverse, out=codes).round_().clamp_(-top, top - 1)
        torch.mul(weights, codes, out=products[:2])
        products[0].mul_(codes)
        sum_l2, sum_xl = add_up(products[:2])
        torch.div(sum_xl, sum_l2, out=scale)
        torch.mul(scale, sum_xl, out=gain)
        if number == 0:
            torch.where(sum_l2 != 0, trial, best, out=best)
            best[2] = inverse
        else:
            torch.where(sum_xl * sum_xl > best[0] * sum_l2, trial, best, out=best)
    fits[:2] = best[1:].masked_fill_(zero, 0)
    fits[2] = add_up(products[0].copy_(weights[0]))


def _improve(tile: Tile, limits: tuple[int, int]) -> Tensor:
    """Changes each code in turn to the best for the others' scale, where that lowers the weighted error.

    The scale of least weighted error is sum(weight * value * code) / sum(weight * code^2); returns the final one.
    """
    torch.mul(tile.weights[0], tile.values, out=tile.weights[1])
    torch.mul(tile.weights, tile.codes, out=tile.products[:2])
    tile.products[0].mul_(tile.codes)
    sum_l2, sum_xl = add_up(tile.products[:2])
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


def _round(rule: SearchRule, weight: Tensor, parts: tuple[Tensor, Tensor, Tensor], limits: tuple[int, int]) -> Tensor:
    """Returns (weight + shift) * factor / step, rounded, within limits and counted from the lower one."""
    codes = torch.empty_like(weight, dtype=torch.uint8)
    shift, factor, step = (part.T.reshape(-1) for part in parts)
    for tile, blocks, lanes in _tiles(rule, weight):
        tile.values.add_(shift[lanes]).mul_(factor[lanes]).div_(step[lanes]).round_().clamp_(*limits).sub_(limits[0])
        codes[blocks].view(-1, rule.sub).T.copy_(tile.values)
    return codes


def _weigh(rule: SearchRule, tile: Tile, weight: Tensor, importance: Tensor | None) -> None:
    """Fills in the weight of an error in each value."""
    x, weights, square = tile.values, tile.weights[0], tile.products[0]
    if importance is not None:
        weights.copy_(importance.view(-1, rule.sub).T)
        if rule.spread is not None:
            mean = add_up(weight.T.contiguous().square_()) * (rule.spread / SUPER)
            weights.mul_(root(torch.mul(x, x, out=square).add_(mean.repeat_interleave(rule.groups))))
    elif rule.plain is None:
        torch.mul(x, x, out=weights)
    elif rule.plain.absolute:
        torch.abs(x, out=weights)
    else:
        mean = add_up(torch.mul(x, x, out=square)) * (1 / rule.sub)
        torch.abs(x, out=weights).add_(root(mean))


def _shared(values: Tensor, weight: Tensor) -> Tile:
    """Returns a tile whose sub-blocks are the scales of super-blocks."""
    tile = Tile(values)
    tile.weights[0].copy_(weight)
    return tile


def _tiles(rule: SearchRule, weight: Tensor) -> Iterator[tuple[Tile, slice, slice]]:
    """Yields tiles with their values, and the super-blocks and sub-blocks they hold; a GPU takes all at once."""
    blocks = weight.shape[0]
    most = TILE // SUPER if weight.device.type == "cpu" else max(1, blocks)
    for start in range(0, blocks, most):
        end = min(blocks, start + most)
        tile = Tile(weight[start:end].view(-1, rule.sub).T)
        yield tile, slice(start, end), slice(start * rule.groups, end * rule.groups)


def _by_super_block(rule: SearchRule, fits: Tensor) -> Tensor:
    """Reshapes (rows, sub-blocks) to (rows, sub-blocks of a super-block, super-blocks)."""
    return fits.view(fits.shape[0], -1, rule.groups).transpose(1, 2).contiguous()


def _largest(rows: Tensor) -> Tensor:
    """Returns the value of the largest magnitude over the rows, the first of equals; it never waits for a GPU."""
    while rows.shape[0] > 1:
        even, odd = rows[0::2], rows[1::2]
        rows = torch.where(odd.abs() > even.abs(), odd, even)
    return rows[0]


def _largest_or_one(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the largest value, but 1 where all are zero; and where they are."""
    most = _largest(rows)
    zero = most.abs() < TINY
    return most.masked_fill_(zero, 1), zero

"""The expensive parts of the searches as machine code for the CPU, bit for bit what ggml computes.

A lane is a super-block and does the scalar operations in their order, one sub-block after another. The functions are
those of `batched`, which documents each of them.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantry.numerics.ggml.exact import TINY
from quantry.numerics.ggml.kquants.rules import ROUNDS, SUPER, BlockFit, SearchRule, StepSizes, around
from quantry.numerics.ggml.lanes import largest_or_one, largest_value, select, square_sum, sum_over
from quantry.numerics.simd import LANES, Array, Kernel, Mask, Vector
from quantry.numerics.threads import buffer


def fit_affine(rule: SearchRule, steps: StepSizes, weight: Tensor, importance: Tensor | None) -> BlockFit:
    fits = buffer("fits", (5, rule.groups, weight.shape[0]), weight)
    _affine(rule, steps, importance is not None)(weight, importance, fits, weight.shape[0])
    return BlockFit(*fits)


def fit_symmetric(rule: SearchRule, weight: Tensor, importance: Tensor | None) -> BlockFit:
    fits = buffer("fits", (5, rule.groups, weight.shape[0]), weight)
    _symmetric(rule, importance is not None)(weight, importance, fits, weight.shape[0])
    return BlockFit(*fits)


def fit_improving(rule: SearchRule, weight: Tensor) -> tuple[Tensor, Tensor]:
    scale, codes = torch.empty(rule.groups, weight.shape[0]), torch.empty_like(weight, dtype=torch.uint8)
    _improving(rule)(weight, scale, codes, weight.shape[0])
    return scale, codes


def share_largest(values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    return _share(_largest_to_top(values.shape[0], top), values)


def share_signed(values: Tensor, top: int, floor: float, code: int) -> tuple[Tensor, Tensor]:
    return _share(_largest_to_bottom(values.shape[0], top, floor, code), values)


def share_positive(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    return _share(_positive(values.shape[0], top), values, weight)


def share_symmetric(values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    return _share(_signed(values.shape[0], top), values, weight)


def round_affine(rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor, offset: Tensor) -> Tensor:
    codes = torch.empty_like(weight, dtype=torch.uint8)
    _rounding(rule, "affine")(weight, codes, step, fit.start, fit.inverse, offset, weight.shape[0])
    return codes


def round_symmetric(rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor) -> Tensor:
    codes = torch.empty_like(weight, dtype=torch.uint8)
    _rounding(rule, "symmetric")(weight, codes, step, fit.start, fit.inverse, None, weight.shape[0])
    return codes


def round_over(rule: SearchRule, weight: Tensor, codes: Tensor, step: Tensor) -> Tensor:
    _rounding(rule, "over")(weight, codes, step, None, None, None, weight.shape[0])
    return codes


def _share(kernel: Kernel, values: Tensor, *weight: Tensor) -> tuple[Tensor, Tensor]:
    shared, multiples = torch.empty(values.shape[1]), torch.empty_like(values)
    kernel(shared, multiples, values, *weight, values.shape[1])
    return shared, multiples


# Kernels. `tile` records them on `k`; `first` is the super-block in lane 0.


@cache
def _affine(rule: SearchRule, steps: StepSizes, important: bool) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        weight, importance, out = k.pointers
        x, w = k.array(rule.sub), k.array(rule.sub)
        mean = _weighted_mean(k, rule, weight, first, x) if important else None

        def group(index: Any) -> None:
            column = k.at(index, rule.sub, 0)
            k.load_rows(weight, first, SUPER, column, x)
            if mean is not None:
                k.load_rows(importance, first, SUPER, column, w)
                k.fill(w, lambda i: w[i] * k.root(mean + x[i] * x[i]))
            elif steps.absolute:
                k.fill(w, lambda i: abs(x[i]))
            else:
                root = k.root(sum_over(k, x, lambda i: x[i] * x[i]) / rule.sub)
                k.fill(w, lambda i: root + abs(x[i]))
            _keep(k, rule, out, index, first, _search_affine(k, x, w, rule.top, steps))

        k.each(rule.groups, group)

    return _kernel(tile, 3)


def _search_affine(k: Kernel, x: Array, w: Array, top: int, steps: StepSizes) -> tuple[Vector, ...]:
    codes, divisors = k.array(x.length), k.table(steps.divisors(top))
    sum_w, sum_x = sum_over(k, x, lambda i: w[i]), sum_over(k, x, lambda i: w[i] * x[i])
    (low,) = k.repeat(x.length, [0.0], lambda i, low: [k.least(low, x[i])])
    (high,) = k.repeat(x.length, [x[0]], lambda i, high: [k.most(high, x[i])])
    uneven = low < high
    high = k.where(uneven, high, 1.0)

    def code(i: Any, start: Vector, inverse: Vector) -> Vector:
        return k.clamp(k.nearest(inverse * (x[i] - start)), 0, top)

    def error(scale: Vector, low: Vector) -> Vector:
        def term(i: Any) -> Vector:
            difference = scale * codes[i] + low - x[i]
            return w[i] * (abs(difference) if steps.absolute else difference * difference)

        return sum_over(k, x, term)

    def trial(index: Any, *best: Vector) -> list[Vector]:
        start = best[2]
        inverse = k.pick(divisors, index) / (high - start)

        def add(i: Any, sum_l: Vector, sum_l2: Vector, sum_xl: Vector) -> list[Vector]:
            codes[i] = this = code(i, start, inverse)
            weighted = w[i] * this
            return [sum_l + weighted, sum_l2 + weighted * this, sum_xl + weighted * x[i]]

        sum_l, sum_l2, sum_xl = k.repeat(x.length, [0.0] * 3, add)
        spread = sum_w * sum_l2 - sum_l * sum_l
        scale, low = (sum_w * sum_xl - sum_x * sum_l) / spread, (sum_l2 * sum_x - sum_l * sum_xl) / spread
        scale, low = k.where(low > 0.0, sum_xl / sum_l2, scale), k.where(low > 0.0, 0.0, low)
        error_now = error(scale, low)
        return select(k, (spread > 0.0) & (error_now < best[0]), (error_now, scale, low, inverse, start), best)

    inverse = k.constant(top) / (high - low)
    scale = 1.0 / inverse
    k.fill(codes, lambda i: code(i, low, inverse))
    first = (error(scale, low), scale, low, inverse, low)
    _, scale, low, inverse, start = k.repeat(steps.last + 1, first, trial)
    inverse = k.where(inverse < float("inf"), inverse, 0.0)
    return k.where(uneven, scale, 0.0), -low, inverse, start, sum_w


@cache
def _symmetric(rule: SearchRule, important: bool) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        weight, importance, out = k.pointers
        x, w = k.array(rule.sub), k.array(rule.sub)
        mean = _weighted_mean(k, rule, weight, first, x) if important and rule.spread is not None else None

        def group(index: Any) -> None:
            column = k.at(index, rule.sub, 0)
            k.load_rows(weight, first, SUPER, column, x)
            if important:
                k.load_rows(importance, first, SUPER, column, w)
            else:
                k.fill(w, lambda i: x[i] * x[i])
            if mean is not None:
                k.fill(w, lambda i: w[i] * k.root(mean + x[i] * x[i]))
            scale, inverse, zero = _search_symmetric(k, x, w, rule.top)
            start, total = k.where(zero, float("inf"), 0.0), sum_over(k, x, lambda i: w[i])
            _keep(k, rule, out, index, first, (scale, k.constant(0.0), inverse, start, total))

        k.each(rule.groups, group)

    return _kernel(tile, 3)


def _search_symmetric(k: Kernel, x: Array, w: Array, top: int) -> tuple[Vector, Vector, Mask]:
    """Returns scale, inverse step (1 where all is zero), and where all is zero."""
    divisors = k.table([-divisor for divisor in around(top, 9)])
    largest, zero = largest_or_one(k, x)

    def trial(index: Any) -> tuple[Vector, Vector, Vector]:
        inverse = k.pick(divisors, index) / largest

        def add(i: Any, sum_xl: Vector, sum_l2: Vector) -> list[Vector]:
            code = k.clamp(k.nearest(inverse * x[i]), -top, top - 1)
            return [sum_xl + w[i] * x[i] * code, sum_l2 + w[i] * code * code]

        sum_xl, sum_l2 = k.repeat(x.length, [0.0] * 2, add)
        return sum_xl, sum_l2, inverse

    def another(index: Any, *best: Vector) -> list[Vector]:
        sum_xl, sum_l2, inverse = trial(k.at(index, 1, 1))
        scale = sum_xl / sum_l2
        return select(k, sum_xl * sum_xl > best[0] * sum_l2, (scale * sum_xl, scale, inverse), best)

    sum_xl, sum_l2, inverse = trial(k.index(0))
    scale = k.where(sum_l2.differs(0.0), sum_xl / sum_l2, 0.0)
    _, scale, inverse = k.repeat(len(around(top, 9)) - 1, [scale * sum_xl, scale, inverse], another)
    return k.where(zero, 0.0, scale), k.where(zero, 1.0, inverse), zero


@cache
def _improving(rule: SearchRule) -> Kernel:
    limits = (-rule.top, rule.top - 1)

    def tile(k: Kernel, first: Any) -> None:
        weight, scales, out = k.pointers
        x, w, codes = k.array(rule.sub), k.array(rule.sub), k.array(rule.sub)

        def group(index: Any) -> None:
            column = k.at(index, rule.sub, 0)
            k.load_rows(weight, first, SUPER, column, x)
            k.fill(w, lambda i: x[i] * x[i])
            largest, zero = largest_or_one(k, x)
            inverse = k.constant(-rule.top) / largest
            k.fill(codes, lambda i: k.clamp(k.nearest(inverse * x[i]), *limits))
            scale = _improve(k, x, w, codes, limits)
            k.store(k.where(zero, 0.0, scale), scales, k.at(index, k.count, first))
            k.fill(codes, lambda i: k.where(zero, 0.0, codes[i] + rule.top))
            k.store_rows(codes, out, first, SUPER, column)

        k.each(rule.groups, group)

    return _kernel(tile, 3)


def _improve(k: Kernel, x: Array, w: Array, codes: Array, limits: tuple[int, int]) -> Vector:
    """Improves codes one after another; returns the scale that fits them."""

    def improve(i: Any, sum_xl: Vector, sum_l2: Vector) -> list[Vector]:
        code = codes[i]
        rest_xl, rest_l2 = sum_xl - w[i] * x[i] * code, sum_l2 - w[i] * code * code
        new = k.clamp(k.nearest(x[i] * rest_l2 / rest_xl), *limits)
        new_xl, new_l2 = rest_xl + w[i] * x[i] * new, rest_l2 + w[i] * new * new
        better = (rest_xl > 0.0) & new.differs(code) & ((new_l2 if limits[0] < 0 else rest_l2) > 0.0)
        better = better & (new_xl * new_xl * sum_l2 > sum_xl * sum_xl * new_l2)
        codes[i] = k.where(better, new, code)
        return select(k, better, (new_xl, new_l2), (sum_xl, sum_l2))

    sums = [sum_over(k, x, lambda i: w[i] * x[i] * codes[i]), sum_over(k, x, lambda i: w[i] * codes[i] * codes[i])]
    sum_xl, sum_l2 = k.repeat(ROUNDS, sums, lambda _, *sums: k.repeat(x.length, sums, improve))
    return k.where(sum_l2 > 0.0, sum_xl / sum_l2, 0.0)


@cache
def _largest_to_top(groups: int, top: int) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        shared, multiples, values = k.pointers
        x = _columns(k, values, first, groups)
        (largest,) = k.repeat(groups, [0.0], lambda i, most: [k.most(most, x[i])])
        inverse = k.constant(top) / largest
        inverse = k.where(inverse < float("inf"), inverse, 0.0)
        k.store(largest / top, shared, first)
        _keep_columns(k, multiples, first, groups, lambda i: k.clamp(k.nearest(inverse * x[i]), 0, top))

    return _kernel(tile, 3)


@cache
def _largest_to_bottom(groups: int, top: int, floor: float, code: int) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        shared, multiples, values = k.pointers
        x = _columns(k, values, first, groups)
        size, largest = largest_value(k, x)
        alive = (size > 0.0) & ~(size < floor)
        inverse = k.constant(-top) / largest

        def multiple(i: Any) -> Vector:
            return k.where(alive, k.clamp(k.nearest(inverse * x[i]), -top, top - 1), code)

        k.store(k.where(alive, 1.0 / inverse, 0.0), shared, first)
        _keep_columns(k, multiples, first, groups, multiple)

    return _kernel(tile, 3)


@cache
def _positive(groups: int, top: int) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        shared, multiples, values, weights = k.pointers
        x, w, codes = _columns(k, values, first, groups), _columns(k, weights, first, groups), k.array(groups)
        divisors = k.table(around(top, 4))
        (largest,) = k.repeat(groups, [0.0], lambda i, most: [k.most(most, x[i])])
        zero = largest < TINY
        largest = k.where(zero, 1.0, largest)

        def code(i: Any, inverse: Vector) -> Vector:
            return k.least(k.nearest(inverse * x[i]), top)

        def trial(index: Any, *best: Vector) -> list[Vector]:
            inverse = k.pick(divisors, index) / largest
            scale = 1.0 / inverse

            def term(i: Any) -> Vector:
                difference = x[i] - scale * code(i, inverse)
                return w[i] * difference * difference

            error = sum_over(k, x, term)
            return select(k, error < best[0], (error, inverse), best)

        _, inverse = k.repeat(len(around(top, 4)), [float("inf"), k.constant(top) / largest], trial)
        k.fill(codes, lambda i: code(i, inverse))
        scale = _improve(k, x, w, codes, (0, top))
        k.store(k.where(zero, 0.0, scale), shared, first)
        _keep_columns(k, multiples, first, groups, lambda i: k.where(zero, 0.0, codes[i]))

    return _kernel(tile, 4)


@cache
def _signed(groups: int, top: int) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        shared, multiples, values, weights = k.pointers
        x, w = _columns(k, values, first, groups), _columns(k, weights, first, groups)
        scale, inverse, zero = _search_symmetric(k, x, w, top)

        def multiple(i: Any) -> Vector:
            return k.where(zero, -top, k.clamp(k.nearest(inverse * x[i]), -top, top - 1))

        k.store(scale, shared, first)
        _keep_columns(k, multiples, first, groups, multiple)

    return _kernel(tile, 4)


@cache
def _rounding(rule: SearchRule, variant: str) -> Kernel:
    """Returns the kernel that rounds; here a lane is a weight."""
    low, high = (0, rule.top) if variant == "affine" else (-rule.top, rule.top - 1)

    def body(k: Kernel) -> None:
        weight, out, steps, starts, inverses, offsets = k.pointers

        def part(row: Any, group: int, start: int) -> None:
            place, column = k.at(group, k.count, row), k.at(row, SUPER, group * rule.sub + start)
            x, step = k.load(weight, column), k.pick(steps, place)
            new = (x + k.pick(offsets, place) if variant == "affine" else x) / step
            if variant == "over":
                new = k.clamp(k.nearest(new), low, high) - low
                new = k.where(step.equals(0.0), k.load_bytes(out, column), new)
            else:
                old = (x - k.pick(starts, place)) * k.pick(inverses, place)
                new = k.clamp(k.nearest(k.where(step.equals(0.0), old, new)), low, high) - low
            k.store_bytes(new, out, column)

        def block(row: Any) -> None:
            for group in range(rule.groups):
                for start in range(0, rule.sub, LANES):
                    part(row, group, start)

        k.each(k.count, block)

    return Kernel(body, 6)


# Shared by the kernels.


def _kernel(tile: Callable[[Kernel, Any], None], pointers: int) -> Kernel:
    """Returns a kernel that goes through super-blocks, 16 at a time."""

    return Kernel(lambda k: k.each_tile(lambda first: tile(k, first)), pointers)


def _weighted_mean(k: Kernel, rule: SearchRule, weight: Any, first: Any, x: Array) -> Vector:
    assert rule.spread is not None
    return square_sum(k, weight, first, SUPER, x) * (rule.spread / SUPER)


def _keep(k: Kernel, rule: SearchRule, out: Any, group: Any, first: Any, values: tuple[Vector, ...]) -> None:
    """Stores the values of a sub-block of each lane, as (values, sub-blocks in a super-block, super-blocks)."""
    for row, value in enumerate(values):
        k.store(value, out, k.at(k.at(row, rule.groups, group), k.count, first))


def _columns(k: Kernel, pointer: Any, first: Any, groups: int) -> Array:
    """Loads per-sub-block numbers, (sub-blocks in a super-block, super-blocks)."""
    array = k.array(groups)
    k.fill(array, lambda i: k.load(pointer, k.at(i, k.count, first)))
    return array


def _keep_columns(k: Kernel, pointer: Any, first: Any, groups: int, value: Callable[[Any], Vector]) -> None:
    k.each(groups, lambda i: k.store(value(i), pointer, k.at(i, k.count, first)))

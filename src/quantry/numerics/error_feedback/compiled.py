"""The loop within a block as machine code for the CPU. A lane is a row; its 128 weights stay in the first cache."""

from functools import cache
from itertools import pairwise
from typing import Any

from torch import Tensor

from quantry.numerics.ladders import Ladder
from quantry.numerics.simd import LANES, Kernel, Vector

EXPONENT = 0x7F800000  # the exponent bits of a float32


def block(ladder: Ladder, weight: Tensor, step: Tensor, shift: Tensor | None, upper: Tensor, error: Tensor) -> None:
    """Does the same as `plain.block`, for contiguous float32 with a multiple of 16 rows."""
    columns, rows = weight.shape
    _loop(ladder, columns, shift is not None)(weight, step, shift, upper, error, rows)


@cache
def _loop(ladder: Ladder, columns: int, shifted: bool) -> Kernel:
    def tile(k: Kernel, first: Any) -> None:
        weights, steps, shifts, upper, errors = k.pointers
        x = k.array(columns)
        k.fill(x, lambda i: k.load(weights, k.at(i, k.count, first)))

        def column(j: Any) -> None:
            place = k.at(j, k.count, first)
            step, here = k.load(steps, place), x[j]
            divisor = k.where(step.equals(0.0), 1.0, step)
            if shifted:
                shift = k.load(shifts, place)
                level = _nearest(k, ladder, (here + shift) / divisor)
                value = level * step - shift
            else:
                level = _nearest(k, ladder, here / divisor)
                value = level * step
            error = (here - value) / k.pick(upper, k.at(j, columns, j))
            k.store(level, weights, place)
            k.store(error, errors, place)

            def compensate(i: Any) -> None:  # from j on: a loop runs at least once, and x[j] is not used again
                later = k.builder.add(j, i)
                x[later] = x[later] - k.pick(upper, k.at(j, columns, later)) * error

            k.each(k.builder.sub(k.index(columns), j), compensate)

        k.each(columns, column)

    return Kernel(lambda k: k.each_tile(lambda first: tile(k, first)), 5)


def _nearest(k: Kernel, ladder: Ladder, values: Vector) -> Vector:
    if ladder.rungs:
        level = k.constant(ladder.rungs[0])
        for lower, upper in pairwise(ladder.rungs):
            level = level + k.where(values < (lower + upper) / 2, 0.0, upper - lower)
        return level
    if ladder.mantissa is None:
        return k.clamp(k.nearest(values), ladder.low, ladder.high)
    values = k.clamp(values, ladder.low, ladder.high)
    step = k.most(_power(k, values), ladder.smallest) * 2.0**-ladder.mantissa
    return k.nearest(values / step) * step


def _power(k: Kernel, values: Vector) -> Vector:
    """Returns the power of two at or below each magnitude: the float32 with its exponent bits alone."""
    integers = k.ir.VectorType(k.ir.IntType(32), LANES)
    bits = k.builder.and_(k.builder.bitcast(values.value, integers), k.ir.Constant(integers, [EXPONENT] * LANES))
    return Vector(k, k.builder.bitcast(bits, k.vector))

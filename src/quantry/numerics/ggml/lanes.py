"""Parts of the searches in machine code: each lane works on its own block, one weight after another."""

from collections.abc import Callable
from typing import Any

from quantry.numerics.ggml.exact import TINY
from quantry.numerics.simd import Array, Kernel, Mask, Vector


def sum_over(k: Kernel, over: Array, term: Callable[[Any], Vector]) -> Vector:
    """Returns the sum of term(i) over the elements of an array, in their order."""
    return k.repeat(over.length, [0.0], lambda i, so_far: [so_far + term(i)])[0]


def square_sum(k: Kernel, weight: Any, first: Any, size: int, x: Array) -> Vector:
    """Returns the sum of squares of each block of `size` weights; overwrites `x`, which holds a part of a block."""

    def part(index: Any, so_far: Vector) -> list[Vector]:
        k.load_rows(weight, first, size, k.at(index, x.length, 0), x)
        return k.repeat(x.length, [so_far], lambda i, so_far: [so_far + x[i] * x[i]])

    return k.repeat(size // x.length, [0.0], part)[0]


def select(k: Kernel, mask: Mask, new: tuple[Vector, ...], old: tuple[Vector, ...]) -> list[Vector]:
    """Returns the new values in the lanes of the mask, the old ones elsewhere."""
    return [k.where(mask, mine, theirs) for mine, theirs in zip(new, old, strict=True)]


def largest_value(k: Kernel, x: Array) -> tuple[Vector, Vector]:
    """Returns the largest magnitude, and the first value that has it."""

    def larger(i: Any, most: Vector, value: Vector) -> list[Vector]:
        return select(k, abs(x[i]) > most, (abs(x[i]), x[i]), (most, value))

    most, value = k.repeat(x.length, [0.0, 0.0], larger)
    return most, value


def largest_or_one(k: Kernel, x: Array) -> tuple[Vector, Mask]:
    """Returns the largest value, but 1 where all are zero; and where they are."""
    most, value = largest_value(k, x)
    return k.where(most < TINY, 1.0, value), most < TINY

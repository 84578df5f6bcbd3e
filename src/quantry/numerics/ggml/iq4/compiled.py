"""The expensive parts of IQ4's search as machine code for the CPU, bit for bit what ggml computes.

A lane is a block in `fit`, which does the scalar operations in their order, and a weight in `nearest`. The nearest
level is the lowest plus a step for every midpoint that a scaled weight has reached.
"""

from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.numerics.ggml.iq4.batched import FIRST, SUB, TRIED
from quantry.numerics.ggml.lanes import largest_or_one, select, square_sum
from quantry.numerics.ggml.layout import IQ4
from quantry.numerics.simd import LANES, Array, Kernel, Vector


def fit(weight: Tensor, importance: Tensor | None) -> Tensor:
    """Returns the scale (blocks, sub-blocks) whose nearest levels fit each 32 weights best."""
    blocks, size = weight.shape
    more = (0, 0, 0, -blocks % LANES)
    scale = torch.empty(size // SUB, blocks + more[-1])
    counts = None if importance is None else pad(importance, more).contiguous()
    _fitting(size, importance is not None)(pad(weight, more).contiguous(), counts, scale, scale.shape[1])
    return scale.t()[:blocks].contiguous()


def nearest(weight: Tensor, inverse: Tensor) -> Tensor:
    """Returns the code of the level nearest to each weight times the inverse of its scale."""
    codes = torch.empty_like(weight, dtype=torch.uint8)
    _rounding()(weight.contiguous(), inverse.contiguous(), codes, weight.numel() // SUB)
    return codes


@cache
def _fitting(size: int, important: bool) -> Kernel:
    def body(k: Kernel) -> None:
        weight, importance, out = k.pointers
        x, w = k.array(SUB), k.array(SUB)
        tried = k.table([float(number) for number in TRIED])

        def tile(first: Any) -> None:
            power = square_sum(k, weight, first, size, x) * (2.0 / size) if important else None

            def group(number: Any) -> None:
                column = k.at(number, SUB, 0)
                k.load_rows(weight, first, size, column, x)
                if power is None:
                    k.fill(w, lambda i: x[i] * x[i])
                else:
                    k.load_rows(importance, first, size, column, w)
                    k.fill(w, lambda i: w[i] * k.root(power + x[i] * x[i]))
                k.store(_search(k, x, w, tried), out, k.at(number, k.count, first))

            k.each(size // SUB, group)

        k.each_tile(tile)

    return Kernel(body, 3)


def _search(k: Kernel, x: Array, w: Array, tried: Any) -> Vector:
    """Returns the best scale, or 0 if all weights are zero."""

    def sums(inverse: Vector) -> list[Vector]:
        def add(i: Any, qx: Vector, qq: Vector) -> list[Vector]:
            level = _level(k, inverse * x[i])
            weighted = w[i] * level
            return [qx + weighted * x[i], qq + weighted * level]

        return k.repeat(SUB, [0.0, 0.0], add)

    def better(index: Any, gain: Vector, scale: Vector) -> list[Vector]:
        qx, qq = sums(k.pick(tried, index) / top)
        new, wins = qx / qq, (qq > 0.0) & (qx * qx > gain * qq)
        return select(k, wins, (new * qx, new), (gain, scale))

    top, zero = largest_or_one(k, x)
    qx, qq = sums(1.0 / (top / FIRST))
    scale = k.where(qq > 0.0, qx / qq, 0.0)
    _, best = k.repeat(len(TRIED), [scale * qx, scale], better)
    return k.where(zero, 0.0, best)


@cache
def _rounding() -> Kernel:
    def body(k: Kernel) -> None:
        weight, inverses, out = k.pointers

        def group(number: Any) -> None:
            inverse = k.pick(inverses, number)
            for column in range(0, SUB, LANES):
                place = k.at(number, SUB, column)
                k.store_bytes(_climb(k, inverse * k.load(weight, place), 0, [1] * (len(IQ4) - 1)), out, place)

        k.each(k.count, group)

    return Kernel(body, 3)


def _level(k: Kernel, scaled: Vector) -> Vector:
    return _climb(k, scaled, IQ4[0], [upper - lower for lower, upper in pairwise(IQ4)])


def _climb(k: Kernel, scaled: Vector, start: int, steps: list[int]) -> Vector:
    """Returns the start plus the steps at all midpoints between levels that the number has reached."""
    height = k.constant(start)
    for (lower, upper), step in zip(pairwise(IQ4), steps, strict=True):
        height = height + k.where(scaled < (lower + upper) / 2, 0.0, step)
    return height

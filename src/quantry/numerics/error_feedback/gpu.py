"""The loop within a block as a Triton kernel: one launch for 128 columns. Triton comes with torch for GPUs.

A program holds 16 rows in registers. A sum over a mask, which is exact, picks column j; row j of U times the error is
subtracted from all columns. U is 0 before the diagonal, so finished columns stay unchanged.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# (Triton evaluates parameter annotations, and knows only its own names.)

from functools import cache
from importlib import import_module
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantry.numerics.ladders import Ladder

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")
if TYPE_CHECKING:
    constexpr = Any
else:
    constexpr = tl.constexpr

ROWS = 16  # of a program


def block(ladder: Ladder, weight: Tensor, step: Tensor, shift: Tensor | None, upper: Tensor, error: Tensor) -> None:
    """Does the same as `plain.block`, for contiguous float32 on a GPU."""
    columns, rows = weight.shape
    level = torch.empty_like(weight)
    middles, climbs = _rungs(ladder, weight.device)
    shape = 2 if ladder.rungs else 0 if ladder.mantissa is None else 1
    _loop[(triton.cdiv(rows, ROWS),)](
        weight, level, error, step, step if shift is None else shift, upper, middles, climbs, rows,
        columns=columns, width=triton.next_power_of_2(columns), height=ROWS, shifted=shift is not None, shape=shape,
        low=float(ladder.low), high=float(ladder.high), smallest=ladder.smallest,
        fraction=2.0 ** -(ladder.mantissa or 0), steps=middles.numel(),
    )  # fmt: skip
    weight.copy_(level)


@cache
def _rungs(ladder: Ladder, device: torch.device) -> tuple[Tensor, Tensor]:
    pairs = list(pairwise(ladder.rungs)) or [(0.0, 0.0)]
    return (
        torch.tensor([(lower + upper) / 2 for lower, upper in pairs], dtype=torch.float32, device=device),
        torch.tensor([upper - lower for lower, upper in pairs], dtype=torch.float32, device=device),
    )


def _round_whole(values):
    """Rounds halves to even, for magnitudes below 2**22: from 2**23 on a float32 has no fraction."""
    return (values + 12582912.0) - 12582912.0


def _find_nearest(
    values, middles, climbs, shape: constexpr, low: constexpr, high: constexpr, smallest: constexpr,
    fraction: constexpr, steps: constexpr,
):  # fmt: skip
    if shape == 2:  # rungs
        level = tl.full(values.shape, low, tl.float32)
        for i in tl.static_range(steps):
            level += tl.where(values < tl.load(middles + i), 0.0, tl.load(climbs + i))
        return level
    values = tl.minimum(tl.maximum(values, low), high)
    if shape == 0:  # whole numbers
        return _whole(values)
    power = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    step = tl.maximum(power, smallest) * fraction
    return _whole(tl.div_rn(values, step)) * step


def _columns(
    weights, levels, errors, steps_of, shifts, upper, middles, climbs,
    rows, columns: constexpr, width: constexpr, height: constexpr, shifted: constexpr, shape: constexpr,
    low: constexpr, high: constexpr, smallest: constexpr, fraction: constexpr, steps: constexpr,
):  # fmt: skip
    row = tl.program_id(0) * height + tl.arange(0, height)
    column = tl.arange(0, width)
    here, own = row < rows, column < columns
    x = tl.load(weights + column[:, None] * rows + row[None, :], mask=own[:, None] & here[None, :], other=0.0)
    for j in range(columns):
        value = tl.sum(tl.where(column[:, None] == j, x, 0.0), axis=0)
        step = tl.load(steps_of + j * rows + row, mask=here, other=1.0)
        moved = value
        if shifted:
            shift = tl.load(shifts + j * rows + row, mask=here, other=0.0)
            moved = value + shift
        level = _nearest(
            tl.div_rn(moved, tl.where(step == 0.0, 1.0, step)), middles, climbs, shape, low, high, smallest, fraction,
            steps,
        )  # fmt: skip
        stored = level * step
        if shifted:
            stored = stored - shift
        error = tl.div_rn(value - stored, tl.load(upper + j * columns + j))
        tl.store(levels + j * rows + row, level, mask=here)
        tl.store(errors + j * rows + row, error, mask=here)
        later = tl.load(upper + j * columns + column, mask=own, other=0.0)
        x -= later[:, None] * error[None, :]


_whole = triton.jit(_round_whole)
_nearest = triton.jit(_find_nearest)
_loop = triton.jit(_columns)

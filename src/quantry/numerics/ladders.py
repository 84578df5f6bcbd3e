"""The values of codes before any scale, for every grid in one form: whole numbers, small floats, or a table.

A method that chooses codes one after another only needs the nearest of these, in the dtype it computes in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from quantry.numerics.grids import LARGEST, code_range
from quantry.types import Grid

MANTISSA = {"e4m3": (3, -6), "e5m2": (2, -14), "e2m1": (1, 0)}  # bits of mantissa, and the smallest normal exponent


@dataclass(frozen=True, slots=True)
class Ladder:
    """Values from `low` to `high`: whole numbers, floats with some bits of mantissa, or `rungs` in rising order."""

    low: float
    high: float
    mantissa: int | None = None
    smallest: float = 1.0  # the smallest normal power of two; below it the step stays the same
    rungs: tuple[float, ...] = ()

    def nearest(self, values: Tensor) -> Tensor:
        """Returns the nearest values, halves to even (with rungs, to the upper one); may overwrite its argument."""
        if self.rungs:
            rungs = torch.tensor(self.rungs, dtype=values.dtype, device=values.device)
            return rungs[torch.bucketize(values, (rungs[1:] + rungs[:-1]) / 2, right=True)]
        if self.mantissa is None:
            return values.round_().clamp_(self.low, self.high)
        values.clamp_(self.low, self.high)
        exponent = torch.frexp(values).exponent - 1
        step = torch.ldexp(torch.ones_like(values), exponent).clamp_(min=self.smallest).mul_(2.0**-self.mantissa)
        return values.div_(step).round_().mul_(step)


def of_grid(grid: Grid) -> Ladder:
    """Returns the ladder of an integer or float grid."""
    if grid.kind == "int":
        low, high = code_range(grid)
        return Ladder(low, high)
    mantissa, exponent = MANTISSA[grid.kind]
    return Ladder(-LARGEST[grid.kind], LARGEST[grid.kind], mantissa, 2.0**exponent)

"""How the searches of the k-quants differ, as data; the numbers are those of ggml's reference quantizers."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

SUPER = 256  # weights in a super-block
ROUNDS = 5  # how often codes are improved one after another


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The step sizes tried: a sub-block's range over top + first, top + first + width, ... up to `last` widths."""

    first: float
    width: float
    last: int
    absolute: bool = False  # compare weighted |differences| instead of their squares

    def divisors(self, top: int) -> list[float]:
        first, width, largest = np.float32(self.first), np.float32(self.width), np.float32(top)
        return [float(first + width * np.float32(i) + largest) for i in range(self.last + 1)]


@dataclass(frozen=True, slots=True)
class SearchRule:
    """The search of one k-quant."""

    sub: int  # weights in a sub-block
    top: int  # codes are 0 to top where there are minimums, else -top to top - 1
    scale_top: int  # the same for the scales of sub-blocks
    plain: StepSizes | None = None  # without importance; None: no minimums
    weighted: StepSizes | None = None  # with importance
    spread: float | None = None  # an error weighs importance * sqrt(spread * mean square + square); None: importance
    improve: bool = False  # without importance, codes are improved one after another instead of trying step sizes

    @property
    def groups(self) -> int:
        return SUPER // self.sub


@dataclass(frozen=True, slots=True)
class BlockFit:
    """The result of a search, each tensor (sub-blocks in a super-block, super-blocks)."""

    scale: Tensor
    minimum: Tensor  # how far below 0 code 0 lies; 0 where a type has no minimums
    inverse: Tensor  # the codes of the search were (weight - start) * inverse, rounded
    start: Tensor  # infinite where all is zero and a type has no minimums: the code is then the lowest
    total: Tensor  # the sum of weights


FINE = StepSizes(-0.9, 0.05, 36)
RULES = {
    "Q2_K": SearchRule(16, 3, 15, StepSizes(-0.5, 0.1, 15, absolute=True), FINE, spread=1.0),
    "Q3_K": SearchRule(16, 4, 32, spread=2.0, improve=True),
    "Q4_K": SearchRule(32, 15, 63, StepSizes(-1.0, 0.1, 20), FINE, spread=2.0),
    "Q5_K": SearchRule(32, 31, 63, StepSizes(-0.5, 0.1, 15), FINE, spread=2.0),
    "Q6_K": SearchRule(16, 32, 128),
}


def around(top: int, tenths: int) -> list[float]:
    """Returns top, then the numbers up to some tenths below and above it: the codes tried for the largest value."""
    sides = [0, *(i for i in range(-tenths, tenths + 1) if i)]
    return [float(np.float32(top) + np.float32(0.1) * np.float32(i)) for i in sides]

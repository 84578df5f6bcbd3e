"""Whether a difference between two models on the same questions can be chance.

The questions are the same for both, so only the pairs say something: a question both get right tells nothing of their
difference. Right or wrong goes to McNemar's test in its exact form (under chance, a question on which they differ is as
likely to fall either way, so the count is binomial with one half), which holds for ten questions as for ten thousand.
Other numbers go to a bootstrap over questions: they are drawn anew with replacement, each with both of its values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quantry.proof.divergence import Interval

RESAMPLES = 5000
LEVEL = 0.95
DRAWS = 1 << 20  # indices held at once: a bootstrap over 10,000 questions would need 400 MB in one piece


@dataclass(frozen=True, slots=True)
class Pairs:
    """Right and wrong answers of two models to the same questions, and the chance of so uneven a split."""

    both: int
    only_base: int
    only_quantized: int
    neither: int
    p: float


@dataclass(frozen=True, slots=True)
class Paired:
    """One number of two models on the same questions: `difference` is quantized less base."""

    base: float
    quantized: float
    difference: Interval
    p: float


def mcnemar(base: Sequence[bool], quantized: Sequence[bool]) -> Pairs:
    """The exact two-sided test of McNemar."""
    _same_length(base, quantized)
    both, only_base, only_quantized, neither = (
        sum((bool(first), bool(second)) == kind for first, second in zip(base, quantized, strict=True))
        for kind in ((True, True), (True, False), (False, True), (False, False))
    )
    return Pairs(both, only_base, only_quantized, neither, sign_test(only_base, only_quantized))


def sign_test(losses: int, wins: int) -> float:
    """The chance that fair coins fall at least as unevenly as `losses` to `wins`."""
    tosses = losses + wins
    tail = sum(comb(tosses, count) for count in range(min(losses, wins) + 1))
    return min(1.0, 2 * tail / (1 << tosses))  # integers up to the division, so that nothing is rounded before it


def mean(values: ArrayLike, seed: int = 0) -> Interval:
    """A mean with its 95 % interval by bootstrap."""
    found = _values(values)
    low, high = _ends(_means(found, seed))
    return Interval(float(found.mean()), low, high)


def paired(base: ArrayLike, quantized: ArrayLike, seed: int = 0) -> Paired:
    """Two means over the same questions: McNemar's test for right and wrong, the bootstrap for anything else."""
    first, second = _values(base), _values(quantized)
    _same_length(first, second)
    difference = second - first
    drawn = _means(difference, seed)
    low, high = _ends(drawn)
    is_binary = all(np.isin(values, (0.0, 1.0)).all() for values in (first, second))
    p = mcnemar((first == 1).tolist(), (second == 1).tolist()).p if is_binary else _bootstrap_p(drawn)
    return Paired(float(first.mean()), float(second.mean()), Interval(float(difference.mean()), low, high), p)


def _values(values: ArrayLike) -> NDArray[np.float64]:
    found = np.asarray(values, np.float64)
    if found.ndim != 1 or not len(found):
        raise ValueError(f"a mean needs a list of at least one number, not shape {found.shape}")
    return found


def _same_length(base: Sequence[bool] | NDArray[np.float64], quantized: Sequence[bool] | NDArray[np.float64]) -> None:
    if len(base) != len(quantized):
        raise ValueError(f"{len(base)} and {len(quantized)} answers are not pairs")


def _means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """The means of samples drawn with replacement; the seed makes a report the same each time."""
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWS // len(values))
    pieces = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([values[generator.integers(0, len(values), (n, len(values)))].mean(1) for n in pieces])


def _ends(means: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _bootstrap_p(means: NDArray[np.float64]) -> float:
    """Twice the share of resampled differences on the far side of zero; never less than the resamples can show."""
    least = min((means <= 0).sum(), (means >= 0).sum())
    return min(1.0, 2 * (float(least) + 1) / (len(means) + 1))

"""Tests if a difference between two models on the same questions can be chance.

Both models get the same questions, so only pairs count: a question that both answer right says nothing about their
difference. Right and wrong answers go to the exact form of McNemar's test (under chance, a question on which they
differ falls either way with probability one half, so the count is binomial), which is valid for ten questions as for
ten thousand. Other numbers go to a bootstrap that draws questions with replacement, each with both of its values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quantry.proof.interval import Interval

RESAMPLES = 5000
LEVEL = 0.95
DRAWS = 1 << 20  # indices held at once: a bootstrap over 10,000 questions would need 400 MB in one piece


@dataclass(frozen=True, slots=True)
class Pairs:
    """Right and wrong answers of two models to the same questions, and the probability of so uneven a split."""

    both: int
    only_base: int
    only_quantized: int
    neither: int
    p: float


@dataclass(frozen=True, slots=True)
class Paired:
    """One number of two models on the same questions: `difference` is quantized minus base."""

    base: float
    quantized: float
    difference: Interval
    p: float


def mcnemar(base: Sequence[bool], quantized: Sequence[bool]) -> Pairs:
    """Runs the exact two-sided test of McNemar."""
    _same_length(base, quantized)
    both, only_base, only_quantized, neither = (
        sum((bool(first), bool(second)) == case for first, second in zip(base, quantized, strict=True))
        for case in ((True, True), (True, False), (False, True), (False, False))
    )
    return Pairs(both, only_base, only_quantized, neither, sign_test(only_base, only_quantized))


def sign_test(losses: int, wins: int) -> float:
    """Returns the probability that fair coins fall at least as unevenly as `losses` to `wins`."""
    tosses = losses + wins
    tail = sum(comb(tosses, count) for count in range(min(losses, wins) + 1))
    return min(1.0, 2 * tail / (1 << tosses))  # integers up to the division: nothing is rounded before it


def mean(values: ArrayLike, seed: int = 0) -> Interval:
    """Returns a mean with its 95 % interval by bootstrap."""
    numbers = _numbers(values)
    low, high = _ends(_means(numbers, seed))
    return Interval(float(numbers.mean()), low, high)


def paired(base: ArrayLike, quantized: ArrayLike, seed: int = 0) -> Paired:
    """Compares two means over the same questions: McNemar's test for right and wrong, the bootstrap otherwise."""
    first, second = _numbers(base), _numbers(quantized)
    _same_length(first, second)
    difference = second - first
    drawn = _means(difference, seed)
    low, high = _ends(drawn)
    is_binary = all(np.isin(values, (0.0, 1.0)).all() for values in (first, second))
    p = mcnemar((first == 1).tolist(), (second == 1).tolist()).p if is_binary else _bootstrap_p(drawn)
    return Paired(float(first.mean()), float(second.mean()), Interval(float(difference.mean()), low, high), p)


def _numbers(values: ArrayLike) -> NDArray[np.float64]:
    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise ValueError(f"a mean needs a list of at least one number, not shape {numbers.shape}")
    return numbers


def _same_length(base: Sequence[bool] | NDArray[np.float64], quantized: Sequence[bool] | NDArray[np.float64]) -> None:
    if len(base) != len(quantized):
        raise ValueError(f"{len(base)} and {len(quantized)} answers are not pairs")


def _means(values: NDArray[np.float64], seed: int) -> NDArray[np.float64]:
    """Returns the means of samples drawn with replacement; the seed makes reports reproducible."""
    generator = np.random.default_rng(seed)
    rows = max(1, DRAWS // len(values))
    pieces = [min(rows, RESAMPLES - start) for start in range(0, RESAMPLES, rows)]
    return np.concatenate([values[generator.integers(0, len(values), (n, len(values)))].mean(1) for n in pieces])


def _ends(means: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _bootstrap_p(means: NDArray[np.float64]) -> float:
    """Returns twice the share of resampled differences on the far side of zero, at least what resamples can show."""
    least = min((means <= 0).sum(), (means >= 0).sum())
    return min(1.0, 2 * (float(least) + 1) / (len(means) + 1))

"""The tests of significance against plain restatements: every way coins can fall, every way questions can be drawn."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from quantry.proof.tasks.significance import LEVEL, mcnemar, mean, paired, sign_test


def fallen(losses: int, wins: int) -> float:
    """The sign test by throwing all coins in all ways."""
    tosses = losses + wins
    distance = abs(losses - wins)
    ways = [abs(2 * sum(coins) - tosses) >= distance for coins in itertools.product((0, 1), repeat=tosses)]
    return float(Fraction(sum(ways), len(ways)))


@pytest.mark.parametrize(("losses", "wins"), [(a, b) for a in range(7) for b in range(7)])
def test_sign_test_is_the_share_of_throws_as_uneven(losses: int, wins: int) -> None:
    assert sign_test(losses, wins) == pytest.approx(fallen(losses, wins), abs=1e-15)


def test_sign_test_of_many_questions_is_near_the_normal_one() -> None:
    z = (520 - 480 - 1) / math.sqrt(1000)  # with the correction for continuity
    assert sign_test(520, 480) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    assert sign_test(6000, 0) == 0.0  # less than a float can say, and no error
    assert sign_test(0, 0) == 1.0


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12))
@examples(60)
def test_mcnemar_counts_pairs_and_looks_only_at_differences(pairs: list[tuple[bool, bool]]) -> None:
    base, quantized = [first for first, _ in pairs], [second for _, second in pairs]
    found = mcnemar(base, quantized)
    assert (found.both, found.only_base, found.only_quantized, found.neither) == (
        pairs.count((True, True)), pairs.count((True, False)), pairs.count((False, True)), pairs.count((False, False)),
    )  # fmt: skip
    assert found.p == pytest.approx(fallen(found.only_base, found.only_quantized))
    assert mcnemar(quantized, base).p == found.p
    assert mcnemar([*base, True, False], [*quantized, True, False]).p == found.p


def test_bootstrap_interval_is_that_of_all_possible_draws() -> None:
    values = [0.1, -0.4, 0.9, 0.35, 2.0]
    every = [sum(draw) / len(values) for draw in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(every, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    found = mean(values)
    assert found.value == pytest.approx(sum(values) / len(values))
    assert found.low == pytest.approx(low, abs=0.03)
    assert found.high == pytest.approx(high, abs=0.03)
    below = sum(value <= 0 for value in every) / len(every)
    assert paired([0.0] * 5, values).p == pytest.approx(2 * below, abs=0.01)


def test_bootstrap_keeps_pairs_together_and_is_the_same_each_time() -> None:
    generator = np.random.default_rng(3)
    base = generator.normal(0, 10, 400)  # questions differ far more than the models do
    quantized = base + generator.normal(0.1, 0.5, 400)
    found = paired(base, quantized)
    error = np.std(quantized - base, ddof=1) / 20
    assert found.difference.value == pytest.approx(np.mean(quantized) - np.mean(base))
    assert found.difference.low == pytest.approx(found.difference.value - 1.96 * error, abs=0.01)
    assert found.difference.high == pytest.approx(found.difference.value + 1.96 * error, abs=0.01)
    assert found.p < 0.01
    assert paired(base, quantized) == found
    opposite = paired(quantized, base)
    assert opposite.p < 0.01
    assert opposite.difference.value == pytest.approx(-found.difference.value)


def test_right_and_wrong_go_to_mcnemar() -> None:
    base, quantized = [1, 1, 1, 1, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]
    found = paired(base, quantized)
    assert (found.base, found.quantized, found.p) == (7 / 8, 1 / 8, sign_test(6, 0))
    assert found.difference.low <= -0.75 <= found.difference.high


def test_many_questions_are_drawn_in_pieces() -> None:
    found = mean(np.tile([0.0, 1.0], 10_000))
    assert found.low == pytest.approx(0.5 - 1.96 * 0.5 / math.sqrt(20_000), abs=5e-4)
    assert found.high == pytest.approx(0.5 + 1.96 * 0.5 / math.sqrt(20_000), abs=5e-4)


def test_no_difference_is_no_significance() -> None:
    same = paired([0.25, 0.5], [0.25, 0.5])
    assert (same.p, same.difference.low, same.difference.high) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("call", [lambda: mean([]), lambda: paired([1, 2], [1]), lambda: mcnemar([True], [])])
def test_what_is_no_pair_is_a_bug_of_the_caller(call: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()  # type: ignore[operator]

"""Divergence against a plain float64 restatement, on the demo model's own logits and on drawn ones."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from depth import examples
from quantry.errors import WeightError
from quantry.models.reader import demo_folder
from quantry.proof.divergence import (
    LEAST_TAIL,
    Divergence,
    Scores,
    TopK,
    full_kl,
    kl,
    recovered,
    scores_at,
    summary,
    top_k,
    weighted_quantiles,
)
from quantry.proof.text import Window, default_text, windows

Pair = tuple[Tensor, Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def cuts() -> list[Window]:
    return windows(default_text(), AutoTokenizer.from_pretrained(demo_folder()), 96, 6)


@pytest.fixture(scope="module")
def logits(model: Any, cuts: list[Window]) -> list[Pair]:
    """Of the demo model, and of the same model with weights rounded coarsely."""

    def run(cut: Window) -> Tensor:
        result: Tensor = model(torch.tensor([cut.tokens])).logits[0]
        return result

    with torch.no_grad():
        exact = [run(cut) for cut in cuts]
        for name, weight in model.named_parameters():
            if "proj" in name:
                step = weight.abs().amax(1, keepdim=True) / 12
                weight.copy_((weight / step).round() * step)
        return list(zip(exact, [run(cut) for cut in cuts], strict=True))


def plain(rows: Tensor) -> np.ndarray[Any, Any]:
    """Log-probabilities in float64, by their definition."""
    values = rows.double().numpy()
    shifted = values - values.max(1, keepdims=True)
    result: np.ndarray[Any, Any] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def plain_kl(p: Tensor, q: Tensor) -> np.ndarray[Any, Any]:
    logp, logq = plain(p), plain(q)
    result: np.ndarray[Any, Any] = (np.exp(logp) * (logp - logq)).sum(1)
    return result


def drawn(seed: int, rows: int, vocabulary: int, spread: float, shift: float) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    p = spread * torch.randn(rows, vocabulary, generator=generator)
    return p, p + shift * torch.randn(rows, vocabulary, generator=generator)


def measured(pairs: list[Pair], cuts: list[Window], k: int) -> tuple[list[TopK], list[Scores]]:
    references = [top_k(p, cut.tokens, cut.start, k) for (p, _), cut in zip(pairs, cuts, strict=True)]
    return references, [
        scores_at(q, cut.tokens, cut.start, reference.ids)
        for (_, q), cut, reference in zip(pairs, cuts, references, strict=True)
    ]


def test_divergence_of_the_demo_model_is_that_of_plain_float64(logits: list[Pair], cuts: list[Window]) -> None:
    references, observed = measured(logits, cuts, 4096)
    wanted = np.concatenate([plain_kl(p[:-1], q[:-1]) for p, q in logits])
    assert 1e-3 < wanted.mean() < 1
    found = np.concatenate([kl(*pair) for pair in zip(references, observed, strict=True)])
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    np.testing.assert_allclose(np.concatenate([full_kl(p[:-1], q[:-1]) for p, q in logits]), wanted, atol=1e-12)
    result = summary(references, observed)
    assert result.kl.value == pytest.approx(wanted.mean(), abs=1e-7)
    assert result.kl_median.value == pytest.approx(np.quantile(wanted, 0.5, method="inverted_cdf"), abs=2e-6)
    assert result.kl_p99.value == pytest.approx(np.quantile(wanted, 0.99, method="inverted_cdf"), abs=2e-6)
    assert (result.positions, result.windows) == (len(wanted), 6) == (6 * 95, 6)


def test_perplexity_is_that_of_transformers_own_loss(model: Any, logits: list[Pair], cuts: list[Window]) -> None:
    result = summary(*measured(logits, cuts, 256))
    with torch.no_grad():  # the fixture has left the coarse weights in the model
        losses = [model(torch.tensor([cut.tokens]), labels=torch.tensor([cut.tokens])).loss.item() for cut in cuts]
    assert result.perplexity.value == pytest.approx(math.exp(np.mean(losses)), rel=1e-5)
    nll = [-plain(p[:-1])[np.arange(95), cut.tokens[1:]].mean() for (p, _), cut in zip(logits, cuts, strict=True)]
    assert result.reference_perplexity.value == pytest.approx(math.exp(np.mean(nll)), rel=1e-6)
    ratio = result.perplexity.value / result.reference_perplexity.value
    assert result.perplexity_ratio.value == pytest.approx(ratio, rel=1e-9)
    assert ratio > 1.001


def test_same_top_token_is_counted(logits: list[Pair], cuts: list[Window]) -> None:
    same = np.concatenate([(p[:-1].argmax(1) == q[:-1].argmax(1)).numpy() for p, q in logits])
    for k in (64, 4096):
        assert summary(*measured(logits, cuts, k)).top1.value == pytest.approx(same.mean(), abs=1e-12)
    assert 0.5 < same.mean() < 1


def test_only_scored_positions_count() -> None:
    p, q = drawn(3, 9, 40, 2.0, 0.5)
    tokens = [5, 1, 7, 0, 39, 12, 3, 3, 8]
    reference = top_k(p, tokens, 4, 40)
    observed = scores_at(q, tokens, 4, reference.ids)
    np.testing.assert_allclose(kl(reference, observed), plain_kl(p[3:8], q[3:8]), atol=2e-6)
    np.testing.assert_allclose(reference.next, plain(p)[np.arange(3, 8), tokens[4:]], rtol=1e-6)
    np.testing.assert_allclose(observed.next, plain(q)[np.arange(3, 8), tokens[4:]], rtol=1e-6)
    assert list(reference.top) == p[3:8].argmax(1).tolist()
    with pytest.raises(ValueError, match="9 rows of logits for 8 tokens"):
        top_k(p, tokens[:8], 1, 40)


@pytest.mark.parametrize("k", [1, 7, 39])
def test_top_k_keeps_the_most_probable_and_the_mass_of_the_rest(k: int) -> None:
    p, q = drawn(5, 12, 40, 3.0, 1.0)
    tokens = list(range(12))
    reference = top_k(p, tokens, 1, k)
    probabilities = np.exp(plain(p[:-1]))
    order = np.argsort(-probabilities, axis=1)
    assert [set(row) for row in reference.ids] == [set(row) for row in order[:, :k]]
    rest = np.take_along_axis(probabilities, order[:, k:], 1).sum(1)
    np.testing.assert_allclose(np.exp(reference.tail), rest, rtol=1e-5)
    merged = np.concatenate([np.take_along_axis(probabilities, order[:, :k], 1), rest[:, None]], 1)
    other = np.exp(plain(q[:-1]))
    kept = np.take_along_axis(other, order[:, :k], 1)
    merged_other = np.concatenate([kept, 1 - kept.sum(1, keepdims=True)], 1)
    wanted = (merged * np.log(merged / merged_other)).sum(1)
    np.testing.assert_allclose(kl(reference, scores_at(q, tokens, 1, reference.ids)), wanted, atol=2e-6)


@given(
    seed=st.integers(0, 10**6),
    vocabulary=st.integers(2, 300),
    spread=st.floats(0.01, 12),
    shift=st.floats(0, 6),
    data=st.data(),
)
@examples(150)
def test_top_k_divergence_is_a_lower_bound_that_grows_with_k(
    seed: int, vocabulary: int, spread: float, shift: float, data: st.DataObject
) -> None:
    p, q = drawn(seed, 5, vocabulary, spread, shift)  # without ties: those may go to other tokens for another k
    sizes = sorted({*data.draw(st.lists(st.integers(1, vocabulary), max_size=4)), vocabulary})
    tokens = [number % vocabulary for number in range(5)]
    full = full_kl(p[:-1], q[:-1])
    results = [(np.zeros(4), np.zeros(4))]
    for k in sizes:
        reference = top_k(p, tokens, 1, k)
        results.append((kl(reference, scores_at(q, tokens, 1, reference.ids)), doubt(reference, q[:-1])))
    for (fewer, doubt_of_fewer), (more, doubt_of_more) in pairwise([*results, (full, np.zeros(4))]):
        assert (fewer <= more + doubt_of_fewer + doubt_of_more + 1e-5 * (1 + full)).all()
    np.testing.assert_allclose(results[-1][0], full, atol=1e-5 * (1 + full.max()))


def doubt(reference: TopK, q: Tensor) -> np.ndarray[Any, Any]:
    """How far the tail's term can be off: its mass in the artefact is 1 minus float32 probabilities, a small difference."""
    rest = 1 - np.exp(np.take_along_axis(plain(q), reference.ids.astype(np.int64), 1)).sum(1)
    step = 4e-7  # float32 log-probabilities of at most 300 tokens sum to 1 within this
    width = np.log(np.maximum(rest + step, LEAST_TAIL) / np.maximum(rest - step, 1e-30))
    result: np.ndarray[Any, Any] = np.exp(reference.tail.astype(np.float64)) * width
    return result


def test_recovered_share_is_that_of_top_k_divergences(logits: list[Pair], cuts: list[Window]) -> None:
    sizes = [1, 64, 1000, 4096]
    p, q = (torch.cat([pair[side][:-1] for pair in logits]) for side in (0, 1))
    full = full_kl(p, q).mean()
    wanted = []
    for k in sizes:
        pairs = zip(*measured(logits, cuts, k), strict=True)
        wanted.append(np.concatenate([kl(*pair) for pair in pairs]).mean() / full)
    shares = recovered(p, q, sizes)
    assert shares == pytest.approx(wanted, abs=1e-4)
    assert shares[0] < shares[1] < shares[2] < shares[3] == pytest.approx(1, abs=1e-12)
    assert recovered(p, p, [3, 4096]) == [1.0, 1.0]


def test_a_collapsed_tail_is_not_hidden_by_rounding() -> None:
    """Half of the reference's mass is in the tail, and the artefact gives it nothing that float32 can tell from 0."""
    p = torch.zeros(2, 64)
    q = torch.zeros(2, 64)
    q[:, 32:] = -40.0
    p[:, :32] += 1e-3  # so that the first 32 are the most probable
    reference = top_k(p, [0, 1], 1, 32)
    found = kl(reference, scores_at(q, [0, 1], 1, reference.ids))
    assert 5 < found[0] < full_kl(p[:1], q[:1])[0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    p, _ = drawn(1, 4, 20, 1.0, 0.0)
    broken = p.clone()
    broken[1, 3] = bad
    reference = top_k(p, [0, 1, 2, 3], 1, 8)
    with pytest.raises(WeightError, match="not finite"):
        top_k(broken, [0, 1, 2, 3], 1, 8)
    with pytest.raises(WeightError, match="not finite"):
        scores_at(broken, [0, 1, 2, 3], 1, reference.ids)
    observed = scores_at(p, [0, 1, 2, 3], 1, reference.ids)
    observed.logq[0, 0] = bad
    with pytest.raises(WeightError, match="not finite"):
        kl(reference, observed)


def unit(values: Any) -> tuple[TopK, Scores]:
    """A window with these divergences: of a token with probability 1 in the reference, -log q."""
    logq = -np.asarray(values, np.float32)
    n = len(logq)
    zeros, top = np.zeros(n, np.float32), np.zeros(n, np.int32)
    nothing = np.full(n, -np.inf, np.float32)
    return TopK(top[:, None], zeros[:, None], nothing, zeros, top), Scores(logq[:, None], logq, top)


def summed(rows: Any, **options: Any) -> Divergence:
    return summary(*zip(*[unit(row) for row in rows], strict=True), **options)


def test_windows_of_different_lengths_weigh_by_their_positions() -> None:
    result = summed([[1.0], [0.0, 0.0, 2.0], [5.0]])
    assert result.kl.value == pytest.approx(8 / 5)
    assert result.kl_median.value == 1.0
    assert result.kl_p99.value == 5.0
    assert result.perplexity.value == pytest.approx(math.exp(8 / 5))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    """Windows that differ from each other, with tokens alike: intervals over tokens would hold it in a third of cases."""
    generator = np.random.default_rng(7)
    held = 0
    for trial in range(300):
        rows = generator.gamma(8, 0.125, size=(8, 1)) + generator.uniform(-0.1, 0.1, (8, 20))
        interval = summed(rows, draws=400, seed=trial).kl
        assert interval.low <= interval.value <= interval.high
        held += interval.low <= 1.0 <= interval.high
    assert 0.90 < held / 300 < 0.985


def test_intervals_are_the_same_every_time_and_narrow_with_more_windows() -> None:
    rows = np.random.default_rng(1).gamma(2, 0.5, (8, 30))
    few, many = summed(rows), summed(np.tile(rows, (16, 1)))
    assert summed(rows) == few
    assert many.kl.high - many.kl.low < (few.kl.high - few.kl.low) / 4
    assert many.kl_p99.low < many.kl_p99.value < many.kl_p99.high


def test_a_single_window_has_an_interval_from_its_pieces() -> None:
    row = np.random.default_rng(2).gamma(2, 0.5, 320)
    result = summed([row])
    assert (result.windows, result.positions) == (1, 320)
    assert result.kl.value == pytest.approx(row.mean(), rel=1e-6)
    assert result.kl.low < result.kl.value < result.kl.high
    assert summed([[0.5]]).kl.value == 0.5


def test_quantiles_of_drawn_windows_are_those_of_the_windows_laid_end_to_end() -> None:
    generator = np.random.default_rng(11)
    values = [generator.random(size) for size in (5, 17, 40)]
    counts = generator.multinomial(3, [1 / 3] * 3, size=20)
    found = weighted_quantiles(values, counts, (0.5, 0.99))
    for row, count in enumerate(counts):
        pooled = np.concatenate([np.tile(part, times) for part, times in zip(values, count, strict=True)])
        assert found[:, row] == pytest.approx(np.quantile(pooled, (0.5, 0.99), method="inverted_cdf"))

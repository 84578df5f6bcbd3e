"""KV caches at length: bins by position against a plain float64 restatement from the full logits of both passes."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from demo_artefacts import gguf_in, quantized_demo
from quantry.errors import QuantryError
from quantry.llamacpp.model import PIECE, LlamaModel
from quantry.models.reader import demo_folder
from quantry.proof.cache_loss import base_perplexity, cache_loss, edges
from quantry.proof.divergence import Positions
from quantry.proof.served.contract import ServedCaches
from quantry.proof.served.llama_cpp import EmbeddedLlama
from quantry.proof.text import Window, windows
from quantry.quantizing.sources import open_source, tokenizer

LENGTH = 600  # more than llama.cpp gets at once
CACHES = ("f16", "q8_0", "q4_0")


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory, "gguf-f16")


@pytest.fixture(scope="module")
def cut() -> list[Window]:
    """Two windows, as they are measured; the prefix of the demo's tokenizer is not scored."""
    text = (demo_folder() / "held-out.txt").read_text(encoding="utf-8")[:9000]
    return windows(text, tokenizer(open_source("demo")), LENGTH, 2)


@pytest.fixture(scope="module")
def served(artefact: Path, cut: list[Window]) -> ServedCaches:
    return EmbeddedLlama(threads=1).compare_caches(artefact, cut, "f16", CACHES)


@pytest.fixture(scope="module")
def model(artefact: Path) -> Iterator[LlamaModel]:
    with LlamaModel(gguf_in(artefact), LENGTH, threads=1) as opened:
        yield opened


def logarithms(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    rows = logits.astype(np.float64)
    rows -= rows.max(1, keepdims=True)
    whole: NDArray[np.float64] = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    return whole


def restated(model: LlamaModel, cache: str, cut: list[Window], begin: int, end: int) -> dict[str, float]:
    """The figures of one bin, position by position: the token at `place` is predicted from the `place` before it."""
    kl, same, ours, theirs = [], [], [], []
    with model.beside(cache) as other:
        for window in cut:
            p, q = logarithms(model.logits(window.tokens)), logarithms(other.logits(window.tokens))
            for place in range(max(begin, window.start), min(end, len(window.tokens))):
                row, found, token = p[place - 1], q[place - 1], window.tokens[place]
                kl.append(float((np.exp(row) * (row - found)).sum()))
                same.append(row.argmax() == found.argmax())
                ours.append(found[token])
                theirs.append(row[token])
    ratio = float(np.exp(np.mean(theirs) - np.mean(ours)))
    return {
        "positions": len(kl), "kl": float(np.mean(kl)), "top1": float(np.mean(same)),
        "perplexity": float(np.exp(-np.mean(ours))), "perplexity_ratio": ratio,
    }  # fmt: skip


def test_bins_say_what_the_full_logits_say(served: ServedCaches, model: LlamaModel, cut: list[Window]) -> None:
    assert LENGTH > PIECE
    start = cut[0].start
    found = cache_loss(served.positions["q4_0"], start, LENGTH)
    assert [(row["begin"], row["end"]) for row in found["bins"]] == [(0, 32), (32, 64), (64, 128), (128, 256), (256, 512), (512, 600)]  # fmt: skip
    for row in (found["bins"][0], found["bins"][-2], found["bins"][-1]):
        want = restated(model, "q4_0", cut, row["begin"], row["end"])
        assert {name: row[name] for name in want} == pytest.approx(want, rel=1e-9)
        assert row["intervals"]["kl"][0] <= row["kl"] <= row["intervals"]["kl"][1]
    want = restated(model, "q4_0", cut, 0, LENGTH)
    assert {name: found[name] for name in want} == pytest.approx(want, rel=1e-9)
    shifted = [Positions(np.roll(w.kl, 1), w.same, w.next, w.reference_next) for w in served.positions["q4_0"]]
    wrong = cache_loss(shifted, start, LENGTH)["bins"][-1]["kl"]
    assert wrong != pytest.approx(found["bins"][-1]["kl"], rel=1e-9)  # the comparison sees a shift by one position


def test_fewer_bits_lose_more_and_the_same_cache_nothing(served: ServedCaches, cut: list[Window]) -> None:
    loss = {name: cache_loss(found, cut[0].start, LENGTH) for name, found in served.positions.items()}
    same = loss["f16"]
    assert (same["kl"], same["kl_p99"], same["top1"], same["perplexity_ratio"]) == (0.0, 0.0, 1.0, 1.0)
    assert 0 < 5 * loss["q8_0"]["kl"] < loss["q4_0"]["kl"] < 0.1
    assert loss["q8_0"]["intervals"]["kl"][1] < loss["q4_0"]["intervals"]["kl"][0]
    for small, large in zip(loss["q8_0"]["bins"], loss["q4_0"]["bins"], strict=True):
        assert small["kl"] < large["kl"]
    assert same["perplexity"] == pytest.approx(base_perplexity(served.positions["q4_0"]), rel=1e-12)
    assert (served.engine, list(served.positions)) == ("llama.cpp", list(CACHES))


@pytest.mark.parametrize(
    ("context", "found"),
    [
        (2, [0, 2]),
        (100, [0, 4, 8, 16, 32, 64, 100]),
        (256, [0, 16, 32, 64, 128, 256]),
        (4096, [0, 256, 512, 1024, 2048, 4096]),
        (8192, [0, 512, 1024, 2048, 4096, 8192]),
        (32768, [0, 512, 1024, 2048, 4096, 8192, 16384, 32768]),
    ],
)
def test_bins_double_up_to_the_context(context: int, found: list[int]) -> None:
    assert edges(context) == found


def test_every_position_is_in_one_bin() -> None:
    numbers = np.random.default_rng(0)
    for start in (1, 2, 5):
        one = Positions(*(numbers.random(1000 - start) for _ in range(4)))
        loss = cache_loss([one, one], start, 1000)
        assert sum(row["positions"] for row in loss["bins"]) == loss["positions"] == 2 * (1000 - start)
        mean = sum(row["positions"] * row["kl"] for row in loss["bins"]) / loss["positions"]
        assert mean == pytest.approx(loss["kl"], rel=1e-12)


def test_contexts_share_the_weights(model: LlamaModel, cut: list[Window]) -> None:
    tokens = cut[0].tokens[:40]
    before = model.logits(tokens)
    again = LlamaModel(model.path, 64, threads=1)
    other = again.beside("q4_0")
    assert "weights" not in other.memory
    assert other.memory["kv_cache"] < 0.3 * again.memory["kv_cache"]
    again.close()
    assert np.abs(other.logits(tokens) - before).max() > 0  # it lives on the same weights
    other.close()
    with pytest.raises(ValueError, match="is closed"):
        again.beside("q8_0")
    assert np.array_equal(model.logits(tokens), before)
    with pytest.raises(QuantryError, match="K cache type q4_K .*; choose another type of cache"):
        model.beside("q4_k")
    with pytest.raises(QuantryError, match="no KV cache of type 'fp8'"):
        model.beside("fp8")

"""The reference against transformers' own run of the same model, its choice of k against a plain one, and its cache."""

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantry.blockwise.walk import Walk, whole
from quantry.errors import OutputError, QuantryError
from quantry.models.reader import demo_folder
from quantry.proof import reference as module
from quantry.proof.divergence import Array, TopK
from quantry.proof.reference import Reference, StandIn, cache_folder, fingerprint, reference, shortfall
from quantry.proof.text import Window, default_text, windows
from quantry.quantizing.sources import open_source, tokenizer
from quantry.storage.holding import unused
from tiny_models import write_model

VOCABULARY = 12288


def cuts(count: int, vocabulary: int = VOCABULARY, seed: int = 0) -> list[Window]:
    """Windows of different lengths, one of them scored from its fourth token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, vocabulary, (40 + 7 * (index % 3),), generator=generator) for index in range(count)]
    return [Window(tuple(drawn.tolist()), 4 if index == 1 else 1) for index, drawn in enumerate(tokens)]


def plain(model: Any, window: Window) -> Array:
    """Log-probabilities at the scored positions, in float64, of a run by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([window.tokens])).logits[0]
    rows: Array = logits.double().log_softmax(1)[window.start - 1 : -1].numpy()
    return rows


def plain_kl(logp: Array, logq: Array) -> Array:
    result: Array = (np.exp(logp) * (logp - logq)).sum(1)
    return result


def four_bits(model: Any) -> None:
    """Rounds the linear weights of all blocks as the stand-in has them, by definition."""
    for name, weight in model.named_parameters():
        if "_proj" in name:
            groups = weight.data.double().reshape(len(weight), -1, 64)
            step = (groups.abs().amax(-1, keepdim=True) / 7.5).bfloat16().double()
            codes = (groups / step).round().clamp(-8, 7)
            weight.data = (codes * step).reshape(weight.shape).float()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder, "LlamaForCausalLM", vocab_size=VOCABULARY, intermediate_size=128)
    return folder, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def made(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tiny[0], cuts(6), cache=tmp_path_factory.mktemp("cache"))


def windows_of(kept: Reference) -> list[TopK]:
    return [kept.top_k(index) for index in range(len(kept.windows))]


def test_the_demo_model_is_kept_whole(tmp_path: Path) -> None:
    found = windows(default_text(), tokenizer(open_source("demo")), 48, 2)
    kept = reference("demo", found, cache=tmp_path)
    assert (kept.k, kept.vocabulary, kept.recovered, kept.sample.logp.shape) == (4096, 4096, 1.0, (0, 4096))
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    for window, part in zip(found, windows_of(kept), strict=True):
        wanted = plain(model, window)
        np.testing.assert_allclose(part.logp, wanted, atol=2e-4)
        assert (part.ids == np.arange(4096)).all()
        assert np.isneginf(part.tail).all()
        np.testing.assert_allclose(part.next, wanted[np.arange(47), window.tokens[1:]], atol=2e-4)
    assert shortfall(kept, torch.empty(0, 4096)) == 0.0
    assert 0 < kept.noise["f16"] < kept.noise["bf16"] == kept.noise_floor < 0.01


def test_each_window_has_the_most_probable_tokens(made: Reference, tiny: tuple[Path, Any]) -> None:
    assert len(made.windows) == 6
    for window, kept in zip(made.windows, windows_of(made), strict=True):
        wanted = plain(tiny[1], window)
        assert kept.ids.shape == kept.logp.shape == (window.scored, made.k)
        assert kept.ids.dtype == np.int32
        rank = (-wanted).argsort(1).argsort(1)
        assert (np.take_along_axis(rank, kept.ids, 1) < made.k + 5).all()  # ties and rounding may swap the last
        np.testing.assert_allclose(kept.logp, np.take_along_axis(wanted, kept.ids, 1), atol=1e-4)
        np.testing.assert_allclose(np.exp(kept.tail), 1 - np.exp(kept.logp.astype(float)).sum(1), atol=1e-5)
        np.testing.assert_allclose(
            kept.next, wanted[np.arange(window.scored), window.tokens[window.start :]], atol=1e-4
        )
        assert (kept.top == wanted.argmax(1)).mean() > 0.95


def test_k_is_the_smallest_that_finds_enough_of_a_plain_4_bit_model(made: Reference, tiny: tuple[Path, Any]) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.float32)
    four_bits(rounded)
    stand_in = whole(StandIn(open_source(tiny[0]))).state_dict()
    assert all(torch.equal(weight, stand_in[name]) for name, weight in rounded.state_dict().items())
    sample = made.sample
    exact = [plain(tiny[1], window) for window in made.windows]
    other = [plain(rounded, window) for window in made.windows]
    places = list(zip(sample.windows.tolist(), sample.rows.tolist(), strict=True))
    assert len(set(places)) == len(places) > 100
    assert {window for window, _ in places} == {0, 2, 3, 5}
    p = np.stack([exact[window][row] for window, row in places])
    q = np.stack([other[window][row] for window, row in places])
    np.testing.assert_allclose(sample.logp, p, atol=1e-4)
    order = (-p).argsort(1)
    p, q = np.take_along_axis(p, order, 1), np.take_along_axis(q, order, 1)

    def share(k: int) -> float:
        """Of the divergence, with all but the first k tokens as one."""
        merged = [np.concatenate([np.exp(x[:, :k]), np.exp(x[:, k:]).sum(1, keepdims=True)], 1) for x in (p, q)]
        return float((merged[0] * np.log(merged[0] / merged[1])).sum() / plain_kl(p, q).sum())

    assert 64 < made.k < VOCABULARY
    assert share(made.k // 2) < 0.99 <= share(made.k)
    assert made.recovered == pytest.approx(share(made.k), abs=1e-3)
    rows = torch.cat(
        [sample.pick(index, _logits(rounded, window), window.start) for index, window in enumerate(made.windows)]
    )
    assert shortfall(made, rows) == pytest.approx(1 - share(made.k), abs=1e-3)


def _logits(model: Any, window: Window) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(torch.tensor([window.tokens])).logits[0]
    return result


def test_noise_is_what_16_bit_arithmetic_does(made: Reference, tiny: tuple[Path, Any]) -> None:
    probes = [made.windows[index] for index in (0, 2, 3, 5)]
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        other = AutoModelForCausalLM.from_pretrained(tiny[0], dtype=dtype)
        wanted = np.concatenate([plain_kl(plain(tiny[1], window), plain(other, window)) for window in probes]).mean()
        assert made.noise[name] == pytest.approx(wanted, rel=0.05)
    assert made.noise_floor == max(made.noise.values()) == made.noise["bf16"]
    assert made.notes == ()


def test_a_type_that_overflows_is_left_out_and_said(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "LlamaForCausalLM")
    model.model.embed_tokens.weight.data[3] = 3e5
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    found = reference(tmp_path / "model", [Window((1, 2, 3, 4)), Window((3, 1, 5))], cache=tmp_path / "cache")
    assert set(found.noise) == {"bf16"}
    assert found.notes == ("the reference overflows in f16, which is left out of the noise floor",)
    assert reference(tmp_path / "model", found.windows, cache=tmp_path / "cache") == found


def test_only_the_beginning_of_long_windows_is_probed(tiny: tuple[Path, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "PROBE_TOKENS", 12)
    monkeypatch.setattr(module, "NOISE_TOKENS", 9)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 4 * VOCABULARY * 20)
    found = reference(tiny[0], cuts(3), cache=tmp_path)
    assert found.sample.logp.shape == (20, VOCABULARY)
    assert found.sample.rows.max() == 10
    assert {len(cut.tokens) for cut in found.windows} == {40, 47, 54}
    other = AutoModelForCausalLM.from_pretrained(tiny[0], dtype=torch.bfloat16)
    begins = [Window(cut.tokens[:9], cut.start) for cut in found.windows]
    noise = np.concatenate([plain_kl(plain(tiny[1], cut), plain(other, cut)) for cut in begins]).mean()
    assert found.noise["bf16"] == pytest.approx(noise, rel=0.05)


def test_a_k_of_the_users_own(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    found = reference(tiny[0], cuts(2), k=100, cache=tmp_path)
    assert (found.k, found.recovered) == (100, None)
    assert found.top_k(1).ids.shape == (cuts(2)[1].scored, 100)
    assert len(found.sample.logp)
    for k in (VOCABULARY, VOCABULARY + 1):
        whole_vocabulary = reference(tiny[0], cuts(1), k=k, cache=tmp_path)
        assert (whole_vocabulary.k, len(whole_vocabulary.sample.logp)) == (VOCABULARY, 0)
    with pytest.raises(QuantryError, match="k = 0"):
        reference(tiny[0], cuts(1), k=0, cache=tmp_path)
    with pytest.raises(QuantryError, match="0 windows"):
        reference(tiny[0], [], cache=tmp_path)


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM"])
def test_the_stand_in_rounds_linear_weights_alone(tmp_path: Path, architecture: str) -> None:
    exact = write_model(tmp_path, architecture).state_dict()
    source = open_source(tmp_path)
    rounded = whole(StandIn(source)).state_dict()
    changed = {name for name in exact if not torch.equal(exact[name], rounded[name])}
    wanted = {name for name in exact if "_proj" in name and "norm" not in name}
    assert changed == wanted
    for name in changed:
        error = (exact[name] - rounded[name]).norm() / exact[name].norm()
        assert 0.02 < error < 0.2


def same(one: Reference, other: Reference) -> bool:
    arrays = [
        (getattr(mine, name), getattr(theirs, name))
        for mine, theirs in zip(windows_of(one), windows_of(other), strict=True)
        for name in ("ids", "logp", "tail", "next", "top")
    ]
    return one.noise == other.noise and all(np.array_equal(*pair) for pair in arrays)


def test_the_second_time_it_comes_from_the_cache(tiny: tuple[Path, Any], made: Reference) -> None:
    before = (made.folder / module.NOTE).stat().st_mtime_ns
    assert reference(open_source(tiny[0]), made.windows, cache=made.folder.parent) == made
    assert (made.folder / module.NOTE).stat().st_mtime_ns == before
    assert sorted(file.name for file in made.folder.iterdir()) == ["lock", "reference.json", "reference.safetensors"]
    assert made.bytes == (made.folder / module.DATA).stat().st_size


def _flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit of the data": lambda folder: _flip(folder / module.DATA),
    "the end of the data": lambda folder: (folder / module.DATA).write_bytes((folder / module.DATA).read_bytes()[:-9]),
    "all of the data": lambda folder: (folder / module.DATA).unlink(),
    "a number of the note": lambda folder: (folder / module.NOTE).write_text(
        json.dumps(json.loads((folder / module.NOTE).read_text()) | {"noise": {"bf16": 0.5}})
    ),
    "half of the note": lambda folder: (folder / module.NOTE).write_bytes((folder / module.NOTE).read_bytes()[:40]),
    "the note's kind": lambda folder: (folder / module.NOTE).write_text("[1, 2]"),
    "the note": lambda folder: (folder / module.NOTE).unlink(),
}


@pytest.fixture(scope="module")
def small(tiny: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(tiny[0], cuts(1), k=64, cache=tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_entry_is_made_anew(
    tiny: tuple[Path, Any], small: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    shutil.copytree(small.folder, tmp_path / small.folder.name)
    DAMAGE[what](tmp_path / small.folder.name)
    walked: list[Any] = []

    def walk(*args: Any, **how: Any) -> Walk:
        walked.append(args)
        return Walk(*args, **how)

    monkeypatch.setattr(module, "Walk", walk)
    again = reference(tiny[0], small.windows, k=64, cache=tmp_path)
    assert same(again, small)
    assert len(walked) == 1
    assert reference(tiny[0], small.windows, k=64, cache=tmp_path) == again
    assert len(walked) == 1


def test_an_interrupted_run_leaves_nothing_behind(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    seen: list[int] = []

    def stop(done: int, total: int, _: str) -> None:
        assert total == 1000
        seen.append(done)
        if len(seen) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference(tiny[0], cuts(2), cache=tmp_path, progress=stop)
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()] == ["lock"]
    again: list[int] = []
    reference(tiny[0], cuts(2), cache=tmp_path, progress=lambda done, *_: again.append(done))
    assert again[:5] == seen
    assert again == sorted(again), "one progress over all passes"
    assert len(again) == 2 + 2 + 2 + 2 + 2  # blocks of the run, of the stand-in and of two types; windows of the head


def test_two_at_a_time_make_it_once(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    steps: list[str] = []

    def make(_: int) -> Reference:
        return reference(tiny[0], cuts(2), k=64, cache=tmp_path, progress=lambda *words: steps.append(words[2]))

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, range(2))
    assert first == second
    blocks, head = [f"model.layers.{index}" for index in range(2)], ["the probabilities"] * 2
    assert steps == [*blocks, *head, *blocks, *blocks]  # no stand-in: k was given


def test_a_reference_like_another_takes_over_its_k_and_noise(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    every = cuts(4)
    first = reference(tiny[0], every[:2], cache=tmp_path)
    steps: list[str] = []
    later = reference(tiny[0], every[2:], like=first, cache=tmp_path, progress=lambda *words: steps.append(words[2]))
    assert (later.k, later.noise, later.vocabulary) == (first.k, first.noise, first.vocabulary)
    assert [step for step in steps if step != "the probabilities"] == ["model.layers.0", "model.layers.1"]
    whole = reference(tiny[0], every, k=first.k, cache=tmp_path)
    for index in (2, 3):
        for name in ("ids", "logp", "tail", "next", "top"):
            kept, expected = getattr(later.top_k(index - 2), name), getattr(whole.top_k(index), name)
            np.testing.assert_allclose(np.sort(kept), np.sort(expected), rtol=1e-4, atol=1e-5)
    assert fingerprint(open_source(tiny[0]), every[2:], None, first) != fingerprint(
        open_source(tiny[0]), every[2:], None
    )


def test_the_fingerprint_knows_all_that_matters(tiny: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny[0], folder)
    given = cuts(2)
    first = fingerprint(open_source(folder), given, None)
    assert fingerprint(open_source(folder), given, None) == first
    other_start = [given[0], Window(given[1].tokens, 2)]
    seen = {
        first,
        *(fingerprint(open_source(folder), *case) for case in ((given[:1], None), (other_start, None), (given, 64))),
    }
    _flip(folder / "model.safetensors")
    seen.add(fingerprint(open_source(folder), given, None))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    seen.add(fingerprint(open_source(folder), given, None))
    with (folder / "tokenizer.json").open("a") as file:
        file.write("\n")
    seen.add(fingerprint(open_source(folder), given, None))
    assert len(seen) == 7


def test_the_cache_goes_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: tuple[Path, Any]
) -> None:
    monkeypatch.delenv("QUANTRY_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache/quantry/references"
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "other"))
    assert reference(tiny[0], cuts(1), k=64).folder.parent == tmp_path / "other/references"
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot write the reference to .*QUANTRY_CACHE"):
        reference(tiny[0], cuts(1), k=64)


def test_a_reference_is_held_as_long_as_it_is_used(small: Reference, tiny: tuple[Path, Any], tmp_path: Path) -> None:
    """Clearing the cache takes no reference from the job that reads it."""
    found: Reference | None = reference(tiny[0], small.windows, k=64, cache=tmp_path)
    assert found is not None
    folder = found.folder
    with unused(folder) as free:
        assert not free
    del found
    with unused(folder) as free:
        assert free

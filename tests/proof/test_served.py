"""Engines as served: llama.cpp embedded, transformers in a process of its own, and processes that misbehave.

The oracle restates the log-probabilities in float64 from the full logits of the same model, run by transformers here.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import quantry
from demo_artefacts import quantized_demo
from depth import deep
from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError, UnknownNameError, WeightError
from quantry.llamacpp.model import LlamaModel
from quantry.models.reader import open_checkpoint
from quantry.proof.divergence import Scores, kl, top_k
from quantry.proof.served.contract import Served
from quantry.proof.served.engines import scoring_engine
from quantry.proof.served.inside.script import ABANDONED, ScoredWindow
from quantry.proof.served.llama_cpp import EmbeddedLlama
from quantry.proof.served.process import SCRIPT, EngineProcess, ScoringRequest
from quantry.proof.text import Window

DEMO = Path(quantry.__file__).parent / "demo"
VOCABULARY = 4096
LLAMA = EmbeddedLlama(threads=1)
ALL = np.broadcast_to(np.arange(VOCABULARY, dtype=np.int32), (10_000, VOCABULARY))


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    text = (DEMO / "held-out.txt").read_text(encoding="utf-8")[:9000]
    return list(AutoTokenizer.from_pretrained(DEMO)(text)["input_ids"])


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    opened: PreTrainedModel = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    return opened


@pytest.fixture(scope="module")
def windows(tokens: list[int]) -> list[Window]:
    """Of several lengths and starts; the second is longer than the script's pieces."""
    return [Window(tuple(tokens[:100])), Window(tuple(tokens[100:700]), 5), Window(tuple(tokens[700:730]), 29)]


@pytest.fixture(scope="module")
def ids(windows: list[Window]) -> list[NDArray[np.int32]]:
    """Other tokens at every position."""
    numbers = np.random.default_rng(0)
    return [numbers.integers(0, VOCABULARY, (window.scored, 7), dtype=np.int32) for window in windows]


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory, "gguf-f16")


def logits(model: PreTrainedModel, window: Window) -> Tensor:
    with torch.no_grad():
        rows: Tensor = model(torch.tensor([window.tokens])).logits[0]
        return rows


def expected(rows: Tensor, window: Window, ids: NDArray[np.int32]) -> Scores:
    """Row by row, as the definition has it."""
    logq, following, top = [], [], []
    for position in range(window.start, len(window.tokens)):
        row = rows[position - 1].double().numpy()
        scores = row - row.max() - np.log(np.exp(row - row.max()).sum())
        logq.append(scores[ids[position - window.start]])
        following.append(scores[window.tokens[position]])
        top.append(row.argmax())
    return Scores(np.array(logq), np.array(following), np.array(top))


def assert_close(found: Scores, want: Scores, tolerance: float) -> None:
    for name in ("logq", "next"):
        got = getattr(found, name)
        assert got.dtype == np.float32
        assert got.shape == getattr(want, name).shape
        assert np.abs(got - getattr(want, name)).max() < tolerance, name
    assert found.top.dtype == np.int32
    assert (found.top == want.top).mean() > 0.99  # near-ties may fall either way


def test_llama_cpp_says_what_its_logits_say(f16: Path, windows: list[Window], ids: list[NDArray[np.int32]]) -> None:
    heard: list[tuple[int, int, str]] = []
    served = LLAMA.score(f16, windows, ids, progress=lambda *words: heard.append(words))
    assert (served.engine, served.notes) == ("llama.cpp", ())
    assert served.version.startswith("xllamacpp 20")
    assert heard == [(100, 730, "llama.cpp"), (700, 730, "llama.cpp"), (730, 730, "llama.cpp")]
    with LlamaModel(f16 / "demo-F16.gguf", context=600, threads=1) as opened:
        for window, places, found in zip(windows, ids, served.scores, strict=True):
            assert_close(found, expected(torch.from_numpy(opened.logits(window.tokens)), window, places), 1e-4)


def test_llama_cpp_is_close_to_transformers_in_16_bit(f16: Path, model: PreTrainedModel, windows: list[Window]) -> None:
    served = LLAMA.score(f16, windows, [ALL[: window.scored] for window in windows])
    assert divergence(served, model, windows) < 1e-4
    shifted = Served("", "", [Scores(np.roll(o.logq, 1, 0), o.next, o.top) for o in served.scores])
    assert divergence(shifted, model, windows) > 0.5  # the measure can tell


def divergence(served: Served, model: PreTrainedModel, windows: Sequence[Window]) -> float:
    pairs = zip(windows, served.scores, strict=True)
    return float(
        np.concatenate(
            [kl(top_k(logits(model, window), window.tokens, window.start, VOCABULARY), o) for window, o in pairs]
        ).mean()
    )


def test_llama_cpp_tells_its_memory(f16: Path, tokens: list[int]) -> None:
    """Against the sizes that follow from the file and from the shape of the model: 8 layers, 2 KV heads of 64."""
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]  # f16, K and V
    weights = sum(tensor.nbytes for tensor in open_checkpoint(f16).tensors)
    rounding = 0.011 * 2**20
    for length in (256, 1024):
        served = LLAMA.score(f16, [Window(tuple(tokens[:length]), length - 1)], [ALL[:1]])
        assert list(served.memory) == ["weights", "output", "kv_cache", "compute"]
        assert abs(served.memory["weights"] - weights) < rounding
        assert abs(served.memory["kv_cache"] - per_token * length) < rounding
        assert (
            1 < served.memory["compute"] / (4 * VOCABULARY * min(512, length)) < 2
        )  # logits of a batch, and some more
        assert abs(served.memory["output"] - 4 * VOCABULARY) < rounding


def test_llama_cpp_writes(f16: Path, tokens: list[int]) -> None:
    prompts = [tokens[:20], tokens[300:330]]
    written = LLAMA.generate(f16, prompts, 6)
    with LlamaModel(f16 / "demo-F16.gguf", context=64, threads=1) as opened:
        assert written == [opened.generate(prompt, 6) for prompt in prompts]


def test_what_llama_cpp_cannot_serve(f16: Path, windows: list[Window], tmp_path: Path) -> None:
    ids = [ALL[: window.scored] for window in windows]
    with pytest.raises(ModelNotFoundError, match="nothing does not exist; give a GGUF file or"):
        LLAMA.score(tmp_path / "nothing", windows, ids)
    with pytest.raises(CheckpointError, match="demo holds no GGUF file"):
        LLAMA.score(DEMO, windows, ids)
    with pytest.raises(QuantryError, match=r"llama.cpp is embedded, .* leave --engine-python out"):
        scoring_engine("llama.cpp", Path(sys.executable))
    with pytest.raises(QuantryError, match="no window to score"):
        LLAMA.score(f16, [], [])
    larger = [np.full((window.scored, 3), VOCABULARY, np.int32) for window in windows]
    with pytest.raises(QuantryError, match="token 4096, demo-F16.gguf a vocabulary of 4096"):
        LLAMA.score(f16, windows, larger)


def test_llama_cpp_with_weights_that_are_not_finite(f16: Path, windows: list[Window], tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    shutil.copy(f16 / "demo-F16.gguf", broken)
    norm = next(t for t in open_checkpoint(f16).tensors if t.name == "output_norm.weight")
    with broken.open("r+b") as file:
        file.seek(norm.start)
        file.write(np.full(norm.nbytes // 4, np.nan, np.float32).tobytes())
    with pytest.raises(WeightError, match=r"broken.gguf that are not finite; quantize the model again"):
        LLAMA.score(broken, windows, [ALL[: window.scored] for window in windows])


def test_transformers_in_a_process_of_its_own(
    model: PreTrainedModel, windows: list[Window], ids: list[NDArray[np.int32]]
) -> None:
    heard: list[tuple[int, int, str]] = []
    python = Path(os.path.relpath(sys.executable))
    engine = scoring_engine("transformers", python, options={"dtype": "float32"})
    places = [ids[0], ALL[: windows[1].scored], ids[2]]
    served = engine.score(DEMO, windows, places, progress=lambda *words: heard.append(words))
    assert heard == [(100, 730, "transformers"), (700, 730, "transformers"), (730, 730, "transformers")]
    assert served.version.startswith("5.")
    assert served.memory["weights"] == model.get_memory_footprint()
    for window, rows, found in zip(windows, places, served.scores, strict=True):
        assert_close(found, expected(logits(model, window), window, rows), 2e-4)


@deep
def test_transformers_writes(model: PreTrainedModel, tokens: list[int]) -> None:
    """Greedy tokens: each is the likeliest after those before it, and the one that ends the text is left out."""
    prompts = [tokens[:20], tokens[1000:1020], tokens[40:60]]
    engine = scoring_engine("transformers", options={"dtype": "float32"})
    written = engine.generate(DEMO, prompts, 12)
    end = model.generation_config.eos_token_id
    lengths = [len(found) for found in written]
    assert min(lengths) < max(lengths) == 12  # some end by themselves
    for prompt, found in zip(prompts, written, strict=True):
        rows = logits(model, Window((*prompt, *found)))[len(prompt) - 1 :]
        for row, token in zip(rows, [*found, end][:12], strict=False):
            assert row.max() - row[token] < 1e-3
    assert engine.generate(DEMO, [], 12) == []


@pytest.mark.parametrize("chunk", [1, 64, 256, 1000])
def test_passes_in_chunks_with_rows_behind_them(
    chunk: int, model: PreTrainedModel, windows: list[Window], ids: list[NDArray[np.int32]], tmp_path: Path
) -> None:
    """What the script sees of vLLM: chunks of a window in order, each filled up with rows that mean nothing."""
    work = ScoringRequest(DEMO, 600, windows, ids)
    work.write(tmp_path)
    for number, (window, places) in enumerate(zip(windows, ids, strict=True)):
        rows, seen = logits(model, window), ScoredWindow(tmp_path / f"window-{number}.npz")
        for start in range(0, len(rows) - 1, chunk):
            true = rows[start : min(start + chunk, len(rows) - 1)]
            seen.see(start, torch.cat([true, torch.full((8, VOCABULARY), torch.nan)]))
        seen.save(tmp_path / "scored.npz")
        with np.load(tmp_path / "scored.npz") as stored:
            assert_close(Scores(**stored), expected(rows, window, places), 1e-5)


@pytest.mark.parametrize("kept", [7, 2 * VOCABULARY])
def test_an_engine_keeps_its_own_likeliest_tokens(
    windows: list[Window], model: PreTrainedModel, tmp_path: Path, kept: int
) -> None:
    """What caches are compared with: the same as the reference's top k, whose numerics have an oracle of their own."""
    request = ScoringRequest(DEMO, 600, windows[1:2], kept=kept)
    request.write(tmp_path)
    rows, seen = logits(model, windows[1]), ScoredWindow(tmp_path / "window-0.npz")
    for start in range(0, len(rows), 96):
        seen.see(start, rows[start : start + 96])
    seen.save(tmp_path / "scored-0.npz")
    facts = {"version": "1", "memory": {}, "notes": [], "answers": []}
    (tmp_path / "result.json").write_text(json.dumps(facts))
    (found,) = request.read(tmp_path, ()).tops
    want = top_k(rows, windows[1].tokens, windows[1].start, min(kept, VOCABULARY - 1))
    order, expected_order = found.ids.argsort(1), want.ids.argsort(1)
    if kept == 7:
        assert (np.take_along_axis(found.ids, order, 1) == np.take_along_axis(want.ids, expected_order, 1)).all()
        logp = np.take_along_axis(want.logp, expected_order, 1)
        assert np.abs(np.take_along_axis(found.logp, order, 1) - logp).max() < 1e-5
        assert np.abs(found.tail - want.tail).max() < 1e-4
    else:
        assert found.ids.shape == (windows[1].scored, VOCABULARY)
        assert found.tail.max() < -20  # nothing is left
    assert np.abs(found.next - want.next).max() < 1e-5
    assert (found.top == want.top).all()


def test_positions_that_were_not_shown_or_are_not_finite(
    windows: list[Window], ids: list[NDArray[np.int32]], tmp_path: Path
) -> None:
    ScoringRequest(DEMO, 600, windows, ids).write(tmp_path)
    seen = ScoredWindow(tmp_path / "window-0.npz")
    seen.see(0, torch.zeros(98, VOCABULARY))
    with pytest.raises(RuntimeError, match="the logits of 98 of 99 positions"):
        seen.save(tmp_path / "scored.npz")
    seen.see(98, torch.full((1, VOCABULARY), torch.inf))
    with pytest.raises(ValueError, match="the logits of 1 of 99 positions are not finite"):
        seen.save(tmp_path / "scored.npz")
    assert not (tmp_path / "scored.npz").exists()


def test_an_engine_that_is_not_installed(windows: list[Window], ids: list[NDArray[np.int32]]) -> None:
    for python in (None, Path(sys.executable)):
        with pytest.raises(
            QuantryError, match="vLLM is not installed for .*python.*; pip install vllm.*--engine-python"
        ):
            scoring_engine("vllm", python).score(DEMO, windows, ids)
    with pytest.raises(QuantryError, match="no-such-python is not a program that can be run; name the python"):
        scoring_engine("vllm", Path("no-such-python")).score(DEMO, windows, ids)
    with pytest.raises(UnknownNameError, match="unknown engine 'vlm'; did you mean vllm"):
        scoring_engine("vlm")


def test_an_engine_that_refuses_the_model(windows: list[Window], ids: list[NDArray[np.int32]], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing is not a folder"):
        scoring_engine("transformers").score(tmp_path / "nothing", windows, ids)
    with pytest.raises(QuantryError, match="no window to score"):
        scoring_engine("transformers").score(DEMO, [], [])
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of"}), encoding="utf-8")
    with pytest.raises(
        QuantryError, match="transformers fails: ValueError: .*`unheard-of`.*; try the model in"
    ) as caught:
        scoring_engine("transformers").score(tmp_path, windows, ids)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_an_engine_ends_with_the_process_that_started_it(tmp_path: Path, tokens: list[int]) -> None:
    many = [Window(tuple(tokens[:500]))] * 500
    ScoringRequest(DEMO, 500, many, [ALL[: window.scored] for window in many]).write(tmp_path)
    engine = scoring_engine("transformers")
    assert isinstance(engine, EngineProcess)
    command = [sys.executable, str(SCRIPT), "transformers", str(engine.scorer), str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin
        process.stdin.close()
        assert process.wait(60) == ABANDONED
    assert not (tmp_path / "result.json").exists()


def program(folder: Path, *lines: str) -> Path:
    """A program in the place of a python."""
    path = folder / "python"
    path.write_text("\n".join(("#!/bin/sh", *lines)), encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (("echo started", "sleep 600"), "no output for 1 s, the last was: started"),
        (("echo started", "kill -9 $$"), "ended by SIGKILL: started"),
        (("echo 'RuntimeError: no room'", "echo goodbye", "exit 3"), "exit code 3: RuntimeError: no room"),
        (("exit 3",), "exit code 3: it says nothing"),
        (("exit 0",), "it ends without a result: it says nothing"),
        (('printf "%0999d\\n" 7', "exit 1"), r"exit code 1: 0{380}0*\.\.\.; try"),
    ],
)
def test_processes_that_misbehave(
    lines: tuple[str, ...], words: str, windows: list[Window], ids: list[NDArray[np.int32]], tmp_path: Path
) -> None:
    """Each leaves a process behind that holds on to its output."""
    begun, alive = time.monotonic(), tmp_path / "alive"
    python = program(tmp_path, f"(while sleep 0.02; do echo >> {alive}; done) &", *lines)
    with pytest.raises(QuantryError, match=f"vLLM fails: {words}"):
        scoring_engine("vllm", python, patience=1).score(DEMO, windows, ids)
    assert time.monotonic() - begun < 20
    grown = alive.stat().st_size
    time.sleep(0.3)
    assert alive.stat().st_size == grown  # nothing is left of it

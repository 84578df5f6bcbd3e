"""`quantry verify --kv`: figures in the proof, the card, the report and the summary; what is refused before any work."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quantry
from command import command
from demo_artefacts import gguf_in, quantized_demo
from quantry.devices.catalogue import parse
from quantry.errors import QuantryError
from quantry.jobs import verify_cache
from quantry.llamacpp.model import LlamaModel
from quantry.models.reader import open_checkpoint
from quantry.planning.cache_choice import cache_choice
from quantry.planning.deployment import Deployment
from quantry.planning.memory.cache_room import cache_rooms
from quantry.proof.prove import VerifyOptions
from quantry.types import Proof
from shared import recorded

SMALL: dict[str, Any] = {"reference": "demo", "windows": 4, "length": 64}
OPTIONS = VerifyOptions(None, None, None, None, None, None, None, "general", 4, 64, 1, "cpu")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory, "gguf-q8_0")


def test_a_cache_is_measured_and_recorded_beside_the_verdict(gguf: Path, tmp_path: Path) -> None:
    artefact = shutil.copytree(gguf, tmp_path / "out")
    words = ("--reference", "demo", "--windows", "4", "--length", "64", "--kv", "int8,q4_0", "--context", "128")
    done = command("verify", artefact, *words, "--json", "--markdown", tmp_path / "summary.md")
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    found = proof["kv_cache"]
    assert set(found) == {"engine", "version", "base", "text", "perplexity", "caches", "room", "notes"}
    assert (found["engine"], found["base"], list(found["caches"])) == ("llama.cpp", "f16", ["q8_0", "q4_0"])
    assert found["text"] == {"name": "held-out.txt", "windows": 2, "length": 128}  # as many tokens as the proof
    loss = found["caches"]["q4_0"]
    assert set(loss) == {"positions", "kl", "kl_median", "kl_p99", "top1", "perplexity", "perplexity_ratio", "intervals", "bins"}  # fmt: skip
    assert set(loss["bins"][0]) == {"begin", "end", "positions", "kl", "top1", "perplexity", "perplexity_ratio", "intervals"}  # fmt: skip
    assert [row["end"] for row in loss["bins"]] == [8, 16, 32, 64, 128]
    assert found["caches"]["q8_0"]["kl"] < loss["kl"]
    assert set(found["room"]["caches"]) == {"f16", "q8_0", "q4_0"}
    kept = json.loads((artefact / "quantry.json").read_text())["proof"]
    assert kept["kv_cache"] == found
    line = f"| q4_0 | {loss['kl']:.4f} ("
    assert line in (artefact / "README.md").read_text(encoding="utf-8")
    assert line in (tmp_path / "summary.md").read_text(encoding="utf-8")
    page = (artefact / "report.html").read_text(encoding="utf-8")
    assert "KV cache at length" in page
    assert "64-128" in page
    assert f"{loss['kl']:.3g} (" in page


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, gguf: Path) -> Proof:
    proof: Proof = recorded(tmp_path_factory, "cacheless", lambda _: quantry.verify(gguf, **SMALL, record=False))
    return proof


def test_the_verdict_does_not_depend_on_the_cache(gguf: Path, plain: Proof) -> None:
    """A cache of 4 bits loses far more than the limit; the gate judges what it did before."""
    heard: list[int] = []
    asked: dict[str, Any] = {"kv": "q4_0", "context": 64, "record": False, "max_kl": 0.005}
    proof = quantry.verify(gguf, **SMALL, **asked, progress=lambda done, *_: heard.append(done))
    assert proof.kv_cache is not None
    assert proof.kv_cache["caches"]["q4_0"]["kl"] > 0.005
    assert (proof.verdict, proof.kl, proof.served) == ("pass", plain.kl, plain.served)
    assert plain.kv_cache is None
    assert heard == sorted(heard)
    assert heard[-1] == 1000


REFUSED: dict[str, dict[str, Any]] = {
    "llama.cpp has no KV cache of type 'fp8'; choose one of: f32, f16, bf16, q8_0": {"kv": "fp8"},
    "llama.cpp has no KV cache of type ''": {"kv": "q8_0,"},
    "--context 2048 is more than the 1024 tokens that .* use --context 1024 or less": {"kv": "q8_0", "context": 2048},
    "--context is 1; give 2 or more": {"kv": "q8_0", "context": 1},
    "--context 512 is the length .* none is named; add --kv q8_0": {"context": 512},
    "short.txt has 6 tokens and one window needs 1023; use a shorter --context": {"kv": "q8_0", "context": 1024, "text": "{text}"},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_before_any_work(words: str, gguf: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("A river and a tree.")
    asked: dict[str, Any] = {
        name: tmp_path / "short.txt" if value == "{text}" else value for name, value in REFUSED[words].items()
    }
    told: list[str] = []
    with pytest.raises(QuantryError, match=words):
        quantry.verify(gguf, **SMALL, **asked, record=False, progress=lambda *_: told.append(""))
    assert told == []


def test_which_engines_and_models_have_caches(tmp_path: Path, tiny: Callable[..., Path]) -> None:
    demo = open_checkpoint("demo")
    with pytest.raises(QuantryError, match="measured in an engine, and none is named .*; add --engine vllm"):
        cache_choice(demo, None, "fp8", 512)
    with pytest.raises(QuantryError, match="transformers has no types of KV cache to choose from; use --engine vllm"):
        cache_choice(demo, "transformers", "fp8", 512)
    with pytest.raises(QuantryError, match="vllm has no KV cache of type 'q8_0'; choose one of"):
        cache_choice(demo, "vllm", "q8_0", 512)
    chosen = cache_choice(demo, "vllm", "int8,fp8,fp8", None)
    assert (chosen.caches, chosen.context) == (("int8_per_token_head", "fp8"), 1024)  # the demo's own context
    odd = open_checkpoint(tiny("LlamaForCausalLM", head_dim=48))
    with pytest.raises(QuantryError, match="of q4_0 stores 32 numbers together, and heads of .* have 48; leave --kv"):
        cache_choice(odd, "llama.cpp", "f16,q4_0", 64)
    assert cache_choice(odd, "llama.cpp", "f16", 64).caches == ("f16",)


def test_the_room_is_what_llama_cpp_allocates(gguf: Path) -> None:
    """Bytes of a sequence are those of the buffers it logs; tokens and sequences follow from the memory that is left."""
    deployment = Deployment(open_checkpoint(gguf), None, "llama.cpp", parse("cpu").device)
    rooms = cache_rooms(deployment, 1024, ("f16", "q8_0", "q4_0"))["caches"]
    with LlamaModel(gguf_in(gguf), 1024, threads=1) as model:
        for name, room in rooms.items():
            with model.beside(name) as other:
                assert room["bytes_per_sequence"] == pytest.approx(other.memory["kv_cache"], abs=6000)  # MiB, 2 digits
            assert room["bytes_per_sequence"] == 1024 * room["bytes_per_token"]
            assert room["sequences"] == room["tokens"] // 1024
    assert [room["bytes_per_token"] for room in rooms.values()] == [
        4096,
        2176,
        1152,
    ]  # 8 layers, 2 heads of 64, K and V
    assert rooms["f16"]["tokens"] < 0.55 * rooms["q8_0"]["tokens"] < 0.3 * rooms["q4_0"]["tokens"]


def test_windows_hold_as_many_tokens_as_the_proof(gguf: Path) -> None:
    def count(context: int, options: VerifyOptions = OPTIONS) -> int:
        job = verify_cache.prepare(str(gguf), "demo", options, "q8_0", context)
        assert job is not None
        assert {len(window.tokens) for window in job.windows} == {context}
        return len(job.windows)

    assert [count(context) for context in (64, 128, 256, 1024)] == [4, 2, 1, 1]


def test_each_of_several_texts_gives_windows(gguf: Path, tmp_path: Path) -> None:
    for name, word in (("a.txt", "river "), ("b.txt", "tree ")):
        (tmp_path / name).write_text(word * 400)
    options = replace(OPTIONS, text=f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}")
    job = verify_cache.prepare(str(gguf), "demo", options, "q8_0", 128)
    assert job is not None
    assert job.text == "a.txt, b.txt"
    assert len(job.windows) == 4
    assert job.windows[0].tokens != job.windows[-1].tokens

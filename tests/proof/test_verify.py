"""The whole of `quantry verify` and `quantry diff`: figures against plain float64, broken artefacts, exit codes."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantry
from command import command
from demo_artefacts import quantized_demo
from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.numerics.grids import dequantize
from quantry.proof import text
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.report import ci
from quantry.types import Proof
from shared import recorded, shared

DEMO = demo_folder()
SMALL: dict[str, Any] = {"windows": 2, "length": 64}
Make = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tests of a run share references, apart from the user's, of the first pages of the text."""
    first = tmp_path_factory.mktemp("text") / text.HELD_OUT
    first.write_text(text.default_text().start(8000))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(shared(tmp_path_factory, "verify-cache", lambda folder: None)))
        patch.setattr(text, "default_text", lambda: text.TextFile(first))
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return lambda preset: quantized_demo(tmp_path_factory, preset)


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory, made: Make) -> Callable[[str], Proof]:
    """The proof of a preset by the general gate; the artefact itself stays without."""

    def prove(preset: str) -> Proof:
        def make(folder: Path) -> Proof:
            return quantry.verify(shutil.copytree(made(preset), folder / preset), reference="demo", **SMALL)

        proof: Proof = recorded(tmp_path_factory, f"proof-{preset}", make)
        return proof

    return prove


@pytest.fixture
def w8(made: Make, tmp_path: Path) -> Path:
    return shutil.copytree(made("w8a16"), tmp_path / "w8a16")


@pytest.fixture
def q8(made: Make, tmp_path: Path) -> Path:
    return shutil.copytree(made("gguf-q8_0"), tmp_path / "gguf-q8_0")


def failed(proof: Proof) -> dict[str, str]:
    assert proof.verdict == ("pass" if proof.passed else "fail")
    return {finding["name"]: finding["words"] for finding in proof.findings if not finding["ok"]}


def plain_figures(artefact: Path, windows: int, length: int) -> dict[str, float]:
    """KL, same first token and perplexities in float64 from the full logits of transformers' own models."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    ids = tokenizer((DEMO / "held-out.txt").read_text(), add_special_tokens=False)["input_ids"]
    step = length - 1
    tokens = torch.tensor([[0, *ids[step * i : step * i + step]] for i in range(windows)])
    base = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    other = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    read = QuantizedModel(artefact)
    for module in read.schemes:
        other.get_submodule(module).weight.data.copy_(dequantize(read.read(module)))
    with torch.no_grad():
        p, q = (torch.log_softmax(model(tokens).logits[:, :-1].double(), -1) for model in (base, other))
    kl = (p.exp() * (p - q)).sum(-1).flatten()
    following = tokens[:, 1:, None]
    return {
        "kl": kl.mean().item(),
        "kl_median": np.sort(kl.numpy())[(len(kl) + 1) // 2 - 1].item(),
        "kl_p99": np.sort(kl.numpy())[int(np.ceil(0.99 * len(kl))) - 1].item(),
        "top1": (p.argmax(-1) == q.argmax(-1)).double().mean().item(),
        "perplexity": q.gather(-1, following).mean().neg().exp().item(),
        "reference_perplexity": p.gather(-1, following).mean().neg().exp().item(),
    }


def test_a_proof_for_continuous_integration(proven: Callable[[str], Proof]) -> None:
    proof = proven("gguf-q4_0")
    proof = replace(proof, artefact="a|b\x1b<c>", findings=({**proof.findings[0], "ok": False}, *proof.findings[1:]))
    suite = ElementTree.fromstring(ci.junit(proof))
    assert (int(suite.attrib["tests"]), int(suite.attrib["failures"])) == (len(proof.findings), len(failed(proof)))
    assert [case.find("failure") is None for case in suite] == [finding["ok"] for finding in proof.findings]
    page = ci.markdown(proof)
    assert page.startswith("## Passed: a\\|b&lt;c>") or page.startswith("## FAILED: a\\|b&lt;c>")
    assert f"| mean KL | {proof.kl:.4f} |" in page
    assert "in llama.cpp" in page
    assert page.count("**failed**") == len(failed(proof))


def test_figures_are_those_of_plain_float64(made: Make, proven: Callable[[str], Proof]) -> None:
    proof = proven("w4a16")
    for name, value in plain_figures(made("w4a16"), **SMALL).items():
        assert getattr(proof, name) == pytest.approx(value, rel=2e-4), name
    assert proof.compact == {"k": 4096, "vocabulary": 4096, "shortfall": 0.0}
    low, high = proof.intervals["kl"]
    assert low < proof.kl < high
    assert 0 < proof.noise_floor < 1e-3
    assert proof.text == {"name": "held-out.txt", "windows": 2, "asked": 2, "length": 64, "positions": 2 * 63}


def test_json_names_are_frozen(proven: Callable[[str], Proof]) -> None:
    proof = json.loads(json.dumps(proven("gguf-q4_k_m").to_dict()))
    assert set(proof) == {
        "artefact", "reference", "gate", "verdict", "kl", "kl_median", "kl_p99", "top1", "perplexity",
        "reference_perplexity", "noise_floor", "served", "intervals", "findings", "text", "compact", "worst_tensors", "domains", "memory",
        "kv_cache", "prompts", "tasks", "notes", "recorded",
    }  # fmt: skip
    assert set(proof["served"]) == {
        "engine", "version", "kl", "kl_median", "kl_p99", "top1", "perplexity", "intervals", "gap",
    }  # fmt: skip
    assert proof["verdict"] == "pass"
    assert proof["served"]["engine"] == "llama.cpp"
    assert proof["served"]["kl"] == pytest.approx(proof["kl"], rel=0.5)
    assert set(proof["memory"]["measured"]) >= {"weights", "kv_cache"}
    predicted, measured = proof["memory"]["predicted"], proof["memory"]["measured"]
    assert predicted["kv_cache"] == measured["kv_cache"]
    assert predicted["weights"] == pytest.approx(measured["weights"], rel=0.05)  # what is repacked it counts elsewhere
    assert all({"name", "ok", "words", "fix", "warning"} <= set(finding) for finding in proof["findings"])


def test_verdict_goes_into_the_card_once(q8: Path) -> None:
    for gate in ("general", "draft"):
        proof = quantry.verify(q8, reference="demo", gate=gate, **SMALL)
        content = json.loads((q8 / "quantry.json").read_text())
        assert content["proof"]["verdict"] == "pass"
        assert content["proof"]["gate"] == gate
        assert content["proof"]["kl"] == proof.kl
        assert content["preset"] == "gguf-q8_0"
    words = (q8 / "README.md").read_text()
    assert words.count("## What was measured") == 1
    assert "*draft*" in words
    assert str(q8.parent) not in words + (q8 / "quantry.json").read_text()


def test_too_few_bits_fail_the_gate(proven: Callable[[str], Proof]) -> None:
    assert {"kl", "top1", "perplexity_ratio"} <= set(failed(proven("w2a16")))


def test_a_use_decides(made: Make, tmp_path: Path) -> None:
    artefact = shutil.copytree(made("w4a16"), tmp_path / "w4a16")
    assert quantry.verify(artefact, reference="demo", gate="draft", **SMALL).passed
    assert "kl" in failed(quantry.verify(artefact, reference="demo", gate="accuracy-critical", **SMALL))


def test_windows_longer_than_the_context_are_clipped_and_it_is_said(w8: Path, tmp_path: Path) -> None:
    """Beyond its context a model computes something else: a perplexity of 26 instead of 5."""
    config = json.loads((w8 / "config.json").read_text())
    (w8 / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 48}))
    proof = quantry.verify(w8, reference="demo", windows=2, length=5000)
    assert proof.text["length"] == 48
    assert "windows have 48 tokens, not 5000: that is the model's context" in proof.notes
    found = quantry.diff("demo", w8, windows=1, length=5000)
    assert found.text["length"] == 48
    assert "windows have 48 tokens, not 5000: that is the model's context" in found.notes


# ---- broken on purpose: each fails the gate or is refused, and is named ----


def vouch(folder: Path) -> None:
    """Makes quantry.json agree with the files, so that only what is in them can give them away."""
    note = folder / "quantry.json"
    content = json.loads(note.read_text())
    for name, entry in content["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    note.write_text(json.dumps(content))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    vouch(folder)


def test_swapped_scales_are_named(w8: Path) -> None:
    names = [f"model.layers.{layer}.mlp.down_proj.weight_scale" for layer in (2, 5)]

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        scrambled = tensors[names[0]].flip(0)
        tensors[names[0]] = tensors[names[1]].flip(0)
        tensors[names[1]] = scrambled

    rewrite(w8, swap)
    proof = quantry.verify(w8, reference="demo", **SMALL)
    assert not proof.passed
    words = " ".join(finding["words"] for finding in proof.findings if finding["name"] == "weights")
    assert "model.layers.2.mlp.down_proj" in words
    assert "model.layers.5.mlp.down_proj" in words


def test_a_layer_of_another_model_is_named(w8: Path) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.mlp.up_proj")]:
            tensors[name] = tensors[name.replace(".3.", ".6.")].clone()

    rewrite(w8, plant)
    proof = quantry.verify(w8, reference="demo", **SMALL)
    assert "model.layers.3.mlp.up_proj" in failed(proof)["weights"]
    assert "another tensor" in failed(proof)["weights"]


def test_changed_bytes_are_named(w8: Path) -> None:
    file = w8 / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    proof = quantry.verify(w8, reference="demo", **SMALL)
    assert "model.safetensors" in failed(proof)["files"]


def test_wrong_bos_is_named(w8: Path, q8: Path) -> None:
    config = json.loads((w8 / "tokenizer.json").read_text())
    config["post_processor"] = None
    (w8 / "tokenizer.json").write_text(json.dumps(config))
    assert "bos" in failed(quantry.verify(w8, reference="demo", **SMALL))
    (file,) = q8.glob("*.gguf")
    reader = gguf.GGUFReader(file, "r+")
    reader.fields["tokenizer.ggml.add_bos_token"].parts[-1][0] = False
    reader.data.flush()
    vouch(q8)
    assert "bos" in failed(quantry.verify(q8, reference="demo", **SMALL))


def test_wrong_chat_template_is_named(w8: Path) -> None:
    template = w8 / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|user|>", "USER:").replace("message['role']", "'user'") + "!")
    assert set(failed(quantry.verify(w8, reference="demo", **SMALL))) == {"chat-template"}


def refused(*words: str | Path) -> str:
    done = command(*words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def test_truncated_shard_is_refused(w8: Path) -> None:
    file = w8 / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])
    assert "truncated" in refused("verify", w8, "--reference", "demo")


def test_unfinished_artefact_is_refused(w8: Path) -> None:
    w8.rename(w8.with_name("w8a16.partial"))
    (w8.with_name("w8a16.partial") / "quantry-job.json").write_text("{}")
    assert "not finished" in refused("verify", w8, "--reference", "demo")


def test_other_vocabulary_is_refused(w8: Path) -> None:
    config = json.loads((w8 / "config.json").read_text())
    (w8 / "config.json").write_text(json.dumps(config | {"vocab_size": 5000}))
    line = refused("verify", w8, "--reference", "demo")
    assert "5000" in line
    assert "4096" in line
    line = refused("diff", w8, "demo")
    assert "5000" in line
    assert "4096" in line


def test_short_text_is_refused(w8: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time.")
    line = refused("verify", w8, "--reference", "demo", "--text", tmp_path / "short.txt")
    assert "5 tokens" in line
    assert "511" in line
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00\x81")
    assert "UTF-8" in refused("verify", w8, "--reference", "demo", "--text", tmp_path / "binary.txt")


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_engine_that_is_not_installed_is_refused(engine: str, w8: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
    steps: list[str] = []
    with pytest.raises(QuantryError, match="not installed.*pip install.*--engine-python"):
        quantry.verify(
            w8, reference="demo", engine=engine, engine_python=bare / "bin" / "python", **SMALL,
            progress=lambda done, total, label: steps.append(label),
        )  # fmt: skip
    assert not steps  # nothing was computed before


def test_what_is_wrong_with_the_request_is_said_before_any_work(w8: Path, tmp_path: Path) -> None:
    """The artefact is cut off too, which the check of its files would refuse next."""
    file = w8 / "model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "short.txt").write_text("Once upon a time.")
    for options, words in (
        ({"text": tmp_path / "empty.txt"}, "has no text"),
        ({"text": tmp_path / "short.txt"}, "has 5 tokens"),
        ({"tasks": str(tmp_path / "none.yaml")}, "no task file"),
        ({"length": 1}, "no token to score"),
        ({"output": tmp_path / "empty.txt"}, "not a folder that can be written"),
        ({"output": tmp_path, "record": False}, "leave one of them out"),
    ):
        with pytest.raises(QuantryError, match=words):
            quantry.verify(w8, reference="demo", **options)


def test_engine_that_does_not_take_the_format_is_refused(w8: Path, q8: Path) -> None:
    with pytest.raises(QuantryError, match="a GGUF file"):
        quantry.verify(w8, reference="demo", engine="llama.cpp", **SMALL)
    with pytest.raises(QuantryError, match="a folder of safetensors"):
        quantry.verify(q8, reference="demo", engine="vllm", **SMALL)
    with pytest.raises(QuantryError, match="unknown engine 'vlm'; did you mean vllm"):
        quantry.verify(w8, reference="demo", engine="vlm", **SMALL)


def test_logits_that_are_not_finite_are_refused(w8: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.4.input_layernorm.weight"][7] = float("inf")

    rewrite(w8, spoil)
    before = (w8 / "quantry.json").read_bytes()
    line = refused("verify", w8, "--reference", "demo", "--windows", "2", "--length", "64")
    assert "model.layers.4" in line
    assert (w8 / "quantry.json").read_bytes() == before


def test_unknown_gate_is_refused(w8: Path) -> None:
    assert "did you mean draft" in refused("verify", w8, "--reference", "demo", "--gate", "draf")


# ---- prompts and tasks ----


def test_prompts_and_tasks(q8: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "What color is the sky?"}], "answer": "blue"},
        {"messages": [{"role": "user", "content": "What do cows give us?"}], "answer": "milk"},
        {"text": "Once upon a time, there was a"},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "riddles.jsonl").write_text(
        "\n".join(
            json.dumps({"question": f"The {thing} is", "choices": [" blue.", " green."], "answer": answer})
            for thing, answer in (("sky", 0), ("grass", 1), ("sea", 0), ("leaf", 1))
        )
    )
    (tmp_path / "riddles.yaml").write_text(
        "task: riddles\ndataset_path: json\ndataset_kwargs: {data_files: {test: riddles.jsonl}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        'doc_to_target: "{{answer}}"\nmetric_list: [{metric: acc}]\n'
    )
    proof = quantry.verify(
        q8,
        reference="demo",
        prompts=tmp_path / "prompts.jsonl",
        tasks=str(tmp_path / "riddles.yaml"),
        max_tokens=12,
        **SMALL,
    )
    assert proof.prompts is not None
    assert proof.prompts["prompts"] == 3
    assert proof.prompts["agreement"]["value"] >= 2 / 3
    assert 0 <= proof.prompts["decoded"]["kl"] < 0.05
    assert proof.tasks is not None
    assert proof.tasks["riddles"]["acc"]["paired"]["p"] == 1.0
    kept = json.loads((q8 / "quantry.json").read_text())["proof"]["prompts"]
    assert ("records" in kept, kept["differing"]) == (False, ci.differing(proof.prompts))


# ---- diff ----


def test_diff_of_the_same_is_nothing(made: Make) -> None:
    found = quantry.diff(made("w8a16"), made("w8a16"), **SMALL)
    assert found.kl == pytest.approx(0, abs=1e-9)
    assert found.top1 == 1
    assert found.tensors == ()


def test_diff_is_the_divergence_of_the_reference(made: Make, proven: Callable[[str], Proof]) -> None:
    """With the 16-bit model as A it must find what verify finds."""
    found = quantry.diff("demo", made("w4a16"), **SMALL)
    proof = proven("w4a16")
    assert (found.kl, found.kl_p99, found.top1) == pytest.approx((proof.kl, proof.kl_p99, proof.top1), rel=1e-5)
    assert found.b["perplexity"] == pytest.approx(proof.perplexity, rel=1e-6)
    assert found.a["bytes"] > 2 * found.b["bytes"]
    assert found.tensors[0]["name"] == proof.worst_tensors[0]["name"]
    assert set(found.to_dict()) == {
        "a", "b", "kl", "kl_median", "kl_p99", "top1", "intervals", "text", "tensors", "notes",
    }  # fmt: skip


def test_exit_codes_and_pictures(made: Make, q8: Path, tmp_path: Path) -> None:
    small = ("--windows", "2", "--length", "64")
    without = ("--no-report", *small)
    w2 = shutil.copytree(made("w2a16"), tmp_path / "w2a16")
    done = command("verify", q8, "--reference", "demo", *without)
    assert done.returncode == 0, done.stderr
    assert "PASS" in done.stdout
    assert "in llama.cpp" in done.stdout
    done = command("verify", w2, "--reference", "demo", *without)
    assert done.returncode == 1
    assert "FAIL" in done.stdout
    assert "more bits" in done.stdout
    done = command("diff", q8, w2, "--json", *small)
    assert done.returncode == 0
    assert json.loads(done.stdout)["kl"] > 0.1

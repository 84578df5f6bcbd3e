"""GGUF files that Quantry writes, loaded by llama.cpp: every architecture, every type, in one file or in several."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import quantry
from demo_artefacts import gguf_in, quantized_demo
from depth import FAMILIES, cases
from quantry.errors import CheckpointError, ConfigError, OutputError, QuantryError, RecipeError, UnknownNameError
from quantry.llamacpp import importance
from quantry.llamacpp.mixture import FILE_TYPES
from quantry.llamacpp.model import LlamaModel
from quantry.models.reader import demo_folder
from quantry.numerics.ggml import native
from quantry.quantizing.makers.gguf import GgufMaker
from tiny_models import ARCHITECTURES, write_model

TEXT = (
    "def area(r: float) -> float:\n\treturn 3.14159 * r ** 2  # 1234567890\n"
    "It's 10:45; they've sold 2,048 tickets — 🙂👩‍👩‍👧 naïve café. 天地玄黃 ひらがな 한국어   end"
)
DEMO = demo_folder()
DemoFile = Callable[[str], Path]


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*.gguf")
    return file


def written(model: Path | str, out: Path, file_type: str, **options: Any) -> Path:
    quantry.quantize(model, out, preset=f"gguf-{file_type}", **options)
    return only_file(out)


@pytest.fixture
def demo_file(tmp_path_factory: pytest.TempPathFactory) -> DemoFile:
    """The GGUF file of the demo in a type, made once in a run."""
    return lambda file_type: gguf_in(quantized_demo(tmp_path_factory, f"gguf-{file_type}"))


def fields(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def divergence(want: torch.Tensor, got: np.ndarray[Any, Any]) -> float:
    """Mean KL divergence in nats."""
    one, other = want.double().log_softmax(-1), torch.from_numpy(got).double().log_softmax(-1)
    return float((one.exp() * (one - other)).sum(-1).mean())


def reference(folder: Path, tokens: list[int]) -> torch.Tensor:
    """The logits of a checkpoint in transformers, loaded anew: a model cast to 16 bit and back has coarser rope angles."""
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
            torch.tensor([tokens])
        ).logits[0]
    return logits


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, FAMILIES))
def test_llama_cpp_computes_what_transformers_does(architecture: str, tmp_path: Path) -> None:
    """Token ids over code, digits, emoji and CJK, and the logits of the F16 file."""
    from transformers import AutoTokenizer

    write_model(tmp_path / "model", architecture, seed=1)  # with 0 one token is a toss-up between experts
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    file = written(tmp_path / "model", tmp_path / "out", "f16")
    with LlamaModel(file, threads=1) as served:
        tokens = served.tokenize(TEXT)
        assert tokens == tokenizer(TEXT)["input_ids"]
        found = served.logits(tokens)
    want = reference(tmp_path / "model", tokens)
    assert divergence(want, found) < 1e-3
    assert divergence(want.roll(1, 0), found) > 0.1  # the measure can tell


@pytest.mark.parametrize("file_type", cases(FILE_TYPES, ("f16", "q8_0", "q4_k_m", "q2_k", "iq4_xs")))
def test_every_type_of_the_demo_loads_and_answers(file_type: str, demo_file: DemoFile, tmp_path: Path) -> None:
    file = demo_file(file_type)
    text = (DEMO / "held-out.txt").read_text(encoding="utf-8")[:3000]
    with LlamaModel(file, context=1024, threads=1) as model:
        tokens = model.tokenize(text)[:500]
        loss = perplexity(tokens, model.logits(tokens))
        answer = model.detokenize(model.generate(model.tokenize(prompt("What color is the sky?")), 16))
    assert loss < (6.5 if file_type != "q2_k" else 12)  # 16 bit is at 5, shuffled weights at 53,000
    if "q2" not in file_type and "q3" not in file_type:
        assert "blue" in answer.lower()


def prompt(question: str) -> str:
    from transformers import AutoTokenizer

    chat = [{"role": "user", "content": question}]
    return str(
        AutoTokenizer.from_pretrained(DEMO).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    )


def perplexity(tokens: list[int], logits: np.ndarray[Any, Any]) -> float:
    found = torch.from_numpy(logits[:-1]).double().log_softmax(-1)
    return float(found.gather(1, torch.tensor(tokens[1:])[:, None]).mean().neg().exp())


def test_blocks_are_those_of_ggml(demo_file: DemoFile, tmp_path: Path) -> None:
    """The tensors of a Q4_K_M file against ggml's own quantizer on the weights of the F16 file's order."""
    plain = {t.name: t for t in gguf.GGUFReader(demo_file("bf16")).tensors}
    equal = total = 0
    for tensor in gguf.GGUFReader(demo_file("q4_k_m")).tensors:
        source = plain[tensor.name]
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            assert np.array_equal(tensor.data, source.data)
            continue
        weight = torch.from_numpy(gguf.quants.dequantize(source.data, source.tensor_type).copy())
        want = native.quantize(weight, tensor.tensor_type.name, None).numpy()
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        same = (tensor.data.reshape(-1, size) == want.reshape(-1, size)).all(1)
        equal, total = equal + int(same.sum()), total + len(same)
    assert equal >= 0.99 * total


def test_several_files_are_one_model(demo_file: DemoFile, tmp_path: Path) -> None:
    whole = demo_file("q8_0")
    quantry.quantize("demo", tmp_path / "parts", preset="gguf-q8_0", shard_bytes=2_000_000)
    parts = sorted((tmp_path / "parts").glob("*.gguf"))
    assert [part.name for part in parts] == [f"demo-Q8_0-{number:05d}-of-00005.gguf" for number in range(1, 6)]
    assert quantry.inspect(tmp_path / "parts").parameters == 7_344_384
    with LlamaModel(whole, threads=1) as one, LlamaModel(parts[0], threads=1) as other:
        tokens = one.tokenize("Once upon a time")
        assert np.array_equal(one.logits(tokens), other.logits(tokens))


def test_a_killed_job_goes_on_inside_its_file(demo_file: DemoFile, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    seen: list[str] = []

    def stop(done: int, total: int, label: str) -> None:
        if done > total / 2:
            raise StopError

    with pytest.raises(StopError):
        quantry.quantize("demo", tmp_path / "out", preset="gguf-q6_k", progress=stop)
    whole = (tmp_path / "out.partial" / "demo-Q6_K.gguf.journal.partial").read_text().count("\n")
    assert whole > 20
    made = GgufMaker.make

    def count(self: Any, piece: Any, known: Any) -> Any:
        seen.append(piece.name)
        return made(self, piece, known)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GgufMaker, "make", count)
        quantry.quantize("demo", tmp_path / "out", preset="gguf-q6_k")
    assert len(seen) == 74 - whole  # what was whole was not made again
    again = demo_file("q6_k")
    assert only_file(tmp_path / "out").read_bytes() == again.read_bytes()


def test_dry_run_says_the_size(tmp_path: Path) -> None:
    planned = quantry.quantize("demo", tmp_path / "out", preset="gguf-q4_k_m", dry_run=True)
    assert not (tmp_path / "out").exists()
    written("demo", tmp_path / "out", "q4_k_m")
    tensors = gguf.GGUFReader(only_file(tmp_path / "out")).tensors
    assert planned.bytes == sum(int(tensor.n_bytes) for tensor in tensors)
    assert planned.quantized_layers == sum(tensor.tensor_type > 1 and tensor.tensor_type != 30 for tensor in tensors)
    record = json.loads((tmp_path / "out" / "quantry.json").read_text())
    assert record["fates"]["quantized: Q4_K"]
    assert "as gguf" in (tmp_path / "out" / "README.md").read_text()


def test_types_by_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'preset = "gguf-q4_0"\n[[rules]]\nmatch = "blk.[01].*_down.weight"\ntype = "q6_k"\n'
        '[[rules]]\nmatch = "token_embd.weight"\nkeep = true\n'
    )
    quantry.quantize("demo", tmp_path / "out", recipe=recipe)
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(only_file(tmp_path / "out")).tensors}
    assert kinds["blk.0.ffn_down.weight"] == kinds["blk.1.ffn_down.weight"] == "Q6_K"
    assert kinds["blk.2.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_0"
    assert kinds["token_embd.weight"] == "BF16"


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        ('[[rules]]\nmatch = "layers.*"\ntype = "Q6_K"', "matches no tensor"),
        ('[[rules]]\nmatch = "blk.*"\ntype = "Q7_K"', "Q7_K"),
        ('[[rules]]\nmatch = "blk.*"\npreset = "w4a16"', "gives a type"),
        ('[[rules]]\nmatch = "blk.*"\ntype = "Q6_K"\nkeep = true', "exactly one"),
    ],
)
def test_bad_rules(rules: str, problem: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'preset = "gguf-q4_k_m"\n{rules}\n')
    with pytest.raises(QuantryError, match=problem):
        quantry.quantize("demo", tmp_path / "out", recipe=recipe)
    assert not (tmp_path / "out").exists()


def write_imatrix(path: Path, vectors: dict[str, np.ndarray[Any, Any]], counts: int = 1) -> Path:
    writer = gguf.GGUFWriter(path, "imatrix")
    writer.add_array("imatrix.datasets", ["words.txt"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 512)
    for name, vector in vectors.items():
        writer.add_tensor(f"{name}.in_sum2", vector.reshape(counts, -1).astype(np.float32) * 16)
        writer.add_tensor(f"{name}.counts", np.full((counts, 1), 16, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_importance(demo_file: DemoFile, tmp_path: Path) -> None:
    """With an importance matrix the mixture is another and so are the codes: those of ggml with the same vector."""
    vector = np.random.default_rng(0).uniform(0.1, 20, 256).astype(np.float32)
    matrix = write_imatrix(tmp_path / "i.gguf", {"blk.3.attn_q.weight": vector, "of.another.weight": vector})
    file = written("demo", tmp_path / "with", "q4_0", imatrix=matrix)
    plain = {t.name: t for t in gguf.GGUFReader(demo_file("bf16")).tensors}
    tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
    assert tensors["blk.0.ffn_down.weight"].tensor_type.name == "Q4_1"  # Q4_0 without
    source = plain["blk.3.attn_q.weight"]
    weight = torch.from_numpy(gguf.quants.dequantize(source.data, source.tensor_type).copy())
    want = native.quantize(weight, "Q4_0", torch.from_numpy(vector)).numpy().reshape(-1, 18)
    other = native.quantize(weight, "Q4_0", None).numpy().reshape(-1, 18)
    found = tensors["blk.3.attn_q.weight"].data.reshape(-1, 18)
    assert (found == want).all(1).mean() > 0.99
    assert (found == other).all(1).mean() < 0.9
    told = fields(file)
    assert told["quantize.imatrix.file"] == "i.gguf"
    assert told["quantize.imatrix.entries_count"] == 2
    assert told["quantize.imatrix.chunks_count"] == 7
    assert told["quantize.imatrix.dataset"] == "words.txt"
    with LlamaModel(file, threads=1) as model:
        assert model.logits([1, 2, 3]).shape == (3, 4096)


def test_importance_is_the_mean_square_of_each_expert(tmp_path: Path) -> None:
    """Sums over counts, expert by expert; one that no token reached weighs all inputs alike."""
    sums = np.arange(12, dtype=np.float32).reshape(3, 4)
    counts = np.array([[2], [0], [5]], np.float32)
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", "imatrix")
    writer.add_tensor("a.weight.in_sum2", sums)
    writer.add_tensor("a.weight.counts", counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = importance.read(tmp_path / "i.gguf").vectors["a.weight"]
    assert np.array_equal(found, np.stack([sums[0] / 2, np.ones(4, np.float32), sums[2] / 5]))
    name = b"a.weight"
    parts = (np.int32(1), np.int32(len(name)), name, np.int32(4), np.int32(12), sums)
    (tmp_path / "i.dat").write_bytes(b"".join(part if isinstance(part, bytes) else part.tobytes() for part in parts))
    assert np.array_equal(importance.read(tmp_path / "i.dat").vectors["a.weight"], sums.reshape(1, 12) / 4)


def test_every_expert_has_its_own_importance(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "MixtralForCausalLM")
    name = "blk.1.ffn_up_exps.weight"
    vectors = np.random.default_rng(0).uniform(0.1, 20, (4, 64)).astype(np.float32)
    matrix = write_imatrix(tmp_path / "i.gguf", {name: vectors}, counts=4)
    file = written(tmp_path / "model", tmp_path / "out", "q4_0", imatrix=matrix)
    found = next(t for t in gguf.GGUFReader(file).tensors if t.name == name).data
    source = next(
        t for t in gguf.GGUFReader(written(tmp_path / "model", tmp_path / "f", "bf16")).tensors if t.name == name
    )
    weight = torch.from_numpy(gguf.quants.dequantize(source.data, source.tensor_type).copy())
    for expert in range(4):
        rows = [native.quantize(weight[expert], "Q4_0", torch.from_numpy(vector)).numpy() for vector in vectors]
        same = [(found[expert].reshape(-1, 18) == row.reshape(-1, 18)).all(1).mean() for row in rows]
        assert same[expert] > 0.99
        assert max(share for other, share in enumerate(same) if other != expert) < 0.9


@pytest.mark.parametrize("fault", ["missing", "size", "foreign", "nan", "text", "cut", "format"])
def test_bad_importance(fault: str, tmp_path: Path) -> None:
    path, options = tmp_path / "i.gguf", {"preset": "gguf-q4_0"}
    size, name = (255 if fault == "size" else 256), "blk.0.attn_q.weight" if fault != "foreign" else "a.weight"
    vector = np.full(size, np.nan if fault == "nan" else 1, np.float32)
    if fault != "missing":
        write_imatrix(path, {name: vector})
    if fault == "text":
        path.write_text("not a matrix")
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-64])
    if fault == "format":
        options = {"preset": "w4a16", "group": 64}  # type: ignore[dict-item]
    expected = {
        "missing": "cannot read", "size": "255 values", "foreign": "has no tensor of this model", "nan": "negative or infinite",
        "text": "claims|needs", "cut": "ends at|bytes", "format": "has no use in format compressed-tensors",
    }  # fmt: skip
    with pytest.raises(QuantryError, match=expected[fault]):
        quantry.quantize("demo", tmp_path / "out", imatrix=path, **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_legacy_importance(tmp_path: Path) -> None:
    """The older binary form: name, calls, values; then chunks and the dataset."""
    vector = np.random.default_rng(0).uniform(0.1, 20, 256).astype(np.float32)
    name, data = b"blk.3.attn_q.weight", b"words.txt"
    content = np.int32(1).tobytes() + np.int32(len(name)).tobytes() + name + np.int32(4).tobytes()
    content += np.int32(256).tobytes() + (vector * 4).tobytes() + np.int32(7).tobytes()
    (tmp_path / "i.dat").write_bytes(content + np.int32(len(data)).tobytes() + data)
    old = written("demo", tmp_path / "old", "q4_0", imatrix=tmp_path / "i.dat")
    new = written("demo", tmp_path / "new", "q4_0", imatrix=write_imatrix(tmp_path / "i.gguf", {name.decode(): vector}))
    for one, other in zip(gguf.GGUFReader(old).tensors, gguf.GGUFReader(new).tensors, strict=True):
        assert np.array_equal(one.data, other.data)
    assert fields(old)["quantize.imatrix.chunks_count"] == 7


def spoil(folder: Path, fault: str) -> None:
    shutil.copytree(DEMO, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    if fault == "architecture":
        config["architectures"] = ["FooForCausalLM"]
    elif fault == "tensor":
        weights["model.layers.0.self_attn.strange.weight"] = torch.zeros(4, 4)
    elif fault == "no tokenizer":
        (folder / "tokenizer.json").unlink()
    elif fault == "regex":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "[a-z]+"}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif fault == "nan":
        weights["model.layers.3.mlp.up_proj.weight"][5, 7] = float("nan")
    elif fault == "heads":
        config["num_attention_heads"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("architecture", UnknownNameError, "FooForCausalLM"),
        ("tensor", CheckpointError, "strange"),
        ("no tokenizer", QuantryError, "tokenizer"),
        ("regex", QuantryError, r"\[a-z\]"),
        ("nan", QuantryError, "up_proj.weight has 1 weights that are NaN"),
        ("heads", ConfigError, "heads"),
    ],
)
def test_what_cannot_be_written(fault: str, error: type[Exception], words: str, tmp_path: Path) -> None:
    spoil(tmp_path / "model", fault)
    with pytest.raises(error, match=words):
        quantry.quantize(tmp_path / "model", tmp_path / "out", preset="gguf-q4_k_m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_other_refusals(demo_file: DemoFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="gguf holds ggml's block types, not int"):
        quantry.quantize("demo", tmp_path / "out", preset="w4a16", format="gguf")
    with pytest.raises(RecipeError, match="cannot hold preset gguf-q4_k_m"):
        quantry.quantize("demo", tmp_path / "out", preset="gguf-q4_k_m", format="compressed-tensors")
    file = demo_file("q8_0")
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        quantry.quantize(file, tmp_path / "out", preset="gguf-q4_k_m")
    with pytest.raises(OutputError, match="ends in .gguf"):
        quantry.quantize("demo", tmp_path / "out.gguf", preset="gguf-q4_k_m")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(OutputError, match="are free"):
        quantry.quantize("demo", tmp_path / "out", preset="gguf-q4_k_m")
    assert sorted(path.name for path in tmp_path.iterdir()) == []


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, FAMILIES))
def test_there_and_back(architecture: str, tmp_path: Path) -> None:
    """A bf16 file turned back is the checkpoint it was made from, bit for bit, and transformers loads it."""
    write_model(tmp_path / "model", architecture)
    quantry.quantize(tmp_path / "model", tmp_path / "gguf", preset="gguf-bf16")
    quantry.convert(tmp_path / "gguf", tmp_path / "back", to="bf16")
    kept = {k: v for k, v in load_file(tmp_path / "model" / "model.safetensors").items() if "vision" not in k}
    made = load_file(tmp_path / "back" / "model.safetensors")
    if architecture != "Gemma3ForConditionalGeneration":  # its language model comes back, as one that cannot see
        kept = {k: v for k, v in kept.items() if not (k == "lm_head.weight" and k not in made)}
        assert made.keys() == kept.keys()
        assert all(torch.equal(made[name], kept[name]) for name in kept)
    tokens = list(range(5, 45))
    assert torch.equal(reference(tmp_path / "back", tokens), reference(tmp_path / "model", tokens))


def test_quantized_files_turn_back_too(demo_file: DemoFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "quantry.quantizing.restore.CHUNK", 100 * 256
    )  # tensors are decoded in several steps, the last short
    file = demo_file("q6_k")
    planned = quantry.convert(file, tmp_path / "back", to="fp16", dry_run=True)
    artefact = quantry.convert(file, tmp_path / "back", to="fp16", shard_bytes=3_000_000)
    assert planned.bytes == artefact.bytes == 2 * artefact.parameters
    made: dict[str, torch.Tensor] = {}
    for shard in (tmp_path / "back").glob("*.safetensors"):
        made.update(load_file(shard))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    for mine, theirs in (
        ("layers.2.mlp.up_proj", "blk.2.ffn_up"),
        ("embed_tokens", "token_embd"),
        ("norm", "output_norm"),
    ):
        tensor = stored[f"{theirs}.weight"]
        want = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).half()
        assert torch.equal(made[f"model.{mine}.weight"], want)
    quantry.quantize(tmp_path / "back", tmp_path / "again", preset="w4a16", group=64)
    with pytest.raises(RecipeError, match="cannot become gptq in one step"):
        quantry.convert(file, tmp_path / "out", to="gptq")
    with pytest.raises(RecipeError, match="give --requantize Q4_K_M"):
        quantry.convert(tmp_path / "again", tmp_path / "out", to="gguf")


def test_truncated_files_are_refused(demo_file: DemoFile, tmp_path: Path) -> None:
    file = demo_file("q8_0")
    data = file.read_bytes()
    for length in (3, 100, 5000, len(data) // 2, len(data) - 40):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="cut.gguf"):
            quantry.convert(tmp_path / "cut.gguf", tmp_path / "out", to="bf16")
    assert not (tmp_path / "out").exists()

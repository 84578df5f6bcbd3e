"""Tensors and key-values of GGUF files, compared with the files that llama.cpp's own converter makes.

The converter runs once over tiny models of every architecture, and over configs that differ in what decides names,
shapes or key-values.
"""

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import quantry
from depth import DEEP, cases, examples
from llama_cpp_converter import Converter
from quantry.errors import CheckpointError, ConfigError, QuantryError, UnknownNameError
from quantry.llamacpp.families import facts, family, known, notes, table
from quantry.llamacpp.metadata import describe, parameters
from quantry.llamacpp.tensor_map import Target, TensorSlice, targets
from quantry.models.reader import open_checkpoint
from quantry.types import TensorInfo
from shared import shared
from tiny_models import ARCHITECTURES, LAYERED, LINEAR, LLAMA3, YARN, longrope, write_model

FILE_TYPES = {"f16": gguf.LlamaFileType.MOSTLY_F16, "bf16": gguf.LlamaFileType.MOSTLY_BF16}


@dataclass(frozen=True)
class Case:
    """A tiny model: its settings, then edits of its config.json, then files beside it."""

    architecture: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    edits: Mapping[str, Any] = field(default_factory=dict)
    old: bool = False  # config.json as transformers 4 wrote it, without what equals a default
    files: Mapping[str, str] = field(default_factory=dict)
    types: tuple[str, ...] = ("bf16",)


CARD = """---
license: apache-2.0
language: [en, "no"]
tags: [tiny, test]
pipeline_tag: text-generation
version: 1.5
base_model: acme/Small-7B
datasets: [acme/words]
---
# A model
"""
POOLING = {
    "modules.json": '[{"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""}, {"idx": 1, "type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}',
}
CASES: dict[str, Case] = {
    **{name: Case(name, types=("f16", "bf16")) for name in ARCHITECTURES},
    **{f"{name}-old": Case(name, old=True) for name in ARCHITECTURES},
    "Acme-Tiny-1.5K-Instruct-v2": Case("LlamaForCausalLM", files={"README.md": CARD.replace("version: 1.5\n", ""), "generation_config.json": '{"temperature": 0.6, "top_k": 20, "top_p": 0.95}'}),
    "llama3-rope": Case("LlamaForCausalLM", edits={"rope_parameters": LLAMA3}),
    "llama3-rope-old": Case("LlamaForCausalLM", edits={"rope_parameters": LLAMA3}, old=True),
    "llama3-rope-mixtral": Case("MixtralForCausalLM", edits={"rope_parameters": LLAMA3}),
    "granite-yarn": Case("GraniteForCausalLM", edits={"rope_parameters": YARN}),
    "llama-linear": Case("LlamaForCausalLM", edits={"rope_parameters": LINEAR}),
    "llama-linear-old": Case("LlamaForCausalLM", edits={"rope_parameters": LINEAR}, old=True),
    "llama-dynamic": Case("LlamaForCausalLM", edits={"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}),
    "llama-head-dim": Case("LlamaForCausalLM", {"head_dim": 32}),
    "llama-heads": Case("LlamaForCausalLM", {"num_key_value_heads": 4}, edits={"num_key_value_heads": None, "head_dim": None}),
    "llama-bias": Case("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Case("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral-full": Case("MistralForCausalLM", edits={"sliding_window": None}),
    "mixtral-8x": Case("MixtralForCausalLM", {"num_local_experts": 8, "head_dim": 32, "sliding_window": 64}),
    "qwen2-yarn": Case("Qwen2ForCausalLM", edits={"rope_parameters": YARN}),
    "qwen2-yarn-old": Case("Qwen2ForCausalLM", edits={"rope_parameters": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 0.1 * math.log(4) + 1}}, old=True),
    "qwen2-sliding": Case("Qwen2ForCausalLM", edits={"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}),
    "qwen2-untied": Case("Qwen2ForCausalLM", {"tie_word_embeddings": False}, edits={"head_dim": 16}),
    "qwen3-yarn": Case("Qwen3ForCausalLM", edits={"rope_parameters": {key: value for key, value in YARN.items() if key[0] != "o"}}),
    "qwen3-embedding": Case("Qwen3ForCausalLM", files=POOLING),
    "qwen3moe-tied": Case("Qwen3MoeForCausalLM", {"tie_word_embeddings": True}, edits={"head_dim": 32, "use_sliding_window": True, "sliding_window": 64}),
    "gemma2-caps": Case("Gemma2ForCausalLM", edits={"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "sliding_window": 128}),
    "gemma3-linear": Case("Gemma3ForCausalLM", edits={"rope_parameters": LAYERED, "final_logit_softcapping": 30.0}),
    "gemma3-linear-old": Case("Gemma3ForCausalLM", edits={"rope_parameters": LAYERED}, old=True),
    "gemma3-full": Case("Gemma3ForCausalLM", edits={"sliding_window_pattern": 1, "layer_types": ["full_attention"] * 6}),
    "gemma3-untied": Case("Gemma3ForCausalLM", {"tie_word_embeddings": False}),
    "gemma3-spare": Case("Gemma3ForCausalLM", {"vocab_size": 864}, edits={"vocab_size": 800}),
    "phi3-long": Case("Phi3ForCausalLM", {"rope_parameters": longrope(8), "original_max_position_embeddings": 256}),
    "phi3-long-old": Case("Phi3ForCausalLM", {"rope_parameters": {**longrope(6), "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 256, "tie_word_embeddings": True}, old=True),
    "phi3-short": Case("Phi3ForCausalLM", {"rope_parameters": longrope(8)}, edits={"sliding_window": None}),
    "smollm3-long": Case("SmolLM3ForCausalLM", {"num_hidden_layers": 9, "tie_word_embeddings": False}, edits={"no_rope_layers": None, "rope_parameters": YARN}),
    "granite-bias": Case("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True}, edits={"head_dim": 16}),
}  # fmt: skip
RUNS = [(name, kind) for name, case in CASES.items() for kind in case.types]
# of the quick run: every architecture, and the configs that differ most
QUICK = (
    *((name, "bf16") for name in ARCHITECTURES), ("LlamaForCausalLM", "f16"), ("Acme-Tiny-1.5K-Instruct-v2", "bf16"),
    ("llama3-rope-old", "bf16"), ("llama-bias", "bf16"), ("qwen2-yarn", "bf16"), ("qwen3-embedding", "bf16"),
    ("gemma3-linear-old", "bf16"), ("gemma3-spare", "bf16"), ("phi3-long", "bf16"),
)  # fmt: skip


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """A config in the words of transformers 4, without the fields that equal a default."""
    text = config.get("text_config")
    if text:
        return {**config, "text_config": old_style({**text, "architectures": config["architectures"]})}
    row = family(config)
    rope = config.pop("rope_parameters")
    if row.layered_rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type" if kind == "linear" else "rope_type": kind, **rope} if kind != "default" else None
    config["torch_dtype"] = config.pop("dtype", None)
    silent = {"layer_types", "no_rope_layers", "hidden_act", "hidden_activation"}
    same = {key for key, value in row.defaults.items() if config.get(key) == value}
    return {key: value for key, value in config.items() if key not in silent | same}


def build(root: Path, name: str, case: Case) -> Path:
    """The checkpoint folder of a case."""
    folder = root / name
    write_model(folder, case.architecture, **case.settings)
    config = json.loads((folder / "config.json").read_text())
    config.update(deepcopy(dict(case.edits)))
    if case.old:
        config = old_style(config)
    (folder / "config.json").write_text(json.dumps(config))
    for file, text in case.files.items():
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_text(text)
    return folder


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory, converter: Converter) -> Path:
    """A folder with the checkpoint of every case, and the file that llama.cpp's converter made of it."""

    def make(root: Path) -> None:
        for name, kind in RUNS if DEEP else QUICK:
            folder = root / name if (root / name).exists() else build(root, name, CASES[name])
            converter.convert(folder, Path(f"{folder}.{kind}.gguf"), FILE_TYPES[kind])

    return shared(tmp_path_factory, "converted", make)


def key_values(path: Path) -> list[tuple[str, list[Any], Any]]:
    """The key-values of a file but the tokenizer's, with their types, in order."""
    reader = gguf.GGUFReader(path)
    outside = ("GGUF.", "tokenizer.")
    return [
        (name, field.types, field.contents()) for name, field in reader.fields.items() if not name.startswith(outside)
    ]


def applied(target: Target, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a target stands for, read plainly."""
    if target.values is not None:
        return torch.tensor(target.values, dtype=torch.float32)
    taken = []
    for source in target.sources:
        weight = weights[source.name] if source.expert is None else weights[source.name][source.expert]
        weight = weight.T if source.flip else weight
        taken.append(weight[source.rows[0] : source.rows[1]] if source.rows else weight)
    value = torch.stack(taken) if len(taken) > 1 else taken[0]
    assert tuple(value.shape) == target.shape
    if target.heads is not None:
        size = len(value) // target.heads
        order = [size * head + half * size // 2 + pair for head in range(target.heads) for pair in range(size // 2) for half in (0, 1)]  # fmt: skip
        value = value[order]
    return value.float() + target.add


def raw(value: torch.Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def check_tensors(found: Sequence[Target], folder: Path, file: Path, kind: str) -> None:
    """All tensors of a converter's file, bit for bit."""
    weights = load_file(folder / "model.safetensors")
    made = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    assert {target.name for target in found} == set(made)
    for target in found:
        stored = made[target.name]
        assert target.shape == tuple(int(size) for size in stored.shape[::-1]), target.name
        assert stored.tensor_type.name == ("F32" if target.float32 else kind.upper()), target.name
        dtype = torch.float32 if target.float32 else {"f16": torch.float16, "bf16": torch.bfloat16}[kind]
        assert raw(applied(target, weights).to(dtype)) == stored.data.tobytes(), target.name


@pytest.mark.parametrize(("name", "kind"), cases(RUNS, QUICK[::4]))
def test_tensors_equal_the_converters(converted: Path, name: str, kind: str) -> None:
    folder = converted / name
    checkpoint = open_checkpoint(folder)
    found, fates = targets(checkpoint.config, checkpoint.tensors)
    check_tensors(found, folder, Path(f"{folder}.{kind}.gguf"), kind)
    used = {source.name for target in found for source in target.sources}
    assert used | set(fates) == {tensor.name for tensor in checkpoint.tensors}
    assert not used & set(fates)
    assert [target.name for target in found] == sorted((target.name for target in found), key=place)


def place(name: str) -> tuple[int, str]:
    return (int(name.split(".")[1]) if name.startswith("blk.") else -1, name)


@pytest.mark.parametrize(("name", "kind"), cases(RUNS, QUICK[1::4]))
def test_key_values_equal_the_converters(converted: Path, tmp_path: Path, name: str, kind: str) -> None:
    made = described(converted / name, tmp_path / "made.gguf", FILE_TYPES[kind])
    expected = key_values(converted / f"{name}.{kind}.gguf")
    assert [key for key, _, _ in made] == [key for key, _, _ in expected]
    assert made == expected


@pytest.mark.parametrize(("name", "kind"), cases(RUNS, QUICK))
def test_whole_files_equal_the_converters(converted: Path, tmp_path: Path, name: str, kind: str) -> None:
    """What `quantry quantize` writes: all tensors and all key-values, the vocabulary's too (but for the name of the
    pre-tokenizer, which the converter was not let look up)."""
    quantry.quantize(converted / name, tmp_path / "out", preset=f"gguf-{kind}")
    (file,) = (tmp_path / "out").glob("*.gguf")
    made, expected = gguf.GGUFReader(file), gguf.GGUFReader(converted / f"{name}.{kind}.gguf")
    tensors = [
        {t.name: (t.tensor_type, list(t.shape), t.data.tobytes()) for t in one.tensors} for one in (made, expected)
    ]
    assert tensors[0] == tensors[1]
    values = [
        [(key, one.types, one.contents()) for key, one in reader.fields.items() if key != "tokenizer.ggml.pre"]
        for reader in (made, expected)
    ]
    assert values[0] == values[1]


def described(folder: Path, out: Path, file_type: int) -> list[tuple[str, list[Any], Any]]:
    """The key-values that Quantry gives a checkpoint, written and read back."""
    checkpoint = open_checkpoint(folder)
    found, _ = targets(checkpoint.config, checkpoint.tensors)
    writer = gguf.GGUFWriter(out, family(checkpoint.config).architecture)
    describe(writer, folder, checkpoint.config, found, folder.name, file_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return key_values(out)


def test_every_table_has_a_tiny_model() -> None:
    assert set(known()) == set(ARCHITECTURES)


@pytest.mark.parametrize("name", known())
def test_defaults_are_those_of_transformers(name: str) -> None:
    config = transformers.AutoConfig.for_model(ARCHITECTURES[name].model_type).get_text_config().to_dict()
    rope = config["rope_parameters"]
    config |= rope.get("full_attention", rope)
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    config |= {name: config[other] for name, other in table()["aliases"].items() if other in config}
    row = family({"architectures": [name]})
    assert {key: config.get(key) for key in row.defaults} == row.defaults
    given = {table()["sources"].get(key, key) for key in row.keys} - {*table()["fields"]["required"], *row.required}
    assert {key for key in given if config.get(key) and not config.get("use_sliding_window")} <= {
        *row.defaults,
        "head_dim",
    }


@pytest.mark.parametrize("name", known())
def test_parameters_are_counted_as_the_gguf_library_counts(converted: Path, name: str) -> None:
    checkpoint = open_checkpoint(converted / name)
    found, _ = targets(checkpoint.config, checkpoint.tensors)
    writer = gguf.GGUFWriter(None, "llama")
    for target in found:
        writer.add_tensor_info(target.name, target.shape, np.dtype("f4"), 0)
    assert parameters(found) == writer.get_total_parameter_count()


MOES = [name for name in known() if "ffn_gate_exps" in family({"architectures": [name]}).layer]


@pytest.mark.parametrize("flip", [False, True], ids=["straight", "flipped"])
@pytest.mark.parametrize("name", cases(MOES, ("Qwen3MoeForCausalLM", "GraniteMoeSharedForCausalLM")))
def test_fused_experts_give_the_file_of_single_ones(converted: Path, tmp_path: Path, name: str, flip: bool) -> None:
    """As transformers 5 keeps experts in memory; and the other way round, as some checkpoints have them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(converted / name)
    model.save_pretrained(tmp_path, save_original_format=False)
    weights = load_file(tmp_path / "model.safetensors")
    stacks = [key for key in weights if "experts" in key and weights[key].ndim == 3]
    assert {key.rpartition(".")[2] for key in stacks} == {"gate_up_proj", "down_proj"}
    if flip:
        save_file({key: weights[key].mT.contiguous() if key in stacks else weights[key] for key in weights}, tmp_path / "model.safetensors")  # fmt: skip
    checkpoint = open_checkpoint(tmp_path)
    found, _ = targets(checkpoint.config, checkpoint.tensors)
    assert any(source.flip for target in found for source in target.sources) == flip
    check_tensors(found, tmp_path, converted / f"{name}.bf16.gguf", "bf16")


# gate and up together, or down, are as wide as high: the other stack tells
@pytest.mark.parametrize("inner", [32, 64], ids=["square gate_up", "square down"])
@pytest.mark.parametrize("flip", [False, True], ids=["straight", "flipped"])
def test_square_stacks_are_told_apart_by_their_siblings(inner: int, flip: bool) -> None:
    shapes = {key: shape for key, shape in tiny_shapes("Qwen3MoeForCausalLM").items() if ".experts." not in key}
    for layer in range(2):
        gate_up, down = (4, 2 * inner, 64), (4, 64, inner)
        for name, shape in (("gate_up_proj", gate_up), ("down_proj", down)):
            shapes[f"model.layers.{layer}.mlp.experts.{name}"] = (shape[0], *shape[:0:-1]) if flip else shape
    found, _ = targets({**tiny_config("Qwen3MoeForCausalLM"), "moe_intermediate_size": inner}, infos(shapes))
    stacked = next(target for target in found if target.name == "blk.1.ffn_up_exps.weight")
    source = "model.layers.1.mlp.experts.gate_up_proj"
    assert stacked.sources == tuple(TensorSlice(source, expert, (inner, 2 * inner), flip) for expert in range(4))


def infos(shapes: Mapping[str, tuple[int, ...]]) -> list[TensorInfo]:
    return [TensorInfo(name, "BF16", shape, "model.safetensors", 0, 0) for name, shape in shapes.items()]


@cache
def _tiny(name: str) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    with TemporaryDirectory() as folder:
        write_model(Path(folder), name)
        checkpoint = open_checkpoint(folder)
    return dict(checkpoint.config), {tensor.name: tensor.shape for tensor in checkpoint.tensors}


def tiny_config(name: str) -> dict[str, Any]:
    return dict(_tiny(name)[0])


def tiny_shapes(name: str) -> dict[str, tuple[int, ...]]:
    return dict(_tiny(name)[1])


def test_a_head_that_is_tied_is_left_out() -> None:
    """transformers does not look at it either; the converter would write it a second time."""
    config, shapes = tiny_config("Qwen3ForCausalLM"), tiny_shapes("Qwen3ForCausalLM")
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"]
    shapes["model.layers.0.self_attn.rotary_emb.inv_freq"] = (16,)
    found, fates = targets(config, infos(shapes))
    assert "output.weight" not in {target.name for target in found}
    assert fates["lm_head.weight"].startswith("tied: ")
    assert fates["model.layers.0.self_attn.rotary_emb.inv_freq"].startswith("dropped: ")
    found, fates = targets({**config, "tie_word_embeddings": False}, infos(shapes))
    assert "output.weight" in {target.name for target in found}
    assert "lm_head.weight" not in fates


@pytest.mark.parametrize("name", ["Olmo2ForCausalLM", "Qwen2MoeForCausalLM"])
def test_a_head_that_llama_cpp_must_have_is_written_again(name: str) -> None:
    shapes = tiny_shapes(name)
    del shapes["lm_head.weight"]
    found, _ = targets({**tiny_config(name), "tie_word_embeddings": True}, infos(shapes))
    embedding, head = (
        next(target for target in found if target.name == one) for one in ("token_embd.weight", "output.weight")
    )
    assert head == replace(embedding, name="output.weight")


def test_the_eyes_of_gemma_3_are_dropped(converted: Path) -> None:
    checkpoint = open_checkpoint(converted / "Gemma3ForConditionalGeneration")
    _, fates = targets(checkpoint.config, checkpoint.tensors)
    assert fates
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in fates)


def torch_factors(powers: torch.Tensor, rope: Mapping[str, float]) -> torch.Tensor:
    """The formula of Llama 3, in torch's float32, of theta's powers."""
    wave = 2 * math.pi / (1.0 / powers)
    low, high, factor, length = (rope[name] for name in ("low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings"))  # fmt: skip
    smooth = (length / wave - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return torch.where(
        wave < length / high, torch.ones(()), torch.where(wave > length / low, torch.tensor(factor), between)
    )


@pytest.mark.parametrize("length", [8192, 5000])
@pytest.mark.parametrize("size", [32, 64, 80, 128, 256])
@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("theta", [10000.0, 500000.0, 1000000.0])
def test_llama_3_factors(size: int, factor: float, theta: float, length: int) -> None:
    rope = {**LLAMA3, "factor": factor, "rope_theta": theta, "original_max_position_embeddings": length}
    config = {**tiny_config("LlamaForCausalLM"), "rope_parameters": rope, "head_dim": size}
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    powers = theta**exponents
    made, expected = torch.tensor(facts(config)["rope_freqs"]), torch_factors(powers, rope)  # type: ignore[arg-type]
    nearest = powers == (theta ** exponents.double()).float()  # torch is a last place off now and then
    if (size, factor, theta, length) in ((128, 8.0, 5e5, 8192), (64, 32.0, 5e5, 8192)):  # Llama 3.1 and 3.2
        nearest[:] = True
    assert nearest.float().mean() > 0.9
    assert torch.equal(made[nearest], expected[nearest])
    torch.testing.assert_close(made, expected, rtol=3e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "edits", "words"),
    [
        ("MistralForCausalLM", {"sliding_window": 256}, ["last 256 tokens"]),
        ("MistralForCausalLM", {"sliding_window": 4096}, []),
        ("MistralForCausalLM", {"sliding_window": None}, []),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": None}, ["last 64 tokens"]),
        ("Phi3ForCausalLM", {}, ["last 256 tokens"]),
        ("Gemma3ForCausalLM", {}, []),
        ("Gemma3ForConditionalGeneration", {}, []),
        ("LlamaForCausalLM", {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, ["over 512 tokens"]),
        ("LlamaForCausalLM", {}, []),
    ],
)  # fmt: skip
def test_notes_tell_what_a_file_cannot(name: str, edits: dict[str, Any], words: list[str]) -> None:
    told = notes({**tiny_config(name), **edits})
    assert len(told) == len(words)
    assert all(word in note for word, note in zip(words, told, strict=True))


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    """A mutation that leaves fields (or tensors) out."""

    def mutate(fields: dict[str, Any]) -> None:
        for name in names:
            del fields[name]

    return mutate


def with_(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.update(fields)


def shaped(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    return lambda table: table.update({name: shape})


CONFIGS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "no architecture": ("LlamaForCausalLM", without("architectures"), "names no architecture"),
    "architectures is a word": ("LlamaForCausalLM", with_(architectures="LlamaForCausalLM"), "names no architecture"),
    "unknown": ("LlamaForCausalLM", with_(architectures=["T5ForConditionalGeneration"]), "T5ForConditionalGeneration cannot be written as GGUF.*known are .*LlamaForCausalLM"),
    "no hidden_size": ("LlamaForCausalLM", without("hidden_size"), "has no hidden_size"),
    "no layers": ("LlamaForCausalLM", with_(num_hidden_layers=0), "has num_hidden_layers 0"),
    "billions of layers": ("LlamaForCausalLM", with_(num_hidden_layers=2_000_000_000), "over 10000"),
    "no experts used": ("MixtralForCausalLM", with_(num_experts_per_tok=None), "has no num_experts_per_tok"),
    "text for a size": ("Qwen2ForCausalLM", with_(intermediate_size="96"), "intermediate_size '96', not a whole number"),
    "negative": ("Qwen2ForCausalLM", with_(vocab_size=-5), "vocab_size '-5', not a whole number"),
    "eps": ("Qwen2ForCausalLM", with_(rms_norm_eps="small"), "rms_norm_eps 'small', not a number"),
    "theta": ("Qwen2ForCausalLM", with_(rope_parameters={"rope_theta": -1.0, "rope_type": "default"}), "rope_theta '-1.0', not a number"),
    "infinite": ("GraniteForCausalLM", with_(residual_multiplier=float("inf")), "residual_multiplier 'inf'"),
    "heads": ("Qwen2ForCausalLM", with_(num_attention_heads=5), "hidden_size 64 is not divided by num_attention_heads 5"),
    "kv heads": ("LlamaForCausalLM", with_(num_key_value_heads=3), "num_attention_heads 4 is not divided by num_key_value_heads 3"),
    "odd heads": ("LlamaForCausalLM", with_(head_dim=15), "heads of size 15"),
    "rope is a number": ("LlamaForCausalLM", with_(rope_scaling=4.0), "rope_scaling '4.0', not an object"),
    "rope type": ("Qwen2ForCausalLM", with_(rope_parameters=LLAMA3), "rope type 'llama3' cannot be written.*llama.cpp's qwen2 has default, linear, dynamic, yarn"),
    "no factor": ("LlamaForCausalLM", with_(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "rope factor 'None'"),
    "yarn's attention": ("Qwen2ForCausalLM", with_(rope_parameters={**YARN, "attention_factor": 1.0}), "attention factor 1 cannot be written.*llama.cpp computes 1.139"),
    "a context of one": ("Phi3ForCausalLM", with_(rope_parameters=longrope(8), original_max_position_embeddings=1), "has original_max_position_embeddings 1"),
    "few long factors": ("Phi3ForCausalLM", with_(rope_parameters=longrope(7)), "7 long factors, not 8"),
    "no long factors": ("Phi3ForCausalLM", with_(rope_parameters={"rope_type": "su", "rope_theta": 1e4}), "no long factors, not 8"),
    "sliding rope": ("Gemma3ForCausalLM", with_(rope_parameters={"full_attention": {}, "sliding_attention": LINEAR}), "rope type 'linear' cannot be written"),
    "no-rope layers": ("SmolLM3ForCausalLM", with_(no_rope_layers=[1, 0, 1, 0, 1]), "own no_rope_layers cannot be written"),
    "no-rope interval": ("SmolLM3ForCausalLM", with_(no_rope_layers=None, no_rope_layer_interval=2), "own no_rope_layers cannot be written"),
    "layer types": ("Gemma3ForCausalLM", with_(layer_types=["full_attention", "sliding_attention"] * 3), "'full_attention' for every 6th layer"),
    "layer types are text": ("Gemma2ForCausalLM", with_(layer_types="full"), "own layer_types cannot be written"),
    "activation": ("LlamaForCausalLM", with_(hidden_act="gelu"), "hidden_act gelu cannot be written as GGUF: llama.cpp computes llama with silu"),
    "experts' weights": ("Qwen3MoeForCausalLM", with_(norm_topk_prob=False), "norm_topk_prob False cannot be written as GGUF: llama.cpp computes qwen3moe with True"),
    "scale of queries": ("Gemma3ForCausalLM", with_(query_pre_attn_scalar=128), "query_pre_attn_scalar 128 cannot be written.*with 32"),
    "soft cap": ("Gemma3ForCausalLM", with_(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0 cannot be written.*with none"),
    "no soft cap": ("Gemma2ForCausalLM", with_(final_logit_softcapping=None), "has no final_logit_softcapping"),
    "gemma's theta": ("Gemma2ForCausalLM", with_(rope_parameters={"rope_theta": 1e6, "rope_type": "default"}), "rope_theta 1000000.0 cannot be written"),
    "partial rope": ("LlamaForCausalLM", with_(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_refused(case: str) -> None:
    name, mutate, words = CONFIGS[case]
    config = tiny_config(name)
    mutate(config)
    with pytest.raises(QuantryError, match=words) as caught:
        targets(config, infos(tiny_shapes(name)))
    assert isinstance(caught.value, ConfigError | UnknownNameError)
    assert "\n" not in str(caught.value)


FIRST = "model.layers.0."
TENSORS: dict[str, tuple[str, Callable[[dict[str, Any]], None], str]] = {
    "unmapped": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.sinks", 4), "self_attn.sinks has no place in llama.cpp's llama"),
    "of another kind": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_norm.weight", 16), "q_norm.weight has no place in llama.cpp's llama"),
    "bias": ("Qwen3ForCausalLM", shaped(f"{FIRST}self_attn.o_proj.bias", 64), "o_proj.bias .* has no place in llama.cpp's qwen3"),
    "bias of one layer": ("Qwen3ForCausalLM", shaped(f"{FIRST}self_attn.q_proj.bias", 128), "nothing for blk.1.attn_q.bias"),
    "head's bias": ("LlamaForCausalLM", shaped("lm_head.bias", 672), "lm_head.bias .* has no place"),
    "scales": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_proj.weight_scale", 1), "weight_scale has no place"),
    "no norm": ("LlamaForCausalLM", without("model.norm.weight"), "nothing for output_norm.weight"),
    "no head": ("LlamaForCausalLM", without("lm_head.weight"), "nothing for output.weight"),
    "no key": ("LlamaForCausalLM", without("model.layers.1.self_attn.k_proj.weight"), "nothing for blk.1.attn_k.weight"),
    "layer too many": ("LlamaForCausalLM", shaped("model.layers.2.self_attn.k_proj.weight", 32, 64), "layer 2 .*config.json has 2 layers"),
    "vocabulary": ("LlamaForCausalLM", shaped("model.embed_tokens.weight", 700, 64), "embed_tokens.weight is 700 x 64, and by config.json it would be 672 x 64"),
    "few rows": ("Gemma3ForCausalLM", shaped("model.embed_tokens.weight", 700, 64), "embed_tokens.weight is 700 x 64"),
    "queries": ("Qwen2ForCausalLM", shaped(f"{FIRST}self_attn.q_proj.weight", 128, 64), "q_proj.weight is 128 x 64, .* 64 x 64"),
    "flat": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_proj.weight", 4096), "q_proj.weight is 4096, .* 64 x 64"),
    "a number": ("LlamaForCausalLM", shaped("model.norm.weight"), "model.norm.weight has an impossible shape"),
    "empty": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_proj.weight", 64, 0), "impossible shape: 64 x 0"),
    "billions of empty experts": ("Qwen3MoeForCausalLM", shaped(f"{FIRST}mlp.experts.gate_up_proj", 2_000_000_000, 0, 64), "impossible shape for 2 matrices: 2000000000 x 0 x 64"),
    "expert missing": ("MixtralForCausalLM", without(f"{FIRST}block_sparse_moe.experts.3.w2.weight"), "ffn_down_exps.weight is made of 3 tensors .*4 experts"),
    "expert too many": ("MixtralForCausalLM", shaped(f"{FIRST}block_sparse_moe.experts.4.w2.weight", 64, 96), "made of 5 tensors .*4 experts"),
    "expert twice": ("Qwen3MoeForCausalLM", shaped(f"{FIRST}mlp.experts.down_proj", 4, 64, 32), "made of 8 tensors .*4 experts"),
    "expert of another size": ("MixtralForCausalLM", shaped(f"{FIRST}block_sparse_moe.experts.1.w2.weight", 64, 32), "experts.1.w2.weight is 64 x 32, .* 64 x 96"),
    "odd stack": ("GraniteMoeForCausalLM", shaped(f"{FIRST}block_sparse_moe.input_linear.weight", 4, 193, 64), "input_linear.weight has an impossible shape for 2 matrices: 4 x 193 x 64"),
    "number of stacked experts": ("GraniteMoeForCausalLM", shaped(f"{FIRST}block_sparse_moe.input_linear.weight", 5, 192, 64), "made of 5 tensors .*4 experts"),
    "a stack of something else": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_norm.weight", 2, 4, 8), "q_norm.weight has no place"),
    "a stack of queries": ("LlamaForCausalLM", shaped(f"{FIRST}self_attn.q_proj.weight", 4, 16, 64), "q_proj.weight.* made of 4 tensors|made of 4 tensors .*q_proj"),
    "a bias in a stack": ("GraniteMoeForCausalLM", shaped(f"{FIRST}block_sparse_moe.input_linear.bias", 4, 192), "input_linear.bias .* has no place"),
    "far layer": ("LlamaForCausalLM", shaped(f"model.layers.{'9' * 5000}.self_attn.q_proj.weight", 64, 64), "has no place"),
    "two names": ("LlamaForCausalLM", shaped("language_model.model.norm.weight", 64), "output_norm.weight is made of 2 tensors"),
    "own head": ("Gemma2ForCausalLM", shaped("lm_head.weight", 800, 64), "head of its own cannot be written"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_refused(case: str) -> None:
    name, mutate, words = TENSORS[case]
    config, shapes = tiny_config(name), tiny_shapes(name)
    mutate(shapes)
    if case == "own head":
        config["tie_word_embeddings"] = False
    with pytest.raises(QuantryError, match=words) as caught:
        targets(config, infos(shapes))
    assert isinstance(caught.value, ConfigError if case == "own head" else CheckpointError)
    assert "\n" not in str(caught.value)


ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "yarn", "llama3", "longrope", "su", "dynamic"])},
    optional={
        key: st.floats() | st.integers() | st.none() | st.text(max_size=3) | st.lists(st.floats(), max_size=8)
        for key in ("rope_theta", "factor", "original_max_position_embeddings", "high_freq_factor", "beta_fast", "mscale", "mscale_all_dim", "attention_factor", "long_factor", "short_factor")
    },
)  # fmt: skip
ODD: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers(-2, 7) | st.integers() | st.floats() | st.text(max_size=6) | ROPES
)
ODD |= st.lists(ODD, max_size=3) | st.dictionaries(st.sampled_from(["full_attention", "sliding_attention"]), ODD)
FIELDS = [
    "architectures", "text_config", "rope_scaling", "rope_parameters", "rope_theta", "partial_rotary_factor", "head_dim",
    "is_causal", "sliding_window", "layer_types", "num_local_experts", "num_experts", "tie_word_embeddings",
    "original_max_position_embeddings", "rope_freqs", "file_type", "queries", "full_rope", "sliding_window_pattern",
    *table()["fields"]["counts"], *table()["fields"]["numbers"],
]  # fmt: skip


@examples(300)
@given(st.sampled_from(known()), st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
def test_odd_configs_end_in_targets_or_one_error(name: str, edits: dict[str, Any]) -> None:
    config = {**tiny_config(name), **edits}
    try:
        found, _ = targets(config, infos(tiny_shapes(name)))
        writer = gguf.GGUFWriter(None, family(config).architecture)
        describe(writer, Path("/nowhere"), config, found, "tiny", 1)
        for entry in writer.kv_data[0].values():
            writer._pack_val(entry.value, entry.type, add_vtype=True, sub_type=entry.sub_type)
        notes(config)
    except QuantryError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 700


CARDS = {
    "yaml": ({"README.md": "---\n{: [\n---\n"}, "README.md, .* of tiny cannot be put into GGUF"),
    "not text": ({"README.md": "---\nname: \udcff\n---\n"}, "cannot be put into GGUF"),
    "sampling": ({"generation_config.json": '{"top_k": "many"}'}, "cannot be put into GGUF"),
    "pooling file": ({"modules.json": POOLING["modules.json"]}, "1_Pooling/config.json, which is missing"),
    "pooling": ({**POOLING, "1_Pooling/config.json": '{"pooling_mode": "max"}'}, "pooling that llama.cpp does not know"),
    "pooling elsewhere": ({"modules.json": POOLING["modules.json"].replace("1_Pooling", "../1_Pooling"), "../1_Pooling/config.json": POOLING["1_Pooling/config.json"]}, "which is missing"),
    "modules": ({"modules.json": "{"}, "modules.json is damaged: it is not JSON"),
    "modules that are none": ({"modules.json": "{}"}, "modules.json is damaged: it holds a dict, not a list"),
    "pooling that is none": ({**POOLING, "1_Pooling/config.json": "[]"}, "config.json is damaged: it holds a list"),
}  # fmt: skip


@pytest.mark.parametrize("case", CARDS)
def test_small_files_are_refused(tmp_path: Path, case: str) -> None:
    files, words = CARDS[case]
    folder = tmp_path / "tiny"
    for name, text in {"config.json": "{}", **files}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text.encode(errors="surrogateescape"))
    config = tiny_config("Qwen3ForCausalLM")
    found, _ = targets(config, infos(tiny_shapes("Qwen3ForCausalLM")))
    with pytest.raises(ConfigError, match=words) as caught:
        describe(gguf.GGUFWriter(None, "qwen3"), folder, config, found, "tiny", 1)
    assert "\n" not in str(caught.value)


def test_numbers_in_a_card_become_text(converted: Path, tmp_path: Path) -> None:
    """YAML reads `version: 1.5` as a number, which the gguf library cannot write."""
    folder = tmp_path / "some-model"
    shutil.copytree(converted / "LlamaForCausalLM", folder)
    (folder / "README.md").write_text(CARD)
    made = {key: value for key, _, value in described(folder, tmp_path / "made.gguf", 1)}
    assert made["general.version"] == "1.5"
    assert made["general.base_model.0.name"] == "Small 7B"
    assert made["general.tags"] == ["tiny", "test", "text-generation"]


def test_no_torch_is_needed() -> None:
    names = "import sys; from quantry.llamacpp import families, metadata, tensor_map; import gguf"
    run = subprocess.run([sys.executable, "-c", f"{names}; print([n for n in ('torch', 'transformers') if n in sys.modules])"], capture_output=True, text=True, check=True)  # fmt: skip
    assert run.stdout.strip() == "[]"

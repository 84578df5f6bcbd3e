"""The memory model against the truth: vLLM on an H200, llama.cpp's own log, published cache sizes, plain restatements."""

import json
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from itertools import product
from math import ceil, prod
from pathlib import Path
from typing import Any

import pytest

import quantry
from command import command
from demo_artefacts import gguf_in, quantized_demo
from depth import DEEP, rounds, sampled
from planning.llamacpp_buffers import ask_all
from quantry.devices import Device
from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import engines
from quantry.errors import ConfigError, QuantryError
from quantry.models.anatomy import dissect
from quantry.models.attention import kv_layers
from quantry.models.reader import demo_folder, open_checkpoint
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.memory.buffers import block_width, ggml_batch, widths
from quantry.planning.memory.footprint import footprint, host_memory, kv_capacity, max_concurrency, most_layers, room
from quantry.planning.memory.job import job_cost
from quantry.planning.memory.kv_cache import Sequences, layers_of, pool
from quantry.planning.memory.llamacpp_graph import GraphBatch, Node, buffer_bytes, lay_out
from quantry.planning.memory.stages import stages
from quantry.planning.memory.terms import cache_type, terms
from quantry.planning.memory.weights import stored, weights_bytes
from quantry.planning.models import from_config, known_models, open_model
from quantry.quantizing.recipe import Preset, Recipe, Rule, presets
from quantry.types import Checkpoint, Footprint, Grid, Scheme, Workload
from shared import shared
from tiny_models import write_model

GIB, MIB = 1 << 30, 1 << 20
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
WITHIN = 0.02


def recipe(name: str, form: str | None = None) -> Recipe:
    """A recipe of a preset, whether it can be made here or not."""
    found = presets()[name]
    return Recipe(found, form or found.formats[0])


def device(name: str) -> Device:
    return parse(name).device


def shape(layers: int = 4, **fields: Any) -> Checkpoint:
    """A Llama by its shape."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
        "max_position_embeddings": 4096, "tie_word_embeddings": False, **fields,
    }  # fmt: skip
    return from_config(config, "shape")


def needed(checkpoint: Checkpoint, made: Recipe | None, engine: str, load: Workload, **place: Any) -> Footprint:
    return footprint(Deployment(checkpoint, made, engine, **place), load)


def deployment(checkpoint: Checkpoint, name: str, engine: str, where: str, **rest: Any) -> Deployment:
    return Deployment(checkpoint, recipe(name), engine, device(where), **rest)


# ---- vLLM on an H200 ----

TABLE = [  # scheme, format, GiB of weights, KV tokens: vLLM 0.26, context 4096, 0.90 of an H200, 2026-11-15
    ("bf16", "safetensors", 14.96, 892_240),
    ("fp8-dynamic", "compressed-tensors", 8.50, 945_456),
    ("w8a8", "compressed-tensors", 8.46, 945_712),
    ("w4a16", "compressed-tensors", 5.32, 971_472),
    ("w4a16-asym", "awq", 5.44, 970_448),
]
OFFLINE = Settings(tokens=16384, sequences=128, utilization=0.90)  # what LLM() takes on such a device


@pytest.mark.parametrize(("name", "form", "weights", "tokens"), TABLE)
def test_vllm_on_an_h200(name: str, form: str, weights: float, tokens: int) -> None:
    """Weights and the cache that is left, for every scheme of the table."""
    found = Deployment(open_model("llama-3-8b"), recipe(name, form), "vllm", device("H200"), "0.26", settings=OFFLINE)
    assert footprint(found, Workload(4096)).weights == pytest.approx(weights * GIB, rel=WITHIN)
    assert kv_capacity(found, 4096) == pytest.approx(tokens, rel=WITHIN)


@pytest.mark.parametrize(("name", "form", "weights", "tokens"), TABLE)
def test_peak_activation_is_what_vllm_measured(name: str, form: str, weights: float, tokens: int) -> None:
    """1.69 to 1.72 GiB in all five."""
    found = Deployment(open_model("llama-3-8b"), recipe(name, form), "vllm", device("H200"), "0.26", settings=OFFLINE)
    assert 1.68 <= footprint(found, Workload(4096)).activations / GIB <= 1.73


# Shapes, presets and GiB that another run of vLLM 0.26 on an H200 logged as "Model loading took" (2026-11-15); nothing
# was fitted to them.
ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
WIDE = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 8, "num_attention_heads": 64}
HELD_OUT: list[tuple[Mapping[str, Any], str, str, float]] = [
    ({}, "bf16", "safetensors", 15.0),
    ({}, "fp8-dynamic", "compressed-tensors", 8.55),
    ({}, "w8a8", "compressed-tensors", 8.52),
    ({}, "w4a16", "compressed-tensors", 5.36),
    ({}, "w8a16", "compressed-tensors", 8.62),
    ({}, "w4a16-asym", "awq", 5.49),
    (ONE_B, "bf16", "safetensors", 2.81),
    (ONE_B, "w4a16", "compressed-tensors", 1.47),
    (WIDE, "bf16", "safetensors", 16.7),
    (WIDE, "w4a16", "compressed-tensors", 7.24),
]


@pytest.mark.parametrize(("changes", "name", "form", "weights"), HELD_OUT)
def test_weights_that_vllm_logged_elsewhere(changes: Mapping[str, Any], name: str, form: str, weights: float) -> None:
    checkpoint = from_config({**known_models()["llama-3.1-8b"].config, **changes}, "made")
    found = needed(checkpoint, recipe(name, form), "vllm", Workload(4096), device=device("H200"), version="0.26")
    assert found.weights == pytest.approx(weights * GIB, rel=WITHIN)


def test_cache_of_a_given_size_holds_what_vllm_said() -> None:
    """9.4 GiB are 76,992 tokens of the 8B shape: 4812 blocks of 16."""
    found = terms("vllm", "0.26", device("H200"))
    layers = [layer for layer in layers_of(open_model("llama-3-8b").config) if layer]
    block = pool(layers, found, cache_type("auto", found, "bf16"), Sequences(16, 1, 1)).per_sequence
    assert int(9.4 * GIB) // block * 16 == 76_992


def test_rotary_table_is_part_of_the_weights() -> None:
    """vLLM reported 14.9889 GiB for Llama-3.1-8B, which is 32 MiB more than its tensors."""
    found = needed(open_model("llama-3.1-8b"), recipe("bf16"), "vllm", Workload(4096), device=device("L40S"))
    assert found.weights / GIB == pytest.approx(14.9889, abs=0.0002)


def test_default_of_vllm_depends_on_version_and_device() -> None:
    cases = {("0.26", "H200"): 8192, ("0.26", "RTX 3090"): 2048, ("0.32", "B200"): 16384, ("0.26", "B200"): 8192,
             ("0.32", "A100 80GB"): 2048}  # fmt: skip
    for (version, name), tokens in cases.items():
        found = needed(shape(), recipe("bf16"), "vllm", Workload(4096), device=device(name), version=version)
        assert any(f"{tokens} tokens" in part for part in found.parts if part.startswith("activations")), (
            version,
            name,
        )


# ---- llama.cpp ----

DEMO_PRESETS = ("gguf-f16", "gguf-q8_0", "gguf-q4_k_m")
ARCHITECTURES = (
    "MixtralForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM", "Qwen2MoeForCausalLM",
)  # fmt: skip
LOADS = list(product(("f16", "q8_0", "q4_0"), ((512, 1, 512), (1024, 1, 1), (512, 3, 3))))
WITHOUT_FLASH = [{"context": context, "outputs": 1, "flash": 0} for context in (512, 1024)]


def write_logs(folder: Path, demo: Mapping[str, Path]) -> None:
    """Asks llama.cpp, in one process, for all buffers that the tests below predict."""
    wishes = [
        {"context": context * sequences, "sequences": sequences, "outputs": outputs, "kv": kv}
        for kv, (context, sequences, outputs) in LOADS
    ]
    asked = dict.fromkeys(DEMO_PRESETS, wishes) | {"without flash": WITHOUT_FLASH}
    folders = {**demo, "without flash": demo["gguf-q8_0"]}
    for name in ARCHITECTURES:
        sizes = {"num_hidden_layers": 7} if "Gemma3" in name else {}
        write_model(folder / "models" / name, name, **sizes, max_position_embeddings=2048)
        quantry.quantize(folder / "models" / name, folder / name, preset="gguf-f16")
        asked[name], folders[name] = [{"context": 2048, "outputs": 1}], folder / name
    answers = ask_all([(gguf_in(folders[name]), wishes) for name, wishes in asked.items()])
    (folder / "logs.json").write_text(json.dumps(dict(zip(asked, answers, strict=True))))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    demo = {name: quantized_demo(tmp_path_factory, name) for name in DEMO_PRESETS}
    return shared(tmp_path_factory, "llamacpp_logs", lambda folder: write_logs(folder, demo))


def logged(logs: Path, name: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((logs / "logs.json").read_text())[name]
    return rows


def predicted(checkpoint: Checkpoint, name: str, kv: str, context: int, sequences: int, outputs: int) -> Footprint:
    return needed(
        checkpoint, recipe(name), "llama.cpp", Workload(context, sequences), kv=kv, device=device("cpu"),
        settings=Settings(outputs=outputs, sequences=sequences),
    )  # fmt: skip


def compute(found: Footprint) -> int:
    return next(size for name, size in found.parts.items() if name.startswith("activations: a batch"))


@pytest.mark.parametrize("name", DEMO_PRESETS)
def test_llamacpp_logs_what_is_predicted(logs: Path, name: str) -> None:
    """Model, KV, compute and output buffers of the demo at several contexts, cache types and numbers of sequences."""
    for (kv, load), row in zip(LOADS, logged(logs, name), strict=True):
        found = predicted(open_checkpoint("demo"), name, kv, *load)
        assert found.weights == row["weights"]
        mapped = row["model"]["CPU_Mapped"]
        assert mapped + row["model"].get("CPU_REPACK", 0) >= found.weights / MIB * (1 - WITHIN)
        if "CPU_REPACK" not in row["model"]:
            assert mapped * MIB == pytest.approx(found.weights, rel=WITHIN)
        assert found.kv_cache / MIB == pytest.approx(row["caches"][0][0], rel=WITHIN), (kv, load)
        assert compute(found) / MIB == pytest.approx(row["compute"]["CPU"], rel=WITHIN), (kv, load)
        assert found.parts["overhead: logits"] / MIB == pytest.approx(row["output"]["CPU"], abs=0.006)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_llamacpp_buffers_of_other_architectures(logs: Path, architecture: str) -> None:
    """Experts, sliding windows, fused projections: cells and buffers are those that llama.cpp logs."""
    (row,) = logged(logs, architecture)
    found = predicted(open_checkpoint(logs / "models" / architecture), "gguf-f16", "f16", 2048, 1, 1)
    assert found.weights == row["weights"]
    assert found.kv_cache / MIB == pytest.approx(sum(cache[0] for cache in row["caches"]), rel=WITHIN, abs=0.011)
    assert compute(found) / MIB == pytest.approx(row["compute"]["CPU"], rel=WITHIN)


def test_llamacpp_without_flash_attention(logs: Path) -> None:
    """All scores of a batch at once: the buffer grows with the context."""
    checkpoint = open_checkpoint("demo")
    found = deployment(checkpoint, "gguf-q8_0", "llama.cpp", "cpu", settings=Settings(flash=False, outputs=1))
    layers = [layer for layer in layers_of(checkpoint.config) if layer]
    for wish, row in zip(WITHOUT_FLASH, logged(logs, "without flash"), strict=True):
        batch = ggml_batch(found, Sequences(wish["context"], 1, 512, 1), layers)
        assert buffer_bytes(batch) / MIB == pytest.approx(row["compute"]["CPU"], rel=WITHIN)


PLAIN = GraphBatch(
    hidden=1024, inner=4096, queries=1024, keys=256, values=256, heads=16, vocabulary=32000, layers=4, tokens=512,
    outputs=1, cells=(4096,),
)  # fmt: skip
LOGGED: list[tuple[dict[str, Any], float]] = [  # MiB, by llama.cpp in xllamacpp 2026.10.11549, nothing allocated
    ({}, 38.02),
    ({"outputs": 512}, 78.52),
    ({"hidden": 2048}, 48.02),
    ({"inner": 8192}, 62.02),
    ({"inner": 1024}, 16.02),
    ({"queries": 2048, "heads": 32}, 38.02),
    ({"keys": 512, "values": 512}, 38.02),
    ({"cells": (8192,)}, 42.02),
    ({"tokens": 256}, 19.01),
    ({"vocabulary": 64000, "outputs": 512}, 141.02),
    ({"flash": False}, 149.01),
    ({"flash": False, "cells": (8192,)}, 285.01),
    ({"rotated": 64}, 38.05),
]


@pytest.mark.parametrize(("changes", "size"), LOGGED)
def test_compute_buffer_of_made_up_shapes(changes: dict[str, Any], size: float) -> None:
    assert buffer_bytes(replace(PLAIN, **changes)) / MIB == pytest.approx(size, abs=0.011)


def test_allocator_takes_the_smallest_hole() -> None:
    """Holes of 128 and 64 bytes: a result of 64 leaves the larger one for a result of 128."""
    inputs = [Node("a", 128), Node("wall", 32), Node("b", 64), Node("end", 32)]
    nodes = [
        Node("x", 32, ("a", "b")),
        Node("small", 64, ("x",)),
        Node("large", 128, ("x",)),
        Node("last", 32, ("small", "large", "wall", "end")),
    ]
    assert lay_out(inputs, nodes) == 128 + 32 + 64 + 32 + 32


@sampled
def test_buffers_that_llamacpp_logged_for_real_shapes() -> None:
    """What benchmarks/llamacpp_memory.py was told for twenty models, and for a real one of 135M, predicted anew."""
    rows = json.loads((RESULTS / "llamacpp_memory.json").read_text())["rows"]
    assert len({row["model"] for row in rows}) == 21
    for row in rows[:: 1 if DEEP else 7]:
        config = open_model("smollm2-135m" if row["model"] == "reference" else row["model"]).config
        made = from_config({**config, "norm_topk_prob": True}, "made")
        found = predicted(made, row["preset"], row["kv"], row["context"], row["sequences"], row["sequences"])
        pairs = {"compute": compute(found), "cache": found.kv_cache, "weights": found.weights}
        for name, size in pairs.items():
            assert size / MIB == pytest.approx(row[name]["logged"], rel=0.002, abs=0.011), (row, name)


def test_tied_head_is_copied_to_a_gpu() -> None:
    """The host keeps the embedding, and the GPU gets it again as the head."""
    found = needed(
        open_model("llama-3.2-1b"), recipe("gguf-q8_0"), "llama.cpp", Workload(4096), device=device("RTX 3060")
    )
    assert found.parts["weights: embedding and head"] == found.parts["weights: embedding and head (host)"] > 0


# ---- the cache ----


def token_bytes(name: str, engine: str = "vllm", kv: str = "auto") -> int:
    """Bytes of one more token in all layers, far behind any window."""
    found = terms(engine, None, device("H100" if engine == "vllm" else "cpu"))
    layers = [layer for layer in layers_of(open_model(name).config) if layer]
    kind = cache_type(kv, found, "bf16")
    return sum(layer.token_bytes(kind) for layer in layers if layer.window is None)


@pytest.mark.parametrize("name", ["num_attention_heads", "num_key_value_heads"])
@pytest.mark.parametrize(
    ("value", "words"),
    [("8", "as '8', not a count"), ([8], "for 1 layers, and has more"), (["8"] * 8, "as '8', not a count")],
)
def test_heads_that_are_none_are_one_line(tmp_path: Path, name: str, value: object, words: str) -> None:
    config = json.loads((demo_folder() / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"config gives {name} {words}"):
        layers_of({**config, name: value})
    (tmp_path / "config.json").write_text(json.dumps({**config, name: value}))
    planned = command("plan", tmp_path, "--gpu", "RTX 4090")
    assert (planned.returncode, len(planned.stderr.splitlines())) == (2, 1), planned.stderr


def test_published_cache_sizes() -> None:
    assert token_bytes("llama-3-8b") == 131_072
    assert token_bytes("llama-3-8b", kv="fp8") == 65_536
    assert token_bytes("llama-3-8b", kv="int8_per_token_head") == 65_536 + 32 * 8 * 2 * 4
    assert token_bytes("llama-3-8b", "llama.cpp", "q8_0") == 131_072 // 2 * 34 // 32
    assert token_bytes("deepseek-v3") == 61 * (512 + 64) * 2  # one latent vector and one rotary key a layer
    gemma = open_model("gemma-3-27b").config  # 62 layers, every sixth full; 16 KV heads of 128; window 1024
    layers = layers_of(gemma)
    assert [layer.window for layer in layers[:6] if layer] == [1024] * 5 + [None]
    assert sum(1 for layer in layers if layer and layer.window is None) == 10
    assert token_bytes("gemma-3-27b") == 10 * 16 * 128 * 2 * 2


@pytest.mark.parametrize("name", list(known_models()))
def test_layers_agree_with_the_anatomy(name: str) -> None:
    """Two ways to the same bytes a token, for every model of the catalogue."""
    config = open_model(name).config
    found = terms("vllm", None, device("H100"))
    kind = cache_type("bfloat16", found, "bf16")
    for group in kv_layers(config):
        mine = [layer for layer in layers_of(config) if layer and layer.kind == group.kind]
        assert len(mine) == group.layers
        assert sum(layer.token_bytes(kind) for layer in mine) == group.bytes_per_token


def test_cache_grows_as_the_layers_say() -> None:
    """Linear for full layers, capped for sliding ones, constant for a state, the same latent vector on every device."""

    def cache(name: str, context: int, concurrency: int = 1, **rest: Any) -> int:
        found = deployment(open_model(name), "bf16", "vllm", "8x H200", **rest)
        return footprint(found, Workload(context, concurrency, prompt=context)).kv_cache

    assert cache("llama-3-8b", 8192) == 2 * cache("llama-3-8b", 4096) == 8192 * 131_072
    assert cache("llama-3-8b", 4096, 7) == 7 * cache("llama-3-8b", 4096)
    assert cache("llama-3-8b", 4097) == (4096 + 16) * 131_072  # a block more
    small = Settings(tokens=2048)
    mistral = [cache("mistral-7b-v0.1", context, settings=small) for context in (16384, 32768)]
    assert mistral[0] == mistral[1] < cache("llama-3-8b", 16384)
    assert cache("deepseek-v3", 4096, tensor_parallel=8) == 8 * cache("deepseek-v3", 4096)
    assert cache("llama-3-8b", 4096, tensor_parallel=8) == cache("llama-3-8b", 4096)
    assert cache("llama-3-8b", 4096, tensor_parallel=16) == 2 * cache("llama-3-8b", 4096)  # 8 heads on 16 devices


def test_hybrid_cache_of_vllm_pads_groups() -> None:
    """Gemma 3 27B has 52 sliding and 10 full layers: groups of 10 share pages, so six groups of sliding layers."""
    found = deployment(open_model("gemma-3-27b"), "bf16", "vllm", "H200", settings=Settings(tokens=1024))
    page = 16 * 16 * 128 * 2 * 2
    full, window = ceil(32768 / 16), ceil((1024 - 1 + 2 * 1024) / 16) + 1
    cache = footprint(found, Workload(32768)).kv_cache
    assert cache == 10 * page * (full + 6 * window)


def test_hybrid_cache_of_vllm_takes_the_larger_group_where_kinds_are_nearly_even() -> None:
    """12 sliding and 13 full layers: 13 of each, where groups of 12 would make two of the full ones."""
    kinds = ["sliding_attention"] * 12 + ["full_attention"] * 13
    checkpoint = shape(25, layer_types=kinds, sliding_window=128, head_dim=64)
    found = deployment(checkpoint, "bf16", "vllm", "H200", settings=Settings(tokens=64))
    page = 16 * 4 * 64 * 2 * 2
    cache = footprint(found, Workload(4096)).kv_cache
    assert cache == 13 * page * (ceil(4096 / 16) + ceil((127 + 128) / 16) + 1)


def test_llamacpp_slides_only_where_it_knows_how() -> None:
    """A Mistral is a Llama to llama.cpp, which keeps all its tokens; a Gemma slides, with room for a batch."""
    mistral = deployment(open_model("mistral-7b-v0.1"), "gguf-q8_0", "llama.cpp", "cpu")
    assert footprint(mistral, Workload(32768)).kv_cache == 32768 * 131_072
    gemma = deployment(open_model("gemma-3-1b"), "gguf-q8_0", "llama.cpp", "cpu")
    each = 256 * 2 * 2  # one KV head of 256
    assert footprint(gemma, Workload(16384)).kv_cache == each * (4 * 16384 + 22 * 1024)


# ---- weights ----


@sampled
def test_demo_is_what_a_dry_run_says() -> None:
    """The bytes of every preset, in every format of it."""
    checkpoint = open_checkpoint("demo")
    pairs = [(preset, form) for preset in presets().values() for form in preset.formats]
    types = {(form, preset.scheme.static is None): (preset, form) for preset, form in pairs}
    for preset, form in pairs if DEEP else types.values():
        said = quantry.quantize("demo", "out", preset=preset.name, format=form, dry_run=True)
        assert weights_bytes(checkpoint, Recipe(preset, form)) == said.bytes, (preset.name, form)
    assert weights_bytes(checkpoint, None) == dissect(checkpoint).bytes


def restated(checkpoint: Checkpoint, grid: Grid, form: str) -> int:
    """Each tensor by itself: codes, scales, zero points and what a format adds."""
    total = 0
    for tensor in checkpoint.tensors:
        linear = tensor.name.endswith("_proj.weight")
        if not linear or grid.is_cast:
            total += prod(tensor.shape) * 2
            continue
        rows, columns = tensor.shape
        groups = rows * columns // grid.block[1] if grid.block[1] else rows
        codes = (
            rows * ceil(columns * grid.bits / 32) * 4
            if form == "compressed-tensors"
            else rows * columns * grid.bits // 8
        )
        if form == "compressed-tensors" and (grid.kind == "e4m3" or (grid.bits == 8 and not grid.block[1])):
            total += rows * columns + groups * 2
        elif form == "compressed-tensors":
            zeros = 0 if grid.symmetric else ceil(rows * grid.bits / 32) * 4 * (groups // rows)
            total += codes + groups * 2 + 16 + zeros
        elif form == "gptq":
            total += codes + groups * 2 + groups * grid.bits // 8 + columns * 4
        else:
            total += codes + groups * 2 + groups // 2
    return total


@sampled
def test_weights_of_random_shapes_and_schemes() -> None:
    """Two hundred of them, against a plain sum over the tensors."""
    drawn = random.Random(0)
    for _ in range(rounds(200)):
        heads, size = drawn.choice((4, 8, 16)), drawn.choice((32, 64, 128))
        checkpoint = shape(
            drawn.randint(1, 6), hidden_size=128 * drawn.randint(1, 6), intermediate_size=128 * drawn.randint(1, 9),
            num_attention_heads=heads, num_key_value_heads=heads // drawn.choice((1, 2, 4)), head_dim=size,
            vocab_size=drawn.randint(100, 9000), tie_word_embeddings=drawn.random() < 0.5,
        )  # fmt: skip
        form = drawn.choice(("compressed-tensors", "gptq", "awq"))
        bits = 4 if form == "awq" else drawn.choice((4, 8)) if form == "gptq" else drawn.choice((2, 3, 4, 8))
        group = drawn.choice((32, 64, 128))
        grid = Grid("int", bits, (1, group), symmetric=drawn.random() < 0.5, scale="bf16")
        if form == "compressed-tensors" and drawn.random() < 0.3:
            grid = Grid("e4m3", 8, (1, 0))
        if grid.bits == 8 and grid.kind == "int":
            grid = replace(grid, symmetric=True)
        try:
            found = weights_bytes(checkpoint, Recipe(Preset("made", "", Scheme(grid), (form,)), form))
        except QuantryError as error:  # 128 columns of a head do not fit every group
            assert "divided" in error.problem or "multiple" in error.problem, error
            continue
        assert found == restated(checkpoint, grid, form), (checkpoint.config, grid, form)


def test_rules_and_equal_blocks_give_the_same_sum() -> None:
    """A rule for one block is counted once; without rules blocks are divided once and counted often."""
    config = {**known_models()["qwen3-30b-a3b"].config, "num_hidden_layers": 3, "num_experts": 16}
    checkpoint = from_config(config, "made")
    plain, kept = recipe("w4a16"), recipe("bf16")
    ruled = replace(plain, rules=(Rule("*.layers.0.*", None),))
    saved = weights_bytes(checkpoint, plain)
    first = [
        tensor for tensor in checkpoint.tensors if ".layers.0." in tensor.name and tensor.name.endswith("_proj.weight")
    ]
    bits = sum(tensor.nbytes - (tensor.numel // 2 + tensor.numel // 128 * 2 + 16) for tensor in first)
    assert weights_bytes(checkpoint, ruled) == saved + bits
    assert weights_bytes(checkpoint, kept) == sum(tensor.nbytes for tensor in checkpoint.tensors)


def test_drafts_are_stored_but_not_loaded() -> None:
    """The MTP heads of DeepSeek V3 are 14B parameters that an engine leaves on the disk."""
    checkpoint = open_model("deepseek-v3")
    found = needed(checkpoint, recipe("bf16"), "vllm", Workload(4096), device=device("H200"))
    made = found.parts["weights: rotary table"] + found.parts["weights: second form of MLA"]
    layers = stored(checkpoint, recipe("bf16"))
    drafts = sum(layers.size(weight) for weight in layers.outside if weight.part == "MTP heads")
    assert drafts > 20 * GIB
    assert found.weights - made == layers.bytes - drafts


# ---- several devices ----


REPEATED = {  # bytes of quantized layers that every device has: shapes, or scales of layers that are cut along inputs
    "bf16": 0, "w4a16": 560 * 16, "w4a16-asym": 560 * 16, "w3a16": 560 * 16, "nvfp4": 560 * 4, "fp8-block": 0,
    "fp8-dynamic": 80 * 2 * 8192 * 4, "w8a8": 80 * 2 * 8192 * 4,
}  # fmt: skip


@pytest.mark.parametrize("name", list(REPEATED))
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_tensor_parallel_shares_the_weights(name: str, devices: int) -> None:
    """What is cut adds up again; what is not (norms, the rotary table, some scales) is on every device."""
    checkpoint = open_model("llama-3.1-70b")
    one = needed(checkpoint, recipe(name), "vllm", Workload(4096), device=device("H100"))
    many = needed(checkpoint, recipe(name), "vllm", Workload(4096), device=device("H100"), tensor_parallel=devices)
    norms = (80 * 2 + 1) * 8192 * 2
    each = REPEATED[name] + norms + one.parts["weights: rotary table"]
    assert many.weights == one.weights + (devices - 1) * each
    assert many.parts["weights: embedding and head"] == one.parts["weights: embedding and head"]


def test_tensor_parallel_repeats_kv_heads_and_pads_the_vocabulary() -> None:
    wide = shape(num_attention_heads=16, num_key_value_heads=4, head_dim=64, vocab_size=32001)

    def weights(devices: int) -> Footprint:
        return needed(wide, recipe("bf16"), "vllm", Workload(512), device=device("H100"), tensor_parallel=devices)

    matrices = 4 * 2 * 1024 * 4 * 64 * 2  # k and v of four layers
    cut = {devices: weights(devices).parts["weights: layers in 16 bit"] for devices in (4, 8)}
    norms = 9 * 1024 * 2
    assert cut[8] - cut[4] == matrices + 4 * norms
    assert weights(1).parts["weights: embedding and head"] == 2 * 32064 * 1024 * 2


def test_pipeline_parallel_shares_layers_as_vllm_does() -> None:
    """30 layers in four stages are 7, 8, 8, 7; the ends have embedding and head besides."""
    checkpoint = shape(30)
    found = deployment(checkpoint, "bf16", "vllm", "4x H100", pipeline_parallel=4)
    assert [(stage.layers, stage.embedding, stage.head) for stage in stages(found, 30)] == [
        (7, True, False),
        (8, False, False),
        (8, False, False),
        (7, False, True),
    ]
    one = needed(checkpoint, recipe("bf16"), "vllm", Workload(4096), device=device("H100"))
    four = needed(checkpoint, recipe("bf16"), "vllm", Workload(4096), device=device("H100"), pipeline_parallel=4)
    tables = one.parts["weights: rotary table"]
    assert four.weights == one.weights + 3 * tables
    assert four.kv_cache == one.kv_cache


def test_layers_that_fit_on_a_gpu() -> None:
    """As many as fit and not one more; what is not there is with the host."""
    found = deployment(open_model("llama-3.1-70b"), "gguf-q4_k_m", "llama.cpp", "RTX 3090")
    load = Workload(8192)
    count = most_layers(found, load)
    assert 0 < count < 81
    fits, more = (footprint(replace(found, offload_layers=number), load) for number in (count, count + 1))
    assert fits.per_device <= room(found) < more.per_device
    assert fits.total - fits.per_device == host_memory(fits)
    none, whole = (footprint(replace(found, offload_layers=number), load) for number in (0, 81))
    assert none.weights == fits.weights == whole.weights == weights_bytes(found.checkpoint, found.recipe)
    assert none.kv_cache == fits.kv_cache == whole.kv_cache
    small = deployment(open_model("llama-3.2-1b"), "gguf-q4_k_m", "llama.cpp", "RTX 3090")
    assert most_layers(small, load) == 17


def test_the_head_is_the_first_that_a_gpu_gets() -> None:
    """Then the last layer, and so on: as -ngl counts them."""
    found = deployment(open_model("llama-3.1-8b"), "gguf-q8_0", "llama.cpp", "RTX 3090")
    parts = [footprint(replace(found, offload_layers=count), Workload(512)).parts for count in range(34)]
    layer = parts[0]["weights: quantized layers (host)"] // 32
    for count, seen in enumerate(parts):
        assert seen.get("weights: quantized layers", 0) == max(0, count - 1) * layer
        assert ("weights: embedding and head" in seen) == (count > 0)


def test_capacity_and_footprint_belong_together() -> None:
    """A device with memory for the footprint of a load holds it, and one with a little less does not."""
    for engine, name in (("vllm", "w4a16"), ("llama.cpp", "gguf-q4_k_m"), ("tensorrt-llm", "fp8-dynamic")):
        found = deployment(
            open_model("llama-3-8b"), name, engine, "RTX 4090", settings=Settings(sequences=16, tokens=512)
        )
        load, engine_terms = Workload(4096, 8, prompt=4096), found.terms
        kept_free = footprint(found, load).kv_cache * (1 / engine_terms.cache_share - 1)
        filled = footprint(found, load).per_device + kept_free + engine_terms.margin_mib * MIB
        least = int(filled / engine_terms.utilization)
        for size, fits in ((least + MIB, True), (least - MIB, False)):
            tried = replace(found, device=replace(found.device, usable=size))
            assert (max_concurrency(tried, 4096) >= 8) == fits, (engine, size)


def test_parts_are_the_whole() -> None:
    """Every term is named, under every engine and on every kind of device."""
    for engine in engines():
        name = "gguf-q4_k_m" if engine in ("llama.cpp", "ollama") else "bf16"
        for where in ("RTX 4090", "cpu", "M2 16GB"):
            found = needed(open_model("qwen2.5-7b"), recipe(name), engine, Workload(2048, 2), device=device(where))
            assert sum(found.parts.values()) == found.total > 0
            assert found.per_device <= found.total


# ---- terms ----


def test_every_term_has_a_source_and_a_date() -> None:
    data = tomllib.loads(files("quantry.planning.memory").joinpath("terms.toml").read_text(encoding="utf-8"))
    rows = [row for value in data.values() for row in (value if isinstance(value, list) else [value])]
    rows += [change for row in rows for change in row.get("changes", ())]
    assert all(row.get("source") and row.get("date") for row in rows)


@pytest.mark.parametrize("name", engines())
def test_every_constant_of_an_engine_has_a_source_and_a_date(name: str) -> None:
    table = engines()[name].memory
    rows = [table, *(row for key in ("changes", "loads", "kv_types") for row in table.get(key, ()))]
    assert all(row.get("source") and row.get("date") for row in rows)


def test_widest_place_of_a_mixture() -> None:
    """Tokens go to eight experts of 768: both buffers of vLLM's kernels are as wide as the hidden size or more."""
    sizes = widths(open_model("qwen3-30b-a3b").config)
    assert block_width(sizes, 1) == 3 * 2048 + 8 * (2048 + 2048)
    assert block_width(widths(open_model("llama-3-8b").config), 1) == 3 * 4096 + 3 * 14336
    assert block_width(widths(open_model("llama-3-8b").config), 4) == 3 * 4096 + 3 * 14336 // 4


def test_job_needs_about_what_was_measured() -> None:
    """Memory of the streaming and GPU benchmarks; the disk holds the result and no more."""
    wide = shape(4, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
    streamed = json.loads((RESULTS / "streaming.json").read_text())
    for name in ("fp8-dynamic", "w4a16"):
        cost = job_cost(wide, recipe(name))
        for layers in (4, 8):
            assert cost.ram == pytest.approx(streamed[f"{name}, {layers} layers"]["peak_anonymous_bytes"], rel=0.1)
        assert cost.vram == 0
        assert cost.disk == weights_bytes(wide, recipe(name))
        peak = json.loads((RESULTS / "gpu_quantize.json").read_text())[name]["peak_gpu_bytes"]
        gpu = job_cost(open_model("llama-3-8b"), recipe(name), "cuda")
        assert gpu.vram - 500 * MIB == pytest.approx(peak, rel=0.1)


def test_job_is_never_much_smaller_than_measured() -> None:
    measured = json.loads((RESULTS / "job_memory.json").read_text())["peak_anonymous_bytes"]
    for name, rows in measured.items():
        hidden, inner = (int(size) for size in name.split(",")[0].split(" x "))
        vocabulary = int(name.split()[-1]) if "vocabulary" in name else 4096
        made = shape(1, hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary, num_attention_heads=32)
        for preset, peak in rows.items():
            assert job_cost(made, recipe(preset)).ram > 0.9 * peak, (name, preset)


# ---- bad input ----

BAD: list[tuple[str, Callable[[], object]]] = [
    ("context", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100"), Workload(0))),
    ("context", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100"), Workload("4096"))),  # type: ignore[arg-type]
    ("concurrency", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100"), Workload(4096, 0))),
    ("concurrency", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100"), Workload(4096, -1))),
    ("context", lambda: kv_capacity(deployment(shape(), "bf16", "vllm", "H100"), 0)),
    ("heads", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100", tensor_parallel=3), Workload(512))),
    ("KV heads", lambda: footprint(deployment(shape(num_attention_heads=24, num_key_value_heads=6, head_dim=64), "bf16", "vllm", "H100", tensor_parallel=4), Workload(512))),
    ("tensor parallel", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100", tensor_parallel=0), Workload(512))),
    ("2817 outputs", lambda: footprint(deployment(shape(intermediate_size=2817), "bf16", "vllm", "H100", tensor_parallel=2), Workload(512))),
    ("groups", lambda: footprint(deployment(shape(intermediate_size=2816), "w4a16", "vllm", "H100", tensor_parallel=4), Workload(512))),
    ("pipeline", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100", pipeline_parallel=5), Workload(512))),
    ("offload", lambda: footprint(deployment(shape(), "gguf-q8_0", "llama.cpp", "RTX 3090", offload_layers=6), Workload(512))),
    ("offload", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100", offload_layers=2), Workload(512))),
    ("offload", lambda: footprint(deployment(shape(), "gguf-q8_0", "llama.cpp", "cpu", offload_layers=2), Workload(512))),
    ("KV cache of type", lambda: footprint(deployment(shape(), "bf16", "vllm", "H100", kv="int8"), Workload(512))),
    ("KV cache of type", lambda: footprint(deployment(shape(), "gguf-q8_0", "llama.cpp", "cpu", kv="fp8"), Workload(512))),
    ("unknown engine", lambda: footprint(deployment(shape(), "bf16", "vlm", "H100"), Workload(512))),
    ("utilization", lambda: Settings(utilization=1.5)),
    ("tokens", lambda: Settings(tokens=0)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), BAD)
def test_bad_input_is_told_in_one_line(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(QuantryError) as caught:
        call()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.fix


def test_context_above_the_models_own_is_possible() -> None:
    found = needed(open_model("llama-3-8b"), recipe("bf16"), "vllm", Workload(16384), device=device("H100"))
    assert found.kv_cache == 16384 * 131_072

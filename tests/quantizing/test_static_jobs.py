"""Jobs that store scales of inputs and of the KV cache: what is in the files is what the model itself shows."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

import quantry
from command import command
from killed_jobs import contents
from linear_inputs import inputs_of
from quantizing.written_llama import CONFIG, llama_shapes
from quantizing.written_llama import write_model as write_plain
from quantry.blockwise.walk import run
from quantry.errors import QuantryError
from quantry.models.reader import demo_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration.text import load
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.recipe import presets
from quantry.quantizing.sources import open_source
from tiny_models import write_model

pytestmark = pytest.mark.usefixtures("exact_store")
TEXT: dict[str, Any] = {"samples": 8, "length": 64}
DEMO = demo_folder()
STATIC = [preset.name for preset in presets().values() if preset.scheme.static]
LARGEST = {"fp8-static": 448, "w8a8-static": 127, "nvfp4-w4a4": 1}
MOE = "Qwen3MoeForCausalLM"


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("moe")
    write_model(folder, MOE)
    return folder


def windows(source: Path) -> tuple[tuple[int, ...], ...]:
    """What a job reads."""
    return load(None, load_tokenizer(source), context=512, **TEXT).tokens


def logits(folder: Path, tokens: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([one.log_softmax(-1) for _, one in run(open_source(folder), tokens, batch=8)])


def lost(wanted: Tensor, found: Tensor) -> float:
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


def scales(folder: Path) -> dict[str, float]:
    model = QuantizedModel(folder)
    found = {module: model.read(module).input_scale for module in model.schemes}
    return {module: float(scale) for module, scale in found.items() if scale is not None}


@cache
def inputs(source: Path) -> dict[str, Tensor]:
    """What each linear of the model itself is given; of experts by their number after the name of the stack."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, experts_implementation="eager")
    seen = inputs_of(model, [list(window) for window in windows(source)])
    return {module: rows for module, rows in seen.items() if "proj" in module}


def largest_inputs(source: Path) -> dict[str, float]:
    return {module: float(rows.abs().max()) for module, rows in inputs(source).items() if len(rows)}


def stretched(source: Path) -> set[str]:
    """The layers whose input, rounded with one scale for all, has an error above 3 % of a typical channel's square."""
    found = set()
    for module, rows in inputs(source).items():
        scale = rows.double().abs().max() / 127
        if scale.square() / 12 > 0.03 * rows.double().square().mean(0).median():
            found.add(module)
    return found


def test_the_list_of_static_presets() -> None:
    assert sorted(STATIC) == sorted(LARGEST)


@pytest.mark.parametrize("preset", STATIC)
def test_scales_are_those_of_the_models_own_inputs(preset: str, tmp_path: Path) -> None:
    quantry.quantize("demo", tmp_path / "out", preset=preset, input_scales="minmax", **TEXT)
    found, tops = scales(tmp_path / "out"), largest_inputs(DEMO)
    assert set(found) == set(tops) - (stretched(DEMO) if preset == "w8a8-static" else set())
    for module, scale in found.items():
        wanted = 448 * 6 / tops[module] if preset == "nvfp4-w4a4" else tops[module] / LARGEST[preset]
        stored = wanted if preset == "nvfp4-w4a4" else float(torch.tensor(wanted).bfloat16())
        assert scale == pytest.approx(stored, rel=1e-5 if preset == "nvfp4-w4a4" else 0.005), module
    for module, scale in found.items():  # what engines fuse must share it
        assert scale == found[module.replace("k_proj", "q_proj").replace("v_proj", "q_proj").replace("up_", "gate_")]


@pytest.mark.parametrize("preset", STATIC)
def test_the_model_is_near_the_original(preset: str, tmp_path: Path) -> None:
    """On other text than it was calibrated on."""
    held = load(None, load_tokenizer(DEMO), context=512, samples=40, length=64).tokens[-8:]
    wanted = logits(DEMO, held)
    quantry.quantize("demo", tmp_path / "out", preset=preset, **TEXT)
    limit = {"fp8-static": 0.02, "w8a8-static": 0.03, "nvfp4-w4a4": 0.3}[preset]
    assert lost(wanted, logits(tmp_path / "out", held)) < limit


def test_least_error_has_less_error_than_the_whole_range(tmp_path: Path) -> None:
    """On the very inputs, counted plainly; and a percentile clips."""
    found = {}
    for way in ("minmax", "percentile", "mse"):
        quantry.quantize("demo", tmp_path / way, preset="w8a8-static", input_scales=way, **TEXT)
        found[way] = scales(tmp_path / way)
    seen = inputs(DEMO)
    model = QuantizedModel(tmp_path / "mse")
    errors = dict.fromkeys(found, 0.0)
    assert len(found["mse"]) > len(seen) / 2
    for module, rows in ((module, seen[module]) for module in found["mse"]):
        assert found["percentile"][module] < found["minmax"][module]
        for way in found:
            scale = found[way][module]
            codes = (rows.double() / scale).round().clamp(-128, 127)
            errors[way] += float(((codes * scale - rows) ** 2).mean() / (rows.double() ** 2).mean())
    assert errors["mse"] < errors["minmax"]
    assert model.schemes[next(iter(seen))].static


def test_layers_with_outliers_keep_dynamic_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel 4,096 times as large, by a change of weights that leaves the model's function as it was."""
    source = shutil.copytree(DEMO, tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    block = "model.layers.1.mlp"
    weights[f"{block}.up_proj.weight"][5] *= 4096
    weights[f"{block}.down_proj.weight"][:, 5] /= 4096
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    tokens = windows(source)
    wanted = logits(source, tokens)
    made = quantry.quantize(source, tmp_path / "found", preset="w8a8-static", **TEXT)
    model = QuantizedModel(tmp_path / "found")
    dynamic = {module for module, scheme in model.schemes.items() if not scheme.static}
    assert dynamic == stretched(source) == {*stretched(DEMO), f"{block}.down_proj"}
    assert f"{block}.down_proj" not in scales(tmp_path / "found")
    words = f"{len(dynamic)} layers scale their inputs by token"
    assert any(words in note and f"{block}.down_proj" in note for note in made.notes)
    assert made.bytes == sum(tensor.nbytes for tensor in open_checkpoint(tmp_path / "found").tensors)
    again = quantry.quantize(source, tmp_path / "found", preset="w8a8-static", **TEXT)
    assert "finished by an earlier run" in again.notes[-1]
    monkeypatch.setattr("quantry.numerics.static.NOISE", float("inf"))
    quantry.quantize(source, tmp_path / "all", preset="w8a8-static", **TEXT)
    found, all_static = (lost(wanted, logits(tmp_path / name, tokens)) for name in ("found", "all"))
    assert found < all_static


def test_experts_share_the_scale_of_all_of_them(moe: Path, tmp_path: Path) -> None:
    quantry.quantize(moe, tmp_path / "out", preset="fp8-static", **TEXT)
    found, tops = scales(tmp_path / "out"), largest_inputs(moe)
    experts = {module: scale for module, scale in found.items() if ".experts." in module}
    assert experts
    for module, scale in experts.items():
        layer = module.partition(".experts.")[0]
        stack = f"{layer}.experts.{'down_proj' if module.endswith('down_proj') else 'gate_up_proj'}."
        top = max(value for name, value in tops.items() if name.startswith(stack))
        assert scale == pytest.approx(top / 448, rel=0.005), module


def cached(source: Path) -> list[tuple[Tensor, Tensor]]:
    """The largest magnitudes by head that the model itself puts into its cache, for each layer: keys and values."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    cache: Any = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor(windows(source)), past_key_values=cache, use_cache=True)
    return [(layer.keys.abs().amax((0, 2, 3)), layer.values.abs().amax((0, 2, 3))) for layer in cache.layers]


@pytest.mark.parametrize(("kv", "strategy"), [("fp8", "tensor"), ("fp8-head", "attn_head")])
def test_cache_scales_are_those_of_the_models_own_cache(kv: str, strategy: str, tmp_path: Path) -> None:
    artefact = quantry.quantize("demo", tmp_path / "out", preset="w8a8", kv=kv, **TEXT)
    model = QuantizedModel(tmp_path / "out")
    assert model.settings["kv_cache_scheme"]["strategy"] == strategy
    assert artefact.notes[-1] == "Serve it with vLLM's --kv-cache-dtype fp8."
    seen = cached(DEMO)
    assert len(model.cache_scales) == 2 * len(seen)
    for index, sides in enumerate(seen):
        for side, tops in zip("kv", sides, strict=True):
            scale = model.tensor(f"model.layers.{index}.self_attn.{side}_scale")
            wanted = tops.reshape(-1, 1, 1) if kv == "fp8-head" else tops.max().reshape(1)
            assert scale.shape == wanted.shape
            torch.testing.assert_close(scale.float(), (wanted / 448).bfloat16().float(), rtol=0.005, atol=0)
    card = json.loads((tmp_path / "out" / "quantry.json").read_text())
    assert card["recipe"]["kv"] == kv


def test_cache_scales_go_with_any_preset_and_change_nothing_else(tmp_path: Path) -> None:
    quantry.quantize("demo", tmp_path / "without", preset="w4a16", group=64)
    quantry.quantize("demo", tmp_path / "with", preset="w4a16", group=64, kv="fp8", **TEXT)
    one, other = QuantizedModel(tmp_path / "without"), QuantizedModel(tmp_path / "with")
    for module in one.schemes:
        assert torch.equal(one.read(module).codes, other.read(module).codes)
    tokens = windows(DEMO)[:2]
    assert torch.equal(logits(tmp_path / "without", tokens), logits(tmp_path / "with", tokens))


@pytest.mark.parametrize(
    ("preset", "note"),
    [
        ("w8a8", "Serve it with vLLM's --kv-cache-dtype int8_per_token_head."),
        ("gguf-q4_0", "Serve it with llama.cpp's --flash-attn on --cache-type-k q8_0 --cache-type-v q8_0."),
    ],
)
def test_an_int8_cache_needs_no_scales(preset: str, note: str, tmp_path: Path) -> None:
    artefact = quantry.quantize("demo", tmp_path / "out", preset=preset, kv="int8")
    assert artefact.notes[-1] == note
    assert note in (tmp_path / "out" / "README.md").read_text()
    plain = quantry.quantize("demo", tmp_path / "plain", preset=preset)
    assert artefact.files == plain.files  # the weights are the same


def test_conversions_carry_static_scales_or_drop_those_of_the_cache(tmp_path: Path) -> None:
    quantry.quantize("demo", tmp_path / "out", preset="fp8-static", kv="fp8", **TEXT)
    quantry.convert(tmp_path / "out", tmp_path / "same", to="compressed-tensors")
    assert contents(tmp_path / "out")["model.safetensors"] == contents(tmp_path / "same")["model.safetensors"]
    assert contents(tmp_path / "out")["config.json"] == contents(tmp_path / "same")["config.json"]
    quantry.convert(tmp_path / "out", tmp_path / "plain", to="bf16")
    fates = json.loads((tmp_path / "plain" / "quantry.json").read_text())["fates"]
    assert len(fates["dropped: this format holds no scales of a KV cache"]) == 16
    AutoModelForCausalLM.from_pretrained(tmp_path / "plain")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--preset", "w8a8", "--input-scales", "mse"], "--input-scales has no use: w8a8 stores no scales of inputs"),
        (["--preset", "fp8-static", "--input-scales", "mean"], "unknown method of input scales 'mean'"),
        (["--preset", "nvfp4-w4a4", "--input-scales", "mse"], "mse cannot choose the input scale of nvfp4-w4a4"),
        (["--preset", "w8a8", "--kv", "fp4"], "unknown KV cache 'fp4'"),
        (["--preset", "gguf-q4_0", "--kv", "fp8"], "format gguf has no place for the scales of an FP8 KV cache"),
        (["--preset", "bf16", "--kv", "fp8"], "format safetensors has no place for the scales of an FP8 KV cache"),
        (["--preset", "w8a8", "--sequential"], "--sequential has no use: w8a8 is not calibrated"),
        (["--preset", "w8a8", "--low-memory"], "--low-memory has no use: w8a8 is not calibrated"),
        (["--preset", "gguf-q4_0", "--imatrix", "auto", "--sequential"], "is computed before the first block"),
        (["--preset", "w8a8-zeroquant", "--sequential"], "trains each block on what the 16-bit ones give"),
    ],
)
def test_what_does_not_go_together_is_refused(options: list[str], reason: str, tmp_path: Path) -> None:
    done = command("quantize", "demo", "-o", str(tmp_path / "out"), *options)
    assert done.returncode == 2
    assert reason in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_model_without_keys_by_head_has_no_scales(tmp_path: Path) -> None:
    """Multi-head latent attention keeps one vector a token."""
    config = {**CONFIG, "model_type": "deepseek_v3", "kv_lora_rank": 64, "qk_rope_head_dim": 64, "q_lora_rank": None}
    shapes = {name: shape for name, shape in llama_shapes().items() if "k_proj" not in name and "v_proj" not in name}
    shapes |= {f"model.layers.{index}.self_attn.kv_a_proj_with_mqa.weight": (128, 256) for index in range(2)}
    source = write_plain(tmp_path / "mla", config, shapes)
    with pytest.raises(QuantryError, match="keeps no keys and values by head"):
        quantry.quantize(source, tmp_path / "out", preset="fp8-dynamic", kv="fp8", **TEXT)

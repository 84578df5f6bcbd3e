"""Presets and engines as people call them, and groups that suit the layers."""

from pathlib import Path

import pytest

import quantry
from quantry.engines.contract.catalogue import engine_name, engines, scoring_name
from quantry.errors import UnknownNameError, WeightError
from quantry.quantizing.recipe import preset, preset_name, presets
from quantry.storage import read_data
from tiny_models import write_model

PRESETS = {
    "Q4_K_M": "gguf-q4_k_m", "q4_k_m": "gguf-q4_k_m", "GGUF-Q4_K_M": "gguf-q4_k_m", "q4km": "gguf-q4_k_m",
    "iq4-xs": "gguf-iq4_xs", "F16": "gguf-f16", "awq": "w4a16-awq", "GPTQ": "w4a16-gptq", "fp8": "fp8-dynamic",
    "int4": "w4a16", "INT8": "w8a16", "4bit": "w4a16", "4-bit": "w4a16", "W4A16": "w4a16", "LLM.int8": "llm-int8",
    "AWQ+GPTQ": "w4a16-awq+gptq", "NF4": "nf4", "Auto": "auto",
}  # fmt: skip
ENGINES = {
    "llamacpp": "llama.cpp", "llama-cpp": "llama.cpp", "LLaMA.cpp": "llama.cpp", "hf": "transformers", "vLLM": "vllm",
    "trt-llm": "tensorrt-llm", "TensorRT-LLM": "tensorrt-llm", "onnx": "onnxruntime",
}  # fmt: skip


@pytest.mark.parametrize(("said", "meant"), PRESETS.items())
def test_presets_as_people_call_them(said: str, meant: str) -> None:
    assert preset_name(said) == meant


@pytest.mark.parametrize(("said", "meant"), ENGINES.items())
def test_engines_as_people_call_them(said: str, meant: str) -> None:
    assert engine_name(said) == meant


def test_every_other_name_is_of_a_preset_or_engine_and_of_one_only() -> None:
    assert set(read_data("quantry", "preset_names.toml").values()) <= set(presets())
    assert all(preset_name(name) == name for name in presets())
    assert all(engine_name(name) == name for name in engines())


def test_an_unknown_name_is_answered_with_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="unknown preset 'q4_k_mm'; did you mean gguf-q4_k_m"):
        preset("q4_k_mm")
    with pytest.raises(UnknownNameError, match="unknown engine 'tgi'"):  # known, but nothing is scored in it
        scoring_name("tgi")


def test_the_largest_group_that_divides_all_layers_is_taken_and_said(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM")  # layers of 64 and 96 columns
    planned = quantry.quantize(tmp_path, tmp_path / "out", preset="int4", dry_run=True)
    assert planned.preset == "w4a16"
    assert "Groups of 32 weights: 128 do not divide the 96 columns of model.layers.0.mlp.down_proj" in planned.notes[0]
    asked = quantry.quantize(tmp_path, tmp_path / "out", preset="w4a16", group=32, dry_run=True)
    assert (asked.bytes, asked.notes) == (planned.bytes, planned.notes[1:])
    with pytest.raises(WeightError, match="use --group 32"):
        quantry.quantize(tmp_path, tmp_path / "out", preset="w4a16", group=64, dry_run=True)

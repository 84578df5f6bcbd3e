"""Static scales of inputs and of the KV cache: plain float64 restatements, and compressed-tensors' own fake quantization.

The tests put artefacts together from the format's parts, load them with transformers and the library's own hooks, and
compare them with what `quantry verify` simulates.
"""

import json
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from depth import cases
from quantry.blockwise import walk
from quantry.errors import CheckpointError, ConfigError, QuantryError, RecipeError, UnknownNameError
from quantry.formats import compressed_tensors
from quantry.formats.contract import STORED as SCALES
from quantry.methods.fits.absmax import fit
from quantry.methods.rounders.nearest import round_weight
from quantry.models.linears import linears
from quantry.models.reader import open_checkpoint
from quantry.numerics.activations import Static, simulate
from quantry.numerics.grids import dequantize
from quantry.numerics.static import METHODS, SHRINKING, cache_scale, input_scale, outlying, percentile, squared_error
from quantry.quantizing.calibration.observe import ObservedBlock, collect
from quantry.quantizing.calibration.statistics import BINS, Heads, merge
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.recipe import presets
from quantry.quantizing.sources import open_source
from quantry.types import Activation, Grid, QTensor, Scheme, Stats, TensorInfo
from shared import TinyModel

library_quantization: Any = import_module("compressed_tensors.quantization")
library_forward: Any = import_module("compressed_tensors.quantization.lifecycle.forward")
library_cache: Any = import_module("compressed_tensors.modeling.kvcache")
INT8, FP8 = Grid("int", 8, (0, 0), scale="f32"), Grid("e4m3", 8, (0, 0), scale="f32")
NVFP4 = Grid("e2m1", 4, (1, 16), scale="e4m3")
BY_HEAD = Grid("e4m3", 8, (1, 0))
MODULE = "model.layers.0.self_attn.q_proj"
STORED = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
STORED |= {torch.int8: "I8", torch.uint8: "U8"}
SCHEMES = {
    "int8": Scheme(Grid("int", 8, (1, 0)), Activation(Grid("int", 8, (0, 0)), dynamic=False)),
    "int8-tensor": Scheme(Grid("int", 8, (0, 0)), Activation(Grid("int", 8, (0, 0)), dynamic=False)),
    "fp8": Scheme(Grid("e4m3", 8, (0, 0)), Activation(Grid("e4m3", 8, (0, 0)), dynamic=False)),
    "fp8-channel": Scheme(Grid("e4m3", 8, (1, 0)), Activation(Grid("e4m3", 8, (0, 0)), dynamic=False)),
    "nvfp4": Scheme(NVFP4, Activation(NVFP4, dynamic=False)),
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
WINDOWS = [torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(6)]


def heavy(tokens: int = 400, channels: int = 64, outliers: float = 0.0) -> Tensor:
    """Inputs with a few large values, as those of language models have."""
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(tokens, channels, generator=generator)
    far = torch.rand(tokens, channels, generator=generator) < outliers
    return torch.where(far, values * 12, values)


def stats_of(values: Tensor, histogram: bool = True) -> Stats:
    """Statistics by plain counting."""
    rows = values.double()
    top = rows.abs().max()
    places = (rows.abs() / top * BINS).long().clamp(max=BINS - 1).flatten()
    counts = torch.bincount(places, minlength=BINS) if histogram else None
    gram = (rows.T @ rows / len(rows)).float()
    absmax, mean = rows.abs().amax(0).float(), rows.abs().mean(0).float()
    return Stats(len(rows), gram, absmax, mean, gram.diagonal().clone(), counts)


def rounded(values: Tensor, grid: Grid, scale: float) -> Tensor:
    """Values on a grid in float64, by comparing each with all of its values."""
    if grid.kind == "int":
        known = torch.arange(-128, 128, dtype=torch.float64)
    else:
        known = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
        known = torch.tensor(sorted(set(known[known.isfinite()].tolist())), dtype=torch.float64)
    places = torch.bucketize(values.double() / scale, (known[1:] + known[:-1]) / 2)
    return known[places] * scale


def least_error(values: Tensor, grid: Grid) -> float:
    """The squared error of the best of all fractions of the range, on the values themselves."""
    top = float(values.abs().max()) / (127 if grid.kind == "int" else 448)
    return min(float((rounded(values, grid, top * part) - values).square().sum()) for part in SHRINKING)


@pytest.mark.parametrize("grid", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("scale", ["f32", "bf16", "f16"])
def test_the_largest_magnitude_lands_on_the_largest_code(grid: Grid, scale: Any) -> None:
    values = heavy(outliers=0.01)
    found = input_scale(stats_of(values, histogram=False), replace(grid, scale=scale))
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[scale]
    assert (found.shape, found.dtype) == ((1,), dtype)
    exact = float(values.double().abs().max()) / (127 if grid.kind == "int" else 448)
    assert torch.equal(found, torch.tensor([exact], dtype=torch.float64).float().to(dtype))


def test_nvfp4_has_the_libraries_own_divisor() -> None:
    values = heavy(outliers=0.01)
    found = input_scale(stats_of(values), NVFP4)
    assert found.dtype == torch.float32
    torch.testing.assert_close(
        found, library_quantization.utils.generate_gparam(values.min(), values.max()), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("percent", [50.0, 99.0, 99.9, 99.99])
def test_percentiles_are_those_of_the_values(percent: float) -> None:
    values = heavy(2000, 64, outliers=0.001)
    exact = np.quantile(values.double().abs().numpy(), percent / 100, method="inverted_cdf")
    assert float(percentile(stats_of(values), percent)) == pytest.approx(exact, abs=float(values.abs().max()) / BINS)


def test_a_percentile_leaves_one_value_in_ten_thousand_outside() -> None:
    values = heavy(2000, 64, outliers=0.001)
    scale = float(input_scale(stats_of(values), INT8, "percentile"))
    outside = int((values.abs() > scale * 127).sum())
    assert 5 <= outside <= 20  # of 128,000


@pytest.mark.parametrize("grid", [INT8, FP8], ids=["int8", "fp8"])
@pytest.mark.parametrize("part", [1.0, 0.61, 0.2, 0.02])
def test_errors_on_counts_are_those_of_evenly_spread_values(grid: Grid, part: float) -> None:
    """The integral against a fine sum over each step of the counts."""
    counts = torch.randint(0, 9, (BINS,), generator=torch.Generator().manual_seed(3))
    stats = replace(stats_of(torch.tensor([[3.7]])), histogram=counts)
    scale = torch.tensor(3.7 * part / (127 if grid.kind == "int" else 448))
    inside = (torch.arange(512, dtype=torch.float64) + 0.5) / 512
    points = (torch.arange(BINS, dtype=torch.float64)[:, None] + inside) * (float(stats.absmax) / BINS)
    means = (rounded(points, grid, float(scale)) - points).square().mean(1)
    assert float(squared_error(stats, grid, scale)) == pytest.approx(float((means * counts).sum()), rel=1e-4)


@pytest.mark.parametrize(
    ("grid", "outliers"),
    cases(product((INT8, FP8), (0.0, 0.0005, 0.01)), quick=[(INT8, 0.0005), (FP8, 0.0)]),
)
def test_least_error_is_that_of_brute_force(grid: Grid, outliers: float) -> None:
    values = heavy(1000, 64, outliers)
    scale = float(input_scale(stats_of(values), grid, "mse"))
    paid = float((rounded(values, grid, scale) - values).square().sum())
    assert paid == pytest.approx(least_error(values, grid), rel=1e-5)


def test_least_error_beats_the_whole_range_by_far_where_outliers_are_rare() -> None:
    values = heavy(20000, 64)
    values[0, 0] = 40.0
    stats = stats_of(values)
    scales = [float(input_scale(stats, INT8, method)) for method in ("mse", "minmax")]
    least, whole = [float((rounded(values, INT8, scale) - values).square().sum()) for scale in scales]
    assert least < 0.25 * whole


def test_inputs_that_are_all_zero_get_a_scale_of_one() -> None:
    nothing = replace(stats_of(torch.ones(4, 8)), absmax=torch.zeros(8), histogram=torch.eye(1, BINS).long()[0] * 32)
    for grid in (INT8, FP8):
        assert [float(input_scale(nothing, grid, method)) for method in METHODS] == [1.0] * 3
    assert float(input_scale(nothing, NVFP4)) == 1.0


def test_what_cannot_be_found_is_refused() -> None:
    stats = stats_of(heavy(), histogram=False)
    with pytest.raises(UnknownNameError, match="unknown method of input scales 'mean'.*minmax, percentile, mse"):
        input_scale(stats, INT8, "mean")
    for method in ("percentile", "mse"):
        with pytest.raises(RecipeError, match="need counts of this input.*use minmax"):
            input_scale(stats, INT8, method)
    with pytest.raises(RecipeError, match="mse cannot choose the input scale of nvfp4"):
        input_scale(stats, NVFP4, "mse")


def test_experts_share_the_scale_of_all_their_inputs() -> None:
    some, others = heavy(100), heavy(300) * 3
    together = merge([stats_of(some), stats_of(others)])
    whole = stats_of(torch.cat([some, others]))
    for method in METHODS:
        torch.testing.assert_close(
            input_scale(together, FP8, method), input_scale(whole, FP8, method), rtol=2e-2, atol=0
        )
    assert torch.equal(input_scale(together, FP8), input_scale(stats_of(others), FP8))


def test_cache_scales_are_by_tensor_or_by_head() -> None:
    largest = torch.tensor([3.5, 0.0, 112.0])
    assert cache_scale(largest, FP8).tolist() == [0.25]
    by_head = cache_scale(largest, BY_HEAD)
    assert (by_head.shape, by_head.dtype) == ((3, 1, 1), torch.bfloat16)
    assert by_head.flatten().tolist() == [0.0078125, 1.0, 0.25]


def library(grid: Grid, scheme: Scheme) -> tuple[Any, Any]:
    """The library's arguments for the inputs of a scheme, out of our config."""
    group = compressed_tensors.config({MODULE: scheme}, [])["config_groups"]["group_0"]
    return library_quantization.QuantizationArgs(**group["input_activations"]), group


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_static_inputs_are_rounded_as_the_library_does(name: str) -> None:
    values = heavy(outliers=0.01).view(4, 100, 64)
    activation = SCHEMES[name].activation
    assert activation
    scale = 0.6 * input_scale(stats_of(values.view(-1, 64)), replace(activation.grid, scale="f32"))  # some are clipped
    args, _ = library(activation.grid, SCHEMES[name])
    theirs = library_forward.fake_quantize(values, scale, torch.zeros(1), args)
    ours = simulate(values, Static(activation.grid, dynamic=False, scale=float(scale)))
    assert torch.equal(ours, theirs)
    torch.testing.assert_close(ours.double(), rounded(values, activation.grid, float(scale)), rtol=1e-6, atol=0)
    assert float(ours.abs().max()) < float(values.abs().max())


@pytest.mark.parametrize("reach", [1.0, 0.3, 3e5])
def test_local_scales_of_nvfp4_are_those_of_the_library(reach: float) -> None:
    """Also where groups are clipped, and where they are too small for E4M3 and vanish."""
    values = heavy(outliers=0.01).view(4, 100, 64).clone()
    values[0, 0] = 0.0
    values[1] *= 1e-4
    divisor = torch.tensor([2688 / (float(values.abs().max()) * reach)])
    args, _ = library(NVFP4, SCHEMES["nvfp4"])
    layer: Any = nn.Linear(64, 64, bias=False)
    library_quantization.initialize_module_for_quantization(
        layer, library_quantization.QuantizationScheme(targets=["Linear"], input_activations=args)
    )
    layer.input_global_scale.data.copy_(divisor)
    theirs = library_forward.forward_quantize(layer, values, "input", args)
    ours = simulate(values, Static(NVFP4, dynamic=False, scale=float(divisor)))
    assert torch.equal(ours, theirs)
    assert bool((ours[1] == 0).all()) == (reach == 3e5)


def test_mxfp4_inputs_are_those_of_the_library() -> None:
    values = heavy(outliers=0.01).view(4, 100, 64)
    grid = Grid("e2m1", 4, (1, 32), scale="e8m0")
    args, _ = library(grid, Scheme(grid, Activation(grid)))
    layer: Any = nn.Linear(64, 64, bias=False)
    library_quantization.initialize_module_for_quantization(
        layer, library_quantization.QuantizationScheme(targets=["Linear"], input_activations=args)
    )
    assert torch.equal(
        simulate(values, Activation(grid)), library_forward.forward_quantize(layer, values, "input", args)
    )


def test_a_static_activation_without_its_scale_is_not_simulated() -> None:
    for grid, dynamic in ((FP8, False), (NVFP4, True)):
        with pytest.raises(ValueError, match="needs the scale of its artefact"):
            simulate(torch.ones(2, 16), Activation(grid, dynamic))


def quantized(scheme: Scheme, dtype: str = "bf16") -> QTensor:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    grid = compressed_tensors.stored_grid(scheme.weight, dtype)  # type: ignore[arg-type]
    return round_weight(weight, grid, fit(weight, grid))


@every_scheme
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_stored_scales_are_as_announced_and_read_back(scheme: Scheme, dtype: str) -> None:
    tensor = quantized(scheme, dtype)
    assert scheme.activation
    grid = replace(scheme.activation.grid, scale=tensor.grid.scale)
    scale = input_scale(stats_of(heavy()), grid)
    stored = compressed_tensors.encode(MODULE, replace(tensor, input_scale=scale))
    announced = compressed_tensors.layout(MODULE, (32, 64), tensor.grid, scheme.activation)
    assert [(name, STORED[one.dtype], tuple(one.shape)) for name, one in stored.items()] == [
        (name, kind, shape) for name, (kind, shape) in announced.items()
    ]
    assert len(announced) == len(compressed_tensors.layout(MODULE, (32, 64), tensor.grid)) + 1
    decoded = compressed_tensors.decode(MODULE, stored, replace(scheme, weight=tensor.grid))
    assert decoded.input_scale is not None
    assert torch.equal(decoded.input_scale, scale)
    assert torch.equal(dequantize(decoded), dequantize(tensor))


@every_scheme
def test_the_library_has_the_same_parameters_for_a_layer(scheme: Scheme) -> None:
    """Names, shapes and dtypes that the library itself makes for a bfloat16 layer of this config."""
    _, group = library(scheme.weight, scheme)
    layer = nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    library_quantization.initialize_module_for_quantization(
        layer, library_quantization.QuantizationScheme(**group), force_zero_point=False
    )
    wanted = {name: (one.dtype, tuple(one.shape)) for name, one in layer.named_parameters() if name.startswith("input")}
    tensor = quantized(scheme)
    assert scheme.activation
    scale = input_scale(stats_of(heavy()), replace(scheme.activation.grid, scale=tensor.grid.scale))
    stored = compressed_tensors.encode(MODULE, replace(tensor, input_scale=scale))
    found = {name.removeprefix(f"{MODULE}."): (one.dtype, tuple(one.shape)) for name, one in stored.items()}
    assert wanted == {name: one for name, one in found.items() if name.startswith("input")}
    assert len(wanted) == 1


@pytest.mark.parametrize(("ours", "theirs"), [("fp8", "FP8"), ("nvfp4", "NVFP4")])
def test_configs_say_what_the_libraries_presets_say(ours: str, theirs: str) -> None:
    _, group = library(Grid("int", 8), SCHEMES[ours])
    mine, preset = (
        library_quantization.QuantizationScheme(**group),
        library_quantization.preset_name_to_scheme(theirs, ["Linear"]),
    )
    for side in ("weights", "input_activations"):
        one, other = getattr(mine, side).model_dump(), getattr(preset, side).model_dump()
        assert {key: value for key, value in one.items() if key != "observer"} == {
            key: value for key, value in other.items() if key != "observer"
        }


@every_scheme
def test_configs_are_read_back(scheme: Scheme) -> None:
    config = json.loads(json.dumps(compressed_tensors.config({MODULE: scheme}, ["lm_head"], BY_HEAD)))
    kind = SCALES[scheme.weight.scale]
    info = TensorInfo(f"{MODULE}.weight_scale", kind, (1,), "model.safetensors", 0, 2)
    assert compressed_tensors.schemes(config, [info]) == {MODULE: scheme}
    assert compressed_tensors.CACHE_SCALES.grid(config) == BY_HEAD
    assert compressed_tensors.CACHE_SCALES.grid({**config, "kv_cache_scheme": None}) is None
    theirs = library_quantization.QuantizationConfig(
        **{key: value for key, value in config.items() if key != "quant_method"}
    )
    assert theirs.kv_cache_scheme
    assert (theirs.kv_cache_scheme.strategy, theirs.kv_cache_scheme.dynamic) == ("attn_head", False)


def test_the_presets_with_static_inputs_can_be_held() -> None:
    for name in ("fp8-static", "nvfp4-w4a4"):
        assert compressed_tensors.refusal(presets()[name].scheme) is None


@pytest.mark.parametrize(
    ("scheme", "reason"),
    [
        (Scheme(Grid("e4m3", 8, (0, 0)), Activation(Grid("e4m3", 8, (1, 0)), False)), "static scales of one for the tensor"),
        (Scheme(Grid("e4m3", 8, (128, 128)), Activation(Grid("e4m3", 8, (0, 0)), False)), "static scales of one"),
        (Scheme(Grid("int", 8, (1, 0)), Activation(Grid("int", 8, (0, 0), False), False)), "without zero points"),
        (Scheme(Grid("int", 8, (1, 0)), Activation(Grid("e4m3", 8, (0, 0)), False)), "int activations, not e4m3"),
        (Scheme(NVFP4, Activation(Grid("e4m3", 8, (0, 0)), False)), "nvfp4 activations, not e4m3"),
        (Scheme(NVFP4, Activation(NVFP4)), "calibrated input scale"),
        (Scheme(Grid("e2m1", 4, (1, 32), scale="e8m0"), Activation(Grid("e2m1", 4, (1, 32), scale="e8m0"), False)), "static"),
    ],
)  # fmt: skip
def test_refusals_say_why(scheme: Scheme, reason: str) -> None:
    assert reason in (compressed_tensors.refusal(scheme) or "nothing")
    with pytest.raises(QuantryError, match=reason):
        compressed_tensors.layout(MODULE, (128, 128), scheme.weight, scheme.activation)


def test_a_cache_that_no_engine_reads_is_refused() -> None:
    for grid in (Grid("int", 8, (0, 0)), Grid("e4m3", 8, (1, 64)), Grid("e4m3", 8, (0, 0), scale="e8m0")):
        with pytest.raises(QuantryError, match="a KV cache of e4m3 per tensor or per head"):
            compressed_tensors.CACHE_SCALES.layout("model.layers.0.self_attn", 2, grid)
        with pytest.raises(QuantryError, match="a KV cache of e4m3 per tensor or per head"):
            compressed_tensors.config({MODULE: SCHEMES["fp8"]}, [], grid)
    with pytest.raises(ConfigError, match="kv_cache_scheme is 'fp8', not an object"):
        compressed_tensors.CACHE_SCALES.grid({"kv_cache_scheme": "fp8"})


def test_a_lost_or_odd_scale_is_named() -> None:
    scheme = SCHEMES["fp8"]
    stored = compressed_tensors.encode(MODULE, quantized(scheme))
    for extra, found in (({}, "is missing"), ({f"{MODULE}.input_scale": torch.ones(3)}, "has 3 values")):
        with pytest.raises(CheckpointError, match=f"static scale for its input, and {MODULE}.input_scale {found}"):
            compressed_tensors.decode(MODULE, {**stored, **extra}, scheme)


def test_attention_modules_are_found_by_their_projections() -> None:
    names = [f"model.layers.{index}.{leaf}" for index in (0, 1) for leaf in ("self_attn.q_proj", "mlp.down_proj")]
    names += ["model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj", "model.layers.2.attn.qkv_proj"]
    assert compressed_tensors.CACHE_SCALES.modules(names) == ("model.layers.0.self_attn", "model.layers.2.attn")


@pytest.fixture
def llama(tiny: TinyModel) -> Path:
    return tiny("LlamaForCausalLM")


@pytest.fixture
def moe(tiny: TinyModel) -> Path:
    return tiny("Qwen3MoeForCausalLM")


def observed(folder: Path) -> list[ObservedBlock]:
    blocks = walk.Walk(open_source(folder), batch=2).blocks(WINDOWS)
    return [collect(block, histogram=True) for block in blocks]


def write_static(
    folder: Path, out: Path, scheme: Scheme, method: str = "minmax", cache: Grid | None = None
) -> dict[str, Tensor]:
    """An artefact with static inputs, made of the parts that a job is made of; gives the scales that are in it."""
    source, checkpoint, blocks = open_source(folder), open_checkpoint(folder), observed(folder)
    found = linears(checkpoint, len(blocks))
    groups = {
        module: seen.stats[group] for seen in blocks for module, group in seen.groups.items() if group in seen.stats
    }
    grid = compressed_tensors.stored_grid(scheme.weight, "bf16")
    tensors: dict[str, Tensor] = {}
    for linear in found:
        together = [one for one in found if one.shared == linear.shared]
        assert scheme.activation
        seen = {id(groups[one.module]): groups[one.module] for one in together if one.module in groups}
        scale = input_scale(merge(seen.values()), replace(scheme.activation.grid, scale=grid.scale), method)
        weights = [matrix(source.read(one.source), one) for one in together]
        whole = torch.stack([weight.abs().max() for weight in weights]).max().float()
        weight = weights[together.index(linear)]
        rounded_weight = round_weight(weight, grid, fit(weight, grid, whole if grid.spans_tensor else None))
        tensors |= compressed_tensors.encode(linear.module, replace(rounded_weight, input_scale=scale))
    scales = dict(tensors)
    attentions = compressed_tensors.CACHE_SCALES.modules(linear.module for linear in found) if cache else ()
    for name, seen_block in zip(attentions, blocks, strict=bool(cache)) if cache else ():
        heads = seen_block.heads
        assert cache
        assert isinstance(heads, Heads)
        tensors |= compressed_tensors.CACHE_SCALES.encode(
            name, cache_scale(heads.keys, cache), cache_scale(heads.values, cache)
        )
    quantized_sources = {linear.source for linear in found}
    tensors |= {name: source.read(name).clone() for name in source.names if name not in quantized_sources}
    out.mkdir()
    save_file({name: one.contiguous() for name, one in tensors.items()}, out / "model.safetensors", {"format": "pt"})
    assignment = {linear.module: Scheme(grid, scheme.activation) for linear in found}
    kept = ["lm_head", *(name.removesuffix(".weight") for name in source.names if name.endswith(".gate.weight"))]
    config = {**checkpoint.config, "quantization_config": compressed_tensors.config(assignment, kept, cache)}
    (out / "config.json").write_text(json.dumps(config))
    return {name: one for name, one in scales.items() if ".input" in name}


def matrix(weight: Tensor, linear: Any) -> Tensor:
    weight = weight if linear.expert is None else weight[linear.expert]
    weight = weight.t() if linear.flip else weight
    return weight[slice(*linear.rows)].contiguous() if linear.rows else weight


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([tokens])).logits[0]
    return found


def exactly_loaded(folder: Path, scheme: Scheme) -> Any:
    """The model as transformers loads it. Decoding 4-bit floats it rounds them to bfloat16; here they stay what they are."""
    if scheme.weight.kind != "e2m1":
        return loaded(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    logits(model, [1, 2])  # decoded when it is first run
    nn.Module.float(model)
    artefact = QuantizedModel(folder)
    for module in artefact.schemes:
        weight, exact = model.get_parameter(f"{module}.weight").data, dequantize(artefact.read(module))
        torch.testing.assert_close(weight, exact, rtol=2**-8, atol=0)
        weight.copy_(exact)
    return model


@every_scheme
def test_verify_sees_what_transformers_computes(scheme: Scheme, llama: Path, tmp_path: Path) -> None:
    """The library's own hooks quantize the inputs of a model that transformers has loaded."""
    scales = write_static(llama, tmp_path / "out", scheme)
    model, plain = exactly_loaded(tmp_path / "out", scheme), loaded(llama)
    for name, scale in scales.items():
        assert torch.equal(model.get_parameter(name).float(), scale.float()), name
    runs = walk.run(open_source(tmp_path / "out"), WINDOWS[:2])
    for (_, mine), window in zip(runs, WINDOWS[:2], strict=True):
        theirs = logits(model, window)
        assert float((mine - theirs).norm()) < 0.02 * float((theirs - logits(plain, window)).norm())


@pytest.mark.parametrize("method", METHODS)
def test_every_method_makes_a_model_that_is_near_the_original(method: str, llama: Path, tmp_path: Path) -> None:
    if method != "mse":
        write_static(llama, tmp_path / "nvfp4", SCHEMES["nvfp4"], method)
    write_static(llama, tmp_path / "fp8", SCHEMES["fp8"], method)
    exact = logits(loaded(llama), WINDOWS[0])
    ((_, found),) = walk.run(open_source(tmp_path / "fp8"), WINDOWS[:1])
    assert float((found - exact).norm()) < 0.2 * float(exact.norm())


def test_experts_are_simulated_with_the_scale_they_share(moe: Path, tmp_path: Path) -> None:
    scales = write_static(moe, tmp_path / "out", SCHEMES["fp8"])
    down = {
        float(scale) for name, scale in scales.items() if "layers.0" in name and "experts" in name and "down" in name
    }
    assert len(down) == 1
    source = open_source(tmp_path / "out")
    module = next(name for name in source.schemes if "experts.0.down_proj" in name)
    activation = source.activations[module]
    assert isinstance(activation, Static)
    assert activation.scale in down
    ((_, found),) = walk.run(source, WINDOWS[:1])
    exact = logits(loaded(moe), WINDOWS[0])
    assert float((found - exact).norm()) < 0.3 * float(exact.norm())


@pytest.mark.parametrize("cache", [Grid("e4m3", 8, (0, 0)), BY_HEAD], ids=["tensor", "head"])
def test_cache_scales_are_loaded_by_transformers(cache: Grid, llama: Path, tmp_path: Path) -> None:
    write_static(llama, tmp_path / "out", SCHEMES["fp8"], cache=cache)
    model = loaded(tmp_path / "out")
    heads = observed(llama)[1].heads
    attention = model.model.layers[1].self_attn
    assert isinstance(getattr(attention, library_cache.KV_CACHE_ATTR), library_cache.QuantizedKVCache)
    assert heads
    for side, largest in (("k", heads.keys), ("v", heads.values)):
        scale = getattr(attention, f"{side}_scale")
        announced = compressed_tensors.CACHE_SCALES.layout("a", len(largest), cache)[f"a.{side}_scale"]
        assert tuple(scale.shape) == announced[1]
        expected = (largest if cache.block == (1, 0) else largest.max()[None]) / 448
        torch.testing.assert_close(scale.flatten().float(), expected.bfloat16().float(), rtol=0, atol=0)
    source = open_source(tmp_path / "out")
    assert source.cache == cache
    assert not [name for name in source.names if name.endswith(("k_scale", "v_scale"))]
    assert len(list(walk.run(source, WINDOWS[:1]))) == 1


def test_an_input_with_a_zero_point_is_not_simulated(llama: Path, tmp_path: Path) -> None:
    write_static(llama, tmp_path / "out", SCHEMES["int8"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="static zero point for its input"):
        _ = open_source(tmp_path / "out").activations


@pytest.mark.parametrize("outlier", [1.0, 20, 60, 100, 150, 1000])
@pytest.mark.parametrize("grid", [INT8, FP8], ids=["int8", "fp8"])
def test_outliers_that_drown_the_rest_are_found(grid: Grid, outlier: float) -> None:
    """One value among many, against the error of rounding the others, of which a scale covers all."""
    rows = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).double()
    rows[3, 7] = outlier
    scale = rows.abs().max() / 127
    error = ((rows / scale).round() * scale - rows).square().mean(0).median() / rows.square().mean(0).median()
    stats = Stats(400, rows.T @ rows / 400, rows.abs().amax(0), rows.abs().mean(0), rows.square().mean(0))
    assert outlying(stats, grid) == (grid is INT8 and bool(error > 0.03))
    assert outlying(stats, INT8) == (outlier >= 100)


def test_an_input_of_zeros_has_no_outliers() -> None:
    zeros = torch.zeros(8)
    assert not outlying(Stats(4, torch.zeros(8, 8), zeros, zeros, zeros), INT8)


def test_a_channel_of_outliers_does_not_hide_itself() -> None:
    """It raises the mean square of the input, and not that of a typical channel."""
    square = torch.ones(64)
    square[7] = 1e6
    assert outlying(Stats(400, torch.diag(square), 3 * square.sqrt(), square.sqrt(), square), INT8)

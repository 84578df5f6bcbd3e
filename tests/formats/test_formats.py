"""Formats: what is written is what was announced, is read back exactly, and decodes alike in the formats' own libraries.

GPTQ and AWQ are also unpacked here by plain loops from the description of the format. compressed-tensors and
bitsandbytes are asked themselves, with their own decompression and their own quantization.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.formats import awq, bitsandbytes, compressed_tensors, gptq
from quantry.formats.contract import scale_shape
from quantry.methods.fits.absmax import fit
from quantry.methods.rounders.nearest import round_weight
from quantry.numerics import blocks, codebooks
from quantry.numerics.grids import dequantize, encode
from quantry.types import Activation, Grid, QTensor, Scheme, TensorInfo

FORMATS: dict[str, Any] = {
    "compressed-tensors": compressed_tensors,
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
}
STORED = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8", torch.uint8: "U8", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
MODULE = "model.layers.0.self_attn.q_proj"
TOKEN = Activation(Grid("int", 8, (1, 0)))

# (format, scheme, shape of a weight)
CASES: list[tuple[str, Scheme, tuple[int, int]]] = [
    *(
        ("compressed-tensors", Scheme(Grid("int", bits, block, symmetric)), shape)
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for block, shape in (((1, 32), (5, 96)), ((1, 0), (33, 37)), ((1, 16), (40, 48)))
        if not (bits == 8 and symmetric and block == (1, 0))
    ),
    ("compressed-tensors", Scheme(Grid("int", 8, (1, 0)), TOKEN), (7, 33)),
    ("compressed-tensors", Scheme(Grid("int", 8, (0, 0)), TOKEN), (7, 33)),
    ("compressed-tensors", Scheme(Grid("int", 4, (1, 32)), TOKEN), (5, 96)),
    ("compressed-tensors", Scheme(Grid("int", 4, (1, 0)), TOKEN), (33, 37)),
    ("compressed-tensors", Scheme(Grid("int", 8, (1, 16)), TOKEN), (40, 48)),
    ("compressed-tensors", Scheme(Grid("e4m3", 8, (0, 0))), (7, 33)),
    ("compressed-tensors", Scheme(Grid("e4m3", 8, (1, 0)), Activation(Grid("e4m3", 8, (1, 0)))), (7, 33)),
    ("compressed-tensors", Scheme(Grid("e4m3", 8, (128, 128)), Activation(Grid("e4m3", 8, (1, 128)))), (130, 384)),
    ("compressed-tensors", Scheme(Grid("e2m1", 4, (1, 16), scale="e4m3")), (5, 80)),
    ("compressed-tensors", Scheme(Grid("e2m1", 4, (1, 32), scale="e8m0")), (5, 96)),
    *(
        ("gptq", Scheme(Grid("int", bits, block, symmetric)), shape)
        for bits in (2, 3, 4, 8)
        for symmetric in (True, False)
        for block, shape in (((1, 32), (32, 96)), ((1, 0), (96, 64)))
    ),
    *(("awq", Scheme(Grid("int", 4, (1, 16), symmetric)), (24, 48)) for symmetric in (True, False)),
    *(
        ("bitsandbytes", Scheme(Grid(kind, 4, (1, 64), nested=nested)), shape)
        for kind in ("nf4", "fp4")
        for nested in (True, False)
        for shape in ((256, 96), (7, 33))
    ),
    ("bitsandbytes", Scheme(Grid("int", 8, (1, 0))), (7, 33)),
]  # fmt: skip


def case_name(case: tuple[str, Scheme, tuple[int, int]]) -> str:
    name, scheme, shape = case
    grid = scheme.weight
    kind = f"{grid.kind}{grid.bits}{'' if grid.symmetric else 'z'}{'n' if grid.nested else ''}"
    return f"{name}-{kind}-{grid.block[0]}x{grid.block[1]}-{shape[0]}x{shape[1]}"


every_case = pytest.mark.parametrize("case", CASES, ids=case_name)


def of_format(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", [case for case in CASES if case[0] == name], ids=case_name)


def weight_of(shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    return (torch.randn(shape, generator=generator) * 0.05).to(dtype)


def quantized(case: tuple[str, Scheme, tuple[int, int]], dtype: str = "bf16") -> QTensor:
    name, scheme, shape = case
    grid = FORMATS[name].stored_grid(scheme.weight, dtype)
    weight = weight_of(shape, torch.bfloat16 if dtype == "bf16" else torch.float16)
    return round_weight(weight, grid, fit(weight, grid))


def assert_same(left: QTensor, right: QTensor) -> None:
    assert left.grid == right.grid
    pairs = [(left.codes, right.codes), (left.params.scale, right.params.scale)]
    pairs += [(left.params.zero, right.params.zero), (left.params.outer, right.params.outer)]  # type: ignore[list-item]
    if left.params.nested is not None:
        assert right.params.nested is not None
        assert left.params.nested.offset == right.params.nested.offset
        pairs += [
            (left.params.nested.codes, right.params.nested.codes),
            (left.params.nested.absmax, right.params.nested.absmax),
        ]
    for mine, theirs in pairs:
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(bits_of(mine), bits_of(theirs))


def bits_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.itemsize == 1 else tensor


def local(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(f"{MODULE}."): tensor for name, tensor in tensors.items()}


@every_case
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_tensors_are_as_announced_and_read_back_exactly(case: tuple[str, Scheme, tuple[int, int]], dtype: str) -> None:
    name, scheme, shape = case
    tensor = quantized(case, dtype)
    announced = FORMATS[name].layout(MODULE, shape, tensor.grid)
    tensors = FORMATS[name].encode(MODULE, tensor)
    assert [(key, STORED[value.dtype], tuple(value.shape)) for key, value in tensors.items()] == [
        (key, kind, size) for key, (kind, size) in announced.items()
    ]
    assert all(value.is_contiguous() for value in tensors.values())
    assert_same(FORMATS[name].decode(MODULE, tensors, replace(scheme, weight=tensor.grid)), tensor)


@every_case
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_what_config_says_is_read_as_the_same_scheme(case: tuple[str, Scheme, tuple[int, int]], dtype: str) -> None:
    name, scheme, shape = case
    grid = FORMATS[name].stored_grid(scheme.weight, dtype)
    settings = json.loads(json.dumps(FORMATS[name].config({MODULE: replace(scheme, weight=grid)}, ["lm_head"])))
    infos = headers(FORMATS[name].layout(MODULE, shape, grid), dtype)
    expected = grid
    if name == "awq":  # always has zero points
        expected = replace(grid, symmetric=False)
    elif name == "bitsandbytes" and grid.kind == "int":  # SCB is float32 whatever the scale was
        expected = replace(grid, scale="f32")
    assert FORMATS[name].refusal(replace(scheme, weight=grid)) is None
    assert FORMATS[name].schemes(settings, infos) == {MODULE: replace(scheme, weight=expected)}
    assert settings["quant_method"] == name == FORMATS[name].NAME


def headers(announced: Mapping[str, tuple[str, tuple[int, ...]]], dtype: str) -> list[TensorInfo]:
    """The headers of a checkpoint with these tensors, a norm and a kept head."""
    half = dtype.upper()
    rest = {"model.norm.weight": (half, (64,)), "lm_head.weight": (half, (10, 64))}
    return [TensorInfo(name, kind, size, "f", 0, 0) for name, (kind, size) in {**announced, **rest}.items()]


def test_scales_have_the_shape_that_the_arithmetic_gives_them() -> None:
    for _, scheme, shape in CASES:
        assert scale_shape(scheme.weight, shape) == blocks.scale_shape(scheme.weight, shape)


# ------------------------------------------------------------------------------------------- GPTQ and AWQ, by plain loops


def code_at(word_bits: str, position: int, bits: int) -> int:
    """A code in a stream of bits, written lowest first."""
    return int(word_bits[position * bits : (position + 1) * bits][::-1], 2)


def bits_low_first(words: list[int]) -> str:
    return "".join(f"{word & 0xFFFFFFFF:032b}"[::-1] for word in words)


@of_format("gptq")
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq_unpacks_by_its_description(case: tuple[str, Scheme, tuple[int, int]], version: Any) -> None:
    tensor = quantized(case)
    bits, (rows, columns) = tensor.grid.bits, case[2]
    stored = {
        name: value.tolist() for name, value in local(gptq.encode(MODULE, tensor, checkpoint_format=version)).items()
    }
    added = 1 if version == "gptq" else 0
    zeros = [[code_at(bits_low_first(row), out, bits) + added for out in range(rows)] for row in stored["qzeros"]]
    expected = dequantize(tensor).double()
    for out in range(rows):
        stream = bits_low_first([row[out] for row in stored["qweight"]])
        for column in range(columns):
            group = stored["g_idx"][column]
            value = (code_at(stream, column, bits) - zeros[group][out]) * stored["scales"][group][out]
            assert value == expected[out, column]
    tensors = gptq.encode(MODULE, tensor, checkpoint_format=version)
    settings = gptq.config({MODULE: Scheme(tensor.grid)}, [], checkpoint_format=version)
    assert_same(gptq.decode(MODULE, tensors, Scheme(tensor.grid), settings), tensor)


@of_format("awq")
def test_awq_unpacks_by_its_description(case: tuple[str, Scheme, tuple[int, int]]) -> None:
    tensor = quantized(case)
    order, (rows, columns), size = (0, 2, 4, 6, 1, 3, 5, 7), case[2], tensor.grid.block[1]
    stored = {name: value.tolist() for name, value in local(awq.encode(MODULE, tensor)).items()}
    expected = dequantize(tensor).double()

    def at(words: list[int], out: int) -> int:
        return (words[out // 8] & 0xFFFFFFFF) >> (4 * order.index(out % 8)) & 15

    for column in range(columns):
        for out in range(rows):
            group = column // size
            code, zero = at(stored["qweight"][column], out), at(stored["qzeros"][group], out)
            assert (code - zero) * stored["scales"][group][out] == expected[out, column]


@pytest.mark.parametrize("sign", [0, 1])  # zeros only, and all above 0: the zero point is the smallest code
def test_only_the_second_version_of_gptq_stores_a_zero_point_of_zero(sign: int) -> None:
    grid = Grid("int", 4, (1, 32), symmetric=False)
    weight = (weight_of((8, 32)).abs() + 0.01) * sign
    tensor = round_weight(weight, grid, fit(weight, grid))
    with pytest.raises(QuantryError, match="gptq_v2"):
        gptq.encode(MODULE, tensor, checkpoint_format="gptq")
    assert_same(gptq.decode(MODULE, gptq.encode(MODULE, tensor), Scheme(grid)), tensor)
    assert gptq.config({MODULE: Scheme(grid)}, [])["checkpoint_format"] == "gptq_v2"


def test_gptq_has_one_version_for_all() -> None:
    both = {"a": Scheme(Grid("int", 4, (1, 32))), "b": Scheme(Grid("int", 4, (1, 32), symmetric=False))}
    with pytest.raises(QuantryError, match="not both"):
        gptq.config(both, [])


def test_gptq_with_permuted_inputs_is_not_read() -> None:
    case = ("gptq", Scheme(Grid("int", 4, (1, 32))), (32, 96))
    tensors = gptq.encode(MODULE, quantized(case))
    tensors[f"{MODULE}.g_idx"] = tensors[f"{MODULE}.g_idx"].flip(0)
    with pytest.raises(CheckpointError, match="permutes"):
        gptq.decode(MODULE, tensors, case[1])


def test_gptq_says_sym_and_is_not() -> None:
    case = ("gptq", Scheme(Grid("int", 4, (1, 32), symmetric=False)), (32, 96))
    with pytest.raises(CheckpointError, match="sym"):
        gptq.decode(MODULE, gptq.encode(MODULE, quantized(case)), Scheme(Grid("int", 4, (1, 32))))


# --------------------------------------------------------------------------------------------------- compressed-tensors


@pytest.fixture
def library() -> Iterator[Any]:
    """The compressed-tensors library, without compilation of its rounding."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    disabled = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    yield quantization
    torch._dynamo.config.disable = disabled


def library_scheme(library: Any, scheme: Scheme) -> Any:
    settings = json.loads(json.dumps(compressed_tensors.config({MODULE: scheme}, ["lm_head"])))
    return library.QuantizationConfig.model_validate(settings).config_groups["group_0"]


@of_format("compressed-tensors")
def test_the_library_decompresses_to_our_values(library: Any, case: tuple[str, Scheme, tuple[int, int]]) -> None:
    registry: Any = pytest.importorskip("compressed_tensors.compressors").BaseCompressor
    tensor = quantized(case)
    scheme = library_scheme(library, replace(case[1], weight=tensor.grid))
    compressor = registry.get_value_from_registry(str(getattr(scheme.format, "value", scheme.format)))
    weight = compressor.decompress(local(compressed_tensors.encode(MODULE, tensor)), scheme)["weight"]
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight, dequantize(tensor, torch.bfloat16))


@of_format("compressed-tensors")
def test_the_library_quantizes_to_our_codes(library: Any, case: tuple[str, Scheme, tuple[int, int]]) -> None:
    quantize: Any = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward").quantize
    tensor, (_, scheme, shape) = quantized(case), case
    grid, params, weight = tensor.grid, tensor.params, weight_of(shape).float()
    scale = torch.exp2(params.scale.float() - 127) if grid.scale == "e8m0" else params.scale.float()
    arguments = library_scheme(library, replace(scheme, weight=grid)).weights
    codes = quantize(
        weight, scale.reshape(-1) if grid.block == (0, 0) else scale, params.zero, arguments, global_scale=params.outer
    )
    ours = codebooks.e2m1_values(tensor.codes) if grid.kind == "e2m1" else tensor.codes.float()
    assert torch.equal(codes.float(), ours)


@of_format("compressed-tensors")
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_the_library_expects_our_tensors(library: Any, case: tuple[str, Scheme, tuple[int, int]], dtype: str) -> None:
    """transformers prepares a layer so, and casts what it reads to the dtypes that it finds there."""
    initialize = pytest.importorskip("compressed_tensors.quantization.lifecycle.initialize")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    _, scheme, shape = case
    grid = compressed_tensors.stored_grid(scheme.weight, "bf16" if dtype == "bf16" else "f16")
    layer = torch.nn.Linear(
        shape[1], shape[0], bias=False, device="meta", dtype=torch.bfloat16 if dtype == "bf16" else torch.float16
    )
    initialize.initialize_module_for_quantization(
        layer, library_scheme(library, replace(scheme, weight=grid)), force_zero_point=False
    )
    compressors.compress_module(layer)
    expected = {
        f"{MODULE}.{name}": (STORED[value.dtype], tuple(value.shape)) for name, value in layer.state_dict().items()
    }
    announced = compressed_tensors.layout(MODULE, shape, grid)
    if not grid.symmetric:  # the library does not pack the zero points of a layer without data
        expected.pop(f"{MODULE}.weight_zero_point"), announced.pop(f"{MODULE}.weight_zero_point")
    assert announced == expected


def test_mixed_schemes_reach_the_layers_they_are_meant_for(library: Any) -> None:
    four, eight = Scheme(Grid("int", 4, (1, 32))), Scheme(Grid("e4m3", 8, (1, 0)), Activation(Grid("e4m3", 8, (1, 0))))
    names = ["a", "b", "c", "lm_head", "d"]
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleDict(
        {name: torch.nn.Linear(64, 64, device="meta") for name in names if name != "lm_head"}
    )
    model.lm_head = torch.nn.Linear(64, 64, device="meta")
    assignment = {"layers.a": four, "layers.b": eight, "layers.c": four}
    settings = compressed_tensors.config(assignment, ["layers.d", "lm_head"])
    assert settings["format"] == "mixed-precision"
    assert [group["targets"] for group in settings["config_groups"].values()] == [["Linear"], ["layers.b"]]
    library.apply_quantization_config(model, library.QuantizationConfig.model_validate(settings), show_progress=False)
    bits = {
        name: module.quantization_scheme.weights.num_bits
        for name, module in model.named_modules()
        if hasattr(module, "quantization_scheme")
    }
    assert bits == {"layers.a": 4, "layers.b": 8, "layers.c": 4}
    infos = [
        info
        for module, scheme in assignment.items()
        for info in headers(compressed_tensors.layout(module, (64, 64), scheme.weight), "bf16")[:-2]
    ]
    assert compressed_tensors.schemes(settings, infos) == assignment


def test_a_quantized_head_is_a_target_by_its_name() -> None:
    scheme = Scheme(Grid("int", 4, (1, 32)))
    groups = compressed_tensors.config({MODULE: scheme, "lm_head": scheme}, [])["config_groups"]
    assert groups["group_0"]["targets"] == ["Linear", "lm_head"]


def test_four_bit_codes_in_bytes_are_read_too() -> None:
    """W4A8 in int-quantized, as other tools write it: one code a byte."""
    form, scheme = FORMATS["compressed-tensors"], Scheme(Grid("int", 4, (1, 32)), TOKEN)
    codes = torch.randint(-8, 8, (5, 96), dtype=torch.int8)
    stored = {f"{MODULE}.weight": codes, f"{MODULE}.weight_scale": torch.rand(5, 3).bfloat16()}
    settings = form.config({MODULE: scheme}, ())
    settings["format"] = settings["config_groups"]["group_0"]["format"] = "int-quantized"
    infos = [TensorInfo(name, STORED[value.dtype], tuple(value.shape), "f", 0, 0) for name, value in stored.items()]
    assert form.schemes(settings, infos) == {MODULE: scheme}
    assert form.shape(MODULE, stored, scheme) == (5, 96)
    read = form.decode(MODULE, stored, scheme, settings)
    assert torch.equal(read.codes, codes)
    assert torch.equal(read.params.scale, stored[f"{MODULE}.weight_scale"])


def test_three_bit_codes_with_gaps_are_read_too() -> None:
    from quantry.numerics.packing import pack_rows_spaced, unsigned

    case = ("compressed-tensors", Scheme(Grid("int", 3, (1, 32), symmetric=False)), (5, 96))
    tensor = quantized(case)
    tensors = compressed_tensors.encode(MODULE, tensor)
    assert tensor.params.zero is not None
    tensors[f"{MODULE}.weight_packed"] = pack_rows_spaced(unsigned(tensor.codes, 3), 3)
    tensors[f"{MODULE}.weight_zero_point"] = pack_rows_spaced(unsigned(tensor.params.zero.T, 3), 3).T
    assert tensors[f"{MODULE}.weight_packed"].shape == (5, 10)
    assert_same(compressed_tensors.decode(MODULE, tensors, case[1]), tensor)


# ----------------------------------------------------------------------------------------------------------- bitsandbytes

KINDS = pytest.mark.parametrize("kind", ["nf4", "fp4"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


@KINDS
@DTYPES
def test_bitsandbytes_chooses_our_codes_and_scales(kind: Any, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    grid, weight = Grid(kind, 4, (1, 64)), weight_of((512, 512), dtype)
    packed, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind)
    tensor = round_weight(weight, grid, fit(weight, grid))
    stored = local(bitsandbytes.encode(MODULE, tensor))
    assert torch.equal(stored["weight"], packed)
    assert torch.equal(stored["weight.absmax"], state.absmax)
    assert torch.equal(stored["weight.quant_map"], state.code)


@KINDS
@DTYPES
def test_bitsandbytes_nests_our_scales(kind: Any, dtype: torch.dtype) -> None:
    """Equal but for what its CPU kernel looks up in a table of 2**16 steps: there a middle may go to either side."""
    functional = pytest.importorskip("bitsandbytes.functional")
    grid, weight = Grid(kind, 4, (1, 64), nested=True), weight_of((512, 512), dtype)
    _, state = functional.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=True)
    nested = fit(weight, grid).nested
    assert nested is not None
    assert nested.offset == state.offset.item()
    assert torch.equal(nested.absmax, state.state2.absmax)
    table = codebooks.dynamic_table()
    assert torch.equal(table, state.state2.code)
    other = nested.codes != state.absmax
    assert other.float().mean() < 0.01
    absmax = fit(weight, replace(grid, nested=False)).scale
    scaled = ((absmax - nested.offset) / nested.absmax.repeat_interleave(256)[: absmax.numel()])[other]
    middle = (table[nested.codes[other].int()] + table[state.absmax[other].int()]) / 2
    assert bool(((scaled - middle).abs() < 2**-16).all())


@KINDS
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_bitsandbytes_decodes_to_our_values(kind: Any, nested: bool, dtype: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    tensor = quantized(("bitsandbytes", Scheme(Grid(kind, 4, (1, 64), nested=nested)), (128, 320)), dtype)
    stored = local(bitsandbytes.encode(MODULE, tensor))
    weight = stored.pop("weight")
    state = functional.QuantState.from_dict(
        {name.removeprefix("weight."): value for name, value in stored.items()}, device=torch.device("cpu")
    )
    half = torch.bfloat16 if dtype == "bf16" else torch.float16
    values = functional.dequantize_4bit(weight, state)
    assert values.dtype == half
    assert torch.equal(values, dequantize(tensor, half))
    theirs = state.as_dict(packed=True)
    assert set(theirs) == {name.removeprefix("weight.") for name in stored}
    text = f"quant_state.bitsandbytes__{kind}"
    assert json.loads(bytes(theirs[text].tolist())) == json.loads(bytes(stored[f"weight.{text}"].tolist()))


def test_bitsandbytes_decodes_int8_to_our_values() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    tensor = quantized(("bitsandbytes", Scheme(Grid("int", 8, (1, 0))), (256, 512)))
    stored = local(bitsandbytes.encode(MODULE, tensor))
    assert torch.equal(functional.int8_vectorwise_dequant(stored["weight"], stored["SCB"]), dequantize(tensor))


def test_bitsandbytes_own_int8_is_read() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of((64, 96), torch.float16)
    codes, stats, _ = functional.int8_vectorwise_quant(weight)
    tensors = {
        f"{MODULE}.weight": codes,
        f"{MODULE}.SCB": stats,
        f"{MODULE}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    tensor = bitsandbytes.decode(MODULE, tensors, Scheme(Grid("int", 8, (1, 0), scale="f32")))
    torch.testing.assert_close(dequantize(tensor), functional.int8_vectorwise_dequant(codes, stats), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    "grid", [Grid("nf4", 4, (1, 64), scale="bf16", nested=True), Grid("fp4", 4, (1, 64), scale="f16"), Grid("int", 8)]
)
def test_config_is_what_transformers_writes(grid: Grid) -> None:
    from transformers import BitsAndBytesConfig

    settings = bitsandbytes.config({MODULE: Scheme(grid)}, ["lm_head"])
    known = {name: value for name, value in settings.items() if not name.startswith(("_", "quant_method"))}
    assert BitsAndBytesConfig(**known).to_dict() == settings


def test_the_length_of_the_state_does_not_depend_on_the_data() -> None:
    """It is written before the mean of the scales, which stands in it, is known."""
    tensor = quantized(("bitsandbytes", Scheme(Grid("nf4", 4, (1, 64), nested=True)), (64, 64)))
    nested = tensor.params.nested
    assert nested is not None
    lengths, name = set(), f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
    for offset in (0.0, 0.5, 1 / 3, 1e-30, -1.2345678901234567e-308):
        params = replace(tensor.params, nested=replace(nested, offset=offset))
        lengths.add(len(bitsandbytes.encode(MODULE, replace(tensor, params=params))[name]))
    assert len(lengths) == 1


def test_quantizing_leaves_the_weight_alone() -> None:
    weight = weight_of((4, 64), torch.float32)
    before, grid = weight.clone(), Grid("nf4", 4, (1, 64))
    encode(weight, grid, fit(weight, grid))
    assert torch.equal(weight, before)


# ------------------------------------------------------------------------------------------------- refusals and mistakes

INT4 = Grid("int", 4, (1, 64))
REFUSED: list[tuple[str, Scheme, str]] = [
    ("gptq", Scheme(Grid("e4m3", 8, (1, 0))), "gptq holds 2, 3, 4 and 8 bit integers, not e4m3"),
    ("gptq", Scheme(Grid("int", 5, (1, 64))), "gptq holds 2, 3, 4 and 8 bit integers, not int5"),
    ("gptq", Scheme(Grid("int", 4, (128, 128))), "groups or channels, not int4 in blocks of 128 x 128"),
    ("gptq", Scheme(Grid("int", 8, (0, 0))), "groups or channels, not int8 per tensor"),
    ("gptq", Scheme(INT4, TOKEN), "weights only"),
    ("awq", Scheme(Grid("int", 8, (1, 64))), "awq holds 4 bit integers, not int8"),
    ("awq", Scheme(Grid("int", 4, (1, 0))), "awq holds groups, not int4 per channel"),
    ("awq", Scheme(INT4, TOKEN), "weights only"),
    ("bitsandbytes", Scheme(INT4), "symmetric int8 per channel, not int4 in groups of 64"),
    ("bitsandbytes", Scheme(Grid("int", 8, (1, 0), symmetric=False)), "not int8 with zero points per channel"),
    ("bitsandbytes", Scheme(Grid("e2m1", 4, (1, 16))), "nf4, fp4 and int8, not e2m1"),
    ("bitsandbytes", Scheme(Grid("nf4", 4, (1, 48))), "blocks of 32 to 4096, not 48"),
    ("bitsandbytes", Scheme(Grid("int", 8, (1, 0)), TOKEN), "weights only"),
    ("compressed-tensors", Scheme(Grid("nf4", 4, (1, 64))), "int, e4m3 and e2m1 weights, not nf4"),
    ("compressed-tensors", Scheme(Grid("bf16", 16)), "not bf16"),
    ("compressed-tensors", Scheme(Grid("e5m2", 8)), "not e5m2"),
    ("compressed-tensors", Scheme(Grid("int", 5, (1, 64))), "not 5 bit"),
    ("compressed-tensors", Scheme(Grid("int", 8, (1, 0))), "weight-only needs groups"),
    ("compressed-tensors", Scheme(Grid("int", 4, (0, 0))), "per channel or in groups, not int4 per tensor"),
    ("compressed-tensors", Scheme(INT4, Activation(Grid("int", 8, (0, 0)), dynamic=False)), "dynamic symmetric activations only"),
    ("compressed-tensors", Scheme(INT4, Activation(Grid("int", 8, (1, 0), symmetric=False))), "dynamic symmetric activations only"),
    ("compressed-tensors", Scheme(INT4, Activation(Grid("e4m3", 8, (1, 0)))), "int activations, not e4m3"),
    ("compressed-tensors", Scheme(Grid("int", 4, (128, 128)), TOKEN), "per channel or in groups, not int4 in blocks"),
    ("compressed-tensors", Scheme(Grid("int", 8, (1, 0)), Activation(Grid("e4m3", 8, (1, 0)))), "int activations, not e4m3"),
    ("compressed-tensors", Scheme(Grid("int", 8, (1, 0)), replace(TOKEN, dynamic=False)), "static"),
    ("compressed-tensors", Scheme(Grid("e4m3", 8, (1, 64))), "not e4m3 in groups of 64"),
    ("compressed-tensors", Scheme(Grid("e4m3", 8, (128, 128)), Activation(Grid("e4m3", 8, (1, 0)))), "not e4m3 per channel"),
    ("compressed-tensors", Scheme(Grid("e2m1", 4, (1, 32), scale="e4m3")), "groups of 16 with e4m3 scales"),
    ("compressed-tensors", Scheme(Grid("e2m1", 4, (1, 16), scale="e4m3"), Activation(Grid("e2m1", 4, (1, 16), scale="e4m3"))), "calibrated input scale"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "scheme", "reason"), REFUSED)
def test_refusals_say_why(name: str, scheme: Scheme, reason: str) -> None:
    assert reason in (FORMATS[name].refusal(scheme) or "nothing")


@pytest.mark.parametrize(
    ("name", "shape", "grid", "limit"),
    [
        ("gptq", (36, 64), Grid("int", 4, (1, 64)), "36 outputs, and gptq stores multiples of 8"),
        ("gptq", (40, 64), Grid("int", 3, (1, 64)), "40 outputs, and gptq stores multiples of 32"),
        ("gptq", (32, 72), Grid("int", 3, (1, 24)), "72 inputs, and gptq stores multiples of 32"),
        ("gptq", (32, 96), Grid("int", 4, (1, 64)), "96 inputs, and gptq stores multiples of 64"),
        ("awq", (36, 64), Grid("int", 4, (1, 64)), "36 outputs, and awq stores multiples of 8"),
        (
            "compressed-tensors",
            (36, 96),
            Grid("int", 4, (1, 64)),
            "96 inputs, and compressed-tensors stores multiples of 64",
        ),
        ("compressed-tensors", (36, 40), Grid("e2m1", 4, (1, 16), scale="e4m3"), "40 inputs"),
    ],
)
def test_layers_that_do_not_fit_are_named_with_the_limit(
    name: str, shape: tuple[int, int], grid: Grid, limit: str
) -> None:
    with pytest.raises(QuantryError, match=f"{MODULE} has {limit}"):
        FORMATS[name].layout(MODULE, shape, grid)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("gptq", {"bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ("gptq", {"bits": "4"}, "bits '4', not int"),
        ("gptq", {}, "no bits"),
        ("gptq", {"bits": 5}, "not int5"),
        ("gptq", {"bits": 4, "group_size": 24}, "3 groups for 96 inputs"),
        ("gptq", {"bits": 4, "dynamic": {"+:(": {}}}, "dynamic rule"),
        ("awq", {"bits": 4, "group_size": 32, "version": "gemv"}, "gemv"),
        ("awq", {"bits": 4, "group_size": 32, "zero_point": False}, "zero_point False"),
        ("compressed-tensors", {}, "config_groups"),
        ("compressed-tensors", {"format": "marlin-24", "config_groups": {"g": {"targets": ["Linear"]}}}, "marlin-24"),
        ("compressed-tensors", {"format": "pack-quantized", "config_groups": {"g": {"targets": ["re:nothing"], "weights": {}}}}, "no group"),
        ("compressed-tensors", {"format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"]}}}, "no weights"),
        ("compressed-tensors", {"format": "pack-quantized", "config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 5}}}}, "int5"),
        ("bitsandbytes", {"load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bfloat16"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_read_are_named(name: str, settings: dict[str, Any], problem: str) -> None:
    stored = {"gptq": "gptq", "awq": "gptq"}.get(name, "compressed-tensors")
    infos = headers(FORMATS[stored].layout(MODULE, (32, 96), Grid("int", 4, (1, 32))), "bf16")
    with pytest.raises((ConfigError, CheckpointError), match=problem):
        FORMATS[name].schemes(settings, infos)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_a_missing_tensor_is_named(case: tuple[str, Scheme, tuple[int, int]]) -> None:
    name, scheme, _ = case
    tensor = quantized(case)
    tensors = FORMATS[name].encode(MODULE, tensor)
    for missing in tensors:
        if missing.endswith((".g_idx", ".weight_format")):  # not needed to read
            continue
        rest = {key: value for key, value in tensors.items() if key != missing}
        with pytest.raises(CheckpointError, match="is missing"):
            FORMATS[name].decode(MODULE, rest, replace(scheme, weight=tensor.grid))


def test_gptq_overrides_fit_a_layer_and_its_fused_name_only() -> None:
    import re

    four, eight = Scheme(Grid("int", 4, (1, 32))), Scheme(Grid("int", 8, (1, 0)))
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in (1, 11)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    ]
    assignment = {name: eight if ".1." in name and "o_proj" not in name else four for name in names}
    settings = gptq.config(assignment, ["model.layers.2.mlp.gate", "lm_head"])
    assert (settings["bits"], settings["group_size"]) == (4, 32)
    rules = [rule.removeprefix("+:") for rule, value in settings["dynamic"].items() if value]
    for name, fits in [
        ("1.self_attn.q_proj", True),
        ("1.self_attn.qkv_proj", True),
        ("1.self_attn.o_proj", False),
        ("11.self_attn.q_proj", False),
    ]:
        assert any(re.match(rule, f"model.layers.{name}") for rule in rules) == fits
    assert r"-:^model\.layers\.2\.mlp\.gate$" in settings["dynamic"]
    infos = [
        info for name in names for info in headers(gptq.layout(name, (32, 96), assignment[name].weight), "bf16")[:-2]
    ]
    assert gptq.schemes(settings, infos) == assignment


@pytest.mark.parametrize(
    ("name", "grids"),
    [("awq", [INT4, Grid("int", 4, (1, 32))]), ("bitsandbytes", [Grid("nf4", 4, (1, 64)), Grid("int", 8)])],
)
def test_one_scheme_for_all_where_config_has_room_for_one(name: str, grids: list[Grid]) -> None:
    with pytest.raises(QuantryError, match="one scheme"):
        FORMATS[name].config({f"m.{index}": Scheme(grid) for index, grid in enumerate(grids)}, [])


def test_a_kept_name_that_begins_a_quantized_one_is_refused() -> None:
    with pytest.raises(QuantryError, match="mlp.gate_proj in 16 bit too"):
        awq.config({"model.layers.0.mlp.gate_proj": Scheme(INT4)}, ["model.layers.0.mlp.gate"])


def test_an_awq_checkpoint_is_float16() -> None:
    assert awq.model_dtype("bf16") == "f16"
    assert all(FORMATS[name].model_dtype("bf16") == "bf16" for name in FORMATS if name != "awq")
    assert awq.stored_grid(INT4, "bf16").scale == "f16"


def test_a_symmetric_scheme_does_not_read_awq_zero_points() -> None:
    case = ("awq", Scheme(Grid("int", 4, (1, 16), symmetric=False)), (24, 48))
    with pytest.raises(CheckpointError, match="not all 8"):
        awq.decode(MODULE, awq.encode(MODULE, quantized(case)), Scheme(Grid("int", 4, (1, 16))))


def test_capabilities_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from quantry.formats import awq, bitsandbytes, compressed_tensors, gptq\n"
        "from quantry.types import Grid, Scheme\n"
        "for module, grid in ((gptq, Grid('int', 4, (1, 32))), (awq, Grid('int', 4, (1, 32))), (compressed_tensors, Grid('int', 4, (1, 32))), (bitsandbytes, Grid('nf4', 4, (1, 64)))):\n"
        "    scheme = Scheme(module.stored_grid(grid, 'bf16'))\n"
        "    assert module.refusal(scheme) is None\n"
        "    module.layout('m', (64, 64), scheme.weight)\n"
        "    module.config({'m': scheme}, [])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

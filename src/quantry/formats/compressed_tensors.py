"""compressed-tensors checkpoints: one format for integers and small floats, with or without quantized activations.

| sub-format | tensors of a layer (module.weight...) |
|---|---|
| pack-quantized | `_packed` int32 [out, ceil(in * bits / 32)], `_scale` [out, groups], `_shape` int64 [2], and with zero points `_zero_point` int32 [ceil(out * bits / 32), groups] |
| int-quantized, float-quantized | the codes themselves, int8 or e4m3, and `_scale`: [1], [out, 1] or [blocks, blocks] |
| nvfp4-pack-quantized | `_packed` uint8 [out, in / 2], `_scale` e4m3 [out, in / 16], `_global_scale` float32 [1], a divisor |
| mxfp4-pack-quantized | `_packed` uint8 [out, in / 2], `_scale` uint8 exponents [out, in / 32] |
| any of int8, e4m3 with static inputs | besides, module.input_scale [1]; NVFP4: module.input_global_scale float32 [1], a divisor, beside scales of groups that are found as it runs (`dynamic` is "local") |
| any, with an FP8 KV cache | besides, for each attention module .k_scale and .v_scale: [1], or with one a key-value head [heads, 1, 1] |

vLLM (0.26 to 0.32) takes the largest static scale of the layers that it fuses, so these must share one; experts too.

Float scales have the model's dtype: vLLM copies them into float32 parameters (integers below 8 bit: into the model's
dtype), transformers casts them to the model's dtype; so a 16-bit scale is rounded by neither, and a float32 one would be.

Integers below 8 bit are packed with quantized inputs too (W4A8): vLLM reads that (compressed_tensors_wNa8.py) on GPUs and
CPUs, though few kernels use 8-bit inputs. It knows W4A8 in int-quantized as well, one code a byte: as large as W8A8, and
for CPUs alone. Such a file is read here and not written.

3-bit codes are packed without gaps, as the library does since 0.18; up to 0.17 it put ten of them in a word. Other
widths are the same in both. Reading tells the two apart by the number of words.
"""  # noqa: E501

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from quantry.errors import CheckpointError
from quantry.formats import _compressed_tensors_cache, contract
from quantry.formats._compressed_tensors_config import BITS, is_packed, schemes_of, settings_of
from quantry.formats.contract import spell
from quantry.types import Activation, Grid, Params, QTensor, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

NAME = "compressed-tensors"
QUANT_METHODS = ("compressed-tensors",)
CACHE_SCALES: contract.CacheFormat = _compressed_tensors_cache


def refusal(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if grid.kind == "int":
        return _refuse_int(scheme)
    if grid.kind == "e4m3":
        return _refuse_float8(scheme)
    if grid.kind != "e2m1":
        return f"compressed-tensors holds int, e4m3 and e2m1 weights, not {grid.kind}"
    if (grid.scale, grid.block) not in (("e4m3", (1, 16)), ("e8m0", (1, 32))):
        return (
            "compressed-tensors holds e2m1 in groups of 16 with e4m3 scales or of 32 with e8m0 scales, "
            f"not {spell(grid)} with {grid.scale} scales"
        )
    if scheme.activation is None:
        return None
    if grid.scale == "e8m0":
        return _refuse_activation(scheme.activation, "e2m1", ((1, 32),))
    if scheme.activation.dynamic:
        return "nvfp4 with quantized activations needs a calibrated input scale, so they cannot be dynamic"
    if scheme.activation.grid != grid:
        return f"with nvfp4 weights compressed-tensors holds nvfp4 activations, not {spell(scheme.activation.grid)}"
    return None


def stored_grid(grid: Grid, dtype: contract.ModelType) -> Grid:
    return grid if grid.kind == "e2m1" else replace(grid, scale=dtype)


def model_dtype(dtype: str) -> str:
    return dtype


def layout(module: str, shape: tuple[int, int], grid: Grid, static: Activation | None = None) -> contract.Layout:
    """Returns the tensors of a layer; a static input adds its scale."""
    contract.refuse(module, NAME, refusal(Scheme(grid, static) if static else _example(grid)))
    weight = _weight_layout(module, shape, grid)
    if static is None:
        return weight
    return {**weight, _input_name(module, grid): ("F32" if grid.kind == "e2m1" else contract.STORED[grid.scale], (1,))}


def _weight_layout(module: str, shape: tuple[int, int], grid: Grid) -> contract.Layout:
    rows, columns = shape
    if grid.block[0] == 1 and grid.block[1]:
        contract.need_multiple(module, "inputs", columns, grid.block[1], NAME)
    high, wide = contract.scale_shape(grid, shape)
    scale = {f"{module}.weight_scale": (contract.STORED[grid.scale], (1,) if grid.block == (0, 0) else (high, wide))}
    if grid.kind == "e2m1":
        outer: contract.Layout = {f"{module}.weight_global_scale": ("F32", (1,))} if grid.scale == "e4m3" else {}
        return {f"{module}.weight_packed": ("U8", (rows, columns // 2)), **scale, **outer}
    if not is_packed(grid):
        return {f"{module}.weight": ("I8" if grid.kind == "int" else "F8_E4M3", shape), **scale}
    zeros: contract.Layout = {f"{module}.weight_zero_point": ("I32", (ceil(rows * grid.bits / 32), wide))}
    return {
        f"{module}.weight_packed": ("I32", (rows, ceil(columns * grid.bits / 32))),
        **scale,
        f"{module}.weight_shape": ("I64", (2,)),
        **({} if grid.symmetric else zeros),
    }


def config(assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None = None) -> dict[str, Any]:
    contract.refuse("the KV cache", NAME, CACHE_SCALES.refusal(cache) if cache else None)
    return settings_of(assignment, kept, cache)


def schemes(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    return schemes_of(settings, tensors)


def encode(module: str, tensor: QTensor) -> "dict[str, Tensor]":
    """Returns the stored tensors of a layer; the static scale of its input is already in its stored dtype."""
    weight = _encode_weight(module, tensor)
    if tensor.input_scale is None:
        return weight
    return {**weight, _input_name(module, tensor.grid): tensor.input_scale.reshape(1)}


def _encode_weight(module: str, tensor: QTensor) -> "dict[str, Tensor]":
    import torch

    from quantry.numerics.packing import pack_nibbles_low_first, pack_rows, unsigned

    grid, params = tensor.grid, tensor.params
    layout(module, (tensor.shape[0], tensor.shape[1]), grid)  # for its refusals
    scale = {f"{module}.weight_scale": params.scale.reshape(-1) if grid.block == (0, 0) else params.scale.contiguous()}
    if grid.kind == "e2m1":
        outer = {} if params.outer is None else {f"{module}.weight_global_scale": params.outer.reshape(1)}
        return {f"{module}.weight_packed": pack_nibbles_low_first(tensor.codes), **scale, **outer}
    if not is_packed(grid):
        return {f"{module}.weight": tensor.codes.contiguous(), **scale}
    stored = {
        f"{module}.weight_packed": pack_rows(unsigned(tensor.codes, grid.bits), grid.bits),
        **scale,
        f"{module}.weight_shape": torch.tensor(tensor.shape, dtype=torch.int64, device=tensor.codes.device),
    }
    if params.zero is not None:
        zero = unsigned(params.zero.T, grid.bits)
        stored[f"{module}.weight_zero_point"] = pack_rows(zero, grid.bits).T.contiguous()
    return stored


def shape(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> tuple[int, int]:
    """Returns the (out, in) of a stored layer without unpacking it."""
    if f"{module}.weight_shape" in tensors:
        rows, columns = (int(size) for size in tensors[f"{module}.weight_shape"].tolist())
        return rows, columns
    if f"{module}.weight_packed" in tensors:
        packed = tensors[f"{module}.weight_packed"]
        return packed.shape[0], 2 * packed.shape[1]
    codes = contract.part(tensors, module, "weight")
    return codes.shape[0], codes.shape[1]


def decode(
    module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None = None
) -> QTensor:
    """Inverts `encode`. Raises CheckpointError for a missing tensor or an activation order."""
    return replace(_decode_weight(module, tensors, scheme.weight), input_scale=_input_scale(module, tensors, scheme))


def _decode_weight(module: str, tensors: "Mapping[str, Tensor]", grid: Grid) -> QTensor:
    if f"{module}.weight_g_idx" in tensors:
        raise CheckpointError(
            f"{module}.weight_g_idx permutes the inputs (activation order with groups), which is not read",
            fix="use a checkpoint made with actorder weight (static) or none",
        )
    stored = contract.part(tensors, module, "weight_scale")
    if grid.kind == "e2m1":
        from quantry.numerics.packing import unpack_nibbles_low_first

        packed = contract.part(tensors, module, "weight_packed")
        nibbles = unpack_nibbles_low_first(packed, 2 * packed.shape[1])
        outer = contract.part(tensors, module, "weight_global_scale").reshape(1) if grid.scale == "e4m3" else None
        return QTensor(grid, nibbles, Params(stored, outer=outer))
    if f"{module}.weight_packed" in tensors:
        return _unpack(module, tensors, grid)
    codes = contract.part(tensors, module, "weight")
    return QTensor(grid, codes, Params(stored.reshape(contract.scale_shape(grid, (codes.shape[0], codes.shape[1])))))


def _unpack(module: str, tensors: "Mapping[str, Tensor]", grid: Grid) -> QTensor:
    """Unpacks integers without gaps, or as the library packed them up to 0.17: the number of words tells which."""
    from quantry.numerics.packing import signed, unpack_rows, unpack_rows_spaced

    packed, bits = contract.part(tensors, module, "weight_packed"), grid.bits
    rows, columns = (int(size) for size in contract.part(tensors, module, "weight_shape").tolist())
    widths = {ceil(columns / (32 // bits)): unpack_rows_spaced, ceil(columns * bits / 32): unpack_rows}
    if packed.shape[1] not in widths:
        raise CheckpointError(
            f"{module}.weight_packed has {packed.shape[1]} words a row for {columns} codes of {bits} bits",
            fix="download the checkpoint again",
        )
    unpack = widths[packed.shape[1]]
    zero = None
    if not grid.symmetric:
        zero = signed(unpack(contract.part(tensors, module, "weight_zero_point").T, bits, rows), bits).T.contiguous()
    scale = contract.part(tensors, module, "weight_scale").reshape(contract.scale_shape(grid, (rows, columns)))
    return QTensor(grid, signed(unpack(packed, bits, columns), bits), Params(scale, zero))


def _input_scale(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> "Tensor | None":
    """Returns the static scale of a layer's input, (1,) as stored (NVFP4: a divisor); None if it has none."""
    if scheme.static is None:
        return None
    name = _input_name(module, scheme.static.grid)
    if name not in tensors or tensors[name].numel() != 1:
        what = "is missing" if name not in tensors else f"has {tensors[name].numel()} values"
        raise CheckpointError(
            f"{module} has a static scale for its input, and {name} {what}", fix="download the checkpoint again"
        )
    return tensors[name].reshape(1)


def _input_name(module: str, grid: Grid) -> str:
    """Returns where the static scale of an input is stored; weights and inputs have the same kind of grid."""
    return f"{module}.{'input_global_scale' if grid.kind == 'e2m1' else 'input_scale'}"


def _example(grid: Grid) -> Scheme:
    """Returns a scheme with this weight grid: with activations if its sub-format is only for them."""
    needs = grid.kind == "int" and not is_packed(grid)
    return Scheme(grid, Activation(Grid("int", 8, (1, 0))) if needs else None)


def _refuse_int(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if grid.bits not in BITS:
        return f"compressed-tensors holds 2, 3, 4 and 8 bit integers, not {grid.bits} bit"
    if grid.scale not in ("f16", "bf16", "f32"):
        return f"compressed-tensors holds integers with float scales, not {grid.scale}"
    if scheme.activation is None:
        if not is_packed(grid):
            return f"compressed-tensors holds {spell(grid)} with quantized activations only; weight-only needs groups"
        if grid.block[0] != 1:
            return f"compressed-tensors holds weight-only integers per channel or in groups, not {spell(grid)}"
        return None
    if is_packed(grid):
        return _refuse_packed(scheme.activation, grid)
    if grid.block not in ((1, 0), (0, 0)):
        return f"compressed-tensors holds int8 with quantized activations per channel or tensor, not {spell(grid)}"
    return _refuse_activation(scheme.activation, "int", ((1, 0),) if scheme.activation.dynamic else ((0, 0),))


def _refuse_packed(activation: Activation, grid: Grid) -> str | None:
    """Checks packed integers with quantized activations, which vLLM wants per token, symmetric and dynamic."""
    if grid.block[0] != 1:
        return f"compressed-tensors holds packed integers per channel or in groups, not {spell(grid)}"
    if not activation.dynamic or not activation.grid.symmetric:
        return f"with {spell(grid)} weights compressed-tensors holds dynamic symmetric activations only"
    return _refuse_activation(activation, "int", ((1, 0),))


def _refuse_float8(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if not grid.symmetric or grid.block not in ((0, 0), (1, 0), (128, 128)):
        return f"compressed-tensors holds e4m3 per tensor, per channel or in blocks of 128 x 128, not {spell(grid)}"
    if grid.scale not in ("f16", "bf16", "f32"):
        return f"compressed-tensors holds e4m3 with float scales, not {grid.scale}"
    if scheme.activation is None:
        return None
    if grid.block == (128, 128):
        return _refuse_activation(scheme.activation, "e4m3", ((1, 128),))
    return _refuse_activation(scheme.activation, "e4m3", ((1, 0), (0, 0)) if scheme.activation.dynamic else ((0, 0),))


def _refuse_activation(activation: Activation, kind: str, blocks: tuple[tuple[int, int], ...]) -> str | None:
    grid = activation.grid
    if not activation.dynamic and ((0, 0) not in blocks or grid.block != (0, 0) or not grid.symmetric):
        return f"compressed-tensors holds static scales of one for the tensor without zero points, not {spell(grid)}"
    if grid.kind != kind or grid.block not in blocks or grid.bits != (4 if kind == "e2m1" else 8):
        return f"with these weights compressed-tensors holds {kind} activations, not {spell(grid)}"
    return None

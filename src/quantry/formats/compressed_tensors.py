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

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Any

from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.formats import (
    STORED,
    Layout,
    ModelType,
    float_scale,
    modules_with,
    need_multiple,
    part,
    refuse,
    scale_shape,
    setting,
    spell,
)
from quantry.types import Activation, Grid, Params, QTensor, ScaleType, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

NAME = "compressed-tensors"
BITS = (2, 3, 4, 8)
READ = (  # sub-formats; naive-quantized is what int- and float-quantized were called before
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
KEYS_VALUES = ("k_proj", "v_proj", "qkv_proj")  # an attention module that has one of them has a cache to be scaled
HEADS = ("lm_head", "embed_tokens")  # no Linear in vLLM (0.32): a quantized one must be a target by its name


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


def stored_grid(grid: Grid, dtype: ModelType) -> Grid:
    return grid if grid.kind == "e2m1" else replace(grid, scale=dtype)


def model_dtype(dtype: str) -> str:
    return dtype


def layout(module: str, shape: tuple[int, int], grid: Grid, activation: Activation | None = None) -> Layout:
    """The tensors of a layer; `activation` is given where its scale is static, and so is stored."""
    refuse(module, NAME, refusal(Scheme(grid, activation) if activation else _example(grid)))
    inputs: Layout = {}
    if activation and not activation.dynamic:
        inputs = {_input_name(module, grid): ("F32" if grid.kind == "e2m1" else STORED[grid.scale], (1,))}
    return {**_weight_layout(module, shape, grid), **inputs}


def _weight_layout(module: str, shape: tuple[int, int], grid: Grid) -> Layout:
    rows, columns = shape
    if grid.block[0] == 1 and grid.block[1]:
        need_multiple(module, "inputs", columns, grid.block[1], NAME)
    high, wide = scale_shape(grid, shape)
    scale = {f"{module}.weight_scale": (STORED[grid.scale], (1,) if grid.block == (0, 0) else (high, wide))}
    if grid.kind == "e2m1":
        outer: Layout = {f"{module}.weight_global_scale": ("F32", (1,))} if grid.scale == "e4m3" else {}
        return {f"{module}.weight_packed": ("U8", (rows, columns // 2)), **scale, **outer}
    if not _is_packed(grid):
        return {f"{module}.weight": ("I8" if grid.kind == "int" else "F8_E4M3", shape), **scale}
    zeros: Layout = {f"{module}.weight_zero_point": ("I32", (ceil(rows * grid.bits / 32), wide))}
    return {
        f"{module}.weight_packed": ("I32", (rows, ceil(columns * grid.bits / 32))),
        **scale,
        f"{module}.weight_shape": ("I64", (2,)),
        **({} if grid.symmetric else zeros),
    }


def encode(module: str, tensor: QTensor, inputs: "Tensor | None" = None) -> "dict[str, Tensor]":
    """The stored tensors of a layer; `inputs` is the static scale of its input, rounded to the dtype that is stored."""
    static = {} if inputs is None else {_input_name(module, tensor.grid): inputs.reshape(1)}
    return {**_encode_weight(module, tensor), **static}


def _encode_weight(module: str, tensor: QTensor) -> "dict[str, Tensor]":
    import torch

    from quantry.numerics.packing import pack_nibbles_low_first, pack_rows, unsigned

    grid, params = tensor.grid, tensor.params
    layout(module, (tensor.shape[0], tensor.shape[1]), grid)  # for its refusals
    scale = {f"{module}.weight_scale": params.scale.reshape(-1) if grid.block == (0, 0) else params.scale.contiguous()}
    if grid.kind == "e2m1":
        outer = {} if params.outer is None else {f"{module}.weight_global_scale": params.outer.reshape(1)}
        return {f"{module}.weight_packed": pack_nibbles_low_first(tensor.codes), **scale, **outer}
    if not _is_packed(grid):
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
    """The (out, in) of a stored layer, without unpacking it."""
    if f"{module}.weight_shape" in tensors:
        rows, columns = (int(size) for size in tensors[f"{module}.weight_shape"].tolist())
        return rows, columns
    if f"{module}.weight_packed" in tensors:
        packed = tensors[f"{module}.weight_packed"]
        return packed.shape[0], 2 * packed.shape[1]
    codes = part(tensors, module, "weight")
    return codes.shape[0], codes.shape[1]


def decode(
    module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None = None
) -> QTensor:
    grid = scheme.weight
    input_scale(module, tensors, scheme)  # that it is there
    if f"{module}.weight_g_idx" in tensors:
        raise CheckpointError(
            f"{module}.weight_g_idx permutes the inputs (activation order with groups), which is not read",
            fix="use a checkpoint made with actorder weight (static) or none",
        )
    stored = part(tensors, module, "weight_scale")
    if grid.kind == "e2m1":
        from quantry.numerics.packing import unpack_nibbles_low_first

        packed = part(tensors, module, "weight_packed")
        codes = unpack_nibbles_low_first(packed, 2 * packed.shape[1])
        outer = part(tensors, module, "weight_global_scale").reshape(1) if grid.scale == "e4m3" else None
        return QTensor(grid, codes, Params(stored, outer=outer))
    if f"{module}.weight_packed" in tensors:
        return _unpack(module, tensors, grid)
    codes = part(tensors, module, "weight")
    return QTensor(grid, codes, Params(stored.reshape(scale_shape(grid, (codes.shape[0], codes.shape[1])))))


def input_scale(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> "Tensor | None":
    """The static scale of a layer's input, (1,) as stored (NVFP4: a divisor); None where it has none."""
    if scheme.activation is None or scheme.activation.dynamic:
        return None
    name = _input_name(module, scheme.activation.grid)
    if name not in tensors or tensors[name].numel() != 1:
        found = "is missing" if name not in tensors else f"has {tensors[name].numel()} values"
        raise CheckpointError(
            f"{module} has a static scale for its input, and {name} {found}", fix="download the checkpoint again"
        )
    return tensors[name].reshape(1)


def cache_modules(modules: Iterable[str]) -> tuple[str, ...]:
    """The attention modules whose keys and values get a scale, from the names of linear layers."""
    found = [name.rpartition(".") for name in modules]
    return tuple(dict.fromkeys(parent for parent, _, leaf in found if leaf in KEYS_VALUES))


def cache_layout(module: str, heads: int, grid: Grid) -> Layout:
    """The scales of keys and of values: one each, or one a key-value head if the grid's block is (1, 0)."""
    refuse(module, NAME, cache_refusal(grid))
    shape = (heads, 1, 1) if grid.block == (1, 0) else (1,)
    return {f"{module}.{side}_scale": (STORED[grid.scale], shape) for side in "kv"}


def encode_cache(module: str, keys: "Tensor", values: "Tensor") -> "dict[str, Tensor]":
    """The stored scales of an attention module, from `numerics.static.cache_scale` of its keys and values."""
    return {f"{module}.k_scale": keys.contiguous(), f"{module}.v_scale": values.contiguous()}


def cache_refusal(grid: Grid) -> str | None:
    """Why a KV cache of this grid cannot be described, or None: what vLLM reads is E4M3 by tensor or by head."""
    wanted = grid.kind == "e4m3" and grid.symmetric and grid.block in ((0, 0), (1, 0))
    if wanted and grid.scale in ("f16", "bf16", "f32"):
        return None
    return f"compressed-tensors holds a KV cache of e4m3 per tensor or per head, not {spell(grid)}"


def cache_grid(settings: Mapping[str, Any]) -> Grid | None:
    """How the KV cache of a checkpoint is quantized; None where it is not."""
    arguments = settings.get("kv_cache_scheme")
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"kv_cache_scheme is {str(arguments)[:40]!r}, not an object", fix="restore config.json")
    by_head = {"attn_head": "channel"}  # a head is a row of keys
    strategy = arguments.get("strategy")
    return _grid("the KV cache", {**arguments, "strategy": by_head.get(str(strategy), strategy)})


def config(assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None = None) -> dict[str, Any]:
    """The most frequent scheme is the one of all Linear layers; the layers of each other one are listed by name."""
    refuse("the KV cache", NAME, cache_refusal(cache) if cache else None)
    groups: dict[str, list[str]] = {}
    for module, scheme in assignment.items():
        groups.setdefault(json.dumps(_group(scheme)), []).append(module)
    if not groups:
        raise QuantryError("no layer is quantized", fix="choose layers to quantize")
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    common = [*(module for module in ordered[0][1] if module.rpartition(".")[2] in HEADS)]
    targets = [["Linear", *common], *(modules for _, modules in ordered[1:])]
    entries = [{"targets": names, **json.loads(key)} for names, (key, _) in zip(targets, ordered, strict=True)]
    formats = {entry["format"] for entry in entries}
    return {
        "quant_method": NAME,
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{index}": entry for index, entry in enumerate(entries)},
        "ignore": list(kept),
        "kv_cache_scheme": cache and _arguments(cache, dynamic=False, single="attn_head"),
        "global_compression_ratio": None,
    }


def schemes(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    groups = _groups(settings)
    return {
        module: _scheme(module, _group_of(module, groups), info)
        for module, info in modules_with(tensors, "weight_scale").items()
    }


def _is_packed(grid: Grid) -> bool:
    """Whether integers are packed into words: not 8-bit ones without groups, whose activations are quantized too."""
    return grid.kind == "int" and not (grid.bits == 8 and grid.symmetric and grid.block[1] == 0)


def _example(grid: Grid) -> Scheme:
    """A scheme that this grid is stored in: with activations where the sub-format is for them only."""
    needs = grid.kind == "int" and not _is_packed(grid)
    return Scheme(grid, Activation(Grid("int", 8, (1, 0))) if needs else None)


def _refuse_int(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if grid.bits not in BITS:
        return f"compressed-tensors holds 2, 3, 4 and 8 bit integers, not {grid.bits} bit"
    if grid.scale not in ("f16", "bf16", "f32"):
        return f"compressed-tensors holds integers with float scales, not {grid.scale}"
    if scheme.activation is None:
        if not _is_packed(grid):
            return f"compressed-tensors holds {spell(grid)} with quantized activations only; weight-only needs groups"
        if grid.block[0] != 1:
            return f"compressed-tensors holds weight-only integers per channel or in groups, not {spell(grid)}"
        return None
    if _is_packed(grid):
        return _refuse_packed(scheme.activation, grid)
    if grid.block not in ((1, 0), (0, 0)):
        return f"compressed-tensors holds int8 with quantized activations per channel or tensor, not {spell(grid)}"
    return _refuse_activation(scheme.activation, "int", ((1, 0),) if scheme.activation.dynamic else ((0, 0),))


def _refuse_packed(activation: Activation, grid: Grid) -> str | None:
    """Packed integers with quantized activations: in vLLM by the token and symmetric, with scales found as it runs."""
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


def _group(scheme: Scheme) -> dict[str, Any]:
    """One config group but for its targets."""
    grid, activation = scheme.weight, scheme.activation
    kind = {"e4m3": "float-quantized", "e2m1": f"{'nv' if grid.scale == 'e4m3' else 'mx'}fp4-pack-quantized"}
    return {
        "weights": _arguments(grid, dynamic=False, single="channel"),
        "input_activations": activation and _arguments(activation.grid, dynamic=_dynamic(activation), single="token"),
        "output_activations": None,
        "format": kind.get(grid.kind, "pack-quantized" if _is_packed(grid) else "int-quantized"),
    }


def _dynamic(activation: Activation) -> bool | str:
    """The library's word: NVFP4's scale for the tensor is stored, and those of groups are found as it runs."""
    return "local" if not activation.dynamic and activation.grid.scale == "e4m3" else activation.dynamic


def _input_name(module: str, grid: Grid) -> str:
    """Where the static scale of an input lies; weights and inputs are of one kind."""
    return f"{module}.{'input_global_scale' if grid.kind == 'e2m1' else 'input_scale'}"


def _arguments(grid: Grid, *, dynamic: bool | str, single: str) -> dict[str, Any]:
    """The library's QuantizationArgs; `single` is what one row of a matrix is called there."""
    rows, columns = grid.block
    strategy = {(1, columns): "group", (0, 0): "tensor", (1, 0): single}.get(grid.block, "block")
    small = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"} if grid.kind == "e2m1" else {}
    return {
        "num_bits": grid.bits,
        "type": "int" if grid.kind == "int" else "float",
        "symmetric": grid.symmetric,
        "strategy": "tensor_group" if grid.kind == "e2m1" and grid.scale == "e4m3" else strategy,
        "group_size": columns if strategy == "group" else None,
        "block_structure": [rows, columns] if strategy == "block" else None,
        "dynamic": dynamic,
        "actorder": None,
        **({"scale_dtype": small[grid.scale]} if grid.scale in small else {}),
    }


def _groups(settings: Mapping[str, Any]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """The config groups with their targets; each sub-format is checked to be one that is read."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError("quantization_config has no config_groups", fix="restore config.json")
    for group in groups.values():
        kind = group.get("format") or settings.get("format")
        if kind not in READ:
            raise ConfigError(
                f"quantization_config has format {str(kind)[:40]!r}; these are read: {', '.join(READ)}",
                fix="quantize the original model",
            )
    return [([str(target) for target in group.get("targets") or ()], group) for group in groups.values()]


def _group_of(module: str, groups: list[tuple[list[str], Mapping[str, Any]]]) -> Mapping[str, Any]:
    """The group of a layer: the one that names it, else one whose pattern fits it, else one for a class of layers."""
    for fits in (_is_name, _is_pattern, _is_class):
        for targets, group in groups:
            if any(fits(target, module) for target in targets):
                return group
    raise CheckpointError(
        f"{module} has a weight_scale, and no group in quantization_config targets it", fix="restore config.json"
    )


def _is_name(target: str, module: str) -> bool:
    return target == module


def _is_pattern(target: str, module: str) -> bool:
    try:
        return target.startswith("re:") and re.match(target[3:], module) is not None
    except re.error as error:
        raise ConfigError(f"quantization_config has a target {target[:80]} ({error})", fix="mend it") from error


def _is_class(target: str, module: str) -> bool:
    return "." not in target and not target.startswith("re:") and target not in HEADS


def _scheme(module: str, group: Mapping[str, Any], scale: TensorInfo) -> Scheme:
    arguments, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"the group of {module} in quantization_config has no weights", fix="restore config.json")
    weight = _grid(module, arguments)
    if weight.kind != "e2m1":
        weight = replace(weight, scale=float_scale(scale))
    if not isinstance(inputs, Mapping):
        return Scheme(weight)
    return Scheme(weight, Activation(_grid(module, inputs), dynamic=inputs.get("dynamic") is True))


def _grid(module: str, arguments: Mapping[str, Any]) -> Grid:
    """The grid of the library's QuantizationArgs. The scale type of activations is not stored; it is the default."""
    bits, kind = setting(arguments, ("num_bits",), int, 8), setting(arguments, ("type",), str, "int")
    size = arguments.get("group_size")
    strategy = arguments.get("strategy") or {None: "tensor", -1: "channel"}.get(size, "group")
    wide = size if isinstance(size, int) and size > 0 else 0
    structure = arguments.get("block_structure")
    blocks: dict[Any, Any] = {"tensor": (0, 0), "channel": (1, 0), "token": (1, 0), "group": (1, wide)}
    blocks |= {"tensor_group": (1, wide), "block": tuple(structure) if isinstance(structure, list) else None}
    block = blocks.get(strategy)
    kinds = {("int", bits): "int", ("float", 8): "e4m3", ("float", 4): "e2m1"}
    if block is None or (kind, bits) not in kinds or (kind == "int" and bits not in BITS):
        raise ConfigError(
            f"{module} is {kind}{bits} with strategy {str(strategy)[:40]}, which is not read",
            fix="quantize the original model",
        )
    scale: ScaleType = "bf16"
    if (kind, bits) == ("float", 4):
        scale = "e4m3" if strategy == "tensor_group" else "e8m0"
    symmetric = setting(arguments, ("symmetric",), bool, True)
    return Grid(kinds[kind, bits], bits, block, symmetric, scale)  # type: ignore[arg-type]


def _unpack(module: str, tensors: "Mapping[str, Tensor]", grid: Grid) -> QTensor:
    """Packed integers: without gaps, or as up to 0.17 of the library; what the words of the codes say holds for all."""
    from quantry.numerics.packing import signed, unpack_rows, unpack_rows_spaced

    packed, bits = part(tensors, module, "weight_packed"), grid.bits
    rows, columns = (int(size) for size in part(tensors, module, "weight_shape").tolist())
    widths = {ceil(columns / (32 // bits)): unpack_rows_spaced, ceil(columns * bits / 32): unpack_rows}
    if packed.shape[1] not in widths:
        raise CheckpointError(
            f"{module}.weight_packed has {packed.shape[1]} words a row for {columns} codes of {bits} bits",
            fix="download the checkpoint again",
        )
    unpack = widths[packed.shape[1]]
    zero = None
    if not grid.symmetric:
        zero = signed(unpack(part(tensors, module, "weight_zero_point").T, bits, rows), bits).T.contiguous()
    scale = part(tensors, module, "weight_scale").reshape(scale_shape(grid, (rows, columns)))
    return QTensor(grid, signed(unpack(packed, bits, columns), bits), Params(scale, zero))

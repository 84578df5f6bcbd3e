"""quantization_config of compressed-tensors: written from schemes, and read back into them."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.formats.contract import float_scale, modules_with, setting
from quantry.types import Activation, Grid, ScaleType, Scheme, TensorInfo

NAME = "compressed-tensors"
BITS = (2, 3, 4, 8)
READ = (  # sub-formats; naive-quantized is what int- and float-quantized were called before
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)  # fmt: skip
HEADS = ("lm_head", "embed_tokens")  # no Linear in vLLM (0.32): a quantized one must be a target by its name


def settings_of(assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None) -> dict[str, Any]:
    """Returns quantization_config: the most frequent scheme targets all Linear layers, others list theirs by name."""
    groups: dict[str, list[str]] = {}
    for module, scheme in assignment.items():
        groups.setdefault(json.dumps(_group(scheme)), []).append(module)
    if not groups:
        raise QuantryError("no layer is quantized", fix="choose layers to quantize")
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    common = [module for module in ordered[0][1] if module.rpartition(".")[2] in HEADS]
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


def schemes_of(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    """Reads the scheme of every layer that has a weight_scale."""
    groups = _groups(settings)
    return {
        module: _scheme(module, _group_of(module, groups), info)
        for module, info in modules_with(tensors, "weight_scale").items()
    }


def _group(scheme: Scheme) -> dict[str, Any]:
    """Returns a config group without its targets."""
    grid, activation = scheme.weight, scheme.activation
    kind = {"e4m3": "float-quantized", "e2m1": f"{'nv' if grid.scale == 'e4m3' else 'mx'}fp4-pack-quantized"}
    return {
        "weights": _arguments(grid, dynamic=False, single="channel"),
        "input_activations": activation and _arguments(activation.grid, dynamic=_dynamic(activation), single="token"),
        "output_activations": None,
        "format": kind.get(grid.kind, "pack-quantized" if is_packed(grid) else "int-quantized"),
    }


def _dynamic(activation: Activation) -> bool | str:
    """Returns the library's value: NVFP4 stores the scale of the tensor and computes those of groups while it runs."""
    return "local" if not activation.dynamic and activation.grid.scale == "e4m3" else activation.dynamic


def _arguments(grid: Grid, *, dynamic: bool | str, single: str) -> dict[str, Any]:
    """Returns the library's QuantizationArgs; `single` is its name for one row of a matrix."""
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
    """Returns the config groups with their targets. Raises ConfigError for a sub-format that is not read."""
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
    """Returns the group of a layer: the one that names it, else one whose pattern matches, else one for a class."""
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
    weight = grid_of(module, arguments)
    if weight.kind != "e2m1":
        weight = replace(weight, scale=float_scale(scale))
    if not isinstance(inputs, Mapping):
        return Scheme(weight)
    return Scheme(weight, Activation(grid_of(module, inputs), dynamic=inputs.get("dynamic") is True))


def grid_of(module: str, arguments: Mapping[str, Any]) -> Grid:
    """Returns the grid of the library's QuantizationArgs; the scale type of activations is not stored."""
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


def is_packed(grid: Grid) -> bool:
    """Says if integers are packed into words: all but 8-bit ones without groups, which have quantized activations."""
    return grid.kind == "int" and not (grid.bits == 8 and grid.symmetric and grid.block[1] == 0)

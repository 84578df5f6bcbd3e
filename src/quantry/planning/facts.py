"""The facts that conditions speak of, gathered from headers: of the deployment, the model and each distinct layer."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantry.devices import Device
from quantry.errors import QuantryError
from quantry.formats.contract import load_format, spell
from quantry.llamacpp import families
from quantry.llamacpp.mixture import BLOCKS, FALLBACKS
from quantry.models.attention import block_count, text_config
from quantry.models.caching import per_checkpoint
from quantry.models.experts import expert_count
from quantry.models.linears import EXPERT, Linear, linears
from quantry.models.parts import block_of
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.quantizing.tensor_plan import DTYPE_NAMES, GROUPS, main_dtype
from quantry.types import Checkpoint, Grid, Scheme, TensorInfo

Facts = dict[str, Any]

WORDS = {  # every fact, in the words of a message
    # of the deployment
    "platform": "platform",
    "family": "device family",
    "capability": "compute capability",
    "gfx": "AMD architecture",
    "features": "processor feature",
    "packages": "package",
    "tensor_parallel": "tensor parallel size",
    "as_is": "files that are there already",
    # of the model
    "architecture": "architecture",
    "model_type": "model type",
    "heads": "attention heads",
    "kv_heads": "KV heads",
    "vocabulary": "vocabulary",
    "experts": "experts",
    "vision": "vision tower",
    "act_order": "activation order",
    "dtype": "16-bit type",
    "gguf_problem": "GGUF",
    "fitting_group": "group that divides all layers",
    # of the scheme of a layer
    "format": "format",
    "kind": "weights of kind",
    "bits": "bits",
    "pack": "codes in a word",
    "group": "group size",
    "block_rows": "rows of a block",
    "strategy": "scales by",
    "scale": "scale type",
    "zero_points": "zero points",
    "inputs": "inputs in",
    "input_scales": "input scales by",
    "dynamic": "dynamic inputs",
    "falls_to": "type for odd rows",
    # of a layer, which is what an engine fuses: q, k and v, or gate and up
    "layer": "layer",
    "rows": "outputs",
    "columns": "inputs",
    "part_rows": "outputs of fused parts",
    "split": "cut along",
    "divided": "equal cut",
    "device_rows": "outputs on a device",
    "device_columns": "inputs on a device",
    "device_parts": "outputs of fused parts on a device",
    "mixed": "schemes mixed in a fused layer",
    "expert": "expert",
    "hidden": "hidden size",
    "inner": "expert size on a device",
    "experts_mixed": "schemes mixed among experts",
    "unstorable": "storage",
    "kernel": "kernel",  # known to cautions alone
}
# Layers cut along their inputs when a model is spread over devices, and layers that every device holds whole; all
# others are cut along their outputs. As vLLM 0.32's models do (RowParallelLinear, ReplicatedLinear), and other engines.
INPUTS_CUT = frozenset({"o_proj", "out_proj", "down_proj", "w2", "dense", "dense_4h_to_h", "fc2", "c_proj", "wo"})
UNCUT = frozenset({"q_a_proj", "kv_a_proj_with_mqa"})
KEYS_VALUES = frozenset({"k_proj", "v_proj"})
HALVES = {"gate_up_proj": 2}  # parts of layers that a checkpoint itself stores fused
ALWAYS_ZERO_POINTS = frozenset({"awq"})  # stores zero points for symmetric weights too
SIZES = ("rows", "columns", "part_rows", "device_rows", "device_columns", "device_parts", "hidden", "inner")
INPUT_NAMES = {"int": "int{bits}", "e4m3": "fp8", "e2m1": "fp4"}


def capability(device: Device) -> int | None:
    """Returns NVIDIA's compute capability as a number: 8.9 is 89."""
    numbers = re.fullmatch(r"(\d+)\.(\d)", device.capability or "")
    return int(numbers[1]) * 10 + int(numbers[2]) if numbers else None


def device_facts(device: Device, tensor_parallel: int, packages: Collection[str], features: Collection[str]) -> Facts:
    """Returns the facts of a deployment: its device, how many share a layer, what is installed."""
    return {
        "platform": device.platform,
        "family": device.family,
        "capability": capability(device),
        "gfx": device.capability if device.vendor == "amd" else None,
        "features": frozenset(features),
        "packages": frozenset(packages),
        "tensor_parallel": tensor_parallel,
    }


@per_checkpoint(1024)
def layer_facts(checkpoint: Checkpoint, recipe: Recipe, tensor_parallel: int) -> list[Facts]:
    """Returns the facts of the model and of every distinct layer.

    A format that takes a model as a whole has one entry, for the model alone. Raises QuantryError if the recipe does
    not suit the model.
    """
    model = _model(checkpoint, recipe)
    stacks = _stacks(checkpoint, recipe)
    model["fitting_group"] = next(
        (size for size in GROUPS if all(stack.linears[0].shape[1] % size == 0 for stack in stacks)), None
    )
    model["falls_to"] = None
    layers = [model | _layer(stack, model, recipe, tensor_parallel) for stack in stacks]
    return layers or [model | _whole(model, recipe)]


def _model(checkpoint: Checkpoint, recipe: Recipe) -> Facts:
    config, text = checkpoint.config, text_config(checkpoint.config)
    names = config.get("architectures") or text.get("architectures")
    heads = _number(text.get("num_attention_heads"))
    return {
        "architecture": str(names[0]) if isinstance(names, list) and names else "unknown",
        "model_type": str(config.get("model_type")),
        "heads": heads,
        "kv_heads": _number(text.get("num_key_value_heads")) or heads,
        "vocabulary": _number(text.get("vocab_size")),
        "experts": expert_count(text),
        "vision": "vision_config" in config,
        "act_order": _act_order(config),
        "dtype": _dtype(checkpoint, recipe),
        "gguf_problem": _gguf_problem(config) if recipe.format == "gguf" else "",
        "format": recipe.format,
    }


def _number(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _dtype(checkpoint: Checkpoint, recipe: Recipe) -> str:
    if recipe.preset.scheme.weight.is_cast:
        return recipe.preset.scheme.weight.kind
    dtype = DTYPE_NAMES[main_dtype(checkpoint)]
    return dtype if recipe.format == "gguf" else load_format(recipe.format).model_dtype(dtype)


def _act_order(config: Mapping[str, Any]) -> bool:
    """Returns True if the columns of an already quantized checkpoint are grouped out of order."""
    settings = config.get("quantization_config")
    if not isinstance(settings, Mapping):
        return False
    groups = settings.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    return bool(settings.get("desc_act")) or any(row.get("actorder") in ("group", "dynamic") for row in weights)


def _gguf_problem(config: Mapping[str, Any]) -> str:
    try:
        families.facts(config)
    except QuantryError as error:
        return error.problem
    return ""


# ---- what an engine fuses ----


@dataclass(frozen=True, slots=True)
class Stack:
    """Linears that an engine fuses into one matrix, and the preset of each."""

    linears: tuple[Linear, ...]
    presets: tuple[Preset | None, ...]
    experts_mixed: bool


def _stacks(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Stack, ...]:
    """Returns one stack of each type; none for a format that takes a model as a whole and does not know its layers."""
    try:
        return _distinct(checkpoint, recipe)
    except QuantryError:
        if recipe.format in (CAST, "gguf"):
            return ()
        raise


def _distinct(checkpoint: Checkpoint, recipe: Recipe) -> tuple[Stack, ...]:
    if not recipe.rules or recipe.format == "gguf":
        return tuple(Stack(group, (recipe.preset,) * len(group), False) for group in _groups(checkpoint))
    named = linears(checkpoint, block_count(checkpoint.config)) if recipe.numbered else None
    groups = _of_blocks(checkpoint) if named is None else _fused(named)  # rules with numbers tell blocks apart
    schemes: dict[str, set[Scheme | None]] = {}
    for linear in (linear for group in groups for linear in group if EXPERT.search(linear.module)):
        schemes.setdefault(_experts_of(linear), set()).add(_scheme_of(recipe.preset_for(linear.module)))
    distinct: dict[object, Stack] = {}
    for group in groups:
        presets = tuple(recipe.preset_for(linear.module) for linear in group)
        mixed = len(schemes.get(_experts_of(group[0]), ())) > 1
        distinct.setdefault((_outline(group), tuple(map(_scheme_of, presets)), mixed), Stack(group, presets, mixed))
    return tuple(distinct.values())


@per_checkpoint(8)
def _groups(checkpoint: Checkpoint) -> tuple[tuple[Linear, ...], ...]:
    """Returns what an engine fuses, one group of each type: apart from names, most blocks are alike."""
    return tuple({_outline(group): group for group in reversed(_of_blocks(checkpoint))}.values())[::-1]


@per_checkpoint(8)
def _of_blocks(checkpoint: Checkpoint) -> list[tuple[Linear, ...]]:
    """Returns what an engine fuses in one of each type of blocks."""
    blocks: dict[int | None, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        blocks.setdefault(block_of(tensor.name), []).append(tensor)
    kept = blocks.pop(None, [])
    seen = set()
    for tensors in blocks.values():
        outline = frozenset((re.sub(r"\d+", "#", tensor.name), tensor.shape, tensor.dtype) for tensor in tensors)
        if outline not in seen:
            seen.add(outline)
            kept += tensors
    reduced = replace(checkpoint, tensors=tuple(kept))
    return _fused(linears(reduced, block_count(checkpoint.config)))


def _fused(layers: Iterable[Linear]) -> list[tuple[Linear, ...]]:
    groups: dict[str, list[Linear]] = {}
    for linear in layers:
        groups.setdefault(linear.fused, []).append(linear)
    return [tuple(group) for group in groups.values()]


def _outline(group: Sequence[Linear]) -> object:
    """Returns what two groups of one type have in common: everything that facts are made of, apart from names."""
    return tuple((_leaf(linear), linear.shape) for linear in group), bool(EXPERT.search(group[0].module))


def _leaf(linear: Linear) -> str:
    return linear.module.rpartition(".")[2]


def _experts_of(linear: Linear) -> str:
    return EXPERT.split(linear.module)[0]


def _scheme_of(preset: Preset | None) -> Scheme | None:
    return preset.scheme if preset else None


def _layer(stack: Stack, model: Facts, recipe: Recipe, tensor_parallel: int) -> Facts:
    first = stack.linears[0]
    leaf = _leaf(first)
    parts = [(leaf, rows) for linear in stack.linears for leaf, rows in _parts(linear)]
    rows, columns = sum(rows for _, rows in parts), first.shape[1]
    split = "none" if leaf in UNCUT else "inputs" if leaf in INPUTS_CUT else "outputs"
    shares = [_share(part, split, model, tensor_parallel) for part in parts]
    inputs = columns / tensor_parallel if split == "inputs" else columns
    whole = all(share == int(share) for share in (*shares, inputs))
    expert = bool(EXPERT.search(first.module))
    scheme = _scheme(stack.presets[0], model, recipe)
    return {
        **scheme,
        "layer": f"{first.fused} ({rows} x {columns})",
        "rows": rows,
        "columns": columns,
        "part_rows": tuple(rows for _, rows in parts),
        "split": split,
        "divided": whole,
        "device_rows": int(sum(shares)),
        "device_columns": int(inputs),
        "device_parts": tuple(map(int, shares)),
        "mixed": len(set(map(_scheme_of, stack.presets))) > 1,
        "expert": expert,
        "hidden": (rows if split == "inputs" else columns) if expert else None,
        "inner": (int(inputs) if split == "inputs" else int(shares[0])) if expert else None,
        "experts_mixed": stack.experts_mixed,
        "unstorable": _unstorable(stack, recipe),
        "falls_to": _falls_to(scheme["kind"], columns),
    }


def _parts(linear: Linear) -> list[tuple[str, int]]:
    leaf = _leaf(linear)
    count = HALVES.get(leaf, 1)
    return [(leaf, linear.shape[0] // count)] * count


def _share(part: tuple[str, int], split: str, model: Facts, tensor_parallel: int) -> float:
    """Returns the outputs of a part on one device; fewer KV heads than devices are repeated."""
    leaf, rows = part
    if split != "outputs":
        return rows
    kv_heads: int = model["kv_heads"] or tensor_parallel
    return rows / (min(tensor_parallel, kv_heads) if leaf in KEYS_VALUES else tensor_parallel)


def _whole(model: Facts, recipe: Recipe) -> Facts:
    """Returns the facts that stand for all layers of a model whose layers are not known."""
    return {
        **_scheme(recipe.preset, model, recipe),
        **dict.fromkeys(SIZES),
        "layer": "the model",
        "split": "none",
        "divided": True,
        "mixed": False,
        "expert": False,
        "experts_mixed": False,
        "unstorable": "",
    }


def _scheme(preset: Preset | None, model: Facts, recipe: Recipe) -> Facts:
    """Returns the facts of a layer's scheme; a layer without a preset stays in 16 bit."""
    grid = preset.scheme.weight if preset else Grid(model["dtype"], 16)
    activation = preset.scheme.activation if preset else None
    rows, columns = grid.block
    plain = grid.is_cast
    return {
        "kind": grid.kind,
        "bits": grid.bits,
        "pack": 32 // grid.bits,
        "group": columns or -1,
        "block_rows": rows,
        "strategy": "none" if plain else _strategy(grid, "channel"),
        "scale": grid.scale,
        "zero_points": not grid.symmetric or (not plain and recipe.format in ALWAYS_ZERO_POINTS),
        "inputs": INPUT_NAMES[activation.grid.kind].format(bits=activation.grid.bits) if activation else "none",
        "input_scales": _strategy(activation.grid, "token") if activation else "none",
        "dynamic": activation.dynamic if activation else None,
        "words": "16 bit" if plain else spell(grid),
    }


def _strategy(grid: Grid, single: str) -> str:
    return {(1, grid.block[1]): "group", (0, 0): "tensor", (1, 0): single}.get(grid.block, "block")


def _unstorable(stack: Stack, recipe: Recipe) -> str:
    if recipe.format in (CAST, "gguf"):
        return ""
    codec = load_format(recipe.format)
    for linear, preset in zip(stack.linears, stack.presets, strict=True):
        if preset is not None:
            try:
                codec.layout(linear.module, linear.shape, codec.stored_grid(preset.scheme.weight, "bf16"))
            except QuantryError as error:
                return error.problem
    return ""


def _falls_to(kind: str, columns: int) -> str | None:
    """Returns the type that llama.cpp stores rows in if the blocks of the wanted type do not divide them, else None."""
    wanted = kind.upper()
    if wanted not in BLOCKS or columns % BLOCKS[wanted] == 0 or wanted not in FALLBACKS:
        return None
    return FALLBACKS[wanted] if columns % BLOCKS[FALLBACKS[wanted]] == 0 else "F16"

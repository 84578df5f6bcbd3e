"""Whether an engine can serve a quantized model on a device: kernel, fallback or refusal, with reason and fix.

What engines can do is data: engines/*.toml, and every.toml beside this file for what holds everywhere. Here facts are
gathered from headers, for the deployment, the model and each distinct layer, and rows of conditions are evaluated on
them. A condition is a table of facts, all of which must agree:

    bits = 4                                  equal
    bits = [4, 8]                             one of these
    capability = { at_least = 75, below = 100 }
    device_columns = { multiple_of = 64 }     or not_multiple_of; a text names another fact: "group"
    format = { not = "awq" }                  or { not = [...] }
    packages = { has = "conch" }              or lacks
    is = "wna16"                              all conditions of [cases.wna16]; or a list of cases
    any = [{ ... }, { ... }]                  at least one of these tables

A fact that is not known agrees with nothing. `WORDS` below has all names. Refusals come first, row by row; then every
layer takes the first kernel that is for it and whose needs it meets, or is refused with what the nearest ones lack;
then cautions turn the verdict into a fallback.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib.resources import files
from operator import ge, gt, le, lt
from typing import Any, Literal

from quantry import registry
from quantry.devices import Device
from quantry.engines.contract.catalogue import (
    Capability,
    Conditions,
    Engine,
    engines,
    flags,
    known_version,
    latest,
    removed,
)
from quantry.engines.contract.catalogue import engine as engine_of
from quantry.errors import QuantryError
from quantry.formats.contract import spell
from quantry.llamacpp import families
from quantry.llamacpp.mixture import BLOCKS, FALLBACKS
from quantry.models.attention import block_count, text_config
from quantry.models.experts import expert_count
from quantry.models.linears import EXPERT, Linear, linears
from quantry.models.parts import block_of
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.quantizing.tensor_plan import DTYPE_NAMES, GROUPS, main_dtype
from quantry.types import Checkpoint, Grid, Scheme, TensorInfo, Verdict

__all__ = ["engines", "feasible", "flags", "latest", "removed"]

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
ALWAYS_ZERO_POINTS = frozenset({"awq"})  # symmetric weights too are stored with them
SIZES = ("rows", "columns", "part_rows", "device_rows", "device_columns", "device_parts", "hidden", "inner")
INPUT_NAMES = {"int": "int{bits}", "e4m3": "fp8", "e2m1": "fp4"}
COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": ge,
    "above": gt,
    "at_most": le,
    "below": lt,
    "multiple_of": lambda value, step: step != 0 and value % step == 0,
    "not_multiple_of": lambda value, step: step != 0 and value % step != 0,
}
SPELLED = {
    "at_least": "of at least {}",
    "above": "above {}",
    "at_most": "of at most {}",
    "below": "below {}",
    "multiple_of": "a multiple of {}",
    "not_multiple_of": "no multiple of {}",
    "not": "other than {}",
    "has": "{}",
    "lacks": "without {}",
}
SHOWN = 3  # kernels named when none fits


def feasible(
    checkpoint: Checkpoint,
    recipe: Recipe | tuple[Scheme, str],
    engine: str,
    version: str | None,
    device: Device,
    tensor_parallel: int = 1,
    *,
    packages: Collection[str] = (),
    features: Collection[str] = (),
) -> Verdict:
    """The one verdict for a model, what becomes of it, and where it shall run.

    `recipe` may be a scheme and a format. `packages` are installed besides those that the engine's data take for
    granted; `features` are the processor's (amx, ...).
    """
    found, version = engine_of(engine), known_version(engine, version)
    if type(tensor_parallel) is not int or not 1 <= tensor_parallel <= 1024:
        raise QuantryError(f"tensor parallel size {tensor_parallel} is not 1 to 1024", fix="use 1, 2, 4 or 8")
    recipe = recipe if isinstance(recipe, Recipe) else _recipe(*recipe)
    there = {*packages, *(package.name for package in found.packages if package.assumed)}
    deployment = _deployment(device, tensor_parallel, there, features)
    try:
        layers = [{**deployment, **facts} for facts in _layers(_Same(checkpoint), recipe, tensor_parallel)]
    except QuantryError as error:
        return Verdict("refusal", None, error.problem, error.fix, "quantry")
    return _judge(found, version, device, layers)


def _judge(found: Engine, version: str, device: Device, layers: Sequence[Facts]) -> Verdict:
    """Refusals, kernels, cautions and notes, in this order."""
    refused = next(_matches(found, "refusals", version, layers), None)
    if refused:
        return _verdict("refusal", None, *refused)
    chosen: dict[str, tuple[Capability, Facts]] = {}
    served: list[Facts] = []
    for facts in layers:
        kernel, missed = choose(found, version, facts)
        if kernel is None:
            return _no_kernel(found, version, device, facts, missed)
        chosen.setdefault(str(kernel.name), (kernel, facts))
        served.append({**facts, "kernel": kernel.name})
    doubts = [pair for pair in chosen.values() if pair[0].outcome == "fallback"]
    doubts += list(_matches(found, "cautions", version, served))[:1]
    names = ", ".join(chosen)
    verdict = _verdict("fallback", names, *doubts[0]) if doubts else _plainly(names, *next(iter(chosen.values())))
    notes = [_filled(row.reason, facts) for row, facts in _matches(found, "notes", version, layers[:1])]
    return replace(verdict, reason="; ".join([verdict.reason, *notes]))


def _matches(found: Engine, table: str, version: str, layers: Sequence[Facts]) -> Iterator[tuple[Capability, Facts]]:
    """Every row of a table that agrees with a layer, with the first such layer."""
    for row in _rows(found, table, version):
        facts = next((facts for facts in layers if agrees(row.when, facts, found.cases)), None)
        if facts is not None:
            yield row, facts


def _plainly(names: str, row: Capability, facts: Facts) -> Verdict:
    return _verdict("kernel", names, replace(row, reason=row.reason or f"{{name}} takes {_scheme_words(facts)}"), facts)


def choose(found: Engine, version: str, facts: Facts) -> tuple[Capability | None, list[tuple[Capability, list[str]]]]:
    """The first kernel that takes a layer; and those that are for such layers, with the needs that it does not meet."""
    missed: list[tuple[Capability, list[str]]] = []
    for row in _rows(found, "kernels", version):
        if agrees(row.when, facts, found.cases):
            lacking = [name for name, wanted in row.needs.items() if not _agrees(name, wanted, facts, found.cases)]
            if not lacking:
                return row, missed
            missed.append((row, lacking))
    return None, missed


def agrees(conditions: Conditions, facts: Facts, cases: Mapping[str, Conditions]) -> bool:
    """Whether all conditions hold."""
    return all(_agrees(name, wanted, facts, cases) for name, wanted in conditions.items())


def _agrees(name: str, wanted: Any, facts: Facts, cases: Mapping[str, Conditions]) -> bool:
    if name == "is":
        return all(agrees(cases[case], facts, cases) for case in ([wanted] if isinstance(wanted, str) else wanted))
    if name == "any":
        return any(agrees(table, facts, cases) for table in wanted)
    value = facts[name]
    if value is None:
        return False
    if isinstance(wanted, Mapping):
        return all(_compares(value, how, limit, facts) for how, limit in wanted.items())
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def _compares(value: Any, how: str, limit: Any, facts: Facts) -> bool:
    if how == "not":
        return value not in limit if isinstance(limit, list) else bool(value != limit)
    if how in ("has", "lacks"):
        return (limit in value) == (how == "has")
    limit = facts[limit] if isinstance(limit, str) else limit
    values = value if isinstance(value, tuple) else (value,)
    if limit is None:
        return False
    if how == "not_multiple_of":
        return any(COMPARE[how](one, limit) for one in values)
    return all(COMPARE[how](one, limit) for one in values)


def _rows(found: Engine, table: str, version: str) -> Iterator[Capability]:
    """The rows of a table that hold in a version; those for every engine come first."""
    everywhere = _every() if table == "refusals" else ()
    return (row for row in (*everywhere, *getattr(found, table)) if row.holds_in(version))


def _verdict(
    outcome: Literal["kernel", "fallback", "refusal"], kernel: str | None, row: Capability, facts: Facts
) -> Verdict:
    named = facts | {"name": row.name or ""}
    fix = _filled(row.fix, named) if row.fix else None
    return Verdict(outcome, kernel, _filled(row.reason, named), fix, f"{row.source} ({row.date})")


def _no_kernel(
    found: Engine, version: str, device: Device, facts: Facts, missed: list[tuple[Capability, list[str]]]
) -> Verdict:
    """What the kernels for such a layer lack, those first that lack least."""
    place = f"{found.name} {version} on {device.name}"
    if not missed:
        reason = f"{place} has no loader for {_scheme_words(facts)} in {facts['format']}: {facts['layer']}"
        return Verdict("refusal", None, reason, _filled(found.fixes["default"], facts), _table_of(found))
    nearest = sorted(missed, key=lambda pair: len(pair[1]))
    lacks = (f"{row.name} needs {_need(row.needs, lacking[0], facts)}" for row, lacking in nearest[:SHOWN])
    row, (first, *_) = nearest[0]
    fix = _filled(found.fixes.get(first, found.fixes["default"]), facts)
    if first == "packages":
        fix = f"install {row.needs['packages']['has']}, or {fix}"
    reason = f"{place} has no kernel for {facts['layer']} in {_scheme_words(facts)}: {'; '.join(dict.fromkeys(lacks))}"
    return Verdict("refusal", None, reason, fix, f"{row.source} ({row.date})")


def _table_of(found: Engine) -> str:
    release = found.releases[-1]
    return f"{release.source} ({release.date})"


def _need(needs: Conditions, name: str, facts: Facts) -> str:
    """A need that is not met, and what there is: "bits 4 or 8, not 3"."""
    wanted = needs[name]
    if name == "any":
        return " or ".join(" and ".join(_wanted(key, value) for key, value in table.items()) for table in wanted)
    if name == "is":
        return str(wanted)
    value = "" if name in ("packages", "features") else f", not {_say(name, facts[name])}"
    return _wanted(name, wanted) + value


def _wanted(name: str, wanted: Any) -> str:
    return f"{WORDS.get(name, name)} {_condition(name, wanted)}"


def _condition(name: str, wanted: Any) -> str:
    if isinstance(wanted, Mapping):
        return " and ".join(SPELLED[how].format(_limit(name, limit)) for how, limit in wanted.items())
    return _limit(name, wanted)


def _limit(name: str, limit: Any) -> str:
    if isinstance(limit, list):
        said = [_say(name, one) for one in limit]
        return " or ".join(filter(None, [", ".join(said[:-1]), said[-1]]))
    return f"the {WORDS[limit]}" if limit in WORDS else _say(name, limit)


def _filled(text: str, facts: Facts) -> str:
    """A sentence of the data with facts in the place of their names."""
    return re.sub(r"\{(\w+)\}", lambda found: _say(found[1], facts[found[1]]), text)


def _say(name: str, value: Any) -> str:
    """A fact in a message."""
    if name == "capability" and isinstance(value, int):
        return f"{value // 10}.{value % 10}"
    if name == "group" and value == -1:
        return "-1 (none)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Collection) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _scheme_words(facts: Facts) -> str:
    inputs = "" if facts["inputs"] == "none" else f" with {facts['inputs']} inputs"
    return f"{facts['words']}{inputs}"


def _recipe(scheme: Scheme, form: str) -> Recipe:
    """A recipe of one scheme, for those that have no preset."""
    return Recipe(Preset(name=spell(scheme.weight), about="", scheme=scheme, formats=(form,)), form)


# ---- facts ----


def _deployment(device: Device, tensor_parallel: int, packages: Collection[str], features: Collection[str]) -> Facts:
    numbers = re.fullmatch(r"(\d+)\.(\d)", device.capability or "")
    return {
        "platform": device.platform,
        "family": device.family,
        "capability": int(numbers[1]) * 10 + int(numbers[2]) if numbers else None,
        "gfx": device.capability if device.vendor == "amd" else None,
        "features": frozenset(features),
        "packages": frozenset(packages),
        "tensor_parallel": tensor_parallel,
    }


@lru_cache(maxsize=1024)
def _layers(same: "_Same", recipe: Recipe, tensor_parallel: int) -> list[Facts]:
    """The facts of every distinct layer; of the model alone where a format asks for no more."""
    model = _model(same.checkpoint, recipe)
    stacks = _stacks(same, recipe)
    model["fitting_group"] = next(
        (size for size in GROUPS if all(stack.linears[0].shape[1] % size == 0 for stack in stacks)), None
    )
    model["falls_to"] = None
    found = [model | _layer(stack, model, recipe, tensor_parallel) for stack in stacks]
    return found or [model | _whole(model, recipe)]


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
    stored = DTYPE_NAMES[main_dtype(checkpoint)]
    return (
        stored if recipe.format == "gguf" else str(registry.load("quantry.formats", recipe.format).model_dtype(stored))
    )


def _act_order(config: Mapping[str, Any]) -> bool:
    """Whether a checkpoint that is quantized already has its columns in groups out of order."""
    stored = config.get("quantization_config")
    if not isinstance(stored, Mapping):
        return False
    groups = stored.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, Mapping) else []
    return bool(stored.get("desc_act")) or any(one.get("actorder") in ("group", "dynamic") for one in weights)


def _gguf_problem(config: Mapping[str, Any]) -> str:
    """Why no GGUF can be written of this model, or nothing."""
    try:
        families.facts(config)
    except QuantryError as error:
        return error.problem
    return ""


@dataclass(frozen=True, slots=True)
class Stack:
    """Linears that an engine fuses into one matrix, and the preset of each."""

    linears: tuple[Linear, ...]
    presets: tuple[Preset | None, ...]
    experts_mixed: bool


def _stacks(same: "_Same", recipe: Recipe) -> tuple[Stack, ...]:
    """One stack of each kind; none for formats that take a model as a whole and cannot be asked for layers."""
    try:
        return _distinct(same, recipe)
    except QuantryError:
        if recipe.format in (CAST, "gguf"):
            return ()
        raise


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A checkpoint as a key of the cache: the same object, since configs cannot be hashed."""

    checkpoint: Checkpoint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.checkpoint is other.checkpoint

    def __hash__(self) -> int:
        return id(self.checkpoint)


@lru_cache(maxsize=8)
def _groups(same: _Same) -> tuple[tuple[Linear, ...], ...]:
    """What an engine fuses, one group of each kind: names aside most blocks are alike, and only one of these counts."""
    checkpoint = same.checkpoint
    blocks: dict[int | None, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        blocks.setdefault(block_of(tensor.name), []).append(tensor)
    kept = blocks.pop(None, [])
    seen = set()
    for tensors in blocks.values():
        look = frozenset((re.sub(r"\d+", "#", tensor.name), tensor.shape, tensor.dtype) for tensor in tensors)
        if look not in seen:
            seen.add(look)
            kept += tensors
    found = linears(replace(checkpoint, tensors=tuple(kept)), block_count(checkpoint.config))
    return tuple({_look(group): group for group in reversed(_fused(found))}.values())[::-1]


def _fused(found: Iterable[Linear]) -> list[tuple[Linear, ...]]:
    groups: dict[str, list[Linear]] = {}
    for linear in found:
        groups.setdefault(linear.fused, []).append(linear)
    return [tuple(group) for group in groups.values()]


def _look(group: Sequence[Linear]) -> object:
    """What makes two groups the same kind: names of layers aside, all that facts are made of."""
    return tuple((_leaf(linear), linear.shape) for linear in group), bool(EXPERT.search(group[0].module))


def _leaf(linear: Linear) -> str:
    return linear.module.rpartition(".")[2]


def _distinct(same: _Same, recipe: Recipe) -> tuple[Stack, ...]:
    if not recipe.rules or recipe.format == "gguf":
        return tuple(Stack(group, (recipe.preset,) * len(group), False) for group in _groups(same))
    checkpoint = same.checkpoint  # with rules blocks may differ by their names
    groups = _fused(linears(checkpoint, block_count(checkpoint.config)))
    schemes: dict[str, set[Scheme | None]] = {}
    for linear in (linear for group in groups for linear in group if EXPERT.search(linear.module)):
        schemes.setdefault(_experts_of(linear), set()).add(_scheme_of(recipe.preset_for(linear.module)))
    distinct: dict[object, Stack] = {}
    for group in groups:
        presets = tuple(recipe.preset_for(linear.module) for linear in group)
        mixed = len(schemes.get(_experts_of(group[0]), ())) > 1
        distinct.setdefault((_look(group), tuple(map(_scheme_of, presets)), mixed), Stack(group, presets, mixed))
    return tuple(distinct.values())


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
    """The outputs of a part that one device holds; KV heads are repeated where there are fewer than devices."""
    leaf, rows = part
    if split != "outputs":
        return rows
    kv_heads: int = model["kv_heads"] or tensor_parallel
    return rows / (min(tensor_parallel, kv_heads) if leaf in KEYS_VALUES else tensor_parallel)


def _whole(model: Facts, recipe: Recipe) -> Facts:
    """The facts of a model whose layers are not looked at."""
    unknown = dict.fromkeys(SIZES)
    return {
        **_scheme(recipe.preset, model, recipe),
        **unknown,
        "layer": "the model",
        "split": "none",
        "divided": True,
        "mixed": False,
        "expert": False,
        "experts_mixed": False,
        "unstorable": "",
    }


def _scheme(preset: Preset | None, model: Facts, recipe: Recipe) -> Facts:
    """The facts of a layer's scheme; a layer that is kept is 16 bit."""
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
    """Why the format cannot hold this layer, or nothing."""
    if recipe.format in (CAST, "gguf"):
        return ""
    form = registry.load("quantry.formats", recipe.format)
    for linear, preset in zip(stack.linears, stack.presets, strict=True):
        if preset is not None:
            try:
                form.layout(linear.module, linear.shape, form.stored_grid(preset.scheme.weight, "bf16"))
            except QuantryError as error:
                return error.problem
    return ""


def _falls_to(kind: str, columns: int) -> str | None:
    """What llama.cpp stores rows in that the blocks of a type do not divide, if it knows something."""
    wanted = kind.upper()
    if wanted not in BLOCKS or columns % BLOCKS[wanted] == 0 or wanted not in FALLBACKS:
        return None
    return FALLBACKS[wanted] if columns % BLOCKS[FALLBACKS[wanted]] == 0 else "F16"


@cache
def _every() -> tuple[Capability, ...]:
    text = files("quantry.planning").joinpath("every.toml").read_text(encoding="utf-8")
    return tuple(Capability(**{**row, "date": str(row["date"])}) for row in tomllib.loads(text)["refusals"])


def used_facts(conditions: Conditions) -> Iterable[str]:
    """The names of facts that conditions speak of, those of the limits among them."""
    for name, wanted in conditions.items():
        if name == "any":
            for table in wanted:
                yield from used_facts(table)
        elif name != "is":
            yield name
            limits = wanted.items() if isinstance(wanted, Mapping) else ()
            yield from (limit for how, limit in limits if how in COMPARE and isinstance(limit, str))

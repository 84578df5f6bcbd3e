"""Recipes: which scheme each linear layer gets, from a preset, a recipe file or a plan.

A recipe file is TOML: what the command line says, and rules for layers by name, the first that matches wins.

    preset = "w4a16"
    format = "compressed-tensors"
    group = 64
    rounder = "gptq"            # for all layers, instead of the presets' own
    transform = "awq"           # the same: what is done to each block before
    input_scales = "mse"        # how static scales of inputs are found, instead of the presets' own way
    kv = "fp8"                  # what the KV cache is to be served in

    [[rules]]
    match = "*.layers.0.*"      # shell pattern on the layer's name
    preset = "w8a16"            # or: keep = true, to leave it in 16 bit

In a recipe for GGUF a rule names tensors as they are called there, and gives a ggml type instead of a preset:

    preset = "gguf-q4_k_m"

    [[rules]]
    match = "blk.*.ffn_down.weight"
    type = "Q6_K"
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from quantry import registry
from quantry.errors import RecipeError, UnknownNameError
from quantry.types import Activation, Grid, Scheme

KV: Mapping[str, Grid | None] = {  # what a KV cache can be served in: the grid of its scales, where some are stored
    "fp8": Grid("e4m3", 8, (0, 0)),
    "fp8-head": Grid("e4m3", 8, (1, 0)),
    "int8": None,
}
COUNTS = frozenset({"percentile", "mse"})  # ways to find static scales that need to know how large inputs are how often
CAST = "safetensors"  # the format of 16-bit presets: nothing is encoded
AUTO = "auto"  # what is found for one model: importance vectors, or the preset of every layer for a size
STATISTICS = frozenset({"clip", "gptq"})  # fits and rounders that need to know the inputs of a layer
SMOOTHING = "smoothquant"  # the transform that is for inputs which are rounded
NEAREST = "leave --rounder out, or use nearest"
UNORDERED = frozenset({"nf4", "fp4", "bf16", "f16"})  # grids without the even steps that gptq rounds onto


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of presets.toml."""

    name: str
    about: str
    scheme: Scheme
    formats: tuple[str, ...]
    transform: str | None = None
    fit: str | None = "absmax"  # None: block types of ggml are searched as ggml does, scales and codes at once
    rounder: str = "nearest"
    input_scales: str = "minmax"  # how static scales of inputs are found
    distilled: bool = False  # whether each block is trained against its 16-bit output before it is rounded
    file_type: str | None = None  # of GGUF: a mixture of block types

    @property
    def calibrated(self) -> bool:
        """Whether it is made from what the layers are given on some text."""
        known = self.transform is not None or not STATISTICS.isdisjoint((self.fit, self.rounder))
        return known or self.scheme.static is not None or self.distilled


@dataclass(frozen=True, slots=True)
class Rule:
    """A preset for the layers whose name matches (in GGUF a type for tensors); neither leaves them in 16 bit."""

    match: str
    preset: Preset | None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that a job was calibrated on."""

    data: str
    fingerprint: str  # SHA-256 of the windows of tokens
    samples: int
    length: int
    seed: int
    tokens: int
    arithmetic: str  # what the model was run in


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset for all linear layers, exceptions for some, and the format that holds them."""

    preset: Preset
    format: str
    rules: tuple[Rule, ...] = ()
    imatrix: str | None = None  # SHA-256 of the file of importance vectors, or AUTO before they are computed
    calibration: Calibration | None = None
    kv: str | None = None  # a name of KV
    sequential: bool = False  # whether a block is calibrated on what the quantized blocks before it give
    budget: str | None = None  # the size that the rules were chosen for, in words

    @property
    def name(self) -> str:
        """What it is called: by its preset, or auto where a size has chosen."""
        return AUTO if self.budget else self.preset.name

    @property
    def about(self) -> str:
        """What it does, for people."""
        return f"Chosen tensor by tensor for {self.budget}" if self.budget else self.preset.about

    def preset_for(self, module: str) -> Preset | None:
        """The preset of the layer `module`; None leaves it in 16 bit."""
        for rule in self.rules:
            if fnmatchcase(module, rule.match):
                return rule.preset
        return self.preset

    @property
    def presets(self) -> tuple[Preset, ...]:
        """All presets that some layer may get."""
        return (self.preset, *(rule.preset for rule in self.rules if rule.preset))

    @property
    def calibrated(self) -> bool:
        """Whether the job needs to know what the layers are given on some text."""
        return self.imatrix == AUTO or self.cache is not None or any(one.calibrated for one in self.presets)

    @property
    def distilled(self) -> bool:
        """Whether blocks are trained before they are rounded."""
        return any(one.distilled for one in self.presets)

    @property
    def histogram(self) -> bool:
        """Whether calibration has to count how large inputs are."""
        return any(one.scheme.static and one.input_scales in COUNTS for one in self.presets)

    @property
    def cache(self) -> Grid | None:
        """The grid of the KV cache, where scales for it are stored."""
        return KV[self.kv] if self.kv else None

    @property
    def transform(self) -> str | None:
        """What is done to a block before its layers are rounded."""
        return next((one.transform for one in self.presets if one.transform), None)

    def to_dict(self) -> dict[str, Any]:
        """Without a calibration that there was not, and what goes with one."""
        optional = ("calibration", "kv", "sequential", "budget")
        return {key: value for key, value in asdict(self).items() if key not in optional or value}


def presets() -> dict[str, Preset]:
    """All presets by name, in the order of presets.toml."""
    return dict(_presets())


def preset(name: str, group: int | None = None) -> Preset:
    """The preset of a name that can be made here, with another group size if asked for."""
    known = _presets()
    if name == AUTO:
        raise RecipeError("preset auto is chosen for one model and size", fix="use it with quantry quantize --budget")
    if name not in known:
        raise UnknownNameError(f"unknown preset {name!r}", fix=registry.suggest(name, tuple(known)))
    chosen = known[name]
    return chosen if group is None else _regroup(chosen, group)


def from_options(
    preset_name: str | None,
    recipe_file: Path | None,
    plan_file: Path | None,
    format_name: str | None,
    group: int | None,
    rounder: str | None = None,
    input_scales: str | None = None,
    kv: str | None = None,
    transform: str | None = None,
) -> Recipe:
    """The recipe that the options of `quantry quantize` describe: exactly one of preset, recipe file and plan."""
    given = [option for option in (preset_name, recipe_file, plan_file) if option is not None]
    if len(given) != 1:
        raise RecipeError(f"{len(given)} of --preset, --recipe and --plan are given", fix="give exactly one of them")
    if recipe_file is not None:
        settings = _read(recipe_file, tomllib.loads)
    elif plan_file is not None:
        settings = _from_plan(_read(plan_file, json.loads), plan_file)
    else:
        settings = {"preset": preset_name}
    overrides = {
        "format": format_name, "group": group, "rounder": rounder, "input_scales": input_scales, "kv": kv,
        "transform": transform,
    }  # fmt: skip
    return _build({**settings, **{key: value for key, value in overrides.items() if value is not None}})


def from_card(content: Mapping[str, Any]) -> Recipe:
    """The recipe that quantry.json tells of."""
    told = content["recipe"]
    rules = [
        {"match": rule["match"]}
        | ({"type": rule["type"]} if rule["type"] else _named(rule["preset"]) if rule["preset"] else {"keep": True})
        for rule in told["rules"]
    ]
    main = {**_named(told["preset"]), **_told_ways(told["preset"])}
    made = _build({**main, "format": told["format"], "rules": rules, "kv": told.get("kv")})
    return replace(made, budget=told.get("budget"))


def mixed(
    name: str,
    group: int | None,
    form: str,
    rounder: str,
    transform: str | None,
    rules: Sequence[Mapping[str, Any]],
    kv: str | None,
    budget: str,
) -> Recipe:
    """A recipe whose rules were chosen for a size."""
    main = {"preset": name, "group": group, "format": form, "rounder": rounder, "transform": transform, "kv": kv}
    return replace(_build({**main, "rules": list(rules)}), budget=budget)


def _named(told: Mapping[str, Any]) -> dict[str, Any]:
    """A preset by its name, and its group where that is another than the preset's own."""
    group = tuple(told["scheme"]["weight"]["block"])
    known = _presets().get(told["name"])
    return {"preset": told["name"]} | ({"group": group[1]} if known and group != known.scheme.weight.block else {})


def _told_ways(told: Mapping[str, Any]) -> dict[str, Any]:
    """The rounder, the transform and the way to static scales, where they are others than the preset's own."""
    known = _presets().get(told["name"])
    ways = ("rounder", "input_scales", "transform")
    return {way: told[way] for way in ways if known and way in told and told[way] != getattr(known, way)}


def _build(settings: Mapping[str, Any]) -> Recipe:
    _only(settings, {"preset", "format", "group", "rounder", "transform", "input_scales", "kv", "rules"}, "recipe")
    main = preset(_text(settings, "preset"), settings.get("group"))
    rules = settings.get("rules", [])
    if not isinstance(rules, list):
        raise RecipeError(f"rules is {str(rules)[:40]!r}, not a list", fix="write each rule as [[rules]]")
    recipe = Recipe(main, settings.get("format") or main.formats[0], tuple(_rule(rule) for rule in rules))
    if settings.get("rounder") is not None:
        recipe = _rounded_by(recipe, _text(settings, "rounder"))
    if settings.get("transform") is not None:
        recipe = _transformed_by(recipe, _text(settings, "transform"))
    if settings.get("input_scales") is not None:
        recipe = _scaled_by(recipe, _text(settings, "input_scales"))
    if settings.get("kv") is not None:
        recipe = replace(recipe, kv=_text(settings, "kv"))
    _check_transforms(recipe)
    return _fitting_cache(_fitting_format(recipe))


def _rounded_by(recipe: Recipe, rounder: str) -> Recipe:
    """The recipe with another rounder for all its presets."""
    known = registry.choices("quantry.methods.rounders")
    if rounder not in known:
        raise UnknownNameError(f"unknown rounder {rounder!r}", fix=registry.suggest(rounder, known))
    for one in recipe.presets:
        if rounder != "nearest" and one.scheme.weight.kind in UNORDERED:
            raise RecipeError(f"{rounder} cannot round onto the {one.scheme.weight.kind} of {one.name}", fix=NEAREST)
    return _changed(recipe, {"rounder": rounder})


def _transformed_by(recipe: Recipe, transform: str) -> Recipe:
    """The recipe with another transform for all its presets."""
    known = registry.choices("quantry.methods.transforms")
    if transform not in known:
        raise UnknownNameError(f"unknown transform {transform!r}", fix=registry.suggest(transform, known))
    for one in recipe.presets:
        wide = f"{one.name} keeps inputs in 16 bit" if transform == SMOOTHING and not one.scheme.activation else ""
        reason = f"{one.name} rounds nothing" if one.scheme.weight.is_cast else wide
        if reason:
            raise RecipeError(f"--transform {transform} has no use: {reason}", fix="leave it out")
    return _changed(recipe, {"transform": transform})


def _scaled_by(recipe: Recipe, way: str) -> Recipe:
    """The recipe with another way to find the static scales of inputs."""
    if way not in ("minmax", *sorted(COUNTS)):
        raise UnknownNameError(
            f"unknown way {way!r} to find input scales", fix=registry.suggest(way, ("minmax", *sorted(COUNTS)))
        )
    if not any(one.scheme.static for one in recipe.presets):
        raise RecipeError(
            f"--input-scales has no use: {recipe.preset.name} stores no scales of inputs",
            fix="leave it out, or use fp8-static or w8a8-static",
        )
    return _changed(recipe, {"input_scales": way})


def _changed(recipe: Recipe, what: Mapping[str, Any]) -> Recipe:
    """The recipe with all its presets changed."""
    rules = tuple(replace(rule, preset=replace(rule.preset, **what)) if rule.preset else rule for rule in recipe.rules)
    return replace(recipe, preset=replace(recipe.preset, **what), rules=rules)


def _check_transforms(recipe: Recipe) -> None:
    """A block is transformed as a whole, so in one way."""
    ways = sorted({one.transform for one in recipe.presets if one.transform})
    if len(ways) > 1:
        raise RecipeError(f"the recipe transforms in {len(ways)} ways, {' and '.join(ways)}", fix="use one of them")
    if ways and recipe.histogram:
        raise RecipeError(
            f"{ways[0]} scales the inputs, so that the counts that percentile and mse need are not theirs any more",
            fix="use --input-scales minmax",
        )
    counted = next((one for one in recipe.presets if one.scheme.static and one.scheme.weight.kind == "e2m1"), None)
    if counted and counted.input_scales == "mse":
        raise RecipeError(
            f"mse cannot choose the input scale of {counted.name}, whose groups have scales of their own",
            fix="use --input-scales minmax or percentile",
        )


def _rule(settings: Any) -> Rule:
    if not isinstance(settings, Mapping):
        raise RecipeError(f"a rule is {str(settings)[:40]!r}, not a table", fix="write each rule as [[rules]]")
    _only(settings, {"match", "preset", "group", "keep", "type"}, "rule")
    if ("preset" in settings) + bool(settings.get("keep")) + ("type" in settings) != 1:
        raise RecipeError(
            f"rule {settings.get('match')!r} has not exactly one of preset, type and keep", fix="give one of them"
        )
    chosen = preset(_text(settings, "preset"), settings.get("group")) if "preset" in settings else None
    return Rule(_text(settings, "match"), chosen, _text(settings, "type") if "type" in settings else None)


def _fitting_format(recipe: Recipe) -> Recipe:
    """The recipe, if its format can hold all its schemes."""
    if recipe.format != CAST and recipe.format not in registry.choices("quantry.formats"):
        known = (*registry.choices("quantry.formats"), CAST)
        raise UnknownNameError(f"unknown format {recipe.format!r}", fix=registry.suggest(recipe.format, known))
    _check_types(recipe)
    for one in recipe.presets:
        if recipe.format == CAST:
            reason = None if one.scheme.weight.is_cast else "safetensors alone holds 16-bit weights only"
        else:
            reason = registry.load("quantry.formats", recipe.format).refusal(one.scheme)
        if reason:
            raise RecipeError(
                f"format {recipe.format} cannot hold preset {one.name}: {reason}",
                fix=f"{one.name} fits {' or '.join(one.formats)}",
            )
    return recipe


def _fitting_cache(recipe: Recipe) -> Recipe:
    """The recipe, if its format can hold what its KV cache needs."""
    if recipe.kv is not None and recipe.kv not in KV:
        raise UnknownNameError(f"unknown KV cache {recipe.kv!r}", fix=registry.suggest(recipe.kv, tuple(KV)))
    form = None if recipe.format == CAST else registry.load("quantry.formats", recipe.format)
    if recipe.cache and not hasattr(form, "cache_layout"):
        raise RecipeError(
            f"format {recipe.format} has no place for the scales of an FP8 KV cache",
            fix="use --format compressed-tensors, or --kv int8, which needs none",
        )
    return recipe


def _check_types(recipe: Recipe) -> None:
    """Rules of GGUF recipes give types, those of all others presets."""
    for rule in recipe.rules:
        if recipe.format == "gguf" and rule.preset is not None:
            raise RecipeError(
                f"rule {rule.match!r} gives the preset {rule.preset.name}, and in GGUF a rule gives a type",
                fix='write type = "Q6_K" or another ggml type',
            )
        if recipe.format != "gguf" and rule.type is not None:
            raise RecipeError(
                f"rule {rule.match!r} gives the type {rule.type}, which only GGUF has",
                fix="write preset = ... or keep = true",
            )


def _regroup(chosen: Preset, group: int) -> Preset:
    grid = chosen.scheme.weight
    if grid.kind != "int" or grid.block[0] != 1 or grid.block[1] == 0:
        raise RecipeError(f"preset {chosen.name} has no groups whose size could be {group}", fix="leave --group out")
    if type(group) is not int or group < 8 or group % 8 or group > 1024:
        raise RecipeError(f"group size {group} is not a multiple of 8 from 8 to 1024", fix="use 32, 64 or 128")
    return replace(chosen, scheme=replace(chosen.scheme, weight=replace(grid, block=(1, group))))


@cache
def _presets() -> dict[str, Preset]:
    rows = tomllib.loads(files("quantry").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {name: _preset(name, row) for name, row in rows.items()}


def _preset(name: str, row: Mapping[str, Any]) -> Preset:
    activation = row.get("activation")
    scheme = Scheme(_grid(row["weight"]), _activation(activation) if activation else None)
    rest = {key: value for key, value in row.items() if key not in ("weight", "activation", "formats")}
    how = {"fit": None} if "file_type" in row else {}
    return Preset(name=name, scheme=scheme, formats=tuple(row["formats"]), **{**how, **rest})


def _activation(row: Mapping[str, Any]) -> Activation:
    grid = {key: value for key, value in row.items() if key != "dynamic"}
    return Activation(_grid(grid), row.get("dynamic", True))


def _grid(row: Mapping[str, Any]) -> Grid:
    return Grid(**{**row, "block": tuple(row.get("block", (1, 0)))})


def _read(path: Path, parse: Any) -> Mapping[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"cannot read {path}: {error.strerror}", fix="check the path") from error
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be parsed: {error}", fix="mend the file") from error
    if not isinstance(content, Mapping):
        raise RecipeError(f"{path} holds a {type(content).__name__}, not an object", fix="mend the file")
    return content


def _from_plan(plan: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The recipe of a plan: of its first, best option."""
    options = plan.get("options")
    best = options[0] if isinstance(options, list) and options else plan
    if not isinstance(best, Mapping) or "preset" not in best:
        raise RecipeError(f"{path} names no preset", fix="write it with quantry plan -o")
    return {key: best[key] for key in ("preset", "format", "group") if best.get(key) is not None}


def _only(settings: Mapping[str, Any], known: set[str], kind: str) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        raise RecipeError(f"the {kind} has an unknown key {unknown[0]!r}", fix=f"known are {', '.join(sorted(known))}")


def _text(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key)
    if not isinstance(value, str):
        raise RecipeError(f"{key} is {str(value)[:40]!r}, not a name", fix=f'write {key} = "..."')
    return value

"""Recipes: which scheme each layer gets, how it is rounded, and the format that holds the result.

A recipe is built from settings as a user writes them (command line, recipe file, plan; see recipe_file.py): a preset, a
format, changes to the preset, and rules for layers by name. `build` checks that all of it can be carried out together.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from quantry import registry
from quantry.errors import RecipeError
from quantry.formats.contract import FORMATS, load_format
from quantry.formats.gguf import NAME as GGUF
from quantry.methods.contract import FITS, ROUNDERS, TRANSFORMS
from quantry.quantizing.calibration.record import Calibration
from quantry.storage import read_data
from quantry.types import Activation, Grid, Scheme

KV: Mapping[str, Grid | None] = {  # KV caches by name: the grid of their stored scales, None if none are stored
    "fp8": Grid("e4m3", 8, (0, 0)),
    "fp8-head": Grid("e4m3", 8, (1, 0)),
    "int8": None,
}
HISTOGRAMS = frozenset({"percentile", "mse"})  # methods for static input scales that need a histogram of the inputs
CAST = "safetensors"  # the format of 16-bit presets: nothing is encoded
AUTO = "auto"  # computed for one model: importance vectors, or the preset of every layer for a size
KEYS = frozenset({"preset", "format", "group", "fit", "rounder", "transform", "input_scales", "kv", "rules"})
LONGEST = 500  # characters of a rule's pattern: Python takes minutes to translate 100,000
RULE_KEYS = frozenset({"match", "preset", "group", "keep", "type"})


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of presets.toml."""

    name: str
    about: str
    scheme: Scheme
    formats: tuple[str, ...]
    transform: str | None = None
    fit: str | None = "absmax"  # None: ggml's own search finds scales and codes of its block types at once
    rounder: str = "nearest"
    input_scales: str = "minmax"  # how static scales of inputs are found
    distilled: bool = False  # train each block against its 16-bit output before rounding
    file_type: str | None = None  # of GGUF: a mixture of block types

    @property
    def needs_statistics(self) -> bool:
        """Says if the statistics of the layers' inputs are needed."""
        return (
            self.transform is not None
            or self.scheme.static is not None
            or (self.fit is not None and bool(registry.facts(FITS, self.fit)["NEEDS_STATISTICS"]))
            or bool(registry.facts(ROUNDERS, self.rounder)["NEEDS_STATISTICS"])
        )

    @property
    def calibrated(self) -> bool:
        """Says if the model has to be run on some text."""
        return self.needs_statistics or self.distilled

    def with_dynamic_inputs(self) -> "Preset":
        """Returns the preset with scales of inputs by token that the engine computes."""
        static = self.scheme.static
        if static is None:
            return self
        activation = Activation(replace(static.grid, block=(1, 0)))
        return replace(self, scheme=replace(self.scheme, activation=activation))


@dataclass(frozen=True, slots=True)
class Rule:
    """A preset for the layers whose name matches, or in GGUF a type for tensors; neither leaves them in 16 bit."""

    match: str
    preset: Preset | None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """A preset for all linear layers, exceptions for some, and the format that holds them."""

    preset: Preset
    format: str
    rules: tuple[Rule, ...] = ()
    imatrix: str | None = None  # SHA-256 of the importance matrix, or AUTO before it is computed
    calibration: Calibration | None = None
    kv: str | None = None  # a name of KV
    sequential: bool = False  # calibrate each block on the output of the quantized blocks before it
    budget: str | None = None  # the size that the rules were chosen for, in words
    dynamic: tuple[str, ...] = ()  # layers whose outliers are too large for a stored scale of the input
    rounding: int | None = None  # steps in which the codes of each stored block are trained
    distil: int | None = None  # steps in which the scales of the stored model are trained

    @property
    def name(self) -> str:
        """The preset's name, or auto if the rules were chosen for a size."""
        return AUTO if self.budget else self.preset.name

    @property
    def about(self) -> str:
        """One sentence for people."""
        return f"Chosen tensor by tensor for {self.budget}" if self.budget else self.preset.about

    def preset_for(self, module: str) -> Preset | None:
        """Returns the preset of a layer; None leaves it in 16 bit."""
        preset = next((rule.preset for rule in self.rules if fnmatchcase(module, rule.match)), self.preset)
        return preset.with_dynamic_inputs() if preset and module in self.dynamic else preset

    @property
    def presets(self) -> tuple[Preset, ...]:
        """All presets that some layer may get."""
        return (self.preset, *(rule.preset for rule in self.rules if rule.preset))

    @property
    def needs_statistics(self) -> bool:
        """Says if some layer needs the statistics of its input."""
        return any(preset.needs_statistics for preset in self.presets)

    @property
    def calibrated(self) -> bool:
        """Says if the model has to be run on some text."""
        reads_text = self.imatrix == AUTO or self.cache is not None or self.trained
        return reads_text or any(preset.calibrated for preset in self.presets)

    @property
    def trained(self) -> bool:
        """Says if what is stored is trained."""
        return self.rounding is not None or self.distil is not None

    @property
    def distilled(self) -> bool:
        """Says if blocks are trained before they are rounded."""
        return any(preset.distilled for preset in self.presets)

    @property
    def stretches(self) -> bool:
        """Says if outliers of an input may stretch a stored scale: those of integers."""
        static = [preset.scheme.static for preset in self.presets]
        return any(one is not None and one.grid.kind == "int" for one in static)

    @property
    def histogram(self) -> bool:
        """Says if calibration has to count the magnitudes of inputs."""
        return any(preset.scheme.static and preset.input_scales in HISTOGRAMS for preset in self.presets)

    @property
    def cache(self) -> Grid | None:
        """The grid of the KV cache, if scales for it are stored."""
        return KV[self.kv] if self.kv else None

    @property
    def transform(self) -> str | None:
        """The transform of every block before its layers are rounded."""
        return next((preset.transform for preset in self.presets if preset.transform), None)

    @property
    def numbered(self) -> bool:
        """True if rules may tell blocks or experts apart by their number."""
        return any(letter.isdigit() for rule in self.rules for letter in rule.match)

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of quantry.json; drops the optional fields that are not set."""
        optional = ("calibration", "kv", "sequential", "budget", "dynamic", "rounding", "distil")
        facts = asdict(self) | ({"calibration": self.calibration.to_dict()} if self.calibration else {})
        return {key: value for key, value in facts.items() if key not in optional or value}


def presets() -> dict[str, Preset]:
    """Returns all presets by name, in the order of presets.toml."""
    return dict(_presets())


def preset_name(name: str) -> str:
    """Returns the preset that somebody means by `Q4_K_M`, `awq` or `int4`. Raises UnknownNameError."""
    known = _presets()
    types = {each.removeprefix(f"{GGUF}-"): each for each in known if each.startswith(f"{GGUF}-")}
    return registry.resolve("preset", name, (*known, AUTO), {**types, **read_data("quantry", "preset_names.toml")})


def preset(name: str, group: int | None = None) -> Preset:
    """Returns the preset of that name, with another group size if given. Raises UnknownNameError or RecipeError."""
    name = preset_name(name)
    if name == AUTO:
        raise RecipeError("preset auto is chosen for one model and size", fix="use it with quantry quantize --budget")
    named = _presets()[name]
    return named if group is None else _with_group(named, group)


def build(settings: Mapping[str, Any], budget: str | None = None) -> Recipe:
    """Returns the recipe that settings describe: the keys of a recipe file, None where nothing is asked for.

    `budget` says in words which size the rules were chosen for. Raises RecipeError for what cannot be carried out and
    UnknownNameError for a name that does not exist.

    >>> build({"preset": "w4a16", "group": 64, "rounder": "gptq"}).format
    'compressed-tensors'
    """
    _check_keys(settings, KEYS, "recipe")
    main = preset(_text(settings, "preset"), settings.get("group"))
    rules = settings.get("rules") or []
    if not isinstance(rules, list):
        raise RecipeError(f"rules is {str(rules)[:40]!r}, not a list", fix="write each rule as [[rules]]")
    format_ = main.formats[0] if settings.get("format") is None else _text(settings, "format")
    plain = Recipe(main, format_, tuple(_rule(rule) for rule in rules), budget=budget)
    changes = {
        key: check(plain, _text(settings, key)) for key, check in CHECKS.items() if settings.get(key) is not None
    }
    recipe = _with_presets(plain, changes)
    if settings.get("kv") is not None:
        recipe = replace(recipe, kv=_text(settings, "kv"))
    _check_transforms(recipe)
    _check_format(recipe)
    _check_cache(recipe)
    return recipe


def _with_presets(recipe: Recipe, changes: Mapping[str, str]) -> Recipe:
    rules = tuple(
        replace(rule, preset=replace(rule.preset, **changes)) if rule.preset else rule  # type: ignore[arg-type]
        for rule in recipe.rules
    )
    return replace(recipe, preset=replace(recipe.preset, **changes), rules=rules)  # type: ignore[arg-type]


def _fit(recipe: Recipe, name: str) -> str:
    registry.check("fit", name, registry.choices(FITS))
    if recipe.preset.fit is None:
        raise RecipeError(f"fit has no use: ggml fits the types of {recipe.preset.name} itself", fix="leave it out")
    return name


def _rounder(recipe: Recipe, name: str) -> str:
    registry.check("rounder", name, registry.choices(ROUNDERS))
    grids = registry.facts(ROUNDERS, name).get("GRIDS")
    for used in recipe.presets:
        if grids is not None and used.scheme.weight.kind not in grids:
            raise RecipeError(
                f"{name} cannot round onto the {used.scheme.weight.kind} of {used.name}",
                fix="leave --rounder out, or use nearest",
            )
    return name


def _transform(recipe: Recipe, name: str) -> str:
    registry.check("transform", name, registry.choices(TRANSFORMS))
    for used in recipe.presets:
        if used.scheme.weight.is_cast:
            raise RecipeError(f"--transform {name} has no use: {used.name} rounds nothing", fix="leave it out")
        if registry.facts(TRANSFORMS, name).get("NEEDS_QUANTIZED_INPUTS") and not used.scheme.activation:
            raise RecipeError(f"--transform {name} has no use: {used.name} keeps inputs in 16 bit", fix="leave it out")
    return name


def _input_scales(recipe: Recipe, method: str) -> str:
    registry.check("method of input scales", method, ("minmax", *sorted(HISTOGRAMS)))
    if not any(used.scheme.static for used in recipe.presets):
        raise RecipeError(
            f"--input-scales has no use: {recipe.preset.name} stores no scales of inputs",
            fix="leave it out, or use fp8-static or w8a8-static",
        )
    return method


CHECKS = {"fit": _fit, "rounder": _rounder, "transform": _transform, "input_scales": _input_scales}


def _check_transforms(recipe: Recipe) -> None:
    """Checks that blocks, which are transformed as a whole, have one transform that suits the input scales."""
    transforms = sorted({used.transform for used in recipe.presets if used.transform})
    if len(transforms) > 1:
        raise RecipeError(
            f"the recipe has {len(transforms)} transforms, {' and '.join(transforms)}, and a block takes one",
            fix="use one of them",
        )
    if transforms and recipe.histogram:
        raise RecipeError(
            f"{transforms[0]} scales the inputs, so that the histograms for percentile and mse no longer hold",
            fix="use --input-scales minmax",
        )
    for used in recipe.presets:
        if used.scheme.static and used.scheme.weight.kind == "e2m1" and used.input_scales == "mse":
            raise RecipeError(
                f"mse cannot choose the input scale of {used.name}, whose groups have scales of their own",
                fix="use --input-scales minmax or percentile",
            )


def _rule(settings: Any) -> Rule:
    if not isinstance(settings, Mapping):
        raise RecipeError(f"a rule is {str(settings)[:40]!r}, not a table", fix="write each rule as [[rules]]")
    _check_keys(settings, RULE_KEYS, "rule")
    if not isinstance(keep := settings.get("keep", False), bool):
        raise RecipeError(f"keep is {str(keep)[:40]!r}, neither true nor false", fix="write keep = true")
    if ("preset" in settings) + keep + ("type" in settings) != 1:
        raise RecipeError(
            f"rule {settings.get('match')!r} does not have exactly one of preset, type and keep", fix="give one of them"
        )
    chosen = preset(_text(settings, "preset"), settings.get("group")) if "preset" in settings else None
    pattern = _text(settings, "match")
    if len(pattern) > LONGEST:
        raise RecipeError(
            f"a rule matches {pattern[:20]!r}... with {len(pattern):,} characters", fix=f"use {LONGEST} at most"
        )
    return Rule(pattern, chosen, _text(settings, "type") if "type" in settings else None)


def _check_format(recipe: Recipe) -> None:
    registry.check("format", recipe.format, (*registry.choices(FORMATS), CAST))
    _check_rules(recipe)
    for used in recipe.presets:
        if recipe.format == CAST:
            reason = None if used.scheme.weight.is_cast else "safetensors alone holds 16-bit weights only"
        else:
            reason = load_format(recipe.format).refusal(used.scheme)
        if reason:
            raise RecipeError(
                f"format {recipe.format} cannot hold preset {used.name}: {reason}",
                fix=f"{used.name} fits {' or '.join(used.formats)}",
            )


def _check_rules(recipe: Recipe) -> None:
    for rule in recipe.rules:
        if recipe.format == GGUF and rule.preset is not None:
            raise RecipeError(
                f"rule {rule.match!r} gives the preset {rule.preset.name}, and in GGUF a rule gives a type",
                fix='write type = "Q6_K" or another ggml type',
            )
        if recipe.format != GGUF and rule.type is not None:
            raise RecipeError(
                f"rule {rule.match!r} gives the type {rule.type}, which only GGUF has",
                fix="write preset = ... or keep = true",
            )


def _check_cache(recipe: Recipe) -> None:
    if recipe.kv is not None:
        registry.check("KV cache", recipe.kv, KV)
    holds = recipe.format not in (CAST, GGUF) and load_format(recipe.format).CACHE_SCALES is not None
    if recipe.cache and not holds:
        raise RecipeError(
            f"format {recipe.format} has no place for the scales of an FP8 KV cache",
            fix="use --format compressed-tensors, or --kv int8, which needs none",
        )


def _with_group(named: Preset, group: int) -> Preset:
    grid = named.scheme.weight
    if grid.kind != "int" or grid.block[0] != 1 or grid.block[1] == 0:
        raise RecipeError(f"preset {named.name} has no groups whose size could be {group}", fix="leave --group out")
    if type(group) is not int or group < 8 or group % 8 or group > 1024:
        raise RecipeError(f"group size {group} is not a multiple of 8 from 8 to 1024", fix="use 32, 64 or 128")
    return replace(named, scheme=replace(named.scheme, weight=replace(grid, block=(1, group))))


@cache
def _presets() -> dict[str, Preset]:
    rows = read_data("quantry", "presets.toml")
    return {name: _preset(name, row) for name, row in rows.items()}


def _preset(name: str, row: Mapping[str, Any]) -> Preset:
    activation = row.get("activation")
    scheme = Scheme(_grid(row["weight"]), _activation(activation) if activation else None)
    rest = {key: value for key, value in row.items() if key not in ("weight", "activation", "formats")}
    fit = {"fit": None} if "file_type" in row else {}
    return Preset(name=name, scheme=scheme, formats=tuple(row["formats"]), **{**fit, **rest})


def _activation(row: Mapping[str, Any]) -> Activation:
    grid = {key: value for key, value in row.items() if key != "dynamic"}
    return Activation(_grid(grid), row.get("dynamic", True))


def _grid(row: Mapping[str, Any]) -> Grid:
    return Grid(**{**row, "block": tuple(row.get("block", (1, 0)))})


def _check_keys(settings: Mapping[str, Any], known: frozenset[str], kind: str) -> None:
    unknown = sorted(set(settings) - known)
    if unknown:
        raise RecipeError(f"the {kind} has an unknown key {unknown[0]!r}", fix=f"known are {', '.join(sorted(known))}")


def _text(settings: Mapping[str, Any], key: str) -> str:
    value = settings.get(key)
    if not isinstance(value, str):
        raise RecipeError(f"{key} is {str(value)[:40]!r}, not a name", fix=f'write {key} = "..."')
    return value

"""Presets with options of quantize as users write them, and what is known about each artefact before it is made."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.devices import hardware
from quantry.errors import QuantryError, RecipeError, UnknownNameError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.quantize import importance_of
from quantry.planning.budget import parse
from quantry.quantizing.recipe import AUTO, build, preset_name
from quantry.registry import suggest
from quantry.types import Anatomy

# Options of quantize that may follow a preset, in their order in the names of folders.
OPTIONS = ("format", "group", "rounder", "transform", "imatrix", "kv", "budget", "gpu")
SAMPLE_PRESETS = {GGUF: "gguf-q4_0", "compressed-tensors": "w4a16"}  # options of a mixture are checked with these
EXAMPLE = "write it as w4a16:group=64,format=compressed-tensors"


@dataclass(frozen=True, slots=True)
class ArtefactSpec:
    """The request for an artefact: a preset, and options of quantize."""

    text: str
    preset: str
    options: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of its folder: preset and options in a fixed order, in characters that every disk takes."""
        parts = [f"{key}-{_plain(key, self.options[key])}" for key in OPTIONS if key in self.options]
        return "_".join([self.preset, *parts])


def read_specs(presets: str | Sequence[str], shared: Mapping[str, Any]) -> tuple[ArtefactSpec, ...]:
    """Parses presets with their options; `shared` options apply to presets that do not set them.

    Raises RecipeError if there is no preset, an option is malformed, or two specs have the same folder.
    """
    texts = _split(presets) if isinstance(presets, str) else tuple(presets)
    if not texts:
        raise RecipeError("no preset is given", fix="give --presets, such as w4a16,gguf-q4_k_m")
    specs = tuple(_spec(text, shared) for text in texts)
    by_name: dict[str, ArtefactSpec] = {}
    for spec in specs:
        first = by_name.setdefault(spec.name.casefold(), spec)
        if first is not spec:
            raise RecipeError(
                f"{first.text!r} and {spec.text!r} would both be written to {spec.name}", fix="leave one of them out"
            )
    return specs


def _split(text: str) -> tuple[str, ...]:
    """Splits presets at commas; an option after a comma (`group=64`) still belongs to the preset before it."""
    texts: list[str] = []
    for piece in (piece.strip() for piece in text.split(",")):
        if texts and "=" in piece.partition(":")[0]:
            texts[-1] += f",{piece}"
        else:
            texts.append(piece)
    return tuple(texts) if text.strip() else ()


def _spec(text: str, shared: Mapping[str, Any]) -> ArtefactSpec:
    preset, colon, rest = text.strip().partition(":")
    if not preset or "," in preset or "=" in preset or (colon and not rest):
        raise RecipeError(f"{text[:60]!r} is not a preset with options", fix=EXAMPLE)
    options: dict[str, Any] = {}
    for pair in rest.split(",") if colon else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not value or key in options:
            raise RecipeError(f"{pair.strip()[:60]!r} of {text[:60]!r} is not one option with a value", fix=EXAMPLE)
        if key not in OPTIONS:
            raise UnknownNameError(f"unknown option {key[:40]!r} of {text[:60]!r}", fix=suggest(key, OPTIONS))
        options[key] = _count(value, text) if key == "group" else value
    try:
        return ArtefactSpec(text.strip(), preset_name(preset.strip()), {**shared, **options})
    except UnknownNameError as error:
        raise UnknownNameError(f"{text.strip()}: {error.problem}", fix=error.fix) from error


def _count(value: str, text: str) -> int:
    if not value.isdecimal() or len(value) > 9:
        raise RecipeError(f"the group {value[:40]!r} of {text[:60]!r} is not a number", fix="use 32, 64 or 128")
    return int(value)


@dataclass(frozen=True, slots=True)
class ArtefactFacts:
    """What is known about an artefact before it is made."""

    format: str
    calibrated: bool = False
    imatrix: str | None = None  # SHA-256 of the file, or auto


def facts_of(spec: ArtefactSpec, anatomy: Anatomy) -> ArtefactFacts:
    """Returns the facts of an artefact. Raises QuantryError, which names the spec, for options that do not fit."""
    try:
        return _mixture(spec, anatomy) if spec.preset == AUTO else _uniform(spec)
    except QuantryError as error:
        raise type(error)(f"{spec.text}: {error.problem}", fix=error.fix) from error


def _mixture(spec: ArtefactSpec, anatomy: Anatomy) -> ArtefactFacts:
    from quantry.jobs.auto.mixer import AutoOptions  # imports transformers
    from quantry.jobs.auto.mixture import check_options

    options = spec.options
    for name in ("group", "imatrix"):
        if name in options:
            raise RecipeError(f"{name} has no use with preset auto, which chooses for each tensor", fix="leave it out")
    auto = AutoOptions(budget=options.get("budget"), format=options.get("format") or GGUF)
    check_options(auto)
    parse(options["budget"], parameters=anatomy.parameters)
    build({"preset": SAMPLE_PRESETS[auto.format], "format": auto.format, "transform": options.get("transform")})
    if "gpu" in options:
        hardware(options["gpu"])
    return ArtefactFacts(auto.format, calibrated=True)


def _uniform(spec: ArtefactSpec) -> ArtefactFacts:
    options = spec.options
    if "budget" in options:
        raise RecipeError("a budget has no use without preset auto", fix=f"write auto:budget={options['budget'][:40]}")
    if "gpu" in options:
        raise RecipeError("a gpu has no use without preset auto", fix="leave it out, or use auto with a budget")
    names = ("format", "group", "rounder", "input_scales", "kv", "transform")
    recipe = build({"preset": spec.preset, **{name: options.get(name) for name in names}})
    vectors = importance_of(options.get("imatrix"), recipe)
    if options.get("imatrix") == AUTO:
        return ArtefactFacts(recipe.format, True, AUTO)
    return ArtefactFacts(recipe.format, recipe.calibrated, vectors.sha256 if vectors else None)


def _plain(key: str, value: Any) -> str:
    """Returns a value as a part of a file name; of a path, its last part."""
    words = Path(value).stem.replace(".", "-") if key == "imatrix" else str(value)
    return re.sub(r"[^A-Za-z0-9.+-]+", "-", words).strip("-.")

"""Recipes from files: a recipe file, a plan, or the quantry.json of an artefact.

A recipe file is TOML: the options of the command line, and rules for layers by name, the first match wins.

    preset = "w4a16"
    format = "compressed-tensors"
    group = 64
    rounder = "gptq"            # for all layers, instead of the presets' own
    fit = "mse"                 # the same: how scales are fitted
    transform = "awq"           # the same: applied to each block before rounding
    input_scales = "mse"        # how static scales of inputs are found, instead of the presets' own method
    kv = "fp8"                  # what the KV cache is served in

    [[rules]]
    match = "*.layers.0.*"      # shell pattern on the layer's name
    preset = "w8a16"            # or: keep = true, to leave it in 16 bit

In a recipe for GGUF a rule names tensors as GGUF names them, and gives a ggml type instead of a preset:

    preset = "gguf-q4_k_m"

    [[rules]]
    match = "blk.*.ffn_down.weight"
    type = "Q6_K"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantry.errors import CheckpointError, RecipeError
from quantry.quantizing.artefact_file import AGAIN
from quantry.quantizing.recipe import Recipe, build, presets
from quantry.storage.reading import read_json, read_toml
from quantry.types import Anatomy

CLOSE = 0.02  # of the parameters: a plan by a shape counts no biases
LIMIT = 16 << 20  # bytes of a recipe or a plan
METHODS = ("fit", "rounder", "input_scales", "transform")  # fields of a preset that a recipe may change


def read_recipe(path: Path) -> Mapping[str, Any]:
    """Reads the settings of a recipe file. Raises RecipeError if it cannot be read."""
    return read_toml(path, fix="correct the file", error=RecipeError, limit=LIMIT)


def read_plan(path: Path, anatomy: Anatomy) -> Mapping[str, Any]:
    """Reads the settings of a plan's first option. Raises RecipeError if it names no preset or is of another model."""
    plan = read_json(path, fix="write it with quantry plan -o", error=RecipeError, limit=LIMIT)
    options = plan.get("options")
    best = options[0] if isinstance(options, list) and options else plan
    if not isinstance(best, Mapping) or "preset" not in best:
        raise RecipeError(f"{path} names no preset", fix="write it with quantry plan -o")
    _check_model(path, plan.get("model"), anatomy)
    return {key: best[key] for key in ("preset", "format", "group") if best.get(key) is not None}


def _check_model(path: Path, planned: Any, anatomy: Anatomy) -> None:
    """Raises RecipeError if a plan names another architecture or size: a name or a folder may be another's."""
    if not isinstance(planned, Mapping):
        raise RecipeError(f"{path} names no model", fix="write it with quantry plan -o")
    parameters, name = planned.get("parameters"), str(planned.get("source"))[:60]
    if not isinstance(parameters, int) or abs(parameters - anatomy.parameters) > CLOSE * anatomy.parameters:
        raise RecipeError(
            f"{path} is the plan of {name}, with {str(parameters)[:20]} parameters, and {anatomy.source} has"
            f" {anatomy.parameters}",
            fix=f"plan this model: quantry plan {anatomy.source}",
        )
    if planned.get("architecture") != anatomy.architecture:
        raise RecipeError(
            f"{path} is the plan of {name}, a {str(planned.get('architecture'))[:40]}, and {anatomy.source} is a"
            f" {anatomy.architecture}",
            fix=f"plan this model: quantry plan {anatomy.source}",
        )


def from_card(content: Mapping[str, Any]) -> Recipe:
    """Returns the recipe that an artefact's quantry.json records. Raises CheckpointError if it records none."""
    try:
        return _recorded(content["recipe"])
    except (KeyError, TypeError, IndexError) as error:
        raise CheckpointError("quantry.json has no recipe that can be read", fix=AGAIN) from error


def _recorded(recorded: Mapping[str, Any]) -> Recipe:
    changed = _changed_methods(recorded["preset"])
    settings = {
        **_named(recorded["preset"]),
        **changed,
        "format": recorded["format"],
        "rules": [_recorded_rule(rule) for rule in recorded["rules"]],
        "kv": recorded.get("kv"),
    }
    return build(settings, recorded.get("budget"))


def _recorded_rule(rule: Mapping[str, Any]) -> dict[str, Any]:
    if rule["type"]:
        return {"match": rule["match"], "type": rule["type"]}
    return {"match": rule["match"], **(_named(rule["preset"]) if rule["preset"] else {"keep": True})}


def _named(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a preset by name, with its group if that is not the preset's own."""
    group = tuple(recorded["scheme"]["weight"]["block"])
    known = presets().get(recorded["name"])
    changed = known is not None and group != known.scheme.weight.block
    return {"preset": recorded["name"], **({"group": group[1]} if changed else {})}


def _changed_methods(recorded: Mapping[str, Any]) -> dict[str, Any]:
    known = presets().get(recorded["name"])
    return {key: recorded[key] for key in METHODS if known and key in recorded and recorded[key] != getattr(known, key)}

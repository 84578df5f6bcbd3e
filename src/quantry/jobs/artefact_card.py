"""Reads what an artefact says about itself in quantry.json; every field is checked, since users may edit the file."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from quantry.errors import CheckpointError
from quantry.quantizing.artefact_file import AGAIN, read_artefact_file
from quantry.quantizing.recipe import presets
from quantry.report.content import Interval
from quantry.report.sizes import counted
from quantry.storage import ARTEFACT_FILE

MANY = 12  # rules of a recipe; beyond, they are counted


@dataclass(frozen=True, slots=True)
class ArtefactCard:
    """The content of quantry.json. Raises CheckpointError if a field has the wrong type."""

    content: Mapping[str, Any]

    def text(self, name: str) -> str:
        return text(self.content, name)

    def count(self, name: str) -> int:
        return count(self.content, name)

    @property
    def proof(self) -> Mapping[str, Any]:
        """The proof; empty before the first `quantry verify`."""
        return mapping(self.content.get("proof") or {}, f"the proof in {ARTEFACT_FILE}")

    @property
    def recipe(self) -> Mapping[str, Any]:
        return mapping(self.content.get("recipe"), f"the recipe in {ARTEFACT_FILE}")

    @property
    def main_preset(self) -> Mapping[str, Any]:
        """The preset of all layers that no rule names."""
        return mapping(self.recipe.get("preset"), f"recipe.preset of {ARTEFACT_FILE}")

    @property
    def main_preset_name(self) -> str:
        return text(self.main_preset, "name")

    @property
    def files(self) -> Mapping[str, Mapping[str, Any]]:
        """The files with weights: size and SHA-256."""
        files = mapping(self.content.get("files") or {}, f"files of {ARTEFACT_FILE}")
        return {name: mapping(file, "a file") for name, file in files.items()}

    @property
    def size(self) -> int:
        """The bytes of its tensors: the size that card, sweep and every page show, known before a file is written."""
        return self.count("bytes")

    @property
    def versions(self) -> dict[str, str]:
        others = mapping(self.content.get("versions") or {}, f"versions of {ARTEFACT_FILE}")
        versions = {"quantry": self.content.get("quantry", ""), **others}
        return {name: str(version) for name, version in versions.items()}

    def name(self) -> str:
        """Returns the preset and every option that differs from it: different artefacts have different names."""
        recipe, preset, known = self.recipe, self.text("preset"), presets().get(self.main_preset_name)
        if budget := recipe.get("budget"):
            return f"{preset} {budget}" + (f" {self.text('format')}" if self.text("format") != "gguf" else "")
        if known is None:
            return preset
        scheme = mapping(self.main_preset.get("scheme"), "its scheme")
        block = tuple(mapping(scheme.get("weight"), "its grid").get("block", ()))
        rounder = self.main_preset.get("rounder", known.rounder)
        words = (
            (f"g{block[-1]}" if block else "", block and block != known.scheme.weight.block),
            (str(rounder), rounder != known.rounder),
            (str(self.content.get("format")), self.content.get("format") != known.formats[0]),
            ("imatrix", recipe.get("imatrix")),
            (f"kv {recipe.get('kv')}", recipe.get("kv")),
            ("with rules", recipe.get("rules")),
        )
        return " ".join([preset, *(word for word, is_shown in words if is_shown)])

    def provenance(self) -> dict[str, Any]:
        """Returns the source, the main choices of the recipe, the texts, and the files; empty ones are left out."""
        proof = self.proof
        facts = {
            "source": self.text("source"),
            "recipe": self._recipe_summary(),
            "calibration text": self.recipe.get("calibration"),
            "proof": {"reference": proof.get("reference"), "text": proof.get("text")} if proof else None,
            "files": {
                name: f"{count(file, 'bytes'):,} bytes, SHA-256 {file.get('sha256')}"
                for name, file in self.files.items()
            },
        }
        return {name: value for name, value in facts.items() if value}

    def _recipe_summary(self) -> dict[str, Any]:
        methods = {name: self.main_preset.get(name) for name in ("transform", "fit", "rounder")}
        others = {name: self.recipe.get(name) for name in ("format", "budget", "kv", "imatrix")}
        summary = {"preset": self.text("preset"), **methods, **others, "rules": self._rules()}
        return {name: value for name, value in summary.items() if value}

    def _rules(self) -> dict[str, str]:
        """Returns each rule; if there are many, how many layers have each scheme."""
        rules = [
            (str(rule.get("match")), _rule(rule))
            for rule in mappings(self.recipe.get("rules") or (), f"rules of {ARTEFACT_FILE}")
        ]
        if len(rules) <= MANY:
            return dict(rules)
        return {
            scheme: counted(number, "layer") for scheme, number in Counter(scheme for _, scheme in rules).most_common()
        }


def read_card(folder: Path) -> ArtefactCard:
    """Reads quantry.json of an artefact. Raises CheckpointError if there is none or it is damaged."""
    file = folder / ARTEFACT_FILE
    if not file.is_file():
        raise CheckpointError(
            f"{folder} has no {ARTEFACT_FILE}, so nothing is known of how it was made",
            fix="give a folder that quantry quantize wrote",
        )
    return ArtefactCard(read_artefact_file(folder))


def figure(figures: Mapping[str, Any], name: str) -> tuple[float | None, Interval | None]:
    """Returns a figure of a proof with its interval; None if it is not a finite number."""
    value = finite(figures.get(name))
    intervals = mapping(figures.get("intervals") or {}, "intervals of the proof")
    bounds = items(intervals.get(name) or (), f"that of {name}")
    if value is None or len(bounds) != 2:
        return value, None
    low, high = map(finite, bounds)
    return value, None if low is None or high is None else (low, high)


def finite(value: Any) -> float | None:
    """Returns a number that can be shown; a broken model has others."""
    return value if isinstance(value, (int, float)) and isfinite(value) else None


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Returns a JSON object. Raises CheckpointError, which names it, if it is something else."""
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{name} is {_shown(value)}, not an object", fix=AGAIN)
    return value


def mappings(values: Any, name: str) -> list[Mapping[str, Any]]:
    """Returns a list of JSON objects. Raises CheckpointError if it is something else."""
    return [mapping(value, f"one of {name}") for value in items(values, name)]


def items(values: Any, name: str) -> Sequence[Any]:
    """Returns a list. Raises CheckpointError if it is something else."""
    if not isinstance(values, (list, tuple)):
        raise CheckpointError(f"{name} is {_shown(values)}, not a list", fix=AGAIN)
    return values


def notes_of(content: Mapping[str, Any]) -> list[str]:
    return [str(note) for note in items(content.get("notes", ()), "notes")]


def text(content: Mapping[str, Any], name: str) -> str:
    """Returns a text. Raises CheckpointError if it is something else."""
    if not isinstance(value := content.get(name), str):
        raise CheckpointError(f"{name} in {ARTEFACT_FILE} is {_shown(value)}, not text", fix=AGAIN)
    return value


def count(content: Mapping[str, Any], name: str) -> int:
    """Returns an integer. Raises CheckpointError if it is something else."""
    if isinstance(value := content.get(name), bool) or not isinstance(value, int):
        raise CheckpointError(f"{name} in {ARTEFACT_FILE} is {_shown(value)}, not a number", fix=AGAIN)
    return value


def _rule(rule: Mapping[str, Any]) -> str:
    if rule.get("type"):
        return str(rule["type"])
    if not rule.get("preset"):
        return "16 bit"
    preset = mapping(rule["preset"], "the preset of a rule")
    scheme = mapping(preset.get("scheme") or {}, "its scheme")
    block = mapping(scheme.get("weight") or {}, "its grid").get("block")
    group = f", groups of {block[1]}" if block and block[0] == 1 and block[1] else ""
    return f"{preset.get('name')}{group}"


def _shown(value: Any) -> str:
    return "missing" if value is None else re.sub(r"\s+", " ", repr(value))[:40]

"""Where an artefact comes from: each step that led to it, with the hashes of what went in, without a path.

Every quantry.json says how its own artefact was made. A job that starts from an artefact takes over its lineage and
adds that step, so the chain is whole in the last file, whatever became of the folders between.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantry.quantizing.artefact_file import read_artefact_file
from quantry.storage import ARTEFACT_FILE


def lineage_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the steps that led to a folder, the first one first; none for a model that Quantry did not make."""
    place = folder if folder.is_dir() else folder.parent
    if not (place / ARTEFACT_FILE).is_file():
        return []
    note = read_artefact_file(place)
    return [*note.get("lineage", []), _step(note)]


def _step(note: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how an artefact was made: from which model, with which adapter and calibration, to which bytes."""
    recipe = note.get("recipe") or {}
    step = {
        "made": note.get("preset"),
        "source": note.get("source"),
        "source_identity": note.get("source_identity"),
        "adapter": note.get("adapter"),
        "calibration": recipe.get("calibration") if isinstance(recipe, dict) else None,
        "files": {name: file["sha256"] for name, file in (note.get("files") or {}).items()},
    }
    return {key: value for key, value in step.items() if value}


def lines(steps: list[dict[str, Any]]) -> list[str]:
    """Returns a line for each step, as people read it."""
    return [_line(step) for step in steps]


def _line(step: Mapping[str, Any]) -> str:
    line = f"{step.get('made')} from {step.get('source')} ({_short(step.get('source_identity'))})"
    adapter, calibration = step.get("adapter"), step.get("calibration")
    if isinstance(adapter, dict):
        line += f", adapter {adapter.get('name')} ({_short(adapter.get('sha256'))})"
        data = adapter.get("data")
        if isinstance(data, dict):
            line += f" trained on {data.get('name')} ({_short(data.get('sha256'))})"
    if isinstance(calibration, dict):
        line += f", calibrated on {calibration.get('data')} ({_short(calibration.get('fingerprint'))})"
    return line


def _short(digest: object) -> str:
    return str(digest)[:12]

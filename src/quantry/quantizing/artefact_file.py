"""Reads quantry.json: what card.py wrote when the artefact was made, and the proof that was added since."""

from pathlib import Path
from typing import Any, TypedDict

from quantry.errors import CheckpointError, QuantryError
from quantry.storage import ARTEFACT_FILE
from quantry.storage.reading import read_json

AGAIN = "write the artefact again with quantry quantize"


class FileNote(TypedDict):
    """A file with weights."""

    bytes: int
    sha256: str


class GridNote(TypedDict, total=False):
    """The grid of weights: how many share a scale."""

    block: list[int] | None


class SchemeNote(TypedDict, total=False):
    """How weights are stored."""

    weight: GridNote


class PresetNote(TypedDict, total=False):
    """A preset as it was."""

    name: str
    scheme: SchemeNote
    transform: str | None
    rounder: str | None
    fit: str | None
    input_scales: str | None


class RuleNote(TypedDict, total=False):
    """A rule of a recipe."""

    match: str
    type: str | None
    preset: PresetNote | None


class RecipeNote(TypedDict, total=False):
    """The recipe of an artefact."""

    preset: PresetNote
    format: str
    rules: list[RuleNote]
    kv: str | None
    budget: str | None
    imatrix: str | None


class Finding(TypedDict, total=False):
    """A figure compared with a limit."""

    ok: bool
    words: str
    fix: str | None


class ProofNote(TypedDict, total=False):
    """The part of a proof that others read."""

    verdict: str
    gate: str
    kl: float | None
    top1: float | None
    perplexity: float | None
    reference_perplexity: float | None
    noise_floor: float | None
    served: dict[str, Any] | None
    intervals: dict[str, list[float | None]] | None
    findings: list[Finding]
    text: dict[str, Any] | None
    domains: list[dict[str, Any]]
    memory: dict[str, Any] | None
    notes: list[str]


class ArtefactNote(TypedDict, total=False):
    """The fields of quantry.json that are read back."""

    quantry: str
    versions: dict[str, str]
    source: str
    source_identity: str
    adapter: dict[str, Any]
    lineage: list[dict[str, Any]]
    preset: str
    format: str
    parameters: int
    source_bytes: int
    bytes: int
    bits_per_weight: float
    files: dict[str, FileNote]
    notes: list[str]
    expert_tokens: dict[str, list[int]]
    recipe: RecipeNote
    fates: dict[str, list[str]]
    proof: ProofNote


def read_artefact_file(
    folder: Path, *, fix: str = AGAIN, error: type[QuantryError] = CheckpointError
) -> dict[str, Any]:
    """Reads quantry.json of a folder; fields may be missing, those that are there have their types.

    Raises `error` if it is missing or damaged.
    """
    return read_json(folder / ARTEFACT_FILE, ArtefactNote, fix=fix, error=error)

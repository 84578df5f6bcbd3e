"""The verdict on an artefact, where people and programs look for it: card, quantry.json and report, always together.

An artefact that Quantry wrote gets it inside. A snapshot of the hub's cache is shared, and its files are links: its
verdict goes into Quantry's own cache. With a folder of the user's own choice, the verdict on any artefact goes there.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantry.errors import OutputError
from quantry.jobs import artefact_report
from quantry.jobs.artefact_report import PAGE
from quantry.jobs.output_folder import writing
from quantry.models.hub import cached_snapshot
from quantry.quantizing.card import proof_section, proven_files
from quantry.report import Content
from quantry.report.ci import differing
from quantry.storage import ARTEFACT_FILE, home, write_together
from quantry.types import Proof

BESIDE, CARD = "proof.json", "proof.md"  # the names of a verdict that is not inside the artefact
FIX = "give -o DIR to keep the verdict, or --no-record"


def check_output(output: Path, artefact: Path) -> None:
    """Raises OutputError unless `output` is a folder that can be written, and not of another artefact."""
    existing = next(folder for folder in (output.absolute(), *output.absolute().parents) if folder.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise OutputError(f"{existing} is not a folder that can be written", fix="give another folder with -o")
    if (output / ARTEFACT_FILE).is_file() and not _is_same(output, folder_of(artefact)):
        raise OutputError(f"{output} holds another artefact", fix="give another folder with -o")


def folder_of(artefact: Path) -> Path:
    """Returns the folder of an artefact, which may be a GGUF file."""
    return artefact if artefact.is_dir() else artefact.parent


def place_of(artefact: Path, output: Path | None) -> Path | None:
    """Returns the folder that gets the verdict on an artefact; None for another tool's, which stays as it is."""
    folder = folder_of(artefact)
    if output is not None:
        return output
    if not (folder / ARTEFACT_FILE).is_file():
        return None
    snapshot = cached_snapshot(folder)
    return folder if snapshot is None else home() / "proofs" / snapshot


def obstacle(artefact: Path, output: Path | None) -> str:
    """Returns what will keep a verdict from being written, as far as that is seen before it is measured; or nothing."""
    place = place_of(artefact, output)
    if place is None:
        return ""
    existing = next(folder for folder in (place.absolute(), *place.absolute().parents) if folder.exists())
    taken = [place / name for name in (ARTEFACT_FILE, "README.md", PAGE, BESIDE, CARD) if (place / name).is_dir()]
    if taken:
        return f"{taken[0]} is a folder; {FIX}"
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return "" if writable else f"{existing} cannot be written; {FIX}"


def record(artefact: Path, place: Path, proof: Proof, *, report: bool) -> None:
    """Writes a proof into a folder: all of its files, or none.

    Without `report` none is added, but one that is there is written anew: it would say something else than the card.
    Raises OutputError if the folder cannot be written.
    """
    folder, kept = folder_of(artefact), _kept(proof)
    drawn = report or (place / PAGE).exists()
    with writing(place, FIX):
        place.mkdir(parents=True, exist_ok=True)
        written = proven_files(folder, kept) if _is_same(place, folder) else {}
        files = written or _beside(place, kept)
        if drawn:
            files |= artefact_report.files(place, _report(artefact, kept))
        write_together(files)


def _report(artefact: Path, proof: Mapping[str, Any]) -> Content:
    folder = folder_of(artefact)
    if (folder / ARTEFACT_FILE).is_file():
        return artefact_report.content_of(folder, proof=proof)
    return artefact_report.content_of_proof(artefact, proof)


def _beside(place: Path, proof: Mapping[str, Any]) -> dict[Path, bytes]:
    text = json.dumps(proof, indent=2) + "\n"
    return {place / BESIDE: text.encode(), place / CARD: proof_section(proof).encode()}


def _kept(proof: Proof) -> dict[str, Any]:
    """Returns the part of a proof that is kept: no paths of this machine, and few answers, shortened."""
    content = {key: value for key, value in proof.to_dict().items() if key not in ("artefact", "recorded")}
    content["reference"] = Path(proof.reference).name
    if proof.prompts:
        kept = {key: value for key, value in proof.prompts.items() if key != "records"}
        content["prompts"] = {**kept, "differing": differing(proof.prompts)}
    return content


def _is_same(folder: Path, other: Path) -> bool:
    return folder.exists() and other.exists() and folder.samefile(other)

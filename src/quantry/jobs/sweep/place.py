"""The folder of a sweep: who may write there, and what earlier runs left."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantry.errors import OutputError
from quantry.models.workspace import check_target
from quantry.storage import ARTEFACT_FILE

NOTE, LOCK = "sweep.json", "sweep.lock"
OURS = frozenset({NOTE, NOTE + ".partial", LOCK})  # files that a sweep may have left before its first artefact
SIZES = ("format", "bytes", "bits_per_weight")


def check_place(out: Path) -> None:
    """A sweep goes into a new or empty folder, or goes on in its own."""
    left = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if NOTE not in left and not left <= OURS:
        raise OutputError(
            f"{out} is not empty and holds no {NOTE}",
            fix="choose another output, or the folder of a sweep",
        )
    if not left:
        check_target(out)


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keeps two sweeps apart; what the disk says is one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(
                    f"another sweep is writing {out}", fix="wait for it or choose another output"
                ) from error
            try:
                yield
            finally:
                (out / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename or out}: {error.strerror}", fix="mend that and run the same command again"
        ) from error


def digest(artefact: Path) -> str:
    """Of what an artefact says of itself, the proof left out; its files must be there in the sizes that it tells."""
    content = read_object(artefact / ARTEFACT_FILE)
    try:
        facts = {key: content[key] for key in ("quantry", "preset", *SIZES, "recipe", "files")}
        whole = all((artefact / name).stat().st_size == told["bytes"] for name, told in facts["files"].items())
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise damaged(artefact) from error
    if not whole:
        raise damaged(artefact)
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def hashes(artefact: Path) -> dict[str, str]:
    return {name: told["sha256"] for name, told in read_object(artefact / ARTEFACT_FILE)["files"].items()}


def read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise OutputError(f"{file.parent} has no {file.name}", fix="remove it or choose another output") from error
    except (ValueError, RecursionError) as error:
        raise damaged(file) from error
    if not isinstance(content, dict):
        raise damaged(file)
    return content


def damaged(path: Path) -> OutputError:
    return OutputError(f"{path} is damaged", fix="remove it to have it made anew")

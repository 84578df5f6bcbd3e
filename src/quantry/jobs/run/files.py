"""The folder of a run: the names in it, one run at a time, JSON that is whole."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quantry.errors import OutputError
from quantry.models.workspace import check_target
from quantry.storage import ARTEFACT_FILE

NOTE, PLAN, CARD, LOG, LOCK = "run.json", "plan.json", ARTEFACT_FILE, "engine.log", "run.lock"
OURS = frozenset({NOTE, PLAN, LOG, LOCK, f"{NOTE}.partial", f"{PLAN}.partial"})


def check_place(out: Path) -> None:
    """A run goes into a new or empty folder, or goes on in its own."""
    left = {file.name for file in out.iterdir()} if out.is_dir() else set()
    if NOTE not in left and not left <= OURS:
        raise OutputError(
            f"{out} is not empty and holds no {NOTE}", fix="choose another output, or the folder of a run"
        )
    if not left:
        check_target(out)


def plain_name(model: str) -> str:
    """The model's own name."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keeps two runs apart; what the disk says is one line."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with (out / LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise OutputError(f"another run works in {out}", fix="wait for it or choose another output") from error
            try:
                yield
            finally:
                (out / LOCK).unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename or out}: {error.strerror}", fix="mend that and run the same command again"
        ) from error


def read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OutputError(f"{file} is damaged or missing", fix=f"remove {file.parent} to have it made anew")
    return found

"""The folder of a job that writes several artefacts (run, sweep): its note, its lock, and artefacts of earlier jobs."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.errors import OutputError
from quantry.models.workspace import check_target
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.storage import ARTEFACT_FILE, write_atomically
from quantry.storage.lock import locked
from quantry.storage.reading import read_json

NEEDED = ("quantry", "preset", "format", "bytes", "source_bytes", "bits_per_weight", "files", "recipe", "notes")


@dataclass(frozen=True, slots=True)
class OutputFolder:
    """The folder of a job; the note JOB.json, with what was asked and done, makes a folder one of this job."""

    path: Path
    job: str  # run or sweep
    others: tuple[str, ...] = ()  # files that the job may write before its first artefact

    @property
    def note(self) -> Path:
        return self.path / f"{self.job}.json"

    def check(self) -> None:
        """Raises OutputError unless the folder is new, empty or of an earlier job of this kind."""
        names = (self.note.name, *self.others)
        ours = {f"{self.job}.lock", *names, *(f"{name}.partial" for name in names)}
        present = {file.name for file in self.path.iterdir()} if self.path.is_dir() else set()
        if self.note.name not in present and not present <= ours:
            raise OutputError(
                f"{self.path} is not empty and holds no {self.note.name}",
                fix=f"choose another output, or the folder of a {self.job}",
            )
        if not present:
            check_target(self.path)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other jobs out. Raises OutputError if one is at work, or if the disk fails meanwhile."""
        taken = OutputError(f"another {self.job} is writing {self.path}", fix="wait for it or choose another output")
        with writing(self.path, "fix that and run the same command again"):
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path / f"{self.job}.lock", taken):
                yield

    def read_note(self, shape: Any) -> dict[str, Any]:
        """Reads the note; returns an empty one if there is none. Raises OutputError if it is damaged."""
        return read_json(self.note, shape, fix=_anew(self.path)) if self.note.exists() else {}

    def write_note(self, **content: Any) -> None:
        """Writes the note, whole or not at all."""
        write_json(self.note, {"quantry": __version__, **content})


@contextmanager
def writing(folder: Path, fix: str = "give another folder with -o") -> Iterator[None]:
    """Raises OutputError if a file cannot be written meanwhile."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write {error.filename or folder}: {error.strerror}", fix=fix) from error


def write_json(file: Path, content: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_atomically(file, (json.dumps(content, indent=2) + "\n").encode())


def without_home(content: Any) -> Any:
    """Returns JSON content with ~ for the user's home folder, which often holds a name; every command reads it."""
    home = str(Path.home()).rstrip("/")
    if isinstance(content, str) and home:  # not in /data/root or /root2 if the home is /root
        return re.sub(rf"(?<![\w.~-])(?<![\w.~-]/){re.escape(home)}(?![\w-]|\.\w)", "~", content)
    if isinstance(content, Mapping):
        return {without_home(key): without_home(value) for key, value in content.items()}
    return [without_home(item) for item in content] if isinstance(content, list | tuple) else content


def read_card(folder: Path) -> dict[str, Any]:
    """Reads an artefact's quantry.json. Raises OutputError if it is missing, damaged or lacks a field."""
    if not (folder / ARTEFACT_FILE).is_file():
        raise OutputError(f"{folder} has no {ARTEFACT_FILE}", fix=_anew(folder))
    content = read_artefact_file(folder, fix=_anew(folder), error=OutputError)
    if missing := [name for name in NEEDED if name not in content]:
        raise OutputError(f"{folder / ARTEFACT_FILE} is damaged: {missing[0]} is missing", fix=_anew(folder))
    return content


def read_artefact(folder: Path) -> dict[str, Any]:
    """Reads an artefact's quantry.json. Raises OutputError if it or a file of the artefact is missing or damaged."""
    content = read_card(folder)
    try:
        whole = all((folder / name).stat().st_size == file["bytes"] for name, file in content["files"].items())
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise OutputError(f"{folder} is damaged", fix=_anew(folder))
    return content


def _anew(folder: Path) -> str:
    return f"remove {folder} to write it again"

"""The folder a job writes into: `OUT.partial` next to OUT, renamed to OUT in one step at the end.

Nothing unfinished ever has the final name. A killed job leaves finished shards behind; the next run of the same job
(same model, recipe and version) takes them over, any other job raises an error. A lock keeps two jobs apart.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import OutputError, QuantryError, WeightError
from quantry.storage import ARTEFACT_FILE, write_atomically
from quantry.storage.lock import locked
from quantry.storage.reading import read_json

RESERVE = 64 << 20  # bytes left free on the disk for everything else
JOB = "quantry-job.json"
UNFINISHED = "run the quantize command again: it continues where it stopped"
DONE = ".done.json"
REPLACED = ".replaced"  # after the name of an artefact that gives way to a new one


@dataclass(frozen=True, slots=True)
class Finished:
    """The size and checksum of a complete shard."""

    bytes: int
    sha256: str


class Workspace:
    """The partial folder of one job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def finished(self, shard: str) -> Finished | None:
        """Returns the record of a shard that an earlier run completed, or None."""
        path = self.folder / shard
        note = path.with_name(shard + DONE)
        if not path.exists() or not note.exists():
            return None
        facts = read_json(note, Finished, fix=f"remove {self.folder}")
        done = Finished(facts["bytes"], facts["sha256"])
        return done if path.stat().st_size == done.bytes else None

    def finish(self, shard: str, done: Finished) -> None:
        write_atomically(
            self.folder / (shard + DONE), json.dumps({"bytes": done.bytes, "sha256": done.sha256}).encode()
        )

    def remember(self, what: str, facts: Mapping[str, Any]) -> None:
        """Keeps facts for later runs of the same job; they are deleted when the job is done."""
        write_atomically(self.folder / (what + DONE), json.dumps(facts).encode())

    def remembered(self, what: str) -> dict[str, Any]:
        """Returns the facts that earlier runs have kept."""
        path = self.folder / (what + DONE)
        return read_json(path, fix=f"remove {self.folder}") if path.exists() else {}

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file; `name` may lie in a folder of its own."""
        (self.folder / name).parent.mkdir(exist_ok=True)
        write_atomically(self.folder / name, data)


def check_finished(path: Path) -> None:
    """Raises QuantryError if a job has not finished writing `path` or the folder that it is in."""
    if path.is_dir() and (path / JOB).exists():
        raise QuantryError(f"{path} is not finished", fix=UNFINISHED)
    for out in (path, path.parent):
        partial = out.with_name(f"{out.name}.partial") if out.name else out
        absent = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        if absent and (partial / JOB).exists():
            raise QuantryError(f"{path} is not finished: {partial} holds its first part", fix=UNFINISHED)


def check_target(out: Path, *, artefact: bool = False, record: str = ARTEFACT_FILE) -> None:
    """Raises OutputError unless OUT is new or empty, or with `artefact` a finished artefact, in a writable folder.

    `record` is the file that makes a folder an artefact of this kind of job.
    """
    known = artefact and (out / record).is_file()
    if out.exists() and not known and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists and is not an empty folder", fix="choose another output or remove it")
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"{parent} is not writable", fix="choose another output or change its permissions")


def check_room(out: Path, parts: Mapping[str, int]) -> None:
    """Raises OutputError if the disk cannot hold the rest of the job's output; `parts` are its bytes by name.

    What an earlier run of the job has written counts as there, also for `--overwrite`, which removes it first.
    """
    partial = _partial(out)
    files = [file for file in partial.rglob("*") if file.is_file()] if partial.is_dir() else []
    present = min(sum(file.stat().st_size for file in files), sum(parts.values()))
    parent = next(folder for folder in out.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    needed = sum(parts.values()) - present + RESERVE
    if needed > free:
        words = [f"{size:,} for {name}" for name, size in parts.items() if size]
        there = [f"less {present:,} that are there"] if present else []
        raise OutputError(
            f"{needed:,} bytes are needed in {parent} and {free:,} are free: "
            f"{', '.join([*words, f'{RESERVE:,} in reserve', *there])}",
            fix="free some space or choose an output on another disk",
        )


def recover(out: Path, record: str = ARTEFACT_FILE) -> None:
    """Ends what a job was killed in: a whole artefact gets its final name, and one that it replaces is removed."""
    partial, replaced = _partial(out), out.with_name(out.name + REPLACED)
    whole = not (partial / JOB).exists() and all((partial / name).is_file() for name in (record, "README.md"))
    if whole and not (out.exists() and any(out.iterdir())):
        with _lock(out):
            _rename(partial, out)
    if replaced.is_dir() and (out / record).is_file():
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def workspace(out: Path, identity: Mapping[str, Any], *, overwrite: bool = False) -> Iterator[Workspace]:
    """Yields the folder to write into; it becomes OUT when the `with` ends without an error.

    With `overwrite` it starts anew, and takes the place of an artefact at the end.
    """
    partial = _partial(out)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        with _lock(out):
            if not overwrite:
                check_target(out)  # again: another job may have finished since this one began
            elif partial.is_dir():
                shutil.rmtree(partial)
            _claim(partial, identity)
            yield Workspace(partial)
            for note in [*partial.glob("*" + DONE), *partial.glob("*.partial"), partial / JOB]:
                note.unlink()
            _rename(partial, out)
    except WeightError:  # no run of this job can succeed: remove its traces
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except OSError as error:
        raise OutputError(
            f"cannot write {error.filename or partial}: {error.strerror}",
            fix="solve that and run the same command again: finished shards are kept",
        ) from error


def _partial(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


def _rename(partial: Path, out: Path) -> None:
    """Gives a folder its final name; an artefact that has it goes away only then."""
    replaced = out.with_name(out.name + REPLACED)
    if out.exists() and any(out.iterdir()):
        shutil.rmtree(replaced, ignore_errors=True)
        out.rename(replaced)
    elif out.exists():
        out.rmdir()
    partial.rename(out)
    descriptor = os.open(out.absolute().parent, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    shutil.rmtree(replaced, ignore_errors=True)


def _claim(partial: Path, identity: Mapping[str, Any]) -> None:
    """Takes over the folder of the same job, or starts a new one."""
    text = json.dumps(identity, indent=1, sort_keys=True).encode()
    partial.mkdir(exist_ok=True)
    job = partial / JOB
    if job.exists():
        if job.read_bytes() != text:
            raise OutputError(
                f"{partial} holds an unfinished job with another model, recipe or version",
                fix=f"finish it with the same options, or remove {partial}",
            )
    elif any(file.name != JOB + ".partial" for file in partial.iterdir()):
        raise OutputError(f"{partial} exists and was not left by a job", fix="remove it or choose another output")
    else:
        write_atomically(job, text)


def _lock(out: Path) -> AbstractContextManager[None]:
    taken = OutputError(f"another job is writing {out}", fix="wait for it or choose another output")
    return locked(out.with_name(out.name + ".lock"), taken)

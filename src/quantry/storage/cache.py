"""What lies in Quantry's cache: its entries by kind, with size and age, and how they are removed.

Only what has a name that Quantry gives is an entry. Links are never followed, and what a running job holds stays.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.storage import VARIABLE, home
from quantry.storage.holding import unused

HOURS = {"h": 1, "d": 24, "w": 7 * 24}


@dataclass(frozen=True, slots=True)
class Kind:
    """A folder of the cache: what it is for, the names of its entries, and if they are cleared only when named."""

    about: str
    names: str  # a regular expression
    precious: bool = False


KINDS = {
    "statistics": Kind("calibration statistics, reused by the next job on the same model and text", r"[0-9a-f]{32}"),
    "references": Kind("answers of 16-bit models, reused by verify, diff and sweep", r"[0-9a-f]{32}"),
    "built": Kind("engines that TensorRT-LLM has built", r".+-[0-9a-f]{12}"),
    "serving": Kind("logs and settings of engines that were served", r"[a-z0-9_.-]+-\d+"),
    "bugs": Kind("bug reports", r"\d{8}-\d{6}-\d+\.txt"),
    "proofs": Kind("verdicts on artefacts in the hub's cache", r".+--.+", precious=True),
    "origins": Kind("where the 16-bit models of artefacts are", r"[0-9a-f]{64}(\.partial)?", precious=True),
}


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder of the cache."""

    kind: str
    name: str
    bytes: int
    used: float  # seconds since 1970, when it was last written or used
    held: bool = False  # by a running job


@dataclass(frozen=True, slots=True)
class Cache:
    """The entries of the cache, those that were removed, and the bytes of files that are not Quantry's."""

    path: str
    entries: tuple[Entry, ...]
    removed: tuple[Entry, ...] = ()
    other_bytes: int = 0

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    def to_dict(self) -> dict[str, Any]:
        now = time.time()
        shown = {"entries": self.entries, "removed": self.removed}
        rows = {name: [_row(entry, now) for entry in entries] for name, entries in shown.items()}
        return {"path": self.path, "bytes": self.bytes, "other_bytes": self.other_bytes, **rows}


def cache(
    kind: str | None = None,
    *,
    clear: bool = False,
    older_than: str | None = None,
    confirm: Callable[[tuple[Entry, ...]], bool] | None = None,
) -> Cache:
    """Lists Quantry's cache, all or one `kind`, and those `older_than` "30d", "12h" or "2w"; with `clear` removes them.

    `confirm` may decline. Verdicts and places of models are removed only if their kind is named, and what a running
    job holds is not removed. Raises QuantryError for an unknown kind or age, and if the cache folder is not Quantry's.
    """
    _check_kind(kind)
    oldest = time.time() - _seconds(older_than) if older_than else None
    root = home()
    if clear:
        _check_own(root)
    entries = tuple(
        entry
        for name in (KINDS if kind is None else (kind,))
        for entry in _entries(root, name)
        if oldest is None or entry.used < oldest
    )
    removed: tuple[Entry, ...] = ()
    if clear:
        chosen = tuple(e for e in entries if not e.held and (kind is not None or not KINDS[e.kind].precious))
        if chosen and (confirm is None or confirm(chosen)):
            removed = tuple(entry for entry in chosen if _remove(root / entry.kind / entry.name))
    left = tuple(entry for entry in entries if entry not in removed)
    return Cache(str(root), left, removed, _others(root) if kind is None else 0)


def _check_kind(kind: str | None) -> None:
    if kind is not None and kind not in KINDS:
        raise QuantryError(f"{kind[:40]!r} is no part of the cache", fix=f"use {', '.join(KINDS)}")


def _seconds(age: str) -> float:
    found = re.fullmatch(r"(\d{1,6})\s*([hdw])", age.strip().lower())
    if found is None:
        raise QuantryError(f"{age[:40]!r} is no age", fix="write hours, days or weeks, such as 12h, 30d or 4w")
    return int(found[1]) * HOURS[found[2]] * 3600.0


def _check_own(root: Path) -> None:
    """Raises QuantryError for a folder with files of others, such as a home folder that QUANTRY_CACHE names."""
    if not root.is_dir():
        return
    usual = Path("~/.cache/quantry").expanduser()
    others = sorted(path.name for path in root.iterdir() if path.name not in KINDS)
    if root.stat().st_uid != os.getuid():
        raise QuantryError(f"the cache {root} is another user's", fix=f"set {VARIABLE} to your own")
    if others and root.resolve() != usual.resolve():
        raise QuantryError(
            f"{root} holds {others[0]!r}, which is not Quantry's, so nothing in it is removed",
            fix=f"set {VARIABLE} to a folder of its own",
        )


def _entries(root: Path, kind: str) -> Iterator[Entry]:
    folder = root / kind
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if re.fullmatch(KINDS[kind].names, path.name) and not path.is_symlink():
            size, used = _measured(path)
            with unused(path) as free:
                yield Entry(kind, path.name, size, used, held=not free)


def _measured(path: Path) -> tuple[int, float]:
    """Returns the bytes of a file or of all files in a folder, and when the last was written; links count as links."""
    size, used = 0, 0.0
    for file in _inside(path):
        try:
            facts = file.lstat()
        except OSError:  # removed since
            continue
        size += 0 if stat.S_ISDIR(facts.st_mode) else facts.st_size
        used = max(used, facts.st_mtime)
    return size, used


def _inside(path: Path) -> Iterator[Path]:
    yield path
    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path):
            yield from (Path(folder, name) for name in (*folders, *files))


def _others(root: Path) -> int:
    paths = [path for path in root.iterdir() if path.name not in KINDS] if root.is_dir() else []
    return sum(_measured(path)[0] for path in paths)


def _remove(path: Path) -> bool:
    """Removes a file or folder unless somebody has taken it since it was listed; True if it is gone."""
    with unused(path) as free:
        if free and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif free:
            path.unlink(missing_ok=True)
    return not path.exists()


def _row(entry: Entry, now: float) -> dict[str, Any]:
    age = max(0, round(now - entry.used))
    return {"kind": entry.kind, "name": entry.name, "bytes": entry.bytes, "age_seconds": age, "held": entry.held}

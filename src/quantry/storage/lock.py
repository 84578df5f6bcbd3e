"""A lock file that keeps two jobs apart: held while a job lives, removed when it ends, free again after a kill."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def locked(path: Path, taken: Exception) -> Iterator[None]:
    """Holds a lock of that name, and removes its file at the end. Raises `taken` if another process holds it.

    A file of the name is locked only if it still has the name: one that its holder has removed keeps nobody out.
    """
    while True:
        with path.open("a") as lock:  # what a link of that name leads to stays as it is
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise taken from error
            if not _has_name(lock, path):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _has_name(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False

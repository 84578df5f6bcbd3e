"""Entries of the cache in use: a job holds a folder with a shared lock on it, so that nobody clears it meanwhile.

The lock ends with its owner, at the latest with the process, also when that is killed.
"""

import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Holder:
    """An owner for a while."""


def hold(folder: Path, owner: object) -> None:
    """Makes a folder if there is none, and holds it as long as `owner` lives. Raises OSError if it cannot be made."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # cleared since
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _has_name(descriptor, folder):
            weakref.finalize(owner, os.close, descriptor)
            return
        os.close(descriptor)


@contextmanager
def unused(path: Path) -> Iterator[bool]:
    """Keeps others from taking a file or folder; gives False if a process holds it, or a lock file or file in it."""
    descriptors: list[int] = []
    try:
        yield all(_taken(file, descriptors) for file in (path, *(path.iterdir() if path.is_dir() else ())))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _taken(path: Path, descriptors: list[int]) -> bool:
    """Locks a file or folder and adds its descriptor; False if another process has locked it."""
    if path.is_symlink() or not (path.is_dir() or path.is_file()):
        return True
    try:
        descriptors.append(os.open(path, FLAGS))
        fcntl.flock(descriptors[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False

"""Where Quantry stores things: its cache folder, names of files that several rooms use, TOML data, atomic writing.

reading.py reads back what was stored, shape.py says what is wrong with it.
"""

import errno
import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

VARIABLE = "QUANTRY_CACHE"
ARTEFACT_FILE = "quantry.json"  # of an artefact: recipe, versions, hashes, fates, proof
STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))  # folders of names that are never replaced
SENSITIVITY_FILE = "sensitivity.json"  # what a mixture was chosen by


def home() -> Path:
    """Returns the cache folder: ~/.cache/quantry, or the one that QUANTRY_CACHE names."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/quantry").expanduser()


@cache
def read_data(package: str, name: str) -> dict[str, Any]:
    """Returns a TOML file of a package; it is read once, and callers must not change it."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a small file that is either complete or absent; a link of that name is replaced, never followed."""
    write_together({path: data})


def write_named(path: Path, data: bytes) -> None:
    """Writes a file that a user named: through no link, but into a device or a pipe, such as /dev/stdout, as it is."""
    if path.absolute().parent in STREAMS or path.is_fifo() or path.is_char_device():
        with path.open("ab") as stream:
            stream.write(data)
    else:
        write_atomically(path, data)


def write_together(files: Mapping[Path, bytes]) -> None:
    """Writes small files that belong together: all are complete beside their names before the first takes its name.

    Links are replaced, never followed. Raises OSError, and leaves every file as it was, if one cannot be written.
    """
    with ExitStack() as writing:
        partials = {}
        for path, data in files.items():
            if path.is_dir() and not path.is_symlink():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
            partials[path] = writing.enter_context(_written(path.with_name(path.name + ".partial"), data))
        for path, partial in partials.items():
            partial.replace(path)


@contextmanager
def _written(partial: Path, data: bytes) -> Iterator[Path]:
    """Writes a file that other writers of the same name wait for; removes it at the end unless it was renamed."""
    descriptor = _claim(partial)
    try:
        os.ftruncate(descriptor, 0)
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        yield partial
    finally:
        if _is_open_as(descriptor, partial):
            partial.unlink()
        os.close(descriptor)


def _claim(partial: Path) -> int:
    """Opens a file of that name for this writer alone: a new one in place of a link, or what a killed writer left."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        if partial.is_symlink():
            partial.unlink()
        descriptor = os.open(partial, flags, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        found = os.fstat(descriptor)
        if _is_open_as(descriptor, partial):
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 1:
                return descriptor
            partial.unlink()  # another name of a file elsewhere, or no file at all
        os.close(descriptor)


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False

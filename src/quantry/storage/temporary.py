"""Temporary folders that a killed process does not leave for ever: the next one that needs a folder removes them.

A folder holds a lock as long as its process lives. It gets its lasting name when the lock is held, so that a folder of
that name without a lock is one of a process that ended.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, NEW, LOCK = "quantry-", "new-quantry-", "quantry.lock"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yields an empty folder, and removes it at the end; also those that killed processes of this user have left."""
    root = Path(tempfile.gettempdir())
    remove_abandoned(root)
    made = Path(tempfile.mkdtemp(prefix=NEW, dir=root))
    with (made / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = made.rename(root / f"{PREFIX}{made.name.removeprefix(NEW)}")
        inner = folder / "files"
        inner.mkdir()
        try:
            yield inner
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Removes the temporary folders whose process has ended; links and folders of other users stay."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or not folder.is_dir() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)

"""Expensive things that all workers of a test run share: made once, by whoever needs them first, in a folder of the run."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name`, which `make` fills; other processes of the same run wait for it and take it as it is.

    Tests must not write into it.
    """
    root = factory.getbasetemp()
    root = root.parent if root.name.startswith("popen-") else root  # of xdist's workers, all in one folder
    folder, done = root / "shared" / name, root / "shared" / f"{name}.done"
    folder.parent.mkdir(exist_ok=True)
    with (root / "shared" / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder

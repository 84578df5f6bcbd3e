"""Expensive things that all workers of a test run share: the first worker that needs one makes it."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

TinyModel = Callable[..., Path]  # of the fixture `tiny`


def shared(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Returns the folder `name` of this run; `make` fills it once, and other workers wait for that.

    Tests must not write into it.
    """
    root = factory.getbasetemp()
    root = root.parent if root.name.startswith("popen-") else root  # xdist gives each worker a subfolder
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

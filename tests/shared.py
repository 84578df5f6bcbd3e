"""Expensive things that all workers of a test run share: the first worker that needs one makes it."""

import fcntl
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def recorded(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns, given a folder that stays: computed once in a run, pickled for the other processes."""

    def record(folder: Path) -> None:
        (folder / "files").mkdir()
        (folder / "value").write_bytes(pickle.dumps(make(folder / "files")))

    return pickle.loads((shared(factory, name, record) / "value").read_bytes())

"""Lock files: one holder at a time, also when the file is removed and made again between opening and locking it."""

import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from quantry.storage.lock import locked

TAKEN = RuntimeError("taken")


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "a.lock"
    with locked(file, TAKEN), pytest.raises(RuntimeError, match="taken"), locked(file, TAKEN):
        pass
    assert not file.exists()
    with locked(file, TAKEN):
        assert file.exists()


def test_a_file_that_its_holder_removed_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder ends after we opened its file, and a third one makes and locks a new file before we lock ours."""
    file, flock = tmp_path / "a.lock", fcntl.flock
    others: list[IO[str]] = []

    def late(descriptor: IO[str], flags: int) -> None:
        if not others:
            file.unlink()
            others.append(file.open("a"))
            flock(others[0], fcntl.LOCK_EX)
        flock(descriptor, flags)

    slow: Callable[..., None] = late
    monkeypatch.setattr(fcntl, "flock", slow)
    with pytest.raises(RuntimeError, match="taken"), locked(file, TAKEN):
        pass
    others[0].close()

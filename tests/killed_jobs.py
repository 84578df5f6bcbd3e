"""Jobs that are killed at random moments and taken up again must write what an undisturbed one writes."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def kill_and_resume(
    start: Callable[[Path], Any], folder: Path, seed: str, rounds: int, shares: tuple[float, float]
) -> tuple[dict[str, bytes], int]:
    """The files of an undisturbed job, held against those of killed ones, and how many of these were killed in time.

    `start` begins the job for an output and gives its process; `shares` are between how much written it is killed.
    """
    start(folder / "whole").join()
    expected = contents(folder / "whole")
    total = sum(map(len, expected.values()))
    moments, killed = random.Random(seed), 0
    for number in range(rounds):
        out, partial = folder / str(number), folder / f"{number}.partial"
        share = moments.uniform(*shares) * total
        child = start(out)
        while child.is_alive() and written(partial) < share:
            time.sleep(0.0005)
        child.kill()
        child.join()
        killed += child.exitcode == -signal.SIGKILL
        if not out.exists():
            start(out).join()
        assert contents(out) == expected
        assert not partial.exists()
    return expected, killed


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def written(folder: Path) -> int:
    """Bytes in a folder that another process is writing to, or is about to rename."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except FileNotFoundError:
        return 0

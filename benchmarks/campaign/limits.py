"""Jobs on a full disk and with little memory: one line, nothing half-written, and the same command then ends well."""

import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from campaign.jobs import JOBS, Case, Faults
from campaign.workers import Once, Workers
from hostile_inputs import MEMORY, Ending

CLASSES = ("lost", "looks whole", "refused", "fault", "left behind")
SIZES = (64 << 10, 1 << 20, 4 << 20, 12 << 20, 70 << 20, 76 << 20, 84 << 20)  # bytes of a disk
PLACES = ("place", "cache", "tmp")  # of the output, the cache, temporary files
MEMORIES = (16 << 20, 64 << 20, 128 << 20, 256 << 20, 512 << 20, 1 << 30, 2 << 30)  # bytes beyond what is imported
ROOM = 1 << 30


def disks(names: list[str], intact: Path, workers: Workers) -> dict[str, Any]:
    """Runs every job with each place on a small disk, then with room."""
    counts = _counts()
    if not _can_mount(workers.folder):
        return {**counts, "skipped": "no tmpfs can be mounted: this needs root"}
    known = Once()
    tasks = [
        (name, place, size) for name in names for place in PLACES for size in (SIZES if place == "place" else SIZES[:4])
    ]

    def fill(task: tuple[str, str, int], folder: Path) -> tuple[Faults, Ending, dict[str, Any]]:
        name, place, size = task
        expected = known.get(name, lambda: _expected(name, intact, folder))
        case = Case.fresh(JOBS[name], intact, folder)
        with _disk(case.folder / place, size) as disk:
            first = case.run()
            faults = _judge(case, first, expected)
            subprocess.run(["mount", "-o", f"remount,size={ROOM}", str(disk)], check=True)
            faults += case.again(expected)
        return faults, first, {"job": name, "place": place, "bytes": size}

    return _noted(counts, workers.each(tasks, fill))


def memories(names: list[str], intact: Path, workers: Workers) -> dict[str, Any]:
    """Runs every job with little memory (as with ulimit -v), then with enough."""
    known = Once()

    def limit(task: tuple[str, int], folder: Path) -> tuple[Faults, Ending, dict[str, Any]]:
        name, memory = task
        expected = known.get(name, lambda: _expected(name, intact, folder))
        case = Case.fresh(JOBS[name], intact, folder)
        first = case.run(memory=memory)
        return _judge(case, first, expected) + case.again(expected), first, {"job": name, "memory": memory}

    return _noted(_counts(), workers.each([(name, memory) for name in names for memory in MEMORIES], limit))


def _counts() -> dict[str, Any]:
    return {"cases": 0, "codes": Counter(), "faults": Counter(dict.fromkeys(CLASSES, 0)), "seen": []}


def _expected(name: str, intact: Path, folder: Path) -> dict[str, str]:
    case = Case.fresh(JOBS[name], intact, folder)
    ending = case.run(memory=MEMORY)
    assert not ending.fault, ending
    return case.written()


def _judge(case: Case, ending: Ending, expected: dict[str, str]) -> Faults:
    """Returns what is wrong with a job that ended early, or in spite of the limit."""
    faults = [("fault", ending.fault)] if ending.fault else []
    out = case.output
    if case.job.words[0] in ("quantize", "convert") and out and (out / "quantry.json").exists():
        if case.written() != expected:
            faults.append(("looks whole", str(sorted(file.name for file in out.iterdir()))))
    elif ending.code == 0 and case.written() != expected:
        faults.append(("lost", f"{case.written()} instead of {expected}"))
    return faults


def _noted(counts: dict[str, Any], cases: Iterator[tuple[Faults, Ending, dict[str, Any]]]) -> dict[str, Any]:
    for faults, ending, what in cases:
        counts["cases"] += 1
        counts["codes"][str(ending.code)] += 1
        for kind, words in faults:
            counts["faults"][kind] += 1
            counts["seen"].append({**what, "class": kind, "words": words[-300:]})
            print(counts["seen"][-1], flush=True)
    return counts


@contextmanager
def _disk(folder: Path, size: int) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _can_mount(folder: Path) -> bool:
    if shutil.which("mount") is None:
        return False
    (folder / "probe").mkdir(parents=True, exist_ok=True)
    try:
        with _disk(folder / "probe", 1 << 20):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False

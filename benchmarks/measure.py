"""Runs a command and says how long it took and how much anonymous memory it and its children held at most."""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def run(command: Sequence[str | Path], **options: Any) -> dict[str, float]:
    """Seconds and peak anonymous bytes (mapped files do not count: the kernel can drop them) of a command."""
    start = time.perf_counter()
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, **options)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_anonymous(pid) for pid in _family(process.pid)))
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with {process.returncode}")
    return {"seconds": round(time.perf_counter() - start, 2), "peak_anonymous_bytes": peak}


def _family(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(other for child in children for other in _family(int(child)))]


def _anonymous(pid: int) -> int:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def disk_speed(folder: Path, size: int = 1 << 30) -> float:
    """Bytes a second that a plain program writes and syncs to this disk."""
    path, block = folder / "speed.tmp", os.urandom(1 << 24)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // len(block)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return size / seconds


def keep(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> None:
    """Prints the figures as the last line, and keeps them with versions and date."""
    versions = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    for package in ("torch", "quantry"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    record = {"benchmark": name, "date": datetime.now(UTC).date().isoformat(), "versions": versions, **figures}
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))

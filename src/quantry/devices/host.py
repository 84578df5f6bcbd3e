"""The host on Linux: its processor, and the memory and cores this process may use.

A container sees the whole machine in /proc, but control groups may limit it to a part. Every function reads below a
`root`, which is / on a real machine.
"""

import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from quantry.devices import Vendor

MAKERS: dict[str, Vendor] = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor as its kernel describes it."""

    name: str
    vendor: Vendor
    cores: int
    threads: int
    mhz: float
    flags: frozenset[str]


def read_processor(root: Path = Path("/")) -> Processor:
    """Returns the processor of a Linux machine, with its highest clock if the kernel lists it."""
    processor = parse_cpuinfo(_read(root / "proc/cpuinfo") or "")
    highest = _number(root / "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")  # kHz
    name = processor.name or board_name(root) or "processor"
    return replace(processor, name=name, mhz=highest / 1000 if highest else processor.mhz)


def parse_cpuinfo(text: str) -> Processor:
    """Returns the processor that /proc/cpuinfo describes, x86 or Arm."""
    blocks = [dict(_pairs(block)) for block in text.split("\n\n")]
    threads = [block for block in blocks if "processor" in block]
    first = threads[0] if threads else {}
    cores = {(block["physical id"], block["core id"]) for block in threads if "physical id" in block}
    arm = "CPU implementer" in first
    return Processor(
        name=first.get("model name", ""),
        vendor="arm" if arm else MAKERS.get(first.get("vendor_id", ""), "x86"),
        cores=len(cores) or len(threads) or 1,  # Arm's list has no cores
        threads=len(threads) or 1,
        mhz=max((float(block["cpu MHz"]) for block in threads if "cpu MHz" in block), default=0.0),
        flags=frozenset((first.get("flags") or first.get("Features") or "").split()),
    )


def board_name(root: Path = Path("/")) -> str:
    """Returns the name of an Arm board ("Raspberry Pi 5 Model B Rev 1.0"), empty on other machines."""
    return (_read(root / "proc/device-tree/model") or "").strip("\0 \n")


def memory(root: Path = Path("/")) -> tuple[int, int]:
    """Returns total and available bytes for this process: the machine's, or its container's if that is less."""
    table = dict(_pairs(_read(root / "proc/meminfo") or ""))
    total, available = (int(table.get(name, "0 kB").split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None:  # version 1 writes "no limit" as a number near 2^63, which limits nothing
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        cached = dict(line.split() for line in (_read(folder / "memory.stat") or "").splitlines() if " " in line)
        total = min(total, limit)
        available = min(available, max(0, limit - used + int(cached.get("inactive_file", 0))))
    return total, available


def usable_cores(root: Path = Path("/"), threads: int | None = None) -> float:
    """Returns the cores this process may use: the threads it is bound to, or its container's share if that is less."""
    bound = threads or len(_bound())
    shares = [_share(folder) for folder in _groups(root, "cpu")]
    return min([float(bound), *(share for share in shares if share)])


def physical_cores(root: Path = Path("/"), allowed: Iterable[int] | None = None) -> int:
    """Returns the physical cores this process is bound to, or its container's share if that is less.

    An engine on a CPU gets as many threads. Two threads of one core share its arithmetic units, which one thread of
    matrix products fills already; more threads than free cores wait for each other at every layer.
    """
    bound = sorted(_bound() if allowed is None else allowed)
    cores = {_siblings(root, number) for number in bound}
    return max(1, min(len(cores), int(usable_cores(root, len(bound)))))


def _bound() -> Collection[int]:
    return os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)


def _siblings(root: Path, number: int) -> str:
    """Returns the processors that share a core, as the kernel writes them; one that it does not know is a core."""
    topology = root / f"sys/devices/system/cpu/cpu{number}/topology"
    texts = (_read(topology / name) for name in ("core_cpus_list", "thread_siblings_list"))
    return next((text.strip() for text in texts if text is not None), str(number))


def _share(folder: Path) -> float | None:
    """Returns the cores that a control group grants, None for no limit."""
    quota, _, period = (_read(folder / "cpu.max") or "").strip().partition(" ")
    if not quota:
        quota, period = (str(_number(folder / f"cpu.cfs_{name}_us") or "") for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of its parents, for one controller; both versions."""
    mount = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if names and controller not in names.split(","):
            continue
        top = mount / controller if names else mount
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            yield name.strip(), value.strip()


def _number(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if re.fullmatch(r"\d{1,20}", text) else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None

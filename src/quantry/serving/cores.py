"""How many threads an engine on a CPU should have: one for each physical core that this process may use.

Two threads of one core share its arithmetic units, which one thread of matrix products fills already. More threads than
free cores wait for each other at every layer, which is far slower than too few threads.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from quantry.devices import host

ROOT = Path("/")


def physical_cores(root: Path = ROOT, allowed: Iterable[int] | None = None) -> int:
    """Physical cores among the processors this process is bound to, or its container's share where that is less."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    bound = sorted(allowed)
    cores = {_siblings(root, number) for number in bound}
    return max(1, min(len(cores), int(host.usable_cores(root, len(bound)))))


def _siblings(root: Path, number: int) -> str:
    """The processors that share a core, as the kernel writes them; a processor it says nothing of is its own core."""
    topology = root / "sys/devices/system/cpu" / f"cpu{number}" / "topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        try:
            return (topology / name).read_text(encoding="utf-8").strip()
        except OSError:
            continue
    return str(number)

"""Apple's chips, from sysctl: the chip's name and its memory choose the row of the catalogue."""

import subprocess
from dataclasses import replace

from quantry.devices import Device, Hardware
from quantry.devices.catalogue import catalogue, match

NAMES = ("machdep.cpu.brand_string", "hw.memsize", "hw.physicalcpu", "hw.logicalcpu")
METAL_SHARE = 2 / 3  # of memory: the least that Metal lets a process hold


def read() -> str:
    """Returns what sysctl prints about this Mac."""
    return subprocess.run(["sysctl", *NAMES], capture_output=True, text=True, timeout=20, check=False).stdout


def parse_sysctl(text: str) -> Hardware | None:
    """Returns the Mac that sysctl's `name: value` lines describe; None if it has no Apple chip."""
    facts = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    name, memory = facts.get("machdep.cpu.brand_string", ""), int(facts.get("hw.memsize", 0))
    if not name.startswith("Apple") or not memory:
        return None
    device = match(name, memory) or _unknown(name, memory)
    return Hardware(
        devices=(device,),
        cpu=device,
        host_memory=memory,
        cores=int(facts.get("hw.physicalcpu", 0)) or None,
        threads=int(facts.get("hw.logicalcpu", 0)) or None,
        features=("neon", "fp16", "dotprod"),  # every Apple chip has them
    )


def _unknown(name: str, memory: int) -> Device:
    """Returns a chip newer than the catalogue, as fast as the slowest of the latest generation in it."""
    newest = [device for device in catalogue() if device.vendor == "apple" and device.name.startswith("M5")]
    like = min(newest, key=lambda device: device.bandwidth)
    source = f"detected; the rates are those of the {like.name.split()[0]}"
    usable = int(memory * METAL_SHARE)
    return replace(like, name=name, memory=memory, usable=usable, aliases=(), source=source, date="")

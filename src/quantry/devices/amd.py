"""AMD's GPUs, read from the kernel's compute driver (amdkfd) in /sys, without ROCm.

Each node of its topology is a folder with `properties` and memory banks; a node without SIMD units is a processor.
"""

from dataclasses import replace
from pathlib import Path

from quantry.devices import Device, Link
from quantry.devices.catalogue import match

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
LOCAL_HEAPS = (1, 2)  # device memory, visible to the host or not
HBM_WIDTH = 1024  # bits; narrower memory is GDDR6


def find(topology: Path = TOPOLOGY) -> tuple[Device, ...]:
    """Returns the AMD GPUs that the compute driver shows this process."""
    nodes = sorted(topology.glob("[0-9]*"), key=lambda node: node.name.zfill(6))
    return tuple(device for device in map(_read_node, nodes) if device)


def gfx_name(version: int) -> str:
    """Returns the name of a version, 90402 -> 'gfx942'; the last two parts are hexadecimal (90010 -> 'gfx90a')."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _read_node(node: Path) -> Device | None:
    facts = _numbers(node / "properties")
    if not facts.get("simd_count") or not facts.get("gfx_target_version"):
        return None
    banks = [_numbers(bank / "properties") for bank in node.glob("mem_banks/*")]
    local = [bank for bank in banks if bank.get("heap_type") in LOCAL_HEAPS]
    memory = sum(bank.get("size_in_bytes", 0) for bank in local) or facts.get("local_mem_size", 0)
    row = match(f"1002:{facts.get('device_id', 0):04x}", memory)
    if row is not None:
        return replace(row, usable=min(row.usable, memory))
    return _unknown(facts, local[0] if local else {}, memory)


def _unknown(facts: dict[str, int], bank: dict[str, int], memory: int) -> Device:
    """Returns a device from the driver's numbers: 64 lanes a unit; an HBM pin moves 2 bits a clock, a GDDR6 pin 16."""
    width, clock = bank.get("width", 0), bank.get("mem_clk_max", 0)
    units = facts["simd_count"] // max(facts.get("simd_per_cu", 4), 1)
    fp32 = units * 64 * 2 * facts.get("max_engine_clk_fcompute", 0) / 1e6
    gfx = gfx_name(facts["gfx_target_version"])
    return Device(
        name=f"AMD {gfx}",
        vendor="amd",
        kind="gpu",
        family=gfx,
        capability=gfx,
        memory=memory,
        usable=memory,
        bandwidth=width / 8 * clock * 1e6 * (2 if width >= HBM_WIDTH else 16),
        tflops={"fp32": round(fp32, 3), "fp16": round(2 * fp32, 3)},
        link=Link("pcie4", 32e9),
    )


def _numbers(path: Path) -> dict[str, int]:
    """Reads `name number` lines; returns none if the file is unreadable, as for GPUs that a container hides."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}

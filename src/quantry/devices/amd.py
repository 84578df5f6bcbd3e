"""AMD's GPUs, read from the kernel's compute driver (amdkfd) in /sys; no ROCm is needed.

Each node of its topology is a folder with `properties` and a bank of memory; a node without SIMD units is a processor.
"""

from dataclasses import replace
from pathlib import Path

from quantry.devices import Device, Link
from quantry.devices.catalogue import match

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
LOCAL_HEAPS = (1, 2)  # memory of the device, open to the host or not
HBM_WIDTH = 1024  # bits; narrower memory is GDDR6


def find(topology: Path = TOPOLOGY) -> tuple[Device, ...]:
    """The AMD GPUs that the compute driver shows this process."""
    nodes = sorted(topology.glob("[0-9]*"), key=lambda node: node.name.zfill(6))
    return tuple(device for device in map(_read_node, nodes) if device)


def gfx_name(version: int) -> str:
    """90402 -> 'gfx942'; the last two parts are hexadecimal digits (90010 -> 'gfx90a')."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def _read_node(node: Path) -> Device | None:
    facts = _numbers(node / "properties")
    if not facts.get("simd_count") or not facts.get("gfx_target_version"):
        return None
    banks = [_numbers(bank / "properties") for bank in node.glob("mem_banks/*")]
    local = [bank for bank in banks if bank.get("heap_type") in LOCAL_HEAPS]
    memory = sum(bank.get("size_in_bytes", 0) for bank in local) or facts.get("local_mem_size", 0)
    known = match(f"1002:{facts.get('device_id', 0):04x}", memory)
    if known is not None:
        return replace(known, usable=min(known.usable, memory))
    return _unknown(facts, local[0] if local else {}, memory)


def _unknown(facts: dict[str, int], bank: dict[str, int], memory: int) -> Device:
    """A device of the driver's own numbers: 64 lanes a unit; a pin of HBM moves 2 bits a clock, one of GDDR6 16."""
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
    """`name number` lines; none where the file cannot be read, as for GPUs that a container hides."""
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) == 2 and line[1].isdecimal()}

"""Devices: the hardware models run on. `catalogue` knows devices by name, `detect` finds those of this machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

GIB = 1024**3
Vendor = Literal["nvidia", "amd", "apple", "intel", "habana", "arm", "x86"]
Kind = Literal["gpu", "unified", "cpu"]
LinkKind = Literal["nvlink", "infinity-fabric", "pcie5", "pcie4", "pcie3", "none"]
PLATFORMS = {"nvidia": "cuda", "amd": "rocm", "intel": "xpu", "habana": "hpu", "apple": "metal"}  # CPUs are cpu
NODE_BANDWIDTH = 50e9  # bytes a second between two nodes, for each device: assumed, one port of 400 Gb/s InfiniBand


@dataclass(frozen=True, slots=True)
class Link:
    """The connection of a device to its peers; bytes a second one way."""

    kind: LinkKind = "none"
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Sizes in bytes, bandwidths in bytes a second, `tflops` in 10^12 dense operations a second by dtype.

    A dtype that `tflops` lacks has no hardware support. `memory` is the size the device is sold with, `usable` the size
    that a program sees when nothing else runs, `free` the free memory at detection. Field names are JSON names.
    """

    name: str
    vendor: Vendor
    kind: Kind
    family: str  # volta, turing, ampere, orin, ada, hopper, blackwell-dc (sm_100, 103), blackwell (sm_120), cdna3, ...
    capability: str | None  # "9.0" of NVIDIA, "gfx942" of AMD
    memory: int
    usable: int
    bandwidth: float
    tflops: Mapping[str, float] = field(hash=False)  # of fp32, fp16, bf16, fp8, int8, fp4
    link: Link = Link()
    price: float | None = None  # typical USD an hour
    price_source: str | None = None
    source: str = "detected"
    date: str = ""
    aliases: tuple[str, ...] = ()
    free: int | None = None

    @property
    def platform(self) -> str:
        """The platform that engines are built for: cuda, rocm, metal, xpu, hpu or cpu."""
        return "cpu" if self.kind == "cpu" else PLATFORMS.get(self.vendor, "cpu")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: the devices a model runs on (the processor if there are no others) and their host.

    With `unified` memory, `cpu` is the device itself. Figures that a description does not give are None. Of several
    nodes, `devices` are those of all, in equal parts, while `cpu`, `host_memory` and cores are those of one node.
    """

    devices: tuple[Device, ...]
    cpu: Device
    host_memory: int | None = None
    host_available: int | None = None
    cores: int | None = None
    threads: int | None = None
    usable_cores: float | None = None  # cores this process may use, by affinity and container limit
    features: tuple[str, ...] = ()  # avx2, avx512, vnni, bf16, amx, neon, ...
    notes: tuple[str, ...] = ()  # how an ambiguous description was read, and what is assumed
    nodes: int = 1  # hosts, joined at NODE_BANDWIDTH

    @property
    def device(self) -> Device:
        """The device that sets pace and limit: the one with the least usable memory."""
        return min(self.devices, key=lambda device: (device.usable, device.bandwidth))

    @property
    def count(self) -> int:
        return len(self.devices)

    @property
    def per_node(self) -> int:
        """The devices of one node; of a count that nodes do not divide, those of the smallest."""
        return self.count // self.nodes

    @property
    def memory(self) -> int:
        return sum(device.memory for device in self.devices)

    @property
    def usable(self) -> int:
        return sum(device.usable for device in self.devices)

    @property
    def bandwidth(self) -> float:
        return sum(device.bandwidth for device in self.devices)

    @property
    def price(self) -> float | None:
        """Typical USD an hour for all devices, or None unless all are priced."""
        prices = [device.price for device in self.devices if device.price is not None]
        return sum(prices) if len(prices) == len(self.devices) else None

    def groups(self) -> tuple[tuple[Device, int], ...]:
        """Returns each different device with its count."""
        counts: dict[Device, int] = {}
        for device in self.devices:
            counts[device] = counts.get(device, 0) + 1
        return tuple(counts.items())

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of `quantry hardware`: equal devices are one entry with a count."""
        totals = {name: getattr(self, name) for name in ("count", "memory", "usable", "bandwidth", "price")}
        rest = ("host_memory", "host_available", "cores", "threads", "usable_cores", "features", "notes", "nodes")
        return {
            "devices": [{"count": count, **asdict(device)} for device, count in self.groups()],
            "total": totals,
            "cpu": asdict(self.cpu),
            **{name: getattr(self, name) for name in rest},
        }


def hardware(gpu: str | None = None) -> Hardware:
    """Returns the machine that `gpu` describes ("2x RTX 3090", "4 cores 8GB"), or this one, with measured bandwidth.

    Raises UnknownNameError for a device that the catalogue lacks.
    """
    if gpu is not None:
        from quantry.devices.catalogue import parse

        return parse(gpu)
    from quantry.devices.detect import detect

    return detect()

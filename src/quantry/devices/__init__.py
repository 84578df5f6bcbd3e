"""Devices: what models run on. `catalogue.py` knows them by name, `detect.py` finds those of this machine."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Vendor = Literal["nvidia", "amd", "apple", "intel", "arm", "x86"]
Kind = Literal["gpu", "unified", "cpu"]
LinkKind = Literal["nvlink", "infinity-fabric", "pcie5", "pcie4", "pcie3", "none"]
PLATFORMS = {"nvidia": "cuda", "amd": "rocm", "intel": "xpu", "apple": "metal"}  # by vendor; CPUs are cpu


@dataclass(frozen=True, slots=True)
class Link:
    """How a device reaches its peers; bytes a second one way."""

    kind: LinkKind = "none"
    bandwidth: float = 0.0


@dataclass(frozen=True, slots=True)
class Device:
    """One device. Sizes in bytes, bandwidths in bytes a second, `tflops` in 10^12 dense operations a second by dtype.

    A dtype that `tflops` lacks has no hardware of its own there. `memory` is what the device is sold with, `usable`
    what a program sees when nothing else runs, `free` what was left when it was detected. Field names are JSON names.
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
        """What engines are built for there: cuda, rocm, metal, xpu or cpu."""
        return "cpu" if self.kind == "cpu" else PLATFORMS.get(self.vendor, "cpu")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine: the devices a model runs on (the processor itself where there are no others) and what is around them.

    Where memory is one for all (`unified`), `cpu` is the device itself. What a description leaves open is None.
    """

    devices: tuple[Device, ...]
    cpu: Device
    host_memory: int | None = None
    host_available: int | None = None
    cores: int | None = None
    threads: int | None = None
    usable_cores: float | None = None  # those this process may use: affinity and the container's share
    features: tuple[str, ...] = ()  # avx2, avx512, vnni, bf16, amx, neon, ...
    notes: tuple[str, ...] = ()  # what a person should know of how it was read

    @property
    def device(self) -> Device:
        """The device that sets the pace and the limit: the one with the least usable memory."""
        return min(self.devices, key=lambda device: (device.usable, device.bandwidth))

    @property
    def count(self) -> int:
        return len(self.devices)

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
        """Typical USD an hour for all devices, where all are priced."""
        prices = [device.price for device in self.devices if device.price is not None]
        return sum(prices) if len(prices) == len(self.devices) else None

    def groups(self) -> tuple[tuple[Device, int], ...]:
        """Each different device with how many there are of it."""
        counts: dict[Device, int] = {}
        for device in self.devices:
            counts[device] = counts.get(device, 0) + 1
        return tuple(counts.items())

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `quantry hardware`: equal devices are one entry with a count."""
        totals = {name: getattr(self, name) for name in ("count", "memory", "usable", "bandwidth", "price")}
        rest = ("host_memory", "host_available", "cores", "threads", "usable_cores", "features", "notes")
        return {
            "devices": [{"count": count, **asdict(device)} for device, count in self.groups()],
            "total": totals,
            "cpu": asdict(self.cpu),
            **{name: getattr(self, name) for name in rest},
        }


def hardware(gpu: str | None = None) -> Hardware:
    """The machine that `gpu` describes ("2x RTX 3090", "M2 16GB", "cpu"), or this one, its memory's speed measured."""
    if gpu is not None:
        from quantry.devices.catalogue import parse

        return parse(gpu)
    from quantry.devices.detect import detect

    return detect()

"""The catalogue of devices, and the parser of descriptions.

Names are compared by their letters and digits alone, without makers' names and memory sizes: "NVIDIA GeForce RTX 3090",
"rtx-3090" and "3090 24GB" are the same. The memory size, which must exist for that device, then chooses among the rows
with the same name. Without a size the first row is taken, and `Hardware.notes` lists the others.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

from quantry.devices import GIB, NODE_BANDWIDTH, Device, Hardware, Link
from quantry.devices.instances import close_names, cpu_instance, gpu_instance
from quantry.devices.numbers import from_numbers
from quantry.devices.processors import assumed_host
from quantry.devices.words import SIZE, Figures, counted, figures, host_memory, sizes, split
from quantry.errors import QuantryError, UnknownNameError
from quantry.storage import read_data

_data = partial(read_data, "quantry.devices", "catalogue.toml")
MOST = 1024  # devices in one description
PER_HOST = 8  # devices in one host, unless a row says otherwise
MAKERS = (
    r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon|intel|apple|mac studio|mac mini|mac pro|macbook pro"
    r"|macbook air|macbook|imac|mac|gpu|graphics|tensor core|generation|edition)\b"
)
LEFT_OUT = ("rtx", "rx")  # of a short name: 3090, 7900 XTX
HOST = "x86 desktop DDR5"  # the processor next to GPUs that are described, not detected
EXAMPLES = "write a name such as H100, 2x RTX 3090, M2 16GB, 4 cores 8GB or 24GB 1008GB/s sm89"


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """A device and the memory sizes its name may carry, in GiB; any size if the user chooses the memory."""

    device: Device
    sizes: tuple[float, ...]
    any_size: bool = False
    usable_share: float = 1.0
    per_host: int = PER_HOST

    def of_size(self, size: float | None) -> "CatalogueRow | None":
        """Returns this row with a memory of `size`, or None if that size does not exist."""
        if size is None or size in self.sizes:
            return self
        if not self.any_size or size <= 0:
            return None
        memory = int(size * GIB)
        return replace(self, device=replace(self.device, memory=memory, usable=int(memory * self.usable_share)))


def catalogue() -> tuple[Device, ...]:
    """Returns every device, in the order of catalogue.toml."""
    return tuple(row.device for row in _rows())


@dataclass(frozen=True, slots=True)
class Found:
    """The devices that one part of a description names."""

    count: int
    row: CatalogueRow
    text: str
    notes: tuple[str, ...] = ()
    ram: float | None = None  # GiB of the host


def parse(text: str, host_memory: int | None = None) -> Hardware:
    """Returns the machine that `text` describes: a name, figures, several devices, their host, several nodes.

    "2x RTX 3090", "a100-80gb", "RTX 4090 + 64GB RAM", "4 cores 8GB", "24GB 1008GB/s sm89", "2 nodes x 8x H100",
    "RTX 4090, RTX 3090", "c7i.8xlarge". `host_memory` is that of a host whose memory `text` leaves out. Raises
    UnknownNameError for an unknown device, QuantryError for an impossible count, size or mixture.
    """
    rented = gpu_instance(text)
    if rented is not None:
        machine = parse(rented[1], host_memory)
        return replace(machine, notes=(f"{rented[0]} is read as {rented[1]}", *machine.notes))
    whole = cpu_instance(text)
    if whole is not None:
        return whole
    nodes, parts = split(text)
    host, found = Figures(), []
    for part in parts:
        said = figures(part)
        if said is not None and not said.is_device:
            host = host.joined(said)
        else:
            found.append(_found(part))
    for one in found:
        host = host.joined(Figures(memory=one.ram)) if one.ram is not None else host
    if host.memory is None and host_memory is not None:
        host = replace(host, memory=host_memory / GIB)
    if not found:
        return _processor(text, host, nodes)
    return _machine(found, host, nodes)


def match(name: str, memory: int) -> Device | None:
    """Returns the device that a driver calls `name`, if the catalogue has it with about as much memory (bytes).

    Drivers and kernels show 80 to 100 % of what is sold.
    """
    rows = _index().get(_key(re.sub(SIZE, "", name.lower())), ())
    near = [row.device for row in rows if 0.8 <= memory / row.device.memory <= 1.02]
    return min(near, key=lambda device: abs(memory / device.memory - 1), default=None)


def family_of(compute: str) -> tuple[str, Mapping[str, float]]:
    """Returns the family of an NVIDIA compute capability, and the speed of its tensor cores over fp32 by dtype."""
    row = next((row for row in _data()["capability"] if row["compute"] == compute), None)
    return (row["family"], row["times"]) if row else (f"sm_{compute.replace('.', '')}", {})


def _found(part: str) -> Found:
    """Returns what a part with a name, or with the figures of a device, means."""
    count, name = counted(part)
    said = figures(part) or figures(name)
    if said is not None and said.is_device:
        device, notes = _in_numbers(part, said)
        return Found(1 if figures(part) else count, CatalogueRow(device, (device.memory / GIB,)), name, notes)
    if said is not None:
        raise QuantryError(f"{part[:60]!r} are {count} machines", fix="plan for one of them")
    bare, ram = host_memory(name)
    row, notes = _named(bare if ram is not None and bare else name)
    if ram is not None and row.device.kind != "gpu":  # the RAM of a Mac or a board is its own memory
        row, notes = _named(f"{bare} {ram:g}gb")
        ram = None
    return Found(count, row, name, notes, ram)


def _in_numbers(part: str, said: Figures) -> tuple[Device, tuple[str, ...]]:
    missing = {"memory": said.memory, "bandwidth": said.bandwidth, "compute capability": said.capability}
    absent = [name for name, value in missing.items() if value is None]
    if said.memory is None or said.bandwidth is None or said.capability is None:
        raise QuantryError(
            f"{part[:60]!r} lacks the {' and the '.join(absent)}", fix="write all, as 24GB 1008GB/s sm89"
        )
    alike = [device for device in catalogue() if device.vendor == "nvidia" and device.capability == said.capability]
    if not alike:
        known = sorted({row.capability for row in catalogue() if row.vendor == "nvidia" and row.capability}, key=float)
        names = ", ".join(f"sm{capability.replace('.', '')}" for capability in known)
        raise UnknownNameError(f"sm{said.capability.replace('.', '')[:20]} is not known", fix=f"write one of {names}")
    return from_numbers(said.memory, said.bandwidth, said.capability, alike)


def _processor(text: str, host: Figures, nodes: int | None) -> Hardware:
    """Returns a host without a GPU, of which cores or memory are given."""
    if not host.is_host:
        what = "gives memory alone" if host.memory is not None else "names no device"
        raise UnknownNameError(f"{text[:60]!r} {what}", fix=EXAMPLES)
    if nodes is not None and nodes != 1:
        raise QuantryError(f"{text[:60]!r} are {nodes} machines", fix="plan for one of them")
    cores, device, notes = assumed_host(host.cores, host.memory)
    threads = host.threads or cores
    return Hardware((device,), device, device.memory, None, cores, threads, float(cores), notes=notes)


def _machine(found: list[Found], host: Figures, nodes: int | None) -> Hardware:
    """Returns the machine with the devices that were found: GPUs and their host, or one of the others."""
    for one in found:
        _check_count(one)
    notes = tuple(dict.fromkeys(note for one in found for note in one.notes))
    others = [one for one in found if one.row.device.kind != "gpu"]
    gpus = [one for one in found if one.row.device.kind == "gpu"]
    if not gpus:
        return _single(others, host, nodes, notes)
    _check_mixture(gpus, others)
    devices = tuple(one.row.device for one in gpus for _ in range(one.count))
    nodes, devices, more = _spread(devices, nodes, min(one.row.per_host for one in gpus))
    cpu, memory, assumed = _host(others, host)
    cores, threads = host.cores, host.threads
    usable = float(cores) if cores else None
    return Hardware(devices, cpu, memory, None, cores, threads, usable, notes=(*notes, *more, *assumed), nodes=nodes)


def _check_count(one: Found) -> None:
    device = one.row.device
    if not 1 <= one.count <= MOST:
        raise QuantryError(f"{one.count} devices are not between 1 and {MOST}", fix="write for example 2x H100")
    if one.count > 1 and device.kind != "gpu":
        raise QuantryError(f"{one.count}x {device.name} are {one.count} machines", fix="plan for one of them")


def _check_mixture(gpus: list[Found], others: list[Found]) -> None:
    """Refuses GPUs beside a device that has one itself, two processors, and GPUs of two platforms."""
    platforms = list(dict.fromkeys(one.row.device.platform for one in gpus))
    others = [one for one in others if one.row.device.kind != "cpu" or len(others) > 1]
    if not others and len(platforms) == 1:
        return
    names = " and ".join(dict.fromkeys(one.row.device.name for one in (*gpus, *others)))
    why = (
        "do not share a machine"
        if others
        else f"need two platforms, {' and '.join(platforms)}, and an engine is built for one"
    )
    raise QuantryError(f"{names} {why}", fix="plan for one kind of device at a time")


def _single(found: list[Found], host: Figures, nodes: int | None, notes: tuple[str, ...]) -> Hardware:
    """Returns a machine whose one device is a processor, or has one memory with it."""
    one, row = found[0], found[0].row
    count = len(found) * (nodes or 1)
    if count != 1:
        raise QuantryError(f"{count}x {row.device.name} are {count} machines", fix="plan for one of them")
    if host.memory is not None and row.device.kind == "cpu" and not sizes(one.text):
        memory = int(host.memory * GIB)
        row = replace(row, device=replace(row.device, memory=memory, usable=int(memory * row.usable_share)))
    elif host.memory is not None and not sizes(one.text):
        row, notes = _named(f"{one.text} {host.memory:g}gb")
    device = row.device
    return Hardware((device,), device, device.memory, None, host.cores, host.threads, notes=notes)


def _spread(
    devices: tuple[Device, ...], nodes: int | None, per_host: int
) -> tuple[int, tuple[Device, ...], tuple[str, ...]]:
    """Returns nodes, the devices of all nodes, and a note: where a description gives no nodes, as few as hold them."""
    counted_nodes = nodes if nodes is not None else -(-len(devices) // per_host)
    count = len(devices) * nodes if nodes is not None else len(devices)
    if counted_nodes < 1 or count > MOST:
        value = f"{counted_nodes} nodes" if counted_nodes < 1 else f"{count} devices"
        raise QuantryError(f"{value} are not between 1 and {MOST}", fix="write for example 2 nodes x 8x H100")
    if counted_nodes == 1:
        return 1, devices, ()
    note = f"{NODE_BANDWIDTH / 1e9:g} GB/s per device are assumed between nodes (400 Gb/s InfiniBand)"
    if nodes is None:
        share = f"{count // counted_nodes}" if count % counted_nodes == 0 else f"at most {per_host}"
        note = (
            f"{count} devices are read as {counted_nodes} nodes of {share}, as one host has at most {per_host}; {note}"
        )
    return counted_nodes, devices * (nodes or 1), (note,)


def _host(others: list[Found], host: Figures) -> tuple[Device, int | None, tuple[str, ...]]:
    """Returns the processor beside GPUs, the memory of their host if that is given, and what is assumed of it."""
    memory = int(host.memory * GIB) if host.memory is not None else None
    if others:
        cpu = others[0].row.device
        memory = cpu.memory if sizes(others[0].text) else memory
        return replace(cpu, memory=memory, usable=memory) if memory is not None else cpu, memory, ()
    if host.cores is not None:
        _, cpu, notes = assumed_host(host.cores, host.memory)
        return cpu, cpu.memory, notes
    cpu = next(other for other in catalogue() if other.name == HOST)
    return replace(cpu, memory=memory, usable=memory) if memory is not None else cpu, memory, ()


def _named(text: str) -> tuple[CatalogueRow, tuple[str, ...]]:
    """Returns the row that a name means, and a note if it could mean another."""
    given = sizes(text)
    key = _key(re.sub(SIZE, "", text))
    rows = _index().get(key) or _index().get(key.removesuffix("s"))
    if not rows:
        raise UnknownNameError(f"unknown device {text[:60]!r}", fix=_suggest(text, key))
    size = given[0] if given else None
    fitting = [fit for fit in (row.of_size(size) for row in rows) if fit]
    if not fitting or len(set(given)) > 1:
        made = " or ".join(f"{size:g} GB" for size in dict.fromkeys(size for row in rows for size in row.sizes))
        raise UnknownNameError(f"{text[:60]!r} is not made", fix=f"that device has {made}")
    others = [row.device.name for row in fitting[1:]]
    note = f"{text!r} is read as {fitting[0].device.name}; it could also be {', '.join(others)}"
    return fitting[0], (note,) if others else ()


def _suggest(text: str, key: str) -> str:
    close = get_close_matches(key, list(_index()), n=5, cutoff=0.6)
    names = list(dict.fromkeys((*close_names(text), *(_index()[match][0].device.name for match in close))))[:3]
    return f"did you mean {' or '.join(names)}?" if names else EXAMPLES


def _key(text: str) -> str:
    """Returns the letters and digits of a name, without makers' names."""
    return re.sub(r"[^a-z0-9]", "", re.sub(MAKERS, "", re.sub(r"[_-]", " ", text.lower())))


@cache
def _index() -> dict[str, list[CatalogueRow]]:
    """Returns the rows by every key that names them, in the catalogue's order."""
    index: dict[str, list[CatalogueRow]] = {}
    for row in _rows():
        for name in (row.device.name, *row.device.aliases):
            key = _key(re.sub(SIZE, "", name.lower()))
            for short in dict.fromkeys((key, *(key.removeprefix(word) for word in LEFT_OUT))):
                rows = index.setdefault(short, [])
                if row not in rows:
                    rows.append(row)
    return index


@cache
def _rows() -> tuple[CatalogueRow, ...]:
    return tuple(row for settings in _data()["device"] for row in _sizes(settings))


def _sizes(settings: Mapping[str, Any]) -> list[CatalogueRow]:
    """Returns one row for each memory size that a row of the file lists."""
    memory, usable, share = settings["memory"], settings.get("usable"), settings.get("usable_share", 1.0)
    if not isinstance(memory, list):
        memory, usable = [memory], None if usable is None else [usable]
    usable = usable or [size * share for size in memory]
    return [
        CatalogueRow(_device(settings, size, seen, len(memory) > 1), (size, *settings.get("sold_as", ())),
            settings.get("any", False), share, settings.get("per_host", PER_HOST))
        for size, seen in zip(memory, usable, strict=True)
    ]  # fmt: skip


def _device(settings: Mapping[str, Any], memory: float, usable: float, named_by_size: bool) -> Device:
    link, price = settings.get("link"), settings.get("price", {})
    return Device(
        name=f"{settings['name']} {memory:g}GB" if named_by_size else settings["name"],
        vendor=settings["vendor"],
        kind=settings["kind"],
        family=settings["family"],
        capability=settings.get("capability"),
        memory=int(memory * GIB),
        usable=int(usable * GIB),
        bandwidth=settings["bandwidth"] * 1e9,
        tflops={dtype: float(rate) for dtype, rate in settings["tflops"].items()},
        link=Link(link["kind"], link["bandwidth"] * 1e9) if link else Link(),
        price=price.get("usd"),
        price_source=price.get("source"),
        source=settings["source"],
        date=settings["date"],
        aliases=tuple(settings["aliases"]),
    )

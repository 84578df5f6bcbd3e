"""The catalogue of devices, and the parser of device names.

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

from quantry.devices import Device, Hardware, Link
from quantry.errors import QuantryError, UnknownNameError
from quantry.storage import read_data

_data = partial(read_data, "quantry.devices", "catalogue.toml")
GIB = 1024**3
MOST = 1024  # devices in one description
MAKERS = r"\b(nvidia|geforce|tesla|quadro|amd|instinct|radeon|apple|gpu|graphics|tensor core|generation|edition)\b"
SIZE = r"(?<![a-z0-9.])(\d{1,6}(?:\.\d{1,3})?) ?(tb|tib|gb|gib|g)\b"
COUNTS = (
    r"(?P<count>[+-]?\d+) ?[x×*] ?(?P<name>.+)",  # 2x RTX 3090
    r"(?P<count>\d{1,2}) (?P<name>[a-z].+)",  # 2 RTX 3090s
    r"(?P<name>.+?)(?: [x×*] ?| ?[×*] ?|(?<=\d)x)(?P<count>\d+)",  # RTX 3090 x2, H100x8
)
HOST = "x86 desktop DDR5"  # the processor next to GPUs that are described, not detected
EXAMPLES = "write a name such as H100, 2x RTX 3090, M2 16GB, Jetson Orin 8GB or cpu"


@dataclass(frozen=True, slots=True)
class CatalogueRow:
    """A device and the memory sizes its name may carry, in GiB; any size if the user chooses the memory."""

    device: Device
    sizes: tuple[float, ...]
    any_size: bool = False
    usable_share: float = 1.0

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


def parse(text: str, host_memory: int | None = None) -> Hardware:
    """Returns the machine that `text` describes: one or several equal devices ("2x RTX 3090", "a100-80gb", "M2 16GB").

    Raises UnknownNameError for an unknown device, QuantryError for a mixture or an impossible count.
    """
    parts = [part.strip() for part in re.split(r"[,;+&]|\band\b", text.lower()) if part.strip()]
    counted = [_counted(part) for part in parts]
    if not counted:
        raise UnknownNameError(f"{text!r} names no device", fix=EXAMPLES)
    names = list(dict.fromkeys(row.device.name for _, row, _ in counted))
    if len(names) > 1:
        raise QuantryError(
            f"{text[:60]!r} mixes {' and '.join(names)}, and engines split a model into equal parts",
            fix="plan for one kind of device at a time",
        )
    _, row, notes = counted[0]
    count = sum(number for number, _, _ in counted)
    _check_count(count, row.device)
    return _hardware(row, count, host_memory, notes)


def match(name: str, memory: int) -> Device | None:
    """Returns the device that a driver calls `name`, if the catalogue has it with about as much memory (bytes).

    Drivers and kernels show 80 to 100 % of what is sold.
    """
    rows = _index().get(_key(re.sub(SIZE, "", name.lower())), ())
    return next((row.device for row in rows if 0.8 <= memory / row.device.memory <= 1.02), None)


def family_of(compute: str) -> tuple[str, Mapping[str, float]]:
    """Returns the family of an NVIDIA compute capability, and the speed of its tensor cores over fp32 by dtype."""
    row = next((row for row in _data()["capability"] if row["compute"] == compute), None)
    return (row["family"], row["times"]) if row else (f"sm_{compute.replace('.', '')}", {})


def processor_rates(flags: frozenset[str]) -> tuple[tuple[str, ...], dict[str, float]]:
    """Returns the features in a processor's flags, and the operations a core does in a cycle by dtype."""
    rows = [row for row in _data()["rate"] if flags & set(row["flags"])]
    best: dict[str, float] = {}
    for row in rows:
        best |= {dtype: max(rate, best.get(dtype, 0)) for dtype, rate in row["per_cycle"].items()}
    return tuple(row["feature"] for row in rows), best


def _check_count(count: int, device: Device) -> None:
    if not 1 <= count <= MOST:
        raise QuantryError(f"{count} devices are not between 1 and {MOST}", fix="write for example 2x H100")
    if count > 1 and device.kind != "gpu":
        raise QuantryError(f"{count}x {device.name} are {count} machines", fix="plan for one of them")


def _counted(part: str) -> tuple[int, CatalogueRow, tuple[str, ...]]:
    """Returns the count and the row that one part of a description means, and notes on the reading."""
    minus = "-" if part.startswith("-") else ""  # a sign, not a hyphen: -2x H100
    spaced = minus + re.sub(r"[\s_-]+", " ", part).strip()
    count = next(filter(None, (re.fullmatch(pattern, spaced) for pattern in COUNTS)), None)
    if count is None:
        return (1, *_named(spaced))
    return (int(count["count"][:9]), *_named(count["name"]))


def _named(text: str) -> tuple[CatalogueRow, tuple[str, ...]]:
    """Returns the row that a name means, and a note if it could mean another."""
    sizes = [float(number) * (1024 if unit[0] == "t" else 1) for number, unit in re.findall(SIZE, text)]
    key = _key(re.sub(SIZE, "", text))
    rows = _index().get(key) or _index().get(key.removesuffix("s"))
    if not rows:
        raise UnknownNameError(f"unknown device {text[:60]!r}", fix=_suggest(key))
    size = sizes[0] if sizes else None
    fitting = [fit for fit in (row.of_size(size) for row in rows) if fit]
    if not fitting or len(set(sizes)) > 1:
        made = " or ".join(f"{size:g} GB" for size in dict.fromkeys(size for row in rows for size in row.sizes))
        raise UnknownNameError(f"{text[:60]!r} is not made", fix=f"that device has {made}")
    others = [row.device.name for row in fitting[1:]]
    note = f"{text!r} is read as {fitting[0].device.name}; it could also be {', '.join(others)}"
    return fitting[0], (note,) if others else ()


def _hardware(row: CatalogueRow, count: int, host_memory: int | None, notes: tuple[str, ...]) -> Hardware:
    device = row.device
    if device.kind == "cpu" and host_memory is not None:
        device = replace(device, memory=host_memory, usable=int(host_memory * row.usable_share))
    if device.kind != "gpu":
        return Hardware((device,), device, device.memory, notes=notes)
    host = next(other for other in catalogue() if other.name == HOST)
    cpu = replace(host, memory=host_memory, usable=host_memory) if host_memory is not None else host
    return Hardware((device,) * count, cpu, host_memory, notes=notes)


def _suggest(key: str) -> str:
    close = get_close_matches(key, list(_index()), n=5, cutoff=0.6)
    names = list(dict.fromkeys(_index()[match][0].device.name for match in close))[:3]
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
            for short in dict.fromkeys((key, key.removeprefix("rtx"))):
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
            settings.get("any", False), share)
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

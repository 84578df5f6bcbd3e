"""Machines that clouds rent out by name: c7i.8xlarge, c3-standard-44, Standard_F32s_v2, p5.48xlarge."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Any

from quantry.devices import GIB, Device, Hardware
from quantry.devices.processors import feature_tflops
from quantry.errors import QuantryError
from quantry.storage import read_data

_data = partial(read_data, "quantry.devices", "instances.toml")
AWS_SIZES = {"medium": 1, "large": 2, "xlarge": 4}  # vCPUs; 8xlarge is eight times xlarge
USABLE_SHARE = 0.9  # of memory, as of all processors in catalogue.toml


def gpu_instance(text: str) -> tuple[str, str] | None:
    """Returns the name of a machine with GPUs and its description ("8x H100 SXM + 2048GB RAM"), or None."""
    return _gpu_names().get(_key(text))


def cpu_instance(text: str) -> Hardware | None:
    """Returns the virtual machine without a GPU that `text` names, or None.

    Raises QuantryError for a size that its family does not have.
    """
    key = _key(text)
    for pattern, name, per_vcpu, row in _families():
        found = re.fullmatch(pattern, key)
        if found:
            return _machine(name.replace("#", found[1]), _vcpus(found[1]), per_vcpu, row)
    return None


def close_names(text: str) -> list[str]:
    """Returns the names of machines that `text` is close to, best first."""
    known = {key: name for key, (name, _) in _gpu_names().items()}
    return [known[key] for key in get_close_matches(_key(text), list(known), n=2, cutoff=0.8)]


def _machine(name: str, vcpus: int, per_vcpu: float, row: Mapping[str, Any]) -> Hardware:
    if not 1 <= vcpus <= row["most"]:
        raise QuantryError(
            f"{name[:40]} has {vcpus} vCPUs, and its family has 1 to {row['most']}",
            fix="write a size that is rented out",
        )
    cores = max(1, vcpus // row["threads"])
    share = min(1.0, cores / row["socket"]["cores"])
    memory = int(vcpus * per_vcpu * GIB)
    device = Device(
        name=name,
        vendor=row.get("vendor", "x86"),
        kind="cpu",
        family=row.get("vendor", "x86"),
        capability=None,
        memory=memory,
        usable=int(memory * USABLE_SHARE),
        bandwidth=round(row["socket"]["bandwidth"] * share, 1) * 1e9,
        tflops=feature_tflops(row["features"], cores, row["ghz"]),
        source=f"{row['source']}: {row['processor']}",
        date=row["date"],
    )
    note = (
        f"{device.bandwidth / 1e9:g} GB/s of memory bandwidth are assumed for {name}: its share of the "
        f"{row['socket']['bandwidth']:g} GB/s of a socket with {row['socket']['cores']} cores ({row['processor']})"
    )
    found = Hardware((device,), device, device.memory, cores=cores, threads=vcpus, usable_cores=float(cores))
    return replace(found, features=tuple(row["features"]), notes=(note,))


def _vcpus(size: str) -> int:
    """Returns the vCPUs of a size: 44, 8xlarge, medium."""
    if size.isdecimal():
        return int(size[:6])
    times = re.match(r"\d*", size)
    number = times[0] if times else ""
    return AWS_SIZES[size.removeprefix(number)] * int(number[:6] or 1)


@cache
def _families() -> tuple[tuple[str, str, float, Mapping[str, Any]], ...]:
    return tuple(_patterns())


def _patterns() -> Iterator[tuple[str, str, float, Mapping[str, Any]]]:
    """Yields the pattern of each family's keys, its name with # for the size, GiB a vCPU, and its row."""
    for row in _data()["family"]:
        size = r"(\d{0,6}xlarge|large|medium)" if row["cloud"] == "AWS" else r"(\d{1,6})"
        for name, per_vcpu in row["names"].items():
            before, after = map(_key, name.split("#"))
            shown = f"Standard_{name}" if row["cloud"] == "Azure" else name
            yield f"{re.escape(before)}{size}{re.escape(after)}", shown, per_vcpu, row


@cache
def _gpu_names() -> dict[str, tuple[str, str]]:
    return {_key(name): (name, text) for name, text in _data()["gpu"].items()}


def _key(text: str) -> str:
    """Returns the letters, digits and dots of a name, without the word that all of Azure's begin with."""
    return re.sub(r"[^a-z0-9.]", "", text.lower()).removeprefix("standard")

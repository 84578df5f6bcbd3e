"""Processors by what is known of them: flags, features, or the cores and memory of a host.

A host of which a description gives cores and memory alone is taken for an old or shared one. What is assumed of it is
said in a note.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from quantry.devices import GIB, Device
from quantry.storage import read_data

_data = partial(read_data, "quantry.devices", "processors.toml")


def processor_rates(flags: frozenset[str]) -> tuple[tuple[str, ...], dict[str, float]]:
    """Returns the features in a processor's flags, and the operations a core does in a cycle by dtype."""
    rows = [row for row in _data()["rate"] if flags & set(row["flags"])]
    return tuple(row["feature"] for row in rows), _best(rows)


def feature_tflops(features: Sequence[str], cores: float, ghz: float) -> dict[str, float]:
    """Returns 10^12 operations a second by dtype, of all cores at a clock."""
    best = _best(row for row in _data()["rate"] if row["feature"] in features)
    return {dtype: round(cores * ghz * rate / 1e3, 3) for dtype, rate in best.items()}


def assumed_host(cores: int | None, memory: float | None) -> tuple[int, Device, tuple[str, ...]]:
    """Returns the cores of a host, the host as a device, and notes on what is assumed; memory in GiB, one is given."""
    settings = _data()["assumed"]
    notes = []
    if cores is None:
        cores = int(next(row["cores"] for row in settings["cores"] if (memory or 0) >= row["memory"]))
        notes.append(f"{cores} cores are assumed for {memory:g} GB of memory; give both, as in '8 cores 32GB'")
    size = memory if memory is not None else 4.0 * cores
    if memory is None:
        notes.append(f"{size:g} GB of memory are assumed for {cores} cores; give both, as in '8 cores 32GB'")
    channels = next(row["channels"] for row in settings["channels"] if cores >= row["cores"])
    bandwidth = min(settings["per_core"] * cores, settings["channel"] * channels)
    notes.append(
        f"{bandwidth:g} GB/s of memory bandwidth are assumed for {cores} cores ({settings['per_core']} per core, "
        f"at most {channels} channels of DDR4-3200); run `quantry hardware` on that machine to measure it"
    )
    return cores, _device(cores, size, bandwidth, settings), tuple(notes)


def _device(cores: int, memory: float, bandwidth: float, settings: Mapping[str, Any]) -> Device:
    size = int(memory * GIB)
    return Device(
        name=f"{cores} cores {memory:g}GB",
        vendor="x86",
        kind="cpu",
        family="x86",
        capability=None,
        memory=size,
        usable=int(size * settings["usable_share"]),
        bandwidth=bandwidth * 1e9,
        tflops=feature_tflops(settings["features"], cores, settings["ghz"]),
        source=settings["source"],
        date=settings["date"],
    )


def _best(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    best: dict[str, float] = {}
    for row in rows:
        best |= {dtype: max(rate, best.get(dtype, 0)) for dtype, rate in row["per_cycle"].items()}
    return best

"""The shares of a device's rates that engines reach, and times: engines/*.toml (`speed`), and factors.toml for all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Literal

from quantry.devices import Device
from quantry.engines.contract.catalogue import engine_facts, ranked
from quantry.errors import QuantryError
from quantry.storage import read_data

_data = partial(read_data, "quantry.planning.speed", "factors.toml")


@dataclass(frozen=True, slots=True)
class Factors:
    """A row of an engine's table `speed`: shares of a device's rates, and seconds; tables go by kind of work."""

    name: str
    engine: str
    families: tuple[str, ...]  # families of devices, or "gpu", "unified", "cpu"
    measured: bool
    spread: float
    bandwidth: float
    attention: float
    compute: Mapping[str, float]
    source: str
    date: str
    attention_step: float | None = None  # of attention to earlier tokens in a step; None: as in prompts
    base: str | None = None  # the dtype whose rate `compute` is a share of; None: that of the numbers multiplied
    step: float = 0.0
    sequence: float = 0.0
    layer: Mapping[str, float] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)
    routing: Mapping[str, float] = field(default_factory=dict)  # what experts add to a layer in steps
    routing_launch: Mapping[str, float] = field(default_factory=dict)  # and in prompts
    grouped: Mapping[str, float] = field(default_factory=dict)  # the share of `compute` that products of experts reach
    latent: float = 0.0  # what latent attention (MLA) adds to a layer in steps
    uncompiled: float = 1.0  # launches without torch.compile, times those with it
    graphs: bool = True  # a step of decoding is launched as one graph
    overlap: float = 1.0  # exponent of the norm: 1 adds launches and work up, more overlaps them
    arrival: float = 0.0  # how often the first of several prompts is read before the others have come
    passes: float = 0.0
    unpack: Mapping[str, float] = field(default_factory=dict)  # 32-bit operations per weight
    pad: float = 0.0  # tokens that a product of several tokens costs extra, because tiles are not full
    split: Literal["tensors", "layers"] = "tensors"  # how several devices share a model
    host: Literal["compute", "stream"] = "stream"  # layers left on the host: computed there, or streamed over the bus
    seen: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)  # measured: devices, kinds, bytes


def factors_for(engine: str, device: Device) -> Factors:
    """Returns the factors of an engine on a device: those of its family, else those of its type.

    Raises UnknownNameError for an unknown engine, QuantryError if the engine's speed is not known on such devices.
    """
    own, like = ([row for row in all_factors() if row.engine == name] for name in (engine, engine_facts(engine).like))
    for wanted in (device.family, device.kind):
        for row in own or like:
            if wanted in row.families:
                return row
    fix = "choose another engine or device"
    raise QuantryError(f"nothing is known of the speed of {engine} on {device.name}", fix=fix)


@cache
def all_factors() -> tuple[Factors, ...]:
    """Returns the factors of all engines."""
    return tuple(read_factors(row) for row in factor_rows().values())


def factor_rows() -> dict[str, dict[str, Any]]:
    """Returns the rows of all engines' tables `speed` by name, each with the numbers that it takes from others."""
    stated = {row["name"]: {**row, "engine": engine.name} for engine in ranked() for row in engine.speed}

    def whole(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**whole(stated[row["like"]]), **row} if "like" in row else dict(row)

    return {name: whole(row) for name, row in stated.items()}


def read_factors(row: Mapping[str, Any]) -> Factors:
    """Reads a row of a table `speed`, where times are in microseconds."""
    given = {name.removesuffix("_us"): _seconds(name, value) for name, value in row.items() if name != "like"}
    return Factors(**{**given, "families": tuple(row["families"]), "date": str(row["date"])})


def _seconds(name: str, value: Any) -> Any:
    if not name.endswith("_us"):
        return value
    return {key: time * 1e-6 for key, time in value.items()} if isinstance(value, Mapping) else value * 1e-6


def link_latency(link: str) -> float:
    """Returns the seconds that a message over a type of link takes at least."""
    return float(_data()["links"][link]["latency_us"]) * 1e-6


def unmeasured_spread(*, experts: bool, latent: bool, several: bool, offload: bool) -> float:
    """Returns what the spread grows by for features that no measurement covers."""
    rows = _data()["unmeasured"]
    cases = {"experts": experts, "latent": latent, "several": several, "offload": offload}
    return float(sum(rows[name]["spread"] for name, holds in cases.items() if holds))

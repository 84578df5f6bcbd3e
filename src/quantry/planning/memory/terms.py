"""Constants of the memory model: those of an engine at a version, and terms.toml for all engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, partial
from typing import Any, Literal

from quantry import registry
from quantry.devices import Device
from quantry.engines.contract.catalogue import engine_facts, version_key
from quantry.errors import QuantryError, UnknownNameError
from quantry.storage import read_data

_data = partial(read_data, "quantry.planning.memory", "terms.toml")
GIB, MIB = 1 << 30, 1 << 20
SIXTEEN = {"bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """The table `memory` of an engine; the head of terms.toml explains each field."""

    name: str
    cache: Literal["blocks", "cells", "tokens"]
    block: int
    auto: str
    sliding: str | Sequence[str]
    activations: Literal["step", "graph", "prompt"]
    defaults: Sequence[Mapping[str, Any]]
    source: str
    date: str
    measured: str
    utilization: float = 1.0  # of a device that is filled at most
    margin_mib: float = 0
    cache_share: float = 1.0
    fixed_mib: float = 0
    host_mib: float = 0
    vocabulary_step: int = 1
    second_runner: Literal["none", "dense", "all"] = "none"
    graphs_counted: Literal["none", "first", "both"] = "none"
    graph_layer_mib: float = 0
    logit_bytes: Sequence[int] = (6, 6)  # 16 and 32 bit
    cpu: Mapping[str, Any] = field(default_factory=dict)

    def slides(self, model_type: str) -> bool:
        """Returns True if the sliding layers of this model type keep only their window."""
        return self.sliding == "all" or (not isinstance(self.sliding, str) and model_type in self.sliding)


@dataclass(frozen=True, slots=True)
class CacheType:
    """A data type of the KV cache, with the bytes that each head stores besides (scales)."""

    name: str
    bits: float
    head_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LoadRule:
    """How an engine holds a stored tensor in memory, where that differs from the file."""

    format: str
    source: str
    date: str
    ends: str = ""
    kinds: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    unpacked: bool = False
    dtype: str | None = None
    like: str | None = None


@lru_cache(maxsize=256)
def terms(engine: str, version: str | None, device: Device) -> EngineTerms:
    """Returns the terms of an engine's version on a device; None means the newest version.

    Raises UnknownNameError for an unknown engine, QuantryError if nothing is known of its memory.
    """
    facts = engine_facts(engine)
    row = {**(engine_facts(facts.like).memory if facts.like else {}), **facts.memory}
    if not row:
        raise QuantryError(f"nothing is known of the memory of {engine}", fix="choose another engine")
    for change in row.pop("changes", ()):
        if version is None or version_key(change["since"]) <= version_key(version):
            row |= {key: value for key, value in change.items() if key != "since"}
    if device.kind == "cpu":
        row |= row.get("cpu", {})
        row["defaults"] = [{"at_least": 0, **row["cpu"]}] if row.get("cpu") else row["defaults"]
    names = {field.name for field in fields(EngineTerms)}
    given = {key: value for key, value in row.items() if key in names}
    return EngineTerms(**{**given, "name": engine, "date": str(row["date"])})


def default_batch(engine: EngineTerms, device: Device) -> tuple[int, int]:
    """Returns the tokens of a step and the sequences at once that an engine chooses by default."""
    for row in engine.defaults:
        if device.usable >= row["at_least"] * GIB and not any(name in device.name for name in row.get("but", ())):
            return row["tokens"], row["sequences"]
    raise AssertionError(f"{engine.name} has no default for {device.name}")


def cache_type(name: str, engine: EngineTerms, dtype: str) -> CacheType:
    """Returns the type of the KV cache by its name; "auto" is the engine's choice for 16-bit weights of `dtype`.

    Raises UnknownNameError if the engine has no such type.
    """
    if name == "auto":
        name = SIXTEEN[dtype] if engine.auto == "model" else engine.auto
    facts = engine_facts(engine.name)
    inherited = engine_facts(facts.like).memory.get("kv_types", ()) if facts.like else ()
    rows = [*_data()["kv_types"], *inherited, *facts.memory.get("kv_types", ())]
    for row in rows:
        if name in row["names"]:
            return CacheType(name, row["bits"], row.get("head_bytes", 0))
    known = tuple(known for row in rows for known in row["names"])
    raise UnknownNameError(f"{engine.name} has no KV cache of type {name[:40]!r}", fix=registry.suggest(name, known))


def link_bytes(device: Device) -> int:
    """Returns the memory that the communication library takes on each of several devices."""
    return _first(_data()["links"], "kinds", device.link.kind)


def workspace_bytes(device: Device) -> int:
    """Returns the workspace of 16-bit matrix products."""
    return 0 if device.kind == "cpu" else _first(_data()["workspaces"], "families", device.family)


def _first(rows: Sequence[Mapping[str, Any]], key: str, value: str) -> int:
    return int(next(row["mib"] for row in rows if value in row[key] or not row[key]) * MIB)


@cache
def load_rules(engine: str, format_name: str) -> tuple[LoadRule, ...]:
    """Returns how an engine changes the tensors of a format when it loads them."""
    rows = [row for row in engine_facts(engine).memory.get("loads", ()) if row["format"] == format_name]
    lists = ("kinds", "families")
    return tuple(
        LoadRule(**{**row, **{key: tuple(row[key]) for key in lists if key in row}, "date": str(row["date"])})
        for row in rows
    )


def job_terms() -> Mapping[str, Any]:
    """Returns the constants of the quantization job itself."""
    return dict(_data()["job"])

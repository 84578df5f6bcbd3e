"""Constants of the memory model: those of an engine with the changes of a version applied, and terms.toml for all."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, Literal

from quantry import registry
from quantry.devices import Device
from quantry.engines.contract.catalogue import engine as engine_facts
from quantry.engines.contract.catalogue import version_key
from quantry.errors import QuantryError, UnknownNameError

GIB, MIB = 1 << 30, 1 << 20
SIXTEEN = {"bf16": "bfloat16", "f16": "float16"}


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """The table `memory` of an engine; terms.toml explains each field."""

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
    utilization: float = 1.0
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
        """Whether sliding layers of a model keep no more than their window."""
        return self.sliding == "all" or (not isinstance(self.sliding, str) and model_type in self.sliding)


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is started; what is None is the engine's own default for the device."""

    tokens: int | None = None  # of a step: --max-num-batched-tokens, --ubatch-size
    sequences: int | None = None  # at once: --max-num-seqs, --parallel
    utilization: float | None = None
    graphs: bool = True  # CUDA graphs
    flash: bool = True  # flash attention in llama.cpp
    outputs: int | None = None  # logits of a step in llama.cpp: its server asks for one a sequence

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "outputs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 1 << 24):
                raise QuantryError(f"{name} of {value} is not 1 to {1 << 24}", fix="leave it to the engine")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise QuantryError(f"a memory utilization of {self.utilization} is not a share", fix="use 0.9")


@dataclass(frozen=True, slots=True)
class CacheType:
    """A type of the KV cache."""

    name: str
    bits: float
    head_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine makes of a stored tensor."""

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
    """The terms of an engine's version on a device; None is the newest."""
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
    names = {one.name for one in fields(EngineTerms)}
    given = {key: value for key, value in row.items() if key in names}
    return EngineTerms(**{**given, "name": engine, "date": str(row["date"])})


def default_batch(found: EngineTerms, device: Device) -> tuple[int, int]:
    """Tokens of a step and sequences at once that an engine chooses by itself."""
    for row in found.defaults:
        if device.usable >= row["at_least"] * GIB and not any(name in device.name for name in row.get("but", ())):
            return row["tokens"], row["sequences"]
    raise AssertionError(f"{found.name} has no default for {device.name}")


def cache_type(name: str, found: EngineTerms, dtype: str) -> CacheType:
    """The type of the cache by its name; "auto" is what the engine takes by itself for 16-bit weights of `dtype`."""
    if name == "auto":
        name = SIXTEEN[dtype] if found.auto == "model" else found.auto
    facts = engine_facts(found.name)
    inherited = engine_facts(facts.like).memory.get("kv_types", ()) if facts.like else ()
    rows = [*_data()["kv_types"], *inherited, *facts.memory.get("kv_types", ())]
    for row in rows:
        if name in row["names"]:
            return CacheType(name, row["bits"], row.get("head_bytes", 0))
    known = tuple(one for row in rows for one in row["names"])
    raise UnknownNameError(f"{found.name} has no KV cache of type {name[:40]!r}", fix=registry.suggest(name, known))


def link_bytes(device: Device) -> int:
    """What the library that joins several devices takes on each."""
    return _first(_data()["links"], "kinds", device.link.kind)


def workspace_bytes(device: Device) -> int:
    """The workspace of 16-bit matrix products."""
    return 0 if device.kind == "cpu" else _first(_data()["workspaces"], "families", device.family)


def _first(rows: Sequence[Mapping[str, Any]], key: str, value: str) -> int:
    return int(next(row["mib"] for row in rows if value in row[key] or not row[key]) * MIB)


@cache
def loads(engine: str, form: str) -> tuple[Load, ...]:
    """What an engine changes in the tensors of a format."""
    rows = [row for row in engine_facts(engine).memory.get("loads", ()) if row["format"] == form]
    lists = ("kinds", "families")
    return tuple(
        Load(**{**row, **{key: tuple(row[key]) for key in lists if key in row}, "date": str(row["date"])})
        for row in rows
    )


def job_terms() -> Mapping[str, Any]:
    return dict(_data()["job"])


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("quantry.planning.memory").joinpath("terms.toml").read_text(encoding="utf-8"))

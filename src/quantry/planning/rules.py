"""The decision table: reads rules.toml and applies it. The head of that file explains the rows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal

from quantry import registry
from quantry.devices import Device
from quantry.engines.contract.catalogue import Conditions, engine_facts
from quantry.errors import UnknownNameError
from quantry.planning.conditions import agrees
from quantry.planning.facts import Facts
from quantry.quantizing.recipe import Preset
from quantry.storage import read_data

_data = partial(read_data, "quantry.planning", "rules.toml")
SMALL_BITS = 4  # schemes of so many bits and less depend on the size of the model


@dataclass(frozen=True, slots=True)
class Use:
    """What a model is for: its default load, and the weights of quality, speed and room."""

    name: str
    about: str
    concurrency: int
    context: int
    quality: float
    speed: float
    room: float
    prompt: int = 512  # tokens of a usual prompt
    answer: int = 256  # and of its answer
    measure: Literal["decode", "answer"] = "decode"
    gate: str = "general"
    prefix_cache: bool = False
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionRule:
    """One rule of the table; empty conditions always hold."""

    name: str
    why: str
    source: str
    when: Conditions = field(default_factory=dict)
    prefer: Conditions | None = None
    avoid: Conditions | None = None
    require: Conditions | None = None
    about: Conditions = field(default_factory=dict)
    warn: str | None = None
    weight: float = 0.0
    fix: str = ""
    corrected: str | None = None


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality that is expected of a scheme before anything was measured."""

    name: str
    points: float


@dataclass(frozen=True, slots=True)
class Ruling:
    """The outcome of all rules for one option."""

    points: float
    reasons: tuple[str, ...]
    warnings: tuple[str, ...]


@cache
def uses() -> Mapping[str, Use]:
    """Returns all uses by name."""
    rows = _data()["uses"]
    return {name: Use(name=name, **{**row, "aliases": tuple(row.get("aliases", ()))}) for name, row in rows.items()}


def find_use(name: str | None) -> Use:
    """Returns the use of a name or an alias; general without a name. Raises UnknownNameError for an unknown one."""
    key = (name or "general").strip().lower().replace("_", "-").replace(" ", "-")
    known = {alias: use for use in uses().values() for alias in (use.name, *use.aliases)}
    if key not in known:
        close = get_close_matches(key, known, n=3, cutoff=0.6)
        raise UnknownNameError(
            f"unknown use {str(name)[:40]!r}", fix=registry.suggest(key, tuple(close) or tuple(uses()))
        )
    return known[key]


@cache
def rules() -> tuple[DecisionRule, ...]:
    """Returns all rules, in the order of the table."""
    return tuple(DecisionRule(**row) for row in _data()["rules"])


def tier(device: Device) -> str:
    """Returns the class of hardware that a device belongs to: cpu, edge, consumer, datacenter, ..."""
    if device.kind == "cpu" and not _named(device, "edge"):
        return "cpu"
    return next((row["tier"] for row in _data()["tiers"] if _named(device, row["tier"])), "datacenter")


def _named(device: Device, wanted: str) -> bool:
    rows = [row for row in _data()["tiers"] if row["tier"] == wanted]
    return any(fnmatchcase(device.name, pattern) for row in rows for pattern in row["names"])


def left_out(preset: Preset) -> str | None:
    """Returns why a preset is not planned, or None."""
    return next((row["why"] for row in _data()["left_out"] if preset.name in row["presets"]), None)


def is_spare(preset: Preset, facts: Facts) -> bool:
    """Returns True if a preset is tried only where nothing else fits."""
    rows = (row for row in _data()["spare"] if preset.name in row["presets"])
    return any(agrees(row.get("when", {}), facts, {}) for row in rows)


def needs_remote_code(config: Mapping[str, Any]) -> bool:
    """Returns True if engines run a model of this config only with Python code of its repository."""
    return str(config.get("model_type")) in _data()["remote_code"]["model_types"]


def image_tokens(model_type: str) -> int:
    """Returns the tokens that a picture of about one million pixels becomes."""
    rows = _data()["images"]
    return int(rows.get(model_type, rows["default"]))


def caches(engine: str, facts: Facts) -> tuple[str, ...]:
    """Returns the smaller cache types that are planned for an engine there."""
    return tuple(row.kv for row in engine_facts(engine).plan.caches if agrees(row.when, facts, {}))


def quality(facts: Facts) -> Quality:
    """Returns the expected quality of an option."""
    row = next(row for row in _data()["quality"] if agrees(row["when"], facts, {}))
    points, parameters = row["points"], facts["parameters"]
    points -= next((cut["points"] for cut in _data()["caches"] if fnmatchcase(facts.get("kv", "auto"), cut["kv"])), 0)
    for size in _data()["sizes"] if facts["bits"] <= SMALL_BITS else ():
        if size.get("at_least", 0) <= parameters < size.get("below", float("inf")):
            points += size["points"]
    return Quality(_class_of(row["class"], row["points"], points), points)


def _class_of(name: str, table: float, points: float) -> str:
    """Returns the class of a row, or the nearest below it where the size of the model takes points off."""
    if points >= table:
        return name
    rows = sorted({(row["points"], row["class"]) for row in _data()["quality"]}, reverse=True)
    return str(next((name for limit, name in rows if limit <= points), rows[-1][1]))


def refusal(facts: Facts) -> DecisionRule | None:
    """Returns the first rule that does not allow an option."""
    rows = (rule for rule in rules() if rule.require is not None and agrees(rule.when, facts, {}))
    return next((rule for rule in rows if not agrees(rule.require or {}, facts, {})), None)


def judge(facts: Facts) -> Ruling:
    """Applies all rules to an option."""
    points, reasons, warnings = 0.0, [], []
    for rule in rules():
        if not agrees(rule.when, facts, {}):
            continue
        if rule.prefer is not None and agrees(rule.prefer, facts, {}):
            points += rule.weight
            reasons.append((rule.weight, rule.why))
        if rule.avoid is not None and agrees(rule.avoid, facts, {}):
            points -= rule.weight
            warnings.append(rule.why)
        if rule.warn and agrees(rule.about, facts, {}):
            warnings.append(rule.warn)
    ordered = [why for _, why in sorted(reasons, key=lambda pair: -pair[0])]
    return Ruling(points, tuple(dict.fromkeys(ordered)), tuple(dict.fromkeys(warnings)))

"""Engines: what each can load and which flags it takes, as data with version ranges; one TOML file is one engine.

| table | a row says |
|---|---|
| `versions` | a release whose sources or documents were read |
| `packages` | what is installed beside the engine, and whether it is taken to be there |
| `cases` | a name for conditions that many rows share; a row asks for it with `is` |
| `refusals` | it will not load: reason and fix |
| `kernels` | in the engine's own order: which layers it is for (`when`), what it `needs`, and what stands in the way if it is no more than a fallback |
| `cautions` | it loads, but not as one would think: a fallback with its reason |
| `notes` | a thing to know, which changes no verdict |
| `fixes` | what to do when a kernel's need for a fact is not met |
| `flags` | options of its command line: name(s), since, until, replacement |

A row holds from version `since` on and before version `until`. Conditions are tables over named facts; their grammar and
the facts are in planning/feasibility.py. Every row has a source and a date.
"""  # noqa: E501

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from quantry import registry
from quantry.errors import UnknownNameError

Conditions = Mapping[str, Any]
RULES = ("refusals", "kernels", "cautions", "notes")


@dataclass(frozen=True, slots=True)
class Row:
    """One rule: `when` says what it is about; a kernel also has a name and needs."""

    source: str
    date: str
    when: Conditions = field(default_factory=dict)
    needs: Conditions = field(default_factory=dict)
    name: str | None = None
    outcome: str = "kernel"
    reason: str = ""
    fix: str | None = None
    since: str | None = None
    until: str | None = None

    def holds_in(self, version: str) -> bool:
        """Whether the row is about a version of its engine."""
        return _within(version, self.since, self.until)


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of an engine's command line; with a `value`, one value of it."""

    name: str
    source: str
    date: str
    since: str | None = None
    until: str | None = None
    replacement: str | None = None
    value: str | None = None
    default: str | None = None
    about: str = ""

    def holds_in(self, version: str) -> bool:
        return _within(version, self.since, self.until)


@dataclass(frozen=True, slots=True)
class Release:
    """A version that is known, and where that is from."""

    version: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Package:
    """Something installed beside an engine; `assumed` unless someone says otherwise."""

    name: str
    assumed: bool
    source: str
    date: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Engine:
    """All that is known of an engine."""

    name: str
    about: str
    releases: tuple[Release, ...]  # oldest first
    packages: tuple[Package, ...]
    cases: Mapping[str, Conditions]
    refusals: tuple[Row, ...]
    kernels: tuple[Row, ...]
    cautions: tuple[Row, ...]
    notes: tuple[Row, ...]
    fixes: Mapping[str, str]
    flags: tuple[Flag, ...]

    @property
    def latest(self) -> str:
        """The newest known release that is no candidate."""
        return [release.version for release in self.releases if "rc" not in release.version][-1]


def engines() -> dict[str, Engine]:
    """All engines by name."""
    return dict(_engines())


def engine(name: str) -> Engine:
    """The engine of a name; an unknown one is answered with suggestions."""
    known = _engines()
    if name not in known:
        raise UnknownNameError(f"unknown engine {name!r}", fix=registry.suggest(name, tuple(known)))
    return known[name]


def latest(name: str) -> str:
    """The newest release of an engine that its data know."""
    return engine(name).latest


def known_version(name: str, version: str | None) -> str:
    """A version that the engine's data speak of: the newest for None, else as given; newer ones count as the newest."""
    found = engine(name)
    if version is None:
        return found.latest
    oldest = found.releases[0].version
    if not re.search(r"\d", version) or version_key(version) < version_key(oldest):
        raise UnknownNameError(
            f"nothing is known of {name} {version[:40]!r}: its data begin at {oldest}",
            fix=f"choose {oldest} to {found.releases[-1].version}, or leave the version out",
        )
    return version


def flags(name: str, version: str | None = None) -> dict[str, Flag]:
    """The flags that a version of an engine takes, by name; values of flags are under "--flag value"."""
    version = known_version(name, version)
    found = (flag for flag in engine(name).flags if flag.holds_in(version))
    return {f"{flag.name} {flag.value}" if flag.value else flag.name: flag for flag in found}


def removed(name: str, version: str | None = None) -> dict[str, Flag]:
    """The flags that a version of an engine no longer takes or does not take yet, with what takes their place."""
    version = known_version(name, version)
    there = flags(name, version)
    gone = (flag for flag in engine(name).flags if not flag.holds_in(version))
    named = {f"{flag.name} {flag.value}" if flag.value else flag.name: flag for flag in gone}
    return {key: flag for key, flag in named.items() if key not in there}


def version_key(version: str) -> tuple[int, ...]:
    """The numbers of a version, to compare: 0.32 and 0.32.0 are equal, b10605 is 10605."""
    numbers = [int(digits[:9]) for digits in re.findall(r"\d+", version)]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _within(version: str, since: str | None, until: str | None) -> bool:
    key = version_key(version)
    return (since is None or version_key(since) <= key) and (until is None or key < version_key(until))


@cache
def _engines() -> dict[str, Engine]:
    folder = files("quantry.engines")
    texts = (file.read_text(encoding="utf-8") for file in folder.iterdir() if file.name.endswith(".toml"))
    found = [_engine(tomllib.loads(text)) for text in texts]
    return {one.name: one for one in sorted(found, key=lambda one: one.name)}


def _engine(data: Mapping[str, Any]) -> Engine:
    return Engine(
        name=data["name"],
        about=data["about"],
        releases=tuple(Release(**_dated(row)) for row in data["versions"]),
        packages=tuple(Package(**_dated(row)) for row in data.get("packages", ())),
        cases=data.get("cases", {}),
        fixes=data.get("fixes", {}),
        flags=tuple(flag for row in data.get("flags", ()) for flag in _flags(row)),
        **{table: tuple(Row(**_dated(row)) for row in data.get(table, ())) for table in RULES},
    )


def _flags(row: Mapping[str, Any]) -> list[Flag]:
    """One flag a name and value: rows may list several that share all else."""
    names = row.get("names") or [row["name"]]
    values = row.get("values") or [row.get("value")]
    rest = {key: value for key, value in _dated(row).items() if key not in ("name", "names", "value", "values")}
    return [Flag(name=name, value=value, **rest) for name in names for value in values]


def _dated(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, "date": str(row["date"])}

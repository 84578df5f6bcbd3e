"""The facts of all engines: the TOML file beside each engine's module, built in or of another package.

Reading them imports no engine; `adapter.adapter` does.
"""

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from quantry import registry
from quantry.errors import QuantryError, UnknownNameError

ROOM = "quantry.engines"
Conditions = Mapping[str, Any]
CAPABILITIES = ("refusals", "kernels", "cautions", "notes")
LAST = 100  # rank of an engine that states none


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionedRow:
    """Knowledge of an engine from version `since` up to, but not including, version `until`."""

    source: str
    date: str
    since: str | None = None
    until: str | None = None

    def holds_in(self, version: str) -> bool:
        key = version_key(version)
        begun = self.since is None or version_key(self.since) <= key
        return begun and (self.until is None or key < version_key(self.until))


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability(VersionedRow):
    """A rule of what an engine can do: `when` says what it is about; a kernel also has a name and needs."""

    when: Conditions = field(default_factory=dict)
    needs: Conditions = field(default_factory=dict)
    name: str | None = None
    outcome: str = "kernel"
    reason: str = ""
    fix: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag(VersionedRow):
    """An option of an engine's command line; with a `value`, one value of it."""

    name: str
    replacement: str | None = None
    value: str | None = None
    default: str | None = None
    about: str = ""

    @property
    def words(self) -> str:
        return f"{self.name} {self.value}" if self.value else self.name


@dataclass(frozen=True, slots=True)
class Release:
    """A known version, and where the knowledge is from."""

    version: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Package:
    """A package installed beside an engine; `assumed` unless the caller says otherwise."""

    name: str
    assumed: bool
    source: str
    date: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class OwnFormat:
    """A model format of one engine: a folder is in it if it has this file."""

    name: str
    file: str
    context: tuple[str, ...] = ()  # keys in that file (JSON) that lead to the longest sequence in tokens


@dataclass(frozen=True, slots=True)
class Installation:
    """How an installed engine is found. One with a `program` is on the search path, others are in a python."""

    program: str | None = None
    distributions: tuple[str, ...] = ()  # names of the Python package
    needs: tuple[str, ...] = ()  # packages without which it is installed and serves nothing
    cpu_distribution: str | None = None  # the one of them that is built for CPUs only
    embedded: str | None = None  # module of a server in Quantry's own python, used unless a program is named
    gpu_probe: str = ""  # Python code that prints True where the embedded engine sees a GPU
    version_pattern: str = r"\b(\d+\.\d+(?:\.\w+)*)"  # finds the version in the output of `program --version`
    version_prefix: str = ""  # of what the pattern finds


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """How a running server of an engine behaves."""

    port: int = 8000
    page: str | None = None  # the path of a page for people: a chat, or the API to try
    health: str = "/health"  # the path that answers 200 once it serves
    model_name: Literal["given", "lower", "path"] = (
        "given"  # in requests: as chosen, in lower case, or the model's path
    )
    threads: bool = True  # on a CPU it takes a number of threads
    slots: int | None = None  # sequences at once without being asked, where these are few
    ignores_end: bool = False  # takes `ignore_eos`: it writes on past the end of an answer
    single_process: bool = False  # on a CPU one process holds all of its memory
    prompt_cache_mib: int | None = None  # host memory it takes for finished prompts unless it is given a limit
    script: str | None = None  # package of Quantry that serves it, run by its path in the engine's python
    keeps_builds: bool = False  # what it builds of a checkpoint is kept in Quantry's cache


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """Types of an engine's KV cache, in the words of its flags."""

    half: str | None = None  # takes half of 16 bit
    tuned: tuple[str, ...] = ()  # that `quantry tune` tries
    recipes: Mapping[str, str] = field(default_factory=dict)  # type of a recipe's KV cache -> type
    flag: str = ""  # whose values are the types; `quantry verify` compares them if its scorer takes a `cache`


@dataclass(frozen=True, slots=True)
class VerifyFacts:
    """How `quantry verify` scores a model: embedded on GGUF files, or by a script in the engine's python on folders."""

    embedded: bool = False
    label: str = ""  # the engine's name in texts
    module: str = ""  # must be importable in the engine's python
    install: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)  # unless the user's environment has the name
    scorer: str = ""  # file beside the engine's own, with a class `Scorer`
    kernels: str = r"(?!)"  # pattern of the log's words on its kernels; matches nothing unless stated


@dataclass(frozen=True, slots=True)
class PlannedCache:
    """A smaller type of the KV cache that is planned where the conditions hold."""

    kv: str
    source: str
    when: Conditions = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """How an engine stands in the decision of `quantry plan`."""

    points: float = 0.0
    why: str = ""
    source: str = ""
    asked: str | None = "it is an engine of another package, and planned only with --engine"  # None: always planned
    uses: tuple[str, ...] = ()  # that it is planned for without being named
    formats: tuple[str, ...] = ()  # that it is planned with; all that it loads if none is listed
    options: tuple[str, ...] = ()  # fields of Serving that a plan sets: utilization, cache_gib, prefix_cache, dtype
    whole_layers: bool = False  # several devices get whole layers each, the host too
    spreads_unasked: bool = False  # it spreads a model over devices without a flag
    copies: bool = False  # it shares requests among copies of a model itself
    expert_parallel: bool = False  # it can share out experts over devices instead of cutting each
    host_experts: bool = False  # it can leave the experts of some blocks on the host
    remote_code: bool = False  # it runs models whose code is in their repository, if it is told to
    speculation: tuple[str, ...] = ()  # ways to guess ahead that a plan may name: lookup, draft, eagle3, mtp
    spare_vocabulary: int = 0  # rows by which the vocabulary of a draft may differ
    break_even: bool = False  # the speed model knows when 4-bit weights stop to pay in it
    caches: tuple[PlannedCache, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure in Prometheus names: what `over` grew by, divided by what `under` grew by; without `under` a gauge."""

    over: tuple[str, ...]
    under: tuple[str, ...] = ()

    def between(self, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
        """Returns its value over a time; None if the engine does not have the names, or nothing happened."""
        if not all(name in after for name in (*self.over, *self.under)):
            return None
        if not self.under:
            return sum(after[name] for name in self.over)
        grown = [sum(after[name] - before.get(name, 0.0) for name in names) for names in (self.over, self.under)]
        return grown[0] / grown[1] if grown[1] > 0 else None


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where an engine's Prometheus page is, and its figures; names are without labels, whose values are added up."""

    path: str
    prefix_hit_rate: Measure | None = None  # tokens of prompts that were in the cache already
    acceptance_rate: Measure | None = None  # guesses of speculative decoding that were right
    kv_usage: Measure | None = None  # share of the cache that is filled now


@dataclass(frozen=True, slots=True)
class Outdated:
    """A form that older texts give; `since` is a version that is known to refuse it.

    Without one it never was right, or it still works and is needless (`new` is empty).
    """

    old: str
    new: str
    reason: str
    since: str | None = None


@dataclass(frozen=True, slots=True)
class Engine:
    """Everything known of an engine."""

    name: str
    about: str
    plugin: str  # its name in the registry
    folder: Path  # that its files are in
    formats: tuple[str, ...]  # that it loads
    releases: tuple[Release, ...]  # oldest first
    also: tuple[str, ...] = ()  # what else people call it
    rank: int = LAST  # its place in lists, and among several usual engines of a format
    usual_for: tuple[str, ...] = ()  # formats
    like: str | None = None  # the engine it runs: memory and speed are as there, where it states nothing else
    own_format: OwnFormat | None = None
    install: Mapping[str, str] = field(default_factory=dict)  # commands by platform, `any` for all others
    installation: Installation = Installation()
    server: ServerFacts = ServerFacts()
    metrics: Metrics | None = None
    kv_cache: CacheFacts = CacheFacts()
    lacks: Mapping[str, str] = field(default_factory=dict)  # options that it has nothing for: what to do instead
    switches: tuple[str, ...] = ()  # that `quantry tune` may set both ways
    verify: VerifyFacts | None = None  # None: `quantry verify` cannot score in it
    plan: PlanFacts = PlanFacts()
    memory: Mapping[str, Any] = field(default_factory=dict)
    speed: tuple[Mapping[str, Any], ...] = ()
    outdated: tuple[Outdated, ...] = ()
    packages: tuple[Package, ...] = ()
    cases: Mapping[str, Conditions] = field(default_factory=dict)
    refusals: tuple[Capability, ...] = ()
    kernels: tuple[Capability, ...] = ()
    cautions: tuple[Capability, ...] = ()
    notes: tuple[Capability, ...] = ()
    fixes: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[Flag, ...] = ()

    @property
    def latest(self) -> str:
        """The newest known release that is not a candidate."""
        return [release.version for release in self.releases if "rc" not in release.version][-1]

    def installed_by(self, platform: str) -> str:
        """Returns the command that installs it on a platform."""
        return self.install.get(platform) or self.install.get("any") or f"install {self.name}"


@cache
def engines() -> Mapping[str, Engine]:
    """Returns all engines by name, in alphabetical order."""
    known: dict[str, Engine] = {}
    for plugin in registry.choices(ROOM):
        file = registry.location(ROOM, plugin).with_suffix(".toml")
        read = _read(plugin, file)
        if read.name in known:
            raise QuantryError(f"two engines are called {read.name} ({file})", fix="remove the package that adds one")
        known[read.name] = read
    return dict(sorted(known.items()))


def ranked() -> list[Engine]:
    """Returns all engines in the order of lists."""
    return sorted(engines().values(), key=lambda engine: (engine.rank, engine.name))


def engine_facts(name: str) -> Engine:
    """Returns what is known of an engine. Raises UnknownNameError, with suggestions, for an unknown name."""
    return engines()[engine_name(name)]


def engine_name(name: str, of: Collection[str] | None = None) -> str:
    """Returns the engine that somebody means by `llamacpp` or `hf`, one of those given or of all.

    Raises UnknownNameError, with suggestions, for an unknown name.
    """
    known = engines() if of is None else of
    also = {other: engine.name for engine in engines().values() for other in engine.also if engine.name in known}
    return registry.resolve("engine", name, known, also)


def usual(stored: str) -> list[str]:
    """Returns the usual engines of a model format, the best first; all that load it where none claims to be usual."""
    claiming = [engine.name for engine in ranked() if stored in engine.usual_for]
    return claiming or [engine.name for engine in ranked() if stored in engine.formats]


def verifying() -> dict[str, VerifyFacts]:
    """Returns the engines that `quantry verify` scores in, in the order of lists."""
    return {engine.name: engine.verify for engine in ranked() if engine.verify is not None}


def scoring_name(name: str | None) -> str | None:
    """Returns the engine of `quantry verify` that somebody means, None for none. Raises UnknownNameError."""
    return None if name is None else engine_name(name, verifying())


def cache_types(name: str, wanted: str) -> tuple[str, ...]:
    """Returns types of an engine's KV cache from names with commas between, in the engine's words or a recipe's.

    Raises QuantryError if the engine offers no choice, and UnknownNameError, with suggestions, for an unknown name.
    """
    facts = engine_facts(name).kv_cache
    known = {flag.value: None for flag in flags(name).values() if facts.flag and flag.name == facts.flag and flag.value}
    known.pop("auto", None)
    if not known:
        raise QuantryError(
            f"{name} has no types of KV cache to choose from", fix="use --engine vllm, or llama.cpp with a GGUF file"
        )
    types = dict.fromkeys(facts.recipes.get(word, word) for word in map(str.strip, wanted.split(",")))
    for kind in types:
        if kind not in known:
            raise UnknownNameError(
                f"{name} has no KV cache of type {kind[:40]!r}", fix=registry.suggest(kind, tuple(filter(None, known)))
            )
    return tuple(types)


def known_version(name: str, version: str | None) -> str:
    """Returns `version`, or the newest for None. Raises UnknownNameError for one before the oldest known version."""
    known = engine_facts(name)
    if version is None:
        return known.latest
    oldest = known.releases[0].version
    if not re.search(r"\d", version) or version_key(version) < version_key(oldest):
        raise UnknownNameError(
            f"nothing is known of {name} {version[:40]!r}: its data begin at {oldest}",
            fix=f"choose {oldest} to {known.releases[-1].version}, or leave the version out",
        )
    return version


def flags(name: str, version: str | None = None) -> dict[str, Flag]:
    """Returns the flags that a version of an engine takes, by name; values of flags are under "--flag value"."""
    version = known_version(name, version)
    return {flag.words: flag for flag in engine_facts(name).flags if flag.holds_in(version)}


def removed(name: str, version: str | None = None) -> dict[str, Flag]:
    """Returns the flags that a version of an engine takes no longer or not yet, with their replacements."""
    version = known_version(name, version)
    taken = flags(name, version)
    return {
        flag.words: flag
        for flag in engine_facts(name).flags
        if not flag.holds_in(version) and flag.words not in taken
    }  # fmt: skip


def version_key(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version, to compare: 0.32 and 0.32.0 are equal, b10605 is 10605."""
    numbers = [int(digits[:9]) for digits in re.findall(r"\d+", version)]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _read(plugin: str, file: Path) -> Engine:
    try:
        return _engine(tomllib.loads(file.read_text(encoding="utf-8")), plugin, file.parent)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise QuantryError(
            f"the engine {plugin} has no valid facts in {file}: {error}",
            fix="correct the file, or remove the package that adds it",
        ) from error


def _engine(data: Mapping[str, Any], plugin: str, folder: Path) -> Engine:
    tables = {
        "own_format": OwnFormat, "installation": Installation, "server": ServerFacts, "kv_cache": CacheFacts,
        "verify": VerifyFacts,
    }  # fmt: skip
    rows = {"outdated": Outdated, "packages": Package, **dict.fromkeys(CAPABILITIES, Capability)}
    read: dict[str, Any] = {key: _plain(value) for key, value in data.items() if key not in ("versions", "tune")}
    read |= {key: table(**_plain(data[key])) for key, table in tables.items() if key in data}
    read |= {key: tuple(table(**_plain(row)) for row in data[key]) for key, table in rows.items() if key in data}
    read |= {"metrics": _metrics(data["metrics"])} if "metrics" in data else {}
    read |= {"plan": _plan(data["plan"])} if "plan" in data else {}
    read["fixes"] = {"default": "use another engine", **data.get("fixes", {})}
    read["releases"] = tuple(Release(**_plain(row)) for row in data["versions"])
    read["flags"] = tuple(flag for row in data.get("flags", ()) for flag in _flags(row))
    return Engine(plugin=plugin, folder=folder, switches=tuple(data.get("tune", {}).get("switches", ())), **read)


def _metrics(table: Mapping[str, Any]) -> Metrics:
    figures = {key: Measure(**_plain(value)) for key, value in table.items() if key != "path"}
    return Metrics(table["path"], **figures)


def _plan(table: Mapping[str, Any]) -> PlanFacts:
    caches = tuple(PlannedCache(**row) for row in table.get("caches", ()))
    return PlanFacts(**{"asked": None, **_plain(table), "caches": caches})


def _flags(row: Mapping[str, Any]) -> list[Flag]:
    """Returns a flag for each name and value of a row; they share the rest."""
    names = row.get("names") or [row["name"]]
    values = row.get("values") or [row.get("value")]
    rest = {key: value for key, value in _plain(row).items() if key not in ("name", "names", "value", "values")}
    return [Flag(name=name, value=value, **rest) for name in names for value in values]


def _plain(value: Any) -> Any:
    """Turns lists into tuples and dates into text, in a value and in the values of a table."""
    if isinstance(value, Mapping):
        return {
            key: str(item) if key == "date" else tuple(item) if isinstance(item, list) else item
            for key, item in value.items()
        }
    return tuple(value) if isinstance(value, list) else value

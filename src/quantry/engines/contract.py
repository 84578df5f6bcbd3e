"""What an engine's file offers, and the nouns it speaks in: a serving, a command, facts of a boot log, metrics.

One Python file is one engine, beside the TOML file of its data. It has

| name | is |
|---|---|
| `NAME`, `FORMATS`, `PORT`, `HEALTH` | its name in the data, the formats it loads, its usual port, the path that answers 200 once it serves |
| `METRICS` | where its Prometheus page is and what the figures that matter are called there, or None |
| `INSTALL` | the command that installs it, by platform; under `any` for all that are not named |
| `OUTDATED` | forms that older texts give, with what is written now and why |
| `settings(serving)` | every flag with its value and its reason; both functions below are made of it |
| `command(serving)` | the words that start it, with environment, files and steps |
| `explain(serving)` | the same as rows of (words, reason) |
| `facts(lines)` | what its boot log says |

Nothing here starts anything. Flags and their values are looked up in the data for the version that is asked for: what it
does not take is an error, never left out.
"""  # noqa: E501

import ipaddress
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, cast

from quantry import registry
from quantry.engines import engine, flags, known_version, removed
from quantry.errors import RecipeError, UnknownNameError

HOST = "127.0.0.1"
LOOKUP = "lookup"  # as `speculative`: guesses are copied from the prompt, no draft model
HERE, HEAD, WORKER = "here", "head", "worker"  # where a step is run
PORTS = range(1, 65536)
THREADS = "OMP_NUM_THREADS="  # of OpenMP, in every engine that computes with it
HIDDEN = "***"  # stands for a secret wherever a command is shown


@dataclass(frozen=True, slots=True)
class Serving:
    """All that the command of an engine depends on; None leaves a thing to the engine."""

    model: str  # what the engine is given: a folder, a .gguf file or a hub id
    format: str  # gguf, compressed-tensors, gptq, awq, bitsandbytes, fp8, onnx; safetensors for 16 bit
    engine: str
    version: str
    platform: str = "cpu"  # cuda, rocm, xpu, metal, cpu
    host: str = HOST
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    name: str | None = None  # that requests ask for
    context: int | None = None  # tokens of one sequence
    concurrency: int | None = None  # sequences at once, of one copy of the model
    kv: str = "auto"
    prefix_cache: bool | None = None
    chunked_prefill: bool | None = None
    batch_tokens: int | None = None  # of one step, prompts and answers together
    speculative: str | None = None  # a draft model's path, or LOOKUP
    draft_tokens: int | None = None  # guesses at a time
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    nodes: int = 1
    head: str | None = None  # address of the first node, where there are several
    offload_layers: int | None = None  # layers on the GPU; None is all
    threads: int | None = None
    utilization: float | None = None  # share of a device's memory
    cache_gib: int | None = None  # of the KV cache, where the engine is told a size
    prompt_cache_mib: int | None = None  # of host memory, for prompts that are finished (llama.cpp)
    dtype: str | None = None
    quantization: str | None = None  # of 16-bit weights as they are loaded
    bits: int | None = None  # of the weights, where it is known
    eager: bool = False  # no graphs, no compilation: starts sooner, answers slower
    trust_remote_code: bool = False
    built: str | None = None  # folder for what the engine makes of the model first; beside the model if None
    python: str = "python"  # of the engine's environment
    extra: tuple[str, ...] = ()  # words for the engine itself, as the user gave them

    @property
    def open_to_others(self) -> bool:
        """Whether other machines can reach it."""
        return not _is_loopback(self.host)


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag or an environment variable (`NAME=`), its value if it has one, and why it is given."""

    name: str
    value: object
    why: str

    @property
    def words(self) -> tuple[str, ...]:
        return (self.name,) if self.value is None else (self.name, str(self.value))


@dataclass(frozen=True, slots=True)
class Step:
    """A command beside the server's own; what is not `here` is for the user to run on that machine."""

    argv: tuple[str, ...]
    why: str
    where: str = HERE


@dataclass(frozen=True, slots=True)
class Command:
    """What starts an engine: files are written into the working folder, then steps, then `argv`, then `after`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # beside the caller's own
    files: Mapping[str, str] = field(default_factory=dict)  # relative name -> text
    steps: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()  # once the server is healthy
    secrets: frozenset[str] = field(default=frozenset(), repr=False)  # values that are never shown

    def shown(self) -> list[str]:
        """One command line that does the same, as words; secrets are hidden, steps elsewhere are left out."""
        env = [f"{name}={self._shown(value)}" for name, value in self.env.items()]
        argv = [self._shown(word) for word in self.argv]
        first = [
            f"printf '%s\\n' {shlex.join(text.splitlines())} > {shlex.quote(name)}" for name, text in self.files.items()
        ]
        first += [shlex.join(step.argv) for step in self.steps if step.where == HERE]
        if not first and not self.after:
            return ["env", *env, *argv] if env else argv
        if not self.after:
            return ["sh", "-c", " && ".join([*first, shlex.join(["env", *env, *argv] if env else argv)])]
        later = " && ".join(shlex.join(step.argv) for step in self.after)
        set_up = [f"export {shlex.join(env)}"] if env else []
        return ["sh", "-c", f"{' && '.join([*set_up, *first])} && {{ (sleep 5; {later}) & exec {shlex.join(argv)}; }}"]

    def _shown(self, word: str) -> str:
        return HIDDEN if word in self.secrets else word


@dataclass(frozen=True, slots=True)
class Facts:
    """What an engine says of itself as it starts; None where it does not."""

    version: str | None = None
    weights_bytes: int | None = None
    kv_cache_tokens: int | None = None
    kv_cache_bytes: int | None = None
    max_concurrency: float | None = None  # sequences of the full context that the cache holds
    quantization: str | None = None
    kernels: tuple[str, ...] = ()
    context: int | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure in Prometheus names: what `over` grew by, divided by what `under` grew by; without `under` a gauge."""

    over: tuple[str, ...]
    under: tuple[str, ...] = ()

    def between(self, before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
        """Its value over a time; None where the engine does not have the names, or nothing happened."""
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
    since: str | None


class Adapter(Protocol):
    """An engine's file."""

    NAME: str
    FORMATS: tuple[str, ...]
    PORT: int
    HEALTH: str
    METRICS: Metrics | None
    INSTALL: Mapping[str, str]
    OUTDATED: tuple[Outdated, ...]

    def settings(self, serving: Serving) -> list[Setting]: ...

    def command(self, serving: Serving) -> Command: ...

    def explain(self, serving: Serving) -> list[tuple[str, str]]: ...

    def facts(self, lines: Iterable[str]) -> Facts: ...


def adapter(name: str) -> Adapter:
    """The file of an engine by the engine's own name, such as llama.cpp."""
    found = registry.load("quantry.engines", engine(name).name.replace(".", "-"))
    return cast(Adapter, found)


def install(name: str, platform: str) -> str:
    """The command that installs an engine on a platform."""
    ways = adapter(name).INSTALL
    return ways.get(platform, ways["any"])


# ---- settings ----


def maybe(name: str, value: object, why: str) -> list[Setting]:
    """A setting, unless its value is None and so left to the engine."""
    return [] if value is None else [Setting(name, value, why)]


def switch(on: bool | None, name: str, why: str, off: str | None = None, why_off: str = "") -> list[Setting]:
    """A flag without a value if a thing is on; its opposite, where there is one, if it is off; nothing for None."""
    if on:
        return [Setting(name, None, why)]
    return [Setting(off, None, why_off)] if on is False and off else []


def several(name: str, number: int, why: str) -> list[Setting]:
    """A setting for more than one of a thing."""
    return [Setting(name, number, why)] if number > 1 else []


# ---- checks that all engines share ----


def checked(serving: Serving, settings: Sequence[Setting]) -> list[str]:
    """Flags and values as words, and the user's own at the end; what the version does not take is an error."""
    known = flags(serving.engine, serving.version)
    for setting in settings:
        _check_flag(serving, setting, known)
    words = [word for one in settings if not one.name.endswith("=") for word in one.words]
    return [*words, *_given(serving)]


def environment(settings: Sequence[Setting]) -> dict[str, str]:
    """The settings that are environment variables."""
    return {one.name[:-1]: str(one.value) for one in settings if one.name.endswith("=")}


def explained(serving: Serving, settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Rows of words and reasons; a key is not shown."""
    rows = [(_shown(serving, one), one.why) for one in settings]
    return [*rows, (shlex.join(serving.extra), "given for the engine itself")] if serving.extra else rows


def check(serving: Serving, formats: Sequence[str]) -> None:
    """What makes no sense for any engine, before a command is made of it."""
    known_version(serving.engine, serving.version)
    if serving.format not in formats:
        raise RecipeError(
            f"{serving.engine} does not load {serving.format} (it loads {', '.join(formats)})",
            fix="choose another --engine, or quantry convert the artefact",
        )
    if serving.open_to_others and not serving.api_key:
        raise RecipeError(
            f"{serving.host} can be reached by other machines, and there is no key",
            fix=f"give --api-key, or use {HOST}",
        )
    if serving.port is not None and serving.port not in PORTS:
        raise RecipeError(f"port {serving.port} is not one of 1 to 65535", fix="leave --port out for the usual one")
    for name in ("context", "concurrency", "batch_tokens", "draft_tokens", "threads", "cache_gib"):
        _check_count(serving, name)
    for name in ("tensor_parallel", "pipeline_parallel", "replicas", "nodes"):
        _check_count(serving, name)
    if serving.draft_tokens is not None and serving.speculative is None:
        raise RecipeError(
            f"{serving.draft_tokens} draft tokens, and nothing that drafts", fix="give --draft or --lookup"
        )
    if serving.utilization is not None and not 0 < serving.utilization <= 1:
        raise RecipeError(f"utilization {serving.utilization:g} is not in (0, 1]", fix="give a share, such as 0.9")


def refuse(serving: Serving, **unknown: str) -> None:
    """An error for each field that is asked for and that the engine has nothing for; the text is the fix."""
    plain = Serving(serving.model, serving.format, serving.engine, serving.version)
    for name, fix in unknown.items():
        asked = getattr(serving, name)
        if asked != getattr(plain, name):
            shown = "" if name == "api_key" else f" (asked for: {asked})"
            raise RecipeError(f"{serving.engine} {serving.version} has no {name.replace('_', ' ')}{shown}", fix=fix)


def _check_count(serving: Serving, name: str) -> None:
    value = getattr(serving, name)
    if value is not None and value < 1:
        raise RecipeError(f"{name.replace('_', ' ')} is {value}, and must be 1 or more", fix="give a positive number")


def _check_flag(serving: Serving, setting: Setting, known: Mapping[str, object]) -> None:
    name, value = setting.name.removesuffix("="), setting.value
    if name not in known and setting.name != THREADS:
        raise UnknownNameError(f"{serving.engine} {serving.version} has no {name}", fix="choose another version")
    listed = {key.partition(" ")[2] for key in known if key.startswith(f"{name} ")}
    if listed and isinstance(value, str) and value not in listed:
        raise UnknownNameError(
            f"{name} of {serving.engine} {serving.version} takes no {value}", fix=f"use {', '.join(sorted(listed))}"
        )


def _given(serving: Serving) -> tuple[str, ...]:
    """The user's own words; engines have more flags than the data, so only those known to be gone are refused."""
    gone = removed(serving.engine, serving.version)
    for word, after in pairwise((*serving.extra, "")):
        name, _, value = word.partition("=")
        old = gone.get(name) or gone.get(f"{name} {value or after}")
        if old is not None:
            shown = f"{old.name} {old.value}" if old.value else old.name
            raise UnknownNameError(
                f"{serving.engine} {serving.version} has no {shown}", fix=f"use {old.replacement or 'another version'}"
            )
    return serving.extra


def _shown(serving: Serving, setting: Setting) -> str:
    if serving.api_key and setting.value == serving.api_key:
        return f"{setting.name}{HIDDEN}"
    return f"{setting.name}{setting.value}" if setting.name.endswith("=") else shlex.join(setting.words)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ---- boot logs ----

UNITS = {"B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def size(number: str, unit: str) -> int:
    """Bytes of a number with its unit, as logs write them."""
    return round(float(number.replace(",", "")) * UNITS[unit.upper()])


def last(pattern: str, lines: Iterable[str]) -> re.Match[str] | None:
    """The last place where a log has a pattern: what is said again replaces what was said before."""
    found = None
    for line in lines:
        found = re.search(pattern, line) or found
    return found


def until(pattern: str, lines: Iterable[str]) -> list[str]:
    """A log up to the line that says that it serves: later lines are about requests."""
    found = []
    for line in lines:
        found.append(line)
        if re.search(pattern, line):
            break
    return found

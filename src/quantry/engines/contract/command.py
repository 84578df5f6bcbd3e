"""A command and the settings it is made of, with the checks that all engines share.

Flags and their values are looked up in the engine's facts for the version that is asked for: what that version does not
take is an error, never left out.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from quantry.engines.contract.catalogue import engine_facts, flags, known_version, removed
from quantry.engines.contract.options import HOST, Serving
from quantry.errors import RecipeError, UnknownNameError

HERE, HEAD, WORKER = "here", "head", "worker"  # where a step is run
PORTS = range(1, 65536)
COUNTS = (
    "context", "parallel", "batch_tokens", "draft_tokens", "threads", "cache_gib", "tensor_parallel",
    "pipeline_parallel", "replicas", "nodes", "offload_layers",
)  # fmt: skip
THREADS = "OMP_NUM_THREADS="  # of OpenMP, in every engine that computes with it
HIDDEN = "***"  # stands for a secret wherever a command is shown


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
    """A command before or after the server's own; the user runs it if it is not `here`."""

    argv: tuple[str, ...]
    why: str
    where: str = HERE
    makes: str | None = None  # the last file that it writes: where that exists, the step is not run again


@dataclass(frozen=True, slots=True)
class Command:
    """What starts an engine: files are written into the working folder, then steps, then `argv`, then `after`."""

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)  # in addition to the caller's own
    files: Mapping[str, str] = field(default_factory=dict)  # relative name -> text
    steps: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()  # once the server is healthy
    secrets: frozenset[str] = field(default=frozenset(), repr=False)  # values that are never shown

    def shown(self) -> list[str]:
        """Returns one command line that does the same, as words; hides secrets, leaves out steps elsewhere."""
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


def maybe(name: str, value: object, why: str) -> list[Setting]:
    """Returns a setting, unless its value is None and so left to the engine."""
    return [] if value is None else [Setting(name, value, why)]


def switch(on: bool | None, name: str, why: str, off: str | None = None, why_off: str = "") -> list[Setting]:
    """Returns a flag without a value for True, its opposite (if it has one) for False, nothing for None."""
    if on:
        return [Setting(name, None, why)]
    return [Setting(off, None, why_off)] if on is False and off else []


def several(name: str, number: int, why: str) -> list[Setting]:
    """Returns a setting, unless its number is 1."""
    return [Setting(name, number, why)] if number > 1 else []


def started_by(
    program: Sequence[str], serving: Serving, settings: Sequence[Setting], steps: Sequence[Step] = ()
) -> Command:
    """Returns the command of a program: its settings as words and as environment, with the key hidden."""
    return Command(
        argv=(*program, *checked(serving, settings)),
        env=environment(settings),
        steps=tuple(steps),
        secrets=frozenset({serving.api_key} if serving.api_key else ()),
    )


def checked(serving: Serving, settings: Sequence[Setting]) -> list[str]:
    """Returns flags and values as words, the user's own last. Raises UnknownNameError if the version lacks one."""
    known = flags(serving.engine, serving.version)
    for setting in settings:
        _check_flag(serving, setting, known)
    words = [word for setting in settings if not setting.name.endswith("=") for word in setting.words]
    return [*words, *_given(serving)]


def environment(settings: Sequence[Setting]) -> dict[str, str]:
    """Returns the settings that are environment variables."""
    return {setting.name[:-1]: str(setting.value) for setting in settings if setting.name.endswith("=")}


def explained(serving: Serving, settings: Sequence[Setting]) -> list[tuple[str, str]]:
    """Returns rows of words and reasons; a key is not shown."""
    rows = [(_shown(serving, setting), setting.why) for setting in settings]
    return [*rows, (shlex.join(serving.extra), "given for the engine itself")] if serving.extra else rows


def check(serving: Serving) -> None:
    """Raises an error for what makes no sense in any engine, or what this engine lacks, before a command is made."""
    known_version(serving.engine, serving.version)
    facts = engine_facts(serving.engine)
    if serving.format not in facts.formats:
        raise RecipeError(
            f"{serving.engine} does not load {serving.format} (it loads {', '.join(facts.formats)})",
            fix="choose another --engine, or quantry convert the artefact",
        )
    if serving.open_to_others and not serving.api_key:
        raise RecipeError(
            f"{serving.host} can be reached by other machines, and there is no key",
            fix=f"give --api-key, or use {HOST}",
        )
    if serving.port is not None and serving.port not in PORTS:
        raise RecipeError(f"port {serving.port} is not one of 1 to 65535", fix="leave --port out for the usual one")
    for name in COUNTS:
        value = getattr(serving, name)
        least = 0 if name == "offload_layers" else 1
        if value is not None and value < least:
            raise RecipeError(f"--{name.replace('_', '-')} is {value}", fix=f"give {least} or more")
    if serving.draft_tokens is not None and serving.speculative is None:
        raise RecipeError(
            f"{serving.draft_tokens} draft tokens, and nothing that drafts", fix="give --draft or --lookup"
        )
    if serving.utilization is not None and not 0 < serving.utilization <= 1:
        raise RecipeError(
            f"utilization {serving.utilization:g} is not above 0 and up to 1", fix="give a share, such as 0.9"
        )
    refuse(serving, **facts.lacks)


def refuse(serving: Serving, **unknown: str) -> None:
    """Raises RecipeError for a field that is set and that the engine has nothing for; the text is the fix."""
    plain = serving.plain()
    for name, fix in unknown.items():
        value = getattr(serving, name)
        if value != getattr(plain, name):
            shown = "" if name == "api_key" else f" (asked for: {value})"
            raise RecipeError(f"{serving.engine} {serving.version} has no {name.replace('_', ' ')}{shown}", fix=fix)


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
    """Returns the user's own words; engines have more flags than the data: only those known to be gone are refused."""
    gone = removed(serving.engine, serving.version)
    for word, after in pairwise((*serving.extra, "")):
        name, _, value = word.partition("=")
        old = gone.get(name) or gone.get(f"{name} {value or after}")
        if old is not None:
            fix = f"use {old.replacement or 'another version'}"
            raise UnknownNameError(f"{serving.engine} {serving.version} has no {old.words}", fix=fix)
    return serving.extra


def _shown(serving: Serving, setting: Setting) -> str:
    if serving.api_key and setting.value == serving.api_key:
        return f"{setting.name}{HIDDEN}"
    return f"{setting.name}{setting.value}" if setting.name.endswith("=") else shlex.join(setting.words)

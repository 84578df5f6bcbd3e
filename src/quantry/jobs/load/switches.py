"""The switches that `quantry tune` tries: their values on each engine, and the command that serves with them.

A switch is an option of `quantry serve`, or another artefact of the same model. `--switches` takes names, with values
to try only those: `kv,parallel=8,parallel=16`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantry import registry
from quantry.engines.contract import catalogue
from quantry.errors import QuantryError

KV, PREFIX, PARALLEL, CHUNKED, LOOKUP, DRAFT, ARTEFACT = (
    "kv", "prefix-cache", "parallel", "chunked-prefill", "lookup", "draft", "artefact",
)  # fmt: skip
NAMES = (KV, PREFIX, PARALLEL, CHUNKED, LOOKUP, DRAFT)
SPECULATION = (LOOKUP, DRAFT)  # only one of them can be on
VALUED = (KV, PARALLEL)  # the others are on or off
FLAGS = {"prefix_cache": "--no-prefix-cache", "chunked_prefill": "--no-chunked-prefill"}  # that turn them off


@dataclass(frozen=True, slots=True)
class Change:
    """One switch set to one value."""

    switch: str
    value: str
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None  # another artefact

    @property
    def name(self) -> str:
        if self.value == "off":
            return f"no {self.switch}"
        return self.switch if self.value == "on" else f"{self.switch} {self.value}"

    @property
    def group(self) -> str:
        """The group of a change, of which a server can have one change only."""
        return "speculation" if self.switch in SPECULATION else self.switch


@dataclass(frozen=True, slots=True)
class Switches:
    """The switches of an engine under a load."""

    engine: str
    concurrency: int
    shares_prefix: bool  # the prompts may share a prefix
    parallel: int | None = None  # sequences at once of the default server; None: the engine's own number
    draft: str | Path | None = None

    def changes(self, words: Sequence[str] | None, others: Sequence[str | Path] = ()) -> list[Change]:
        """Returns the changes to try one at a time, in the order of NAMES.

        `words` are names of switches, with a value to try only that; None tries all that the engine has and the load
        can show. `others` are other artefacts to try. Raises QuantryError if a switch or value is wrong, or if there is
        nothing to try.
        """
        wanted = self._usual() if words is None else [self._parsed(word) for word in words]
        changes = [
            change
            for name, value in wanted
            for change in ([self._change(name, value)] if value else self._all_changes(name))
        ]
        changes += [Change(ARTEFACT, Path(other).name, model=str(other)) for other in others]
        if not changes:
            tunable = ", ".join(engine.name for engine in catalogue.ranked() if engine.switches)
            raise QuantryError(
                f"there is nothing to try on {self.engine}", fix=f"give other artefacts, or an engine of: {tunable}"
            )
        distinct = {(change.switch, change.value, change.model): change for change in changes}
        return sorted(distinct.values(), key=lambda change: (*NAMES, ARTEFACT).index(change.switch))

    @property
    def _facts(self) -> catalogue.Engine:
        return catalogue.engine_facts(self.engine)

    def _usual(self) -> list[tuple[str, str | None]]:
        shown = {PREFIX: self.shares_prefix, DRAFT: self.draft is not None}
        return [(name, None) for name in NAMES if name in self._facts.switches and shown.get(name, True)]

    def _parsed(self, word: str) -> tuple[str, str | None]:
        name, equals, value = word.strip().partition("=")
        registry.check("switch", name, NAMES)
        known = self._facts.switches
        if name not in known:
            raise QuantryError(
                f"{self.engine} has no switch {name} that can be set",
                fix=f"leave it out (it has {', '.join(known) or 'none'})",
            )
        if value and name not in VALUED:
            raise QuantryError(f"the switch {name} takes no value, and is given {value!r}", fix=f"write {name} alone")
        if equals and not value:
            raise QuantryError(f"the switch {word!r} lacks its value", fix=f"write {name} alone, or {name}=VALUE")
        if name == PARALLEL and value and not (value.isdigit() and int(value) > 0):
            raise QuantryError(f"parallel is {value!r}", fix="give a number above 0, such as parallel=8")
        if name == DRAFT and self.draft is None:
            raise QuantryError("the switch draft needs a draft model", fix="name one with --draft")
        return name, value or None

    def _all_changes(self, name: str) -> list[Change]:
        values: Sequence[str] = ("",)
        if name == KV:
            values = self._facts.kv_cache.tuned
        elif name == PARALLEL:
            numbers = {self.concurrency, max(1, self.concurrency // 2)} - {self.parallel or self._facts.server.slots}
            values = [str(number) for number in sorted(numbers)]
        return [self._change(name, value) for value in values]

    def _change(self, name: str, value: str) -> Change:
        if name == KV:
            return Change(KV, value, {"kv": value})
        if name == PARALLEL:
            return Change(PARALLEL, value, {"parallel": int(value)})
        if name == LOOKUP:
            return Change(LOOKUP, "on", {"lookup": True})
        if name == DRAFT:
            return Change(DRAFT, Path(str(self.draft)).name, {"draft": str(self.draft)})
        return Change(name, "off", {name.replace("-", "_"): False})


def serve_words(model: str, options: Mapping[str, Any]) -> list[str]:
    """Returns the command `quantry serve` with these options."""
    words, extra = ["quantry", "serve", model], tuple(options.get("extra") or ())
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is None or name == "extra" or (value is False and name not in FLAGS):
            continue
        if isinstance(value, bool):
            words.append(flag if value else FLAGS[name])
        else:
            words += [flag, str(value)]
    return [*words, "--", *extra] if extra else words

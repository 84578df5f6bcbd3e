"""The switches that `quantry tune` tries: what each is set to, on which engine, and the words that serve with it.

A switch is a field of `serving.Options` (or another artefact of the same model). `--switches` takes names, and values
where only some are to be tried: `kv,parallel=8,parallel=16`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantry.engines.contract import catalogue
from quantry.errors import QuantryError, UnknownNameError
from quantry.registry import suggest

KV, PREFIX, PARALLEL, CHUNKED, LOOKUP, DRAFT, ARTEFACT = (
    "kv", "prefix-cache", "parallel", "chunked-prefill", "lookup", "draft", "artefact",
)  # fmt: skip
NAMES = (KV, PREFIX, PARALLEL, CHUNKED, LOOKUP, DRAFT)
SPECULATION = (LOOKUP, DRAFT)  # two ways to do one thing
VALUED = (KV, PARALLEL)  # the others are on or off
FLAGS = {"prefix_cache": "--no-prefix-cache", "chunked_prefill": "--no-chunked-prefill"}  # when they are off


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
        """Of changes in one group only one can be made."""
        return "speculation" if self.switch in SPECULATION else self.switch


def changes(
    words: Sequence[str] | None,
    engine: str,
    *,
    concurrency: int,
    parallel: int | None = None,
    shared: bool,
    draft: str | Path | None = None,
    others: Sequence[str | Path] = (),
) -> list[Change]:
    """What is tried one at a time, in the order of NAMES; `words` of None are all that the engine and the load have."""
    asked = [_piece(word, engine) for word in words] if words is not None else _usual(engine, shared, draft)
    if words is not None and (DRAFT, None) in asked and draft is None:
        raise QuantryError("the switch draft needs a draft model", fix="name one with --draft")
    slots = parallel or catalogue.engine(engine).server.slots
    found = [
        change
        for name, value in asked
        for change in ([_change(name, value, draft)] if value else _all(name, engine, concurrency, slots, draft))
    ]
    found += [Change(ARTEFACT, Path(other).name, model=str(other)) for other in others]
    if not found:
        tunable = ", ".join(known.name for known in catalogue.ranked() if known.switches)
        raise QuantryError(
            f"there is nothing to try on {engine}", fix=f"give other artefacts, or an engine of: {tunable}"
        )
    return sorted(_distinct(found), key=_order)


def serve_words(model: str, options: Mapping[str, Any]) -> list[str]:
    """`quantry serve` with these fields of `serving.Options`."""
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


def _piece(word: str, engine: str) -> tuple[str, str | None]:
    name, _, value = word.strip().partition("=")
    if name not in NAMES:
        raise UnknownNameError(f"unknown switch {name!r}", fix=suggest(name, NAMES))
    known = catalogue.engine(engine).switches
    if name not in known:
        raise QuantryError(
            f"{engine} has no switch {name} that can be set", fix=f"leave it out (it has {', '.join(known) or 'none'})"
        )
    if value and name not in VALUED:
        raise QuantryError(f"the switch {name} takes no value, and is given {value!r}", fix=f"write {name} alone")
    if "=" in word and not value:
        raise QuantryError(f"the switch {word!r} lacks its value", fix=f"write {name} alone, or {name}=VALUE")
    if name == PARALLEL and value and not (value.isdigit() and int(value) > 0):
        raise QuantryError(f"parallel is {value!r}", fix="give a number above 0, such as parallel=8")
    return name, value or None


def _usual(engine: str, shared: bool, draft: str | Path | None) -> list[tuple[str, str | None]]:
    known = catalogue.engine(engine).switches
    without = {*(() if shared else (PREFIX,)), *(() if draft else (DRAFT,))}
    return [(name, None) for name in NAMES if name in known and name not in without]


def _all(name: str, engine: str, concurrency: int, slots: int | None, draft: str | Path | None) -> list[Change]:
    if name == KV:
        values = list(catalogue.engine(engine).kv_cache.tuned)
    elif name == PARALLEL:
        values = [str(one) for one in sorted({concurrency, max(1, concurrency // 2)}) if one != slots]
    else:
        values = [""]
    return [_change(name, value, draft) for value in values]


def _change(name: str, value: str, draft: str | Path | None) -> Change:
    if name == KV:
        return Change(KV, value, {"kv": value})
    if name == PARALLEL:
        return Change(PARALLEL, value, {"parallel": int(value)})
    if name == LOOKUP:
        return Change(LOOKUP, "on", {"lookup": True})
    if name == DRAFT:
        return Change(DRAFT, Path(str(draft)).name, {"draft": str(draft)})
    return Change(name, "off", {name.replace("-", "_"): False})


def _distinct(found: Sequence[Change]) -> list[Change]:
    return list({(one.switch, one.value, one.model): one for one in found}.values())


def _order(change: Change) -> int:
    return (*NAMES, ARTEFACT).index(change.switch)

"""Conditions on facts: the grammar of every.toml, rules.toml and engines/*.toml.

A condition is a table of facts, all of which must agree:

    bits = 4                                  equal
    bits = [4, 8]                             one of these
    capability = { at_least = 75, below = 100 }
    device_columns = { multiple_of = 64 }     or not_multiple_of; a text names another fact: "group"
    format = { not = "awq" }                  or { not = [...] }
    packages = { has = "conch" }              or lacks
    is = "wna16"                              all conditions of [cases.wna16]; or a list of cases
    any = [{ ... }, { ... }]                  at least one of these tables

An unknown fact (None) agrees with nothing. facts.py lists the facts of a deployment and its layers, rules.toml those
of a request and an option.
"""

import re
from collections.abc import Callable, Collection, Mapping
from operator import ge, gt, le, lt
from typing import Any

from quantry.engines.contract.catalogue import Conditions
from quantry.planning.facts import WORDS, Facts

COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "at_least": ge,
    "above": gt,
    "at_most": le,
    "below": lt,
    "multiple_of": lambda value, step: step != 0 and value % step == 0,
    "not_multiple_of": lambda value, step: step != 0 and value % step != 0,
}
SPELLED = {
    "at_least": "of at least {}",
    "above": "above {}",
    "at_most": "of at most {}",
    "below": "below {}",
    "multiple_of": "a multiple of {}",
    "not_multiple_of": "no multiple of {}",
    "not": "other than {}",
    "has": "{}",
    "lacks": "without {}",
}


def agrees(conditions: Conditions, facts: Facts, cases: Mapping[str, Conditions]) -> bool:
    """Returns True if all conditions hold; `cases` are the named tables that "is" refers to."""
    return all(holds(name, wanted, facts, cases) for name, wanted in conditions.items())


def holds(name: str, wanted: Any, facts: Facts, cases: Mapping[str, Conditions]) -> bool:
    """Returns True if one entry of a table of conditions holds."""
    if name == "is":
        return all(agrees(cases[case], facts, cases) for case in ([wanted] if isinstance(wanted, str) else wanted))
    if name == "any":
        return any(agrees(table, facts, cases) for table in wanted)
    value = facts[name]
    if value is None:
        return False
    if isinstance(wanted, Mapping):
        return all(_compares(value, how, limit, facts) for how, limit in wanted.items())
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def _compares(value: Any, how: str, limit: Any, facts: Facts) -> bool:
    if how == "not":
        return value not in limit if isinstance(limit, list) else bool(value != limit)
    if how in ("has", "lacks"):
        return (limit in value) == (how == "has")
    number = facts[limit] if isinstance(limit, str) else limit
    if number is None:
        return False
    values = value if isinstance(value, tuple) else (value,)
    results = [COMPARE[how](part, number) for part in values]
    return any(results) if how == "not_multiple_of" else all(results)


def spell_need(needs: Conditions, name: str, facts: Facts) -> str:
    """Spells a need that is not met, and the fact: "bits 4 or 8, not 3"."""
    wanted = needs[name]
    if name == "any":
        return " or ".join(" and ".join(_wanted(key, value) for key, value in table.items()) for table in wanted)
    if name == "is":
        return str(wanted)
    value = "" if name in ("packages", "features") else f", not {_spell_fact(name, facts[name])}"
    return _wanted(name, wanted) + value


def _wanted(name: str, wanted: Any) -> str:
    if isinstance(wanted, Mapping):
        limits = " and ".join(SPELLED[how].format(_limit(name, limit)) for how, limit in wanted.items())
    else:
        limits = _limit(name, wanted)
    return f"{WORDS.get(name, name)} {limits}"


def _limit(name: str, limit: Any) -> str:
    if isinstance(limit, list):
        values = [_spell_fact(name, value) for value in limit]
        return " or ".join(filter(None, [", ".join(values[:-1]), values[-1]]))
    return f"the {WORDS[limit]}" if limit in WORDS else _spell_fact(name, limit)


def fill(text: str, facts: Facts) -> str:
    """Replaces the names of facts in a sentence of the data ("{layer} has {columns} inputs") by their values."""
    return re.sub(r"\{(\w+)\}", lambda match: _spell_fact(match[1], facts[match[1]]), text)


def _spell_fact(name: str, value: Any) -> str:
    if name == "capability" and isinstance(value, int):
        return f"{value // 10}.{value % 10}"
    if name == "group" and value == -1:
        return "-1 (none)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Collection) and not isinstance(value, str):
        return ", ".join(map(str, value)) or "none"
    return str(value)

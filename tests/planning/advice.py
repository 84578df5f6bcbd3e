"""Judges answers of `quantry plan` by advice.toml: what must and must not be in them.

python tests/planning/advice.py        # how many requests hold, and what is wrong with the others
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from command import command

QUALITY = ("as published", "lossless", "near lossless", "very good", "good", "fair", "poor")


def requests() -> list[dict[str, Any]]:
    """Returns the rows of advice.toml."""
    rows: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("advice.toml").read_text())["request"]
    return rows


def faults(row: Mapping[str, Any]) -> list[str]:
    """Returns what is wrong with the answer to a request; nothing if it holds."""
    done = command("plan", *shlex.split(row["ask"]), "--json")
    if "error" in row:
        refused = done.returncode == 2 and re.search(row["error"], done.stderr)
        return [] if refused else [f"not refused with {row['error']!r}: {done.stderr.strip()[:160]!r}"]
    if not done.stdout.startswith("{"):
        return [f"exit code {done.returncode}: {done.stderr.strip()[:160]}"]
    return list(_faults(row, json.loads(done.stdout)))


def _faults(row: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
    options = answer["options"]
    if row.get("empty"):
        if options or not (answer["nearest"] or answer["notes"]):
            yield f"{len(options)} options, and nothing should be offered but help"
        return
    if not options and not (row.get("may_be_empty") and (answer["nearest"] or answer["notes"])):
        yield "nothing is offered"
    text = json.dumps(answer)
    commands = " ; ".join(shlex.join(words) for words in options[0]["commands"].values() if words) if options else ""
    for key, value in row.get("first", {}).items():
        if options and not _holds(_fact(options, options[0], key), value):
            yield f"first: {key} is {_fact(options, options[0], key)!r}, not {value}"
    if "some" in row and not any(_all(options, option, row["some"]) for option in options):
        yield f"no option has {row['some']}"
    if "none" in row and any(_all(options, option, row["none"]) for option in options):
        yield f"an option has {row['none']}"
    patterns = ((key, commands if "command" in key else text) for key in ("command", "not_command", "says", "not_says"))
    for key, where in patterns:
        for pattern in row.get(key, ()):
            if (re.search(pattern, where) is None) != key.startswith("not_"):
                yield f"{key}: {pattern}"


def _all(options: list[dict[str, Any]], option: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    return all(_holds(_fact(options, option, key), value) for key, value in facts.items())


def _fact(options: list[dict[str, Any]], option: Mapping[str, Any], key: str) -> Any:
    if key == "used":
        return option["memory"]["per_device"] / option["memory"]["device"]
    if key == "user":
        return option["speed"]["decode_tokens_per_s"] / option["layout"]["concurrency"]
    if key == "dominated":
        return sum(_beats(other, option) for other in options)
    value: Any = option
    for part in key.split("."):
        value = value[part]
    return value


def _beats(other: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    """Says if another option is as good and faster in both phases."""
    better: bool = QUALITY.index(other["quality"]) <= QUALITY.index(option["quality"])
    mine, theirs = option["speed"], other["speed"]
    faster: bool = theirs["decode_tokens_per_s"] > 1.02 * mine["decode_tokens_per_s"]
    return better and faster and bool(theirs["first_token_s"] <= mine["first_token_s"])


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, list):
        return any(_holds(value, one) for one in wanted)
    if isinstance(wanted, dict):
        return bool(wanted.get("least", float("-inf")) <= value <= wanted.get("most", float("inf")))
    return fnmatchcase(str(value), wanted) if isinstance(wanted, str) else bool(value == wanted)


if __name__ == "__main__":
    rows = requests()
    wrong = {row["ask"]: found for row in rows if (found := faults(row))}
    for ask, found in wrong.items():
        print(f"{ask}\n    " + "\n    ".join(found))
    print(json.dumps({"requests": len(rows), "hold": len(rows) - len(wrong)}))

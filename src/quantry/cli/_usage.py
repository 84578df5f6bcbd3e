"""Wrong words of a command line in one line, where typer draws a box."""

import re
from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

PARSED = re.compile(r"Input should be a valid (number|integer).*", re.DOTALL)
NUMBERS = {"number": "a number", "integer": "a whole number"}


def usage_line(error: Any, words: Sequence[str]) -> str:
    """Returns the line of an error that typer found in the `words` of a command line."""
    message = PARSED.sub(lambda found: _not_a_number(error, words, NUMBERS[found[1]]), error.format_message())
    message = " ".join(message.split()).rstrip(".")
    context = getattr(error, "ctx", None)
    fix = f"see {context.command_path} --help" if context else "see quantry --help"
    problem, _, meant = message.partition(". Did you mean ")
    return f"{problem[:1].lower()}{problem[1:]}; {f'did you mean {meant}' if meant else fix}"


def _not_a_number(error: Any, words: Sequence[str], kind: str) -> str:
    """Says which word is not a number: the one behind the option, or after its equals sign."""
    names = getattr(getattr(error, "param", None), "opts", ())
    behind = (after for word, after in pairwise(words) if word in names)
    joined = (word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word)
    value = next(chain(behind, joined), None)
    return f"{value[:40]!r} is not {kind}" if value is not None else f"it is not {kind}"

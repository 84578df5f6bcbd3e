"""The texts that a user names, and the weight of each: `chat.jsonl:3,code.txt:1`.

A path that exists is taken as it is, whatever commas and colons it has. No torch is needed to read this.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantry.errors import QuantryError
from quantry.models.reader import DEMO

Data = str | Path | Sequence[str | Path] | Mapping[str, float] | None

LEAST, MOST = 0.001, 1000.0  # of a weight
NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?|\.[0-9]{1,9}")
EXAMPLE = "write it as chat.jsonl:3,code.txt:1"


@dataclass(frozen=True, slots=True)
class WeightedText:
    """A text by its path, None for the text of the package, and how much of a mixture it is."""

    path: Path | None
    weight: float = 1.0


def texts_of(data: Data) -> tuple[WeightedText, ...]:
    """Returns the texts that `data` names: one path, `chat.jsonl:3,code.txt:1`, a list of these, or paths with weights.

    Raises QuantryError for a weight that is no number from 0.001 to 1000, an empty name, or a text that is named twice.

    >>> [(str(text.path), text.weight) for text in texts_of("chat.jsonl:3,code.txt")]
    [('chat.jsonl', 3.0), ('code.txt', 1.0)]
    """
    if data is None or isinstance(data, Path):
        return (WeightedText(data),)
    texts = tuple(_texts(data))
    if not texts:
        raise QuantryError("no text is given to calibrate on", fix="leave the data out for the built-in text")
    _check_once(texts)
    return texts


def listed(text: str, is_entry: Callable[[str], bool]) -> list[str]:
    """Splits a list at its commas, but not inside of an entry."""
    pieces, entries, start = text.split(","), list[str](), 0
    while start < len(pieces):
        ends = range(len(pieces), start + 1, -1)
        end = next((end for end in ends if is_entry(",".join(pieces[start:end]).strip())), start + 1)
        entries.append(",".join(pieces[start:end]).strip())
        start = end
    return entries


def exists(name: str) -> bool:
    """Says if a path is there, or is the word for the text of the package."""
    return name == DEMO or os.path.exists(os.path.expanduser(name))  # noqa: PTH110,PTH111 - False for any odd name


def _texts(data: str | Sequence[str | Path] | Mapping[str, float]) -> Iterator[WeightedText]:
    if isinstance(data, Mapping):
        for name, weight in data.items():
            yield WeightedText(_path(str(name)), _weight(str(weight), str(name)))
        return
    for entry in listed(data, _is_entry) if isinstance(data, str) else data:
        yield WeightedText(entry) if isinstance(entry, Path) else _text(entry)


def _is_entry(text: str) -> bool:
    name, _, weight = text.rpartition(":")
    return exists(text) or (exists(name) and "," not in weight)


def _text(entry: str) -> WeightedText:
    """Reads a path, or a path and its weight."""
    name, colon, weight = entry.rpartition(":")
    if exists(entry) or not colon or "/" in weight or "\\" in weight:  # also `C:\text.txt`
        return WeightedText(_path(entry))
    return WeightedText(_path(name), _weight(weight, name))


def _path(name: str) -> Path:
    if not name.strip():
        raise QuantryError("a text to calibrate on has no name", fix=EXAMPLE)
    return Path(name).expanduser()


def _weight(text: str, name: str) -> float:
    value = float(text) if NUMBER.fullmatch(text) else 0.0
    if not LEAST <= value <= MOST:
        raise QuantryError(
            f"the weight {text[:40]!r} of {name[-60:]} is not a number from {LEAST:g} to {MOST:g}", fix=EXAMPLE
        )
    return value


def _check_once(texts: Sequence[WeightedText]) -> None:
    paths = [str(text.path) if str(text.path) == DEMO else str(Path(str(text.path)).absolute()) for text in texts]
    twice = next((text for number, text in enumerate(texts) if paths[number] in paths[:number]), None)
    if twice:
        raise QuantryError(f"{twice.path} is given twice", fix="give it once, with the weight of both")

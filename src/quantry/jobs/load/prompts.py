"""Whether prompts can use a prefix cache at all: what they share, and whether it stands where a cache looks for it.

A prefix cache knows a prompt up to the first token that differs. A date or a number at the head makes every prompt new
from there on, however long the instructions after it that all of them share.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantry.errors import QuantryError

SPAN = 8  # words in a row that count as shared when they stand in most prompts
MOST = 0.5
LOOKED_AT = 200  # prompts of a file
LONG = 0.25  # of a prompt: a shared part worth moving
UNUSED = 0.25  # a hit rate under this much of what is shared is next to none
FIELDS = ("prompt", "instruction", "question", "input", "context", "content", "text")  # guidellm's, in its order
FIRST = ("system_prompt", "system", "prefix")  # that it puts before them


@dataclass(frozen=True, slots=True)
class Shared:
    """Of the words of an average prompt: those at its head that most others begin with, and those they have at all."""

    head: float
    anywhere: float


def shared(prompts: Sequence[str]) -> Shared | None:
    """What prompts have in common; None of fewer than three, where most of the others is nobody."""
    texts = [prompt.split() for prompt in prompts[:LOOKED_AT] if prompt.strip()]
    if len(texts) < 3:
        return None
    runs = Counter(run for text in texts for run in {tuple(text[at : at + SPAN]) for at in _starts(text)})
    bar = MOST * len(texts)
    head = _usual_head(texts, bar)
    return Shared(_mean(_begun(text, head) for text in texts), _mean(_covered(text, runs, bar) for text in texts))


def read(file: Path) -> list[str] | None:
    """The prompts of a data set as guidellm sends them; None of kinds that are not looked into."""
    kind = file.suffix.lower()
    try:
        if kind == ".txt":
            return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:LOOKED_AT]
        if kind in (".jsonl", ".json"):
            return _prompts(_rows(file.read_text(encoding="utf-8")))
        if kind == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                return _prompts(list(csv.DictReader(lines)))
    except (OSError, ValueError, csv.Error) as error:
        raise QuantryError(
            f"{file} cannot be read: {str(error)[:120]}", fix="give JSON lines with a field prompt"
        ) from error
    return None


def advice(found: Shared | None, hit_rate: float | None) -> str | None:
    """What to say where prompts share much, and the cache does not see it; None where all is well."""
    if found is None or found.anywhere - found.head < LONG:
        return None
    if hit_rate is not None and hit_rate >= UNUSED * found.anywhere:
        return None
    told = "the engine does not tell its hit rate" if hit_rate is None else f"the hit rate was {hit_rate:.1%}"
    return (
        f"the prompts break the prefix cache: they share {found.anywhere:.0%} of their words but only {found.head:.0%} "
        f"at their head, and {told}; move what changes (a date, a number, a name) behind what stays the same"
    )


def unused(shared_prefix: int, prompt: int, hit_rate: float | None) -> str | None:
    """What to say where prompts do begin alike and the engine finds none of it."""
    share = shared_prefix / (shared_prefix + prompt)
    if share < LONG or hit_rate is None or hit_rate >= UNUSED * share:
        return None
    return (
        f"prompts begin with the same {shared_prefix} of {shared_prefix + prompt} tokens, and the hit rate was "
        f"{hit_rate:.1%}: the prefix cache is off, or too small to keep them"
    )


def _rows(text: str) -> list[dict[str, object]]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [row for row in (rows if isinstance(rows, list) else [rows]) if isinstance(row, dict)]


def _prompts(rows: Iterable[dict[str, object]]) -> list[str] | None:
    found = [" ".join(str(row[name]) for names in (FIRST, FIELDS) if (name := _present(row, names))) for row in rows]
    return found[:LOOKED_AT] if any(found) else None


def _present(row: dict[str, object], names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(row.get(name), str)), None)


def _starts(text: Sequence[str]) -> range:
    return range(len(text) - SPAN + 1)


def _usual_head(texts: Sequence[list[str]], bar: float) -> list[str]:
    """The longest head that most prompts have; there is only one."""
    head: list[str] = []
    alike = list(texts)
    while True:
        following = Counter(text[len(head)] for text in alike if len(text) > len(head))
        word, number = following.most_common(1)[0] if following else ("", 0)
        if number <= bar:
            return head
        alike = [text for text in alike if len(text) > len(head) and text[len(head)] == word]
        head.append(word)


def _begun(text: list[str], head: list[str]) -> float:
    """The share of a prompt that is the usual head, as far as it goes along with it."""
    same = next((at for at, (mine, usual) in enumerate(zip(text, head, strict=False)) if mine != usual), None)
    return (min(len(text), len(head)) if same is None else same) / len(text)


def _covered(text: list[str], runs: "Counter[tuple[str, ...]]", bar: float) -> float:
    """The share of a prompt that is in a run of words which most prompts have."""
    words = {at + step for at in _starts(text) if runs[tuple(text[at : at + SPAN])] > bar for step in range(SPAN)}
    return len(words) / len(text)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)

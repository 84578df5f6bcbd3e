"""What prompts share, and if a prefix cache can use it.

A prefix cache matches a prompt up to the first token that differs. A date or a number at the head makes every prompt
new from there on, even if all of them share long instructions after it.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from quantry.errors import QuantryError
from quantry.report.sizes import percent

SPAN = 8  # words in a row that count as shared if they are in most prompts
MOST = 0.5
SAMPLED = 200  # prompts of a file
LONG = 0.25  # of a prompt: a shared part worth moving
UNUSED = 0.25  # of the shared part: a lower hit rate is next to none
FIELDS = ("prompt", "instruction", "question", "input", "context", "content", "text")  # guidellm's, in its order
FIRST = ("system_prompt", "system", "prefix")  # fields that guidellm puts before them


@dataclass(frozen=True, slots=True)
class Shared:
    """Shares of an average prompt's words: those at the head of most prompts, and those anywhere in most prompts."""

    head: float
    anywhere: float


def shared(prompts: Sequence[str]) -> Shared | None:
    """Returns what prompts have in common; None for fewer than three, where "most of the others" means nothing."""
    texts = [prompt.split() for prompt in prompts[:SAMPLED] if prompt.strip()]
    if len(texts) < 3:
        return None
    runs = Counter(run for text in texts for run in {tuple(text[at : at + SPAN]) for at in _starts(text)})
    majority = MOST * len(texts)
    head = _common_head(texts, majority)
    return Shared(
        head=fmean(_share_of_head(text, head) for text in texts),
        anywhere=fmean(_share_in_runs(text, runs, majority) for text in texts),
    )


def read(file: Path) -> list[str] | None:
    """Returns the prompts of a data set as guidellm sends them; None for types of files that are not examined.

    Raises QuantryError if the file cannot be read.
    """
    suffix = file.suffix.lower()
    try:
        if suffix == ".txt":
            return [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()][:SAMPLED]
        if suffix in (".jsonl", ".json"):
            return _prompts(_rows(file.read_text(encoding="utf-8")))
        if suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                return _prompts(list(csv.DictReader(lines)))
    except (OSError, ValueError, csv.Error) as error:
        raise QuantryError(
            f"{file} cannot be read: {str(error)[:120]}", fix="give JSON lines with a field prompt"
        ) from error
    return None


def advice(common: Shared | None, hit_rate: float | None) -> str | None:
    """Returns advice if prompts share much that a prefix cache cannot use; None otherwise."""
    if common is None or common.anywhere - common.head < LONG:
        return None
    if hit_rate is not None and hit_rate >= UNUSED * common.anywhere:
        return None
    rate = "the engine does not report its hit rate" if hit_rate is None else f"the hit rate was {percent(hit_rate)}"
    return (
        f"the prompts break the prefix cache: they share {percent(common.anywhere)} of their words but only "
        f"{percent(common.head)} at the start, and {rate}; move what changes (a date, a number, a name) behind what "
        "stays the same"
    )


def unused(shared_prefix: int, prompt: int, hit_rate: float | None) -> str | None:
    """Returns a warning if prompts start with the same tokens and the engine uses none of that; None otherwise."""
    share = shared_prefix / (shared_prefix + prompt)
    if share < LONG or hit_rate is None or hit_rate >= UNUSED * share:
        return None
    return (
        f"prompts start with the same {shared_prefix} of {shared_prefix + prompt} tokens, and the hit rate was "
        f"{percent(hit_rate)}: the prefix cache is off, or too small to keep them"
    )


def _rows(text: str) -> list[dict[str, object]]:
    try:
        rows = json.loads(text)
    except ValueError:
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    return [row for row in (rows if isinstance(rows, list) else [rows]) if isinstance(row, dict)]


def _prompts(rows: Iterable[dict[str, object]]) -> list[str] | None:
    prompts = [" ".join(str(row[name]) for names in (FIRST, FIELDS) if (name := _present(row, names))) for row in rows]
    return prompts[:SAMPLED] if any(prompts) else None


def _present(row: dict[str, object], names: Sequence[str]) -> str | None:
    return next((name for name in names if isinstance(row.get(name), str)), None)


def _starts(text: Sequence[str]) -> range:
    return range(len(text) - SPAN + 1)


def _common_head(texts: Sequence[list[str]], majority: float) -> list[str]:
    """Returns the longest head that most prompts have; there is only one."""
    head: list[str] = []
    alike = list(texts)
    while True:
        following = Counter(text[len(head)] for text in alike if len(text) > len(head))
        word, number = following.most_common(1)[0] if following else ("", 0)
        if number <= majority:
            return head
        alike = [text for text in alike if len(text) > len(head) and text[len(head)] == word]
        head.append(word)


def _share_of_head(text: list[str], head: list[str]) -> float:
    """Returns the share of a prompt that agrees with the common head, up to the first difference."""
    same = next((at for at, (word, common) in enumerate(zip(text, head, strict=False)) if word != common), None)
    return (min(len(text), len(head)) if same is None else same) / len(text)


def _share_in_runs(text: list[str], runs: "Counter[tuple[str, ...]]", majority: float) -> float:
    words = {at + step for at in _starts(text) if runs[tuple(text[at : at + SPAN])] > majority for step in range(SPAN)}
    return len(words) / len(text)

"""llama.cpp's names for the ways in which byte-level BPE cuts text before merging (`tokenizer.ggml.pre`).

A tokenizer that llama.cpp's authors have seen is recognized by a fingerprint, as in their converter; any other by the
normalizer and pre-tokenizer of its tokenizer.json. Both are in pretokenizers.toml. A tokenizer that cuts text in
another way is refused.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from typing import Any

from quantry.errors import CheckpointError
from quantry.llamacpp.tokens import CARRY
from quantry.storage import read_data

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # the regex inside ByteLevel
# llama.cpp does not compose characters. Qwen, OLMo and Command R do (NFC), but almost all text is composed already.
HARMLESS_NORMALIZERS = frozenset({"NFC"})


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """A row of the table: a name of llama.cpp, its regexes and its habits."""

    name: str
    regexes: tuple[str, ...]
    whole: bool = False  # a word of the vocabulary is one token, whatever the merges say
    bos: bool = False  # llama.cpp adds the beginning-of-text token unless the file says no


def probe_text() -> str:
    """Returns the text whose token ids are a tokenizer's fingerprint."""
    return str(_table()["text"])


def by_fingerprint(tokens: Sequence[int]) -> str | None:
    """Returns the name of the tokenizer that encodes the probe text as these token ids."""
    return fingerprints().get(sha256(str(list(tokens)).encode()).hexdigest())


@cache
def fingerprints() -> dict[str, str]:
    """Maps fingerprints to names; MPT and OLMo share one, and the converter gives the later name."""
    return {mark: name for name, marks in _table()["fingerprints"].items() for mark in marks}


def by_cuts(tokenizer: Mapping[str, Any]) -> PreTokenizer:
    """Returns the row for a tokenizer.json, by its normalizer, regexes and merges.

    Raises CheckpointError if no pre-tokenizer of llama.cpp does the same.
    """
    _check_model(tokenizer)
    for step in flatten(tokenizer.get("normalizer"), "normalizers"):
        if step["type"] not in HARMLESS_NORMALIZERS:
            raise CheckpointError(f"tokenizer.json has the normalizer {step['type']}, not in llama.cpp", fix=CARRY)
    cuts = tuple(_cuts(flatten(tokenizer.get("pre_tokenizer"), "pretokenizers")))
    rows = [row for row in rows_of_table() if row.regexes == cuts]
    if not rows:
        shown = " then ".join(cut if len(cut) <= 60 else f"{cut[:57]}..." for cut in cuts) or "nothing"
        raise CheckpointError(f"tokenizer.json cuts text by {shown}: no pre-tokenizer of llama.cpp does", fix=CARRY)
    whole = bool(tokenizer["model"].get("ignore_merges"))
    same = [row for row in rows if row.whole == whole]
    if not same and (word := _unmade(tokenizer)):
        raise CheckpointError(
            f"tokenizer.json has ignore_merges {str(whole).lower()} and the token {word!r}, which no merge makes; "
            f"llama.cpp's {rows[0].name} does the opposite",
            fix=CARRY,
        )
    return (same or rows)[0]


@cache
def rows_of_table() -> tuple[PreTokenizer, ...]:
    return tuple(PreTokenizer(**{**row, "regexes": tuple(row["regexes"])}) for row in _table()["cuts"])


def flatten(step: Mapping[str, Any] | None, key: str) -> Iterable[Mapping[str, Any]]:
    """Yields the steps of a normalizer or pre-tokenizer, with its sequences flattened."""
    if step is None:
        return
    if step.get("type") != "Sequence":
        yield step
        return
    for inner in step[key]:
        yield from flatten(inner, key)


def _check_model(tokenizer: Mapping[str, Any]) -> None:
    model = tokenizer["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise CheckpointError(f"tokenizer.json has {key} {model[key]!r}, not in llama.cpp", fix=CARRY)


def _cuts(steps: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yields each step of a pre-tokenizer as the regex whose matches it isolates."""
    for step in steps:
        match step:
            case {"type": "ByteLevel", "add_prefix_space": True}:
                yield "ByteLevel with a space in front"
            case {"type": "ByteLevel"}:
                if step.get("use_regex", True):
                    yield GPT2
            case {"type": "Digits", "individual_digits": individual}:
                yield r"\p{N}" if individual else r"\p{N}+"
            case {"type": "Split", "pattern": {"Regex": regex}} if _sets_apart(step, regex):
                yield regex.replace("\r", r"\r").replace("\n", r"\n")
            case {"type": "Split", "pattern": pattern}:
                yield f"{pattern} ({step.get('behavior')}, invert {step.get('invert')})"
            case _:
                yield str(step.get("type"))


def _sets_apart(step: Mapping[str, Any], regex: str) -> bool:
    """Returns True if matches become pieces and no text is lost: nothing lies between those of `...|\\s+`."""
    if step.get("invert", False):
        return step.get("behavior") in ("Removed", "Isolated") and regex.endswith(r"|\s+")
    return step.get("behavior") == "Isolated"


def _unmade(tokenizer: Mapping[str, Any]) -> str | None:
    """Returns a token of several bytes that no merge makes, or None."""
    added = {token["content"] for token in tokenizer.get("added_tokens", ())}
    made = {left + right for left, right in merge_pairs(tokenizer)}
    words = (word for word in tokenizer["model"]["vocab"] if len(word) > 1 and word not in added)
    return next((word for word in words if word not in made), None)


def merge_pairs(tokenizer: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    """Yields the merges of a tokenizer.json in order; older files write a merge as one string with a space."""
    for merge in tokenizer["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        yield left, right


@cache
def _table() -> dict[str, Any]:
    return read_data("quantry.llamacpp", "pretokenizers.toml")

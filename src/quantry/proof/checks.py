"""Checks before any model runs: unfinished or changed files, another vocabulary or tokenizer, a missing or doubled BOS,
another chat template. Every failed check has a name and a fix.

A GGUF file is read through llama.cpp, since llama.cpp will serve it; a folder through its tokenizer files.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from quantry.errors import CheckpointError, QuantryError
from quantry.llamacpp.model import LlamaModel
from quantry.llamacpp.trial import check_loads
from quantry.models.attention import text_config
from quantry.models.chat_template import TemplateLimitError, TemplateRefusalError
from quantry.models.reader import DEMO, demo_folder
from quantry.models.tokenizer import render_chat, template_of
from quantry.models.workspace import check_finished
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.quantizing.sources import ModelSource, open_source, tokenizer
from quantry.storage import ARTEFACT_FILE
from quantry.storage.reading import read_json

CONTEXT = 32  # tokens: llama.cpp only tokenizes here
START = 4000  # characters of the text that both models tokenize
PROBES = (
    "Hello world",
    "The quick brown fox didn't jump; it's 10:45, and 12,345.67 dollars are gone.",
    "def area(r: float) -> float:\n    return 3.14159 * r ** 2\n\n\tx != y && z[0]",
    "naïve café, größer, Привет, 今天天气很好, 한국어, 🙂 end  of   spaces ",
)
TALK = (
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3 + 3?"},
)
AGAIN = "write the artefact again with quantry quantize"
COPY = "copy the tokenizer's files from the reference"
REWRITE = "convert the reference to GGUF again"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check. Field names are the JSON names."""

    name: str
    ok: bool
    words: str
    fix: str = ""


def checks(reference: str | Path, artefact: str | Path, text: str = "") -> tuple[Check, ...]:
    """Checks an artefact against the model it was made from; `text` is what both will be measured on.

    The order is: finished, files, vocabulary, tokenizer, BOS, EOS, chat template. An artefact that cannot be read ends
    the list with a failed check. Raises QuantryError if the reference cannot be read.
    """
    return tuple(_checks(reference, artefact, text))


def _checks(reference: str | Path, artefact: str | Path, text: str) -> Iterator[Check]:
    path = demo_folder() if artefact == DEMO else Path(artefact).expanduser()
    yield (finished := _finished(path))
    if not finished.ok:
        return
    yield (whole := check_files(path))
    try:
        ours = open_source(artefact)
    except QuantryError as error:
        if whole.ok:
            yield Check("files", False, error.problem, error.fix)
        return
    original = open_source(reference)
    yield _vocabulary(original, ours)
    with closing(_open_tokenizer(original)) as theirs:
        try:
            mine = _open_tokenizer(ours)
        except QuantryError as error:
            yield Check("tokenizer", False, error.problem, error.fix)
            return
        with closing(mine):
            yield _tokens(theirs, mine, [*PROBES, _passage(text[:START], theirs.special_tokens)])
            yield from _ends(original, ours, theirs, mine)
            yield _template(theirs, mine)


def _finished(path: Path) -> Check:
    try:
        check_finished(path)
    except QuantryError as error:
        return Check("finished", False, error.problem, error.fix)
    return Check("finished", True, "the artefact is finished")


def check_files(path: Path) -> Check:
    """Compares the files that quantry.json lists with their recorded size and SHA-256."""
    folder = path.parent if path.is_file() else path
    note = folder / ARTEFACT_FILE
    if not note.is_file():
        return Check("files", True, "no quantry.json: only headers and sizes are held against each other")
    try:
        files = read_artefact_file(folder).get("files", {})
    except QuantryError as error:
        return Check("files", False, error.problem.replace(str(note), note.name), AGAIN)
    listed = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    for name, (size, digest) in listed.items():
        if problem := _problem(folder / name, size, digest):
            return Check("files", False, f"{name} {problem}", f"copy {name} again, or {AGAIN}")
    return Check("files", True, "all files are as they were written (SHA-256)")


def _problem(file: Path, size: int, digest: str) -> str:
    """Says what is wrong with a file; returns an empty text if nothing is."""
    if not file.is_file():
        return "is not there"
    if (present := file.stat().st_size) != size:
        return f"has {present:,} bytes where {size:,} were written" + (": it is truncated" if present < size else "")
    with file.open("rb") as data:
        return "" if hashlib.file_digest(data, "sha256").hexdigest() == digest else "has other bytes than were written"


def _vocabulary(original: ModelSource, ours: ModelSource) -> Check:
    expected, actual = (text_config(source.config).get("vocab_size") for source in (original, ours))
    if expected == actual:
        return Check("vocabulary", True, f"both have {expected} tokens")
    words = f"the artefact has a vocabulary of {actual}, the reference one of {expected}"
    return Check("vocabulary", False, words, "give the reference that the artefact was made from")


class ModelTokenizer:
    """The tokenizer and chat template of a model, as its tokenizer files define them."""

    fix = COPY

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.encode("", special=True)  # raises now if the tokenizer cannot be read

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer(self._source)

    @property
    def template(self) -> str | None:
        """The chat template."""
        return template_of(self._tokenizer)

    @property
    def special_tokens(self) -> Sequence[str]:
        """The texts of all special tokens."""
        return tuple(self._tokenizer.get_added_vocab())

    def encode(self, text: str, special: bool) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def render(self, talk: Sequence[dict[str, str]], template: str) -> str:
        return render_chat(self._tokenizer, talk, template=template, generation=True)

    def close(self) -> None:
        """Does nothing: no file is open."""


class GgufTokenizer(ModelTokenizer):
    """The tokenizer and chat template of a GGUF file, as llama.cpp reads them."""

    fix = REWRITE

    def __init__(self, source: ModelSource) -> None:
        check_loads(source.path)
        self._model = LlamaModel(source.path, context=CONTEXT)
        super().__init__(source)

    @property
    def template(self) -> str | None:
        return self._model.chat_template

    def encode(self, text: str, special: bool) -> list[int]:
        return self._model.tokenize(text, special)

    def close(self) -> None:
        self._model.close()


def _open_tokenizer(source: ModelSource) -> ModelTokenizer:
    return GgufTokenizer(source) if source.format == "gguf" else ModelTokenizer(source)


def _passage(text: str, special_tokens: Sequence[str]) -> str:
    """Returns the longest piece without special tokens: engines disagree on the spaces around these."""
    pieces = re.split("|".join(map(re.escape, special_tokens)), text) if special_tokens else [text]
    return max(pieces, key=len)


def _first_difference(expected: Sequence[Any], actual: Sequence[Any]) -> int:
    """Returns the first index at which two sequences differ; -1 if one is a prefix of the other."""
    pairs = enumerate(zip(expected, actual, strict=False))
    return next((index for index, pair in pairs if pair[0] != pair[1]), -1)


def _tokens(theirs: ModelTokenizer, mine: ModelTokenizer, texts: Sequence[str]) -> Check:
    """Checks that both models give the same tokens for the same text, without special tokens at its ends."""
    for text in texts:
        expected, actual = theirs.encode(text, special=False), mine.encode(text, special=False)
        if expected != actual:
            index = _first_difference(expected, actual)
            right, wrong = (ids[index] if len(ids) > max(index, 0) else None for ids in (expected, actual))
            counts = f"{text[:40]!r} becomes {len(actual)} tokens, {len(expected)} in the reference"
            return Check("tokenizer", False, f"{counts}; first {wrong}, not {right}", mine.fix)
    return Check("tokenizer", True, f"{len(texts)} texts give the same tokens")


def _ends(original: ModelSource, ours: ModelSource, theirs: ModelTokenizer, mine: ModelTokenizer) -> Iterator[Check]:
    """Checks the tokens that each model adds before and after a text."""
    settings = [_settings(source) for source in (original, ours)]
    for index, (name, edge) in enumerate((("bos", "begins"), ("eos", "ends"))):
        expected, actual = (_added_tokens(model, PROBES[0])[index] for model in (theirs, mine))
        flags = [setting.get(f"add_{name}_token") for setting in settings]
        if expected != actual:
            yield Check(name, False, _edges(edge, expected, actual), mine.fix)
        elif None not in flags and flags[0] != flags[1]:
            words = f"tokenizer_config.json has add_{name}_token {flags[1]}, in the reference it is {flags[0]}"
            yield Check(name, False, words, mine.fix)
        else:
            yield Check(name, True, f"a text {edge} with {_spelled(expected)} in both")


def _added_tokens(model: ModelTokenizer, text: str) -> tuple[list[int], list[int]]:
    bare, full = model.encode(text, special=False), model.encode(text, special=True)
    starts = range(len(full) - len(bare) + 1)
    place = next((start for start in starts if full[start : start + len(bare)] == bare), None)
    if place is None:  # special tokens changed the text's own tokens: the whole is compared
        return full, []
    return full[:place], full[place + len(bare) :]


def _edges(edge: str, expected: list[int], actual: list[int]) -> str:
    """Describes a difference; a doubled token is the most common mistake and is named."""
    doubled = ", which is doubled" if len(expected) == 1 and actual == expected * 2 else ""
    return f"a text {edge} with {_spelled(actual)}{doubled}; in the reference with {_spelled(expected)}"


def _spelled(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if tokens else "no token of its own"


def _settings(source: ModelSource) -> dict[str, Any]:
    file = source.path / "tokenizer_config.json"
    if source.format != "safetensors" or not file.is_file():
        return {}
    return read_json(file, fix="copy it from the original model", error=CheckpointError)


def _template(theirs: ModelTokenizer, mine: ModelTokenizer) -> Check:
    """Checks that a conversation becomes the same text; if none can be rendered, that the templates are the same."""
    expected, actual = theirs.template, mine.template
    if expected is None:
        return Check("chat-template", True, "the reference has no chat template to compare")
    if actual is None:
        return Check("chat-template", False, "the artefact has no chat template and the reference has one", mine.fix)
    for talk in (TALK, TALK[1:], TALK[1:2]):
        try:
            wanted = theirs.render(talk, expected)
        except TemplateRefusalError:  # of these roles in this order
            continue
        except TemplateLimitError as error:
            return Check("chat-template", False, f"in the reference, {error.problem}", error.fix)
        try:
            rendered = mine.render(talk, actual)
        except TemplateRefusalError as error:
            return Check("chat-template", False, f"the artefact's chat template fails: {error.reason}", mine.fix)
        except TemplateLimitError as error:
            return Check("chat-template", False, error.problem, mine.fix)
        except CheckpointError:  # llama.cpp reads some tokenizers that transformers cannot
            break
        return _same_text(wanted, rendered, mine.fix)
    return _same_text(expected, actual, mine.fix)


def _same_text(expected: str, actual: str, fix: str) -> Check:
    if expected == actual:
        return Check("chat-template", True, "a conversation becomes the same text")
    near = max(_first_difference(expected, actual) - 10, 0)
    words = (
        f"a conversation becomes ...{actual[near : near + 40]!r}, in the reference ...{expected[near : near + 40]!r}"
    )
    return Check("chat-template", False, words, fix)

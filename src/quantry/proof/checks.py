"""What can be seen to be wrong before any model runs: unfinished or changed files, another vocabulary or tokenizer, a
missing or doubled BOS, another chat template. Each is named, and each comes with a way to mend it.

A GGUF file is asked through llama.cpp itself, since it is llama.cpp that will read it; a folder through its own files.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

from quantry.errors import CheckpointError, QuantryError
from quantry.llamacpp.model import Model
from quantry.models.attention import text_config
from quantry.models.reader import DEMO, demo_folder
from quantry.proof.sources import ModelSource, check_finished, open_source, tokenizer
from quantry.storage import ARTEFACT_FILE

CONTEXT = 32  # tokens: llama.cpp only tokenizes here
START = 4000  # characters of the text that both tokenize
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
    """One thing that was looked at. Field names are the JSON names."""

    name: str
    ok: bool
    words: str
    fix: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tongue(Protocol):
    """How a model reads text: its tokens, and its chat template."""

    fix: str

    @property
    def template(self) -> str | None: ...
    @property
    def marks(self) -> Sequence[str]: ...  # what special tokens look like in a text

    def encode(self, text: str, special: bool) -> list[int]: ...

    def render(self, talk: Sequence[dict[str, str]], template: str) -> str: ...

    def close(self) -> None: ...


def checks(reference: str | Path, artefact: str | Path, text: str = "") -> tuple[Check, ...]:
    """Looks at an artefact beside the model it was made from; `text` is what both will be measured on.

    Whether it is finished, its files, vocabulary, tokenizer, BOS, EOS and chat template, in this order. What cannot be
    read ends the list. A reference that cannot be read is an error.
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
    with closing(_tongue(original)) as first:
        try:
            second = _tongue(ours)
        except QuantryError as error:
            yield Check("tokenizer", False, error.problem, error.fix)
            return
        with closing(second):
            yield _tokens(first, second, [*PROBES, _passage(text[:START], first.marks)])
            yield from _ends(original, ours, first, second)
            yield _template(first, second)


def _finished(path: Path) -> Check:
    try:
        check_finished(path)
    except QuantryError as error:
        return Check("finished", False, error.problem, error.fix)
    return Check("finished", True, "the artefact is finished")


def check_files(path: Path) -> Check:
    """The files that quantry.json lists, by size and SHA-256."""
    folder = path.parent if path.is_file() else path
    note = folder / ARTEFACT_FILE
    if not note.is_file():
        return Check("files", True, "no quantry.json: only headers and sizes are held against each other")
    try:
        listed = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in _listed(note).items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        return Check("files", False, f"quantry.json is damaged ({str(error)[:80]})", AGAIN)
    for name, (size, digest) in listed.items():
        if wrong := _changed(folder / name, size, digest):
            return Check("files", False, f"{name} {wrong}", f"copy {name} again, or {AGAIN}")
    return Check("files", True, f"{len(listed)} files are as they were written (SHA-256)")


def _listed(note: Path) -> dict[str, Any]:
    files: dict[str, Any] = json.loads(note.read_text())["files"]
    return files


def _changed(file: Path, size: int, digest: str) -> str:
    """What is wrong with a file, or nothing."""
    if not file.is_file():
        return "is not there"
    if (found := file.stat().st_size) != size:
        return f"has {found:,} bytes where {size:,} were written" + (": it is truncated" if found < size else "")
    with file.open("rb") as data:
        return "" if hashlib.file_digest(data, "sha256").hexdigest() == digest else "has other bytes than were written"


def _vocabulary(original: ModelSource, ours: ModelSource) -> Check:
    want, found = (text_config(source.config).get("vocab_size") for source in (original, ours))
    if want == found:
        return Check("vocabulary", True, f"both have {want} tokens")
    words = f"the artefact has a vocabulary of {found}, the reference one of {want}"
    return Check("vocabulary", False, words, "give the reference that the artefact was made from")


class _Folder:
    """The tokenizer of a folder, by its own files."""

    fix = COPY

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.encode("", special=True)  # one that cannot be read is refused here

    @cached_property
    def _tokenizer(self) -> Any:
        return tokenizer(self._source)

    @property
    def template(self) -> str | None:
        found = self._tokenizer.chat_template
        return found.get("default") if isinstance(found, dict) else found

    @property
    def marks(self) -> Sequence[str]:
        return tuple(self._tokenizer.get_added_vocab())

    def encode(self, text: str, special: bool) -> list[int]:
        return cast(list[int], self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])

    def render(self, talk: Sequence[dict[str, str]], template: str) -> str:
        options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
        return cast(str, self._tokenizer.apply_chat_template(list(talk), **options))

    def close(self) -> None:
        """Nothing is open."""


class _Gguf(_Folder):
    """What is in a GGUF file, as llama.cpp sees it; its template is rendered with the special tokens it has there."""

    fix = REWRITE

    def __init__(self, source: ModelSource) -> None:
        self._model = Model(source.path, context=CONTEXT)
        super().__init__(source)

    @property
    def template(self) -> str | None:
        return self._model.chat_template

    def encode(self, text: str, special: bool) -> list[int]:
        return self._model.tokenize(text, special)

    def close(self) -> None:
        self._model.close()


def _tongue(source: ModelSource) -> Tongue:
    return _Gguf(source) if source.format == "gguf" else _Folder(source)


def _passage(text: str, marks: Sequence[str]) -> str:
    """The longest piece without special tokens: engines differ in whether these take the spaces around them."""
    pieces = re.split("|".join(re.escape(mark) for mark in marks), text) if marks else [text]
    return max(pieces, key=len)


def _tokens(first: Tongue, second: Tongue, texts: Sequence[str]) -> Check:
    """The same text must give the same tokens, whatever stands at its ends."""
    for text in texts:
        want, found = first.encode(text, special=False), second.encode(text, special=False)
        if want != found:
            place = next((n for n, pair in enumerate(zip(want, found, strict=False)) if pair[0] != pair[1]), -1)
            one, other = (ids[place] if len(ids) > max(place, 0) else None for ids in (want, found))
            words = f"{text[:40]!r} becomes {len(found)} tokens, {len(want)} in the reference; first {other}, not {one}"
            return Check("tokenizer", False, words, second.fix)
    return Check("tokenizer", True, f"{len(texts)} texts give the same tokens")


def _ends(original: ModelSource, ours: ModelSource, first: Tongue, second: Tongue) -> Iterator[Check]:
    """What is put before and after every text."""
    settings = [_settings(source) for source in (original, ours)]
    for index, (name, edge) in enumerate((("bos", "begins"), ("eos", "ends"))):
        want, found = (_around(tongue, PROBES[0])[index] for tongue in (first, second))
        flags = [setting.get(f"add_{name}_token") for setting in settings]
        if want != found:
            yield Check(name, False, _edges(edge, want, found), second.fix)
        elif None not in flags and flags[0] != flags[1]:
            words = f"tokenizer_config.json has add_{name}_token {flags[1]}, in the reference it is {flags[0]}"
            yield Check(name, False, words, second.fix)
        else:
            yield Check(name, True, f"a text {edge} with {_spelled(want)} in both")


def _around(tongue: Tongue, text: str) -> tuple[list[int], list[int]]:
    """The tokens that are put before a text and after it."""
    bare, full = tongue.encode(text, special=False), tongue.encode(text, special=True)
    starts = range(len(full) - len(bare) + 1)
    place = next((start for start in starts if full[start : start + len(bare)] == bare), None)
    if place is None:  # then both sides are compared as a whole
        return full, []
    return full[:place], full[place + len(bare) :]


def _edges(edge: str, want: list[int], found: list[int]) -> str:
    """A doubled token is the most common mistake, and is called so."""
    doubled = ", which is doubled" if len(want) == 1 and found == want * 2 else ""
    return f"a text {edge} with {_spelled(found)}{doubled}; in the reference with {_spelled(want)}"


def _spelled(tokens: list[int]) -> str:
    return " ".join(map(str, tokens)) if tokens else "no token of its own"


def _settings(source: ModelSource) -> dict[str, Any]:
    file = source.path / "tokenizer_config.json"
    return json.loads(file.read_text()) if source.format == "safetensors" and file.is_file() else {}


def _template(first: Tongue, second: Tongue) -> Check:
    """The same conversation must become the same text; where none can be rendered, templates must be the same."""
    want, found = first.template, second.template
    if want is None:
        return Check("chat-template", True, "the reference has no chat template to compare")
    if found is None:
        return Check("chat-template", False, "the artefact has no chat template and the reference has one", second.fix)
    for talk in (TALK, TALK[1:], TALK[1:2]):
        try:
            right = first.render(talk, want)
        except Exception:  # a template refuses roles and orders with whatever error it likes
            continue
        try:
            given = second.render(talk, found)
        except CheckpointError:  # llama.cpp reads tokenizers that only it can
            break
        except Exception as error:
            return Check("chat-template", False, f"the artefact's chat template fails: {str(error)[:80]}", second.fix)
        return _rendered(right, given, second.fix)
    return _rendered(want, found, second.fix)


def _rendered(want: str, found: str, fix: str) -> Check:
    if want == found:
        return Check("chat-template", True, "a conversation becomes the same text")
    place = next((n for n, pair in enumerate(zip(want, found, strict=False)) if pair[0] != pair[1]), -1)
    near = max(place - 10, 0)
    words = f"a conversation becomes ...{found[near : near + 40]!r}, in the reference ...{want[near : near + 40]!r}"
    return Check("chat-template", False, words, fix)

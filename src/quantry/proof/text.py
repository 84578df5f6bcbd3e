"""Windows of a text: the token ids that every model is scored on.

The text is tokenized front to back, in pieces of PIECE characters, until there are enough tokens: a file of any size
needs the memory of its windows. All models see the same windows. Every window starts with what the tokenizer puts
before a text (a BOS, or nothing): a model trained with a BOS is far worse without one. JSON lines are read as
documents, as they are for calibration: chats in the model's chat template.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.models.attention import context_length
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import encode, prefix_of
from quantry.quantizing.calibration.data import exists, listed
from quantry.quantizing.calibration.documents import LINES
from quantry.quantizing.calibration.text import document_tokens

Texts = str | Path | Sequence[str | Path] | None

HELD_OUT = "held-out.txt"  # a text that the demo model was not trained on
PIECE = 1 << 20  # characters tokenized at a time: the tokenizers library needs some 75 bytes for each


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of one forward pass; those from `start` to the end are scored, each predicted from all before it."""

    tokens: tuple[int, ...]
    start: int = 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text file in UTF-8, read in pieces. Every method raises QuantryError if it cannot be read or is not UTF-8."""

    file: Path

    @property
    def name(self) -> str:
        return self.file.name

    def start(self, length: int) -> str:
        """Returns the first characters."""
        with _reading(self.file), self.file.open(encoding="utf-8") as text:
            return text.read(length)

    def pieces(self, size: int = PIECE) -> Iterator[str]:
        """Yields pieces of about `size` characters, each up to the end of a line if a line ends soon enough."""
        with _reading(self.file), self.file.open(encoding="utf-8") as text:
            while piece := text.read(size):
                yield piece + text.readline(size)

    def digest(self) -> str:
        """Returns the SHA-256 of the text."""
        digest = hashlib.sha256()
        for piece in self.pieces():
            digest.update(piece.encode())
        return digest.hexdigest()


def windows(
    text: str | TextFile, tokenizer: Any, length: int, count: int | None, *, option: str = "--length"
) -> list[Window]:
    """Cuts the first `count` windows (None: all) of `length` tokens each, BOS included; a shorter rest is dropped.

    `option` gave the length. Raises QuantryError if a window has no token to score, if `count` is below 1, or if the
    text is too short.
    """
    prefix = prefix_of(tokenizer)
    start = max(1, len(prefix))
    if length <= start:
        raise QuantryError(
            f"a window of {length} tokens has no token to score", fix=f"give a {option} of at least {start + 1}"
        )
    if count is not None and count < 1:
        raise QuantryError(f"{count} windows leave nothing to measure", fix="ask for at least 1")
    step = length - len(prefix)
    needed = None if count is None else count * step + len(prefix)
    tokens = _first(_tokens(text, tokenizer), needed)
    if tuple(tokens[: len(prefix)]) == tuple(prefix):  # every window gets its own
        tokens = tokens[len(prefix) :]
    available = len(tokens) // step
    if available == 0:
        name = "the text" if isinstance(text, str) else text.name
        raise QuantryError(
            f"{name} has {len(tokens)} tokens and one window needs {step}",
            fix=f"use a shorter {option} or a longer text",
        )
    cuts = range(0, step * min(available, available if count is None else count), step)
    return [Window((*prefix, *tokens[cut : cut + step]), start) for cut in cuts]


def fitting_length(length: int, *configs: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Returns the length of windows, at most the shortest context of some models; and a note if it is shorter."""
    context = min((known for config in configs if (known := context_length(config))), default=length)
    if context >= length:
        return length, ()
    return context, (f"windows have {context} tokens, not {length}: that is the model's context",)


def check_time(seconds: float | None) -> float | None:
    """Returns the seconds that the windows of a proof may take. Raises QuantryError if they are none."""
    if isinstance(seconds, str):
        raise QuantryError(f"the time of a proof is {seconds[:40]!r}, not a number of seconds", fix="give 180.0")
    if seconds is not None and not (isfinite(seconds) and seconds > 0):
        raise QuantryError(f"a proof cannot be made in {seconds:g} s", fix="give --proof-time 3m, or leave it out")
    return seconds


def load_texts(files: Texts) -> tuple[TextFile, ...]:
    """Opens a text, several with commas between, or the text of the package where none is given.

    A path that exists is taken as it is, with its commas. Raises QuantryError as `load_text` does, and for a text that
    is given twice.
    """
    paths = [files] if files is None or isinstance(files, Path) else _paths(files)
    texts = tuple(load_text(path) for path in paths)
    if not texts:
        raise QuantryError("no text is given to measure on", fix="give a text file in UTF-8")
    twice = next((text for number, text in enumerate(texts) if text in texts[:number]), None)
    if twice:
        raise QuantryError(f"{twice.file} is given twice", fix="give each text once")
    return texts


def names_of(texts: Sequence[TextFile]) -> tuple[str, ...]:
    """Returns the names of texts; those that occur twice get the name of their folder."""
    alone = Counter(text.name for text in texts)
    return tuple(
        text.name if alone[text.name] == 1 else f"{text.file.absolute().parent.name}/{text.name}" for text in texts
    )


def _paths(files: str | Sequence[str | Path]) -> Sequence[str | Path]:
    return listed(files, exists) if isinstance(files, str) else files


def load_text(file: str | Path | None) -> TextFile:
    """Opens a text file, or the text of the package where none is given.

    Raises QuantryError if it cannot be read, does not begin as UTF-8, or begins with nothing but white space.
    """
    if file is None:
        return default_text()
    path = Path(file).expanduser()
    if path.exists() and not path.is_file():
        raise QuantryError(f"{path} is not a file", fix="give a text file in UTF-8")
    text = TextFile(path)
    if not text.start(PIECE).strip():
        raise QuantryError(f"{path} has no text", fix="give a text file in UTF-8")
    return text


def default_text() -> TextFile:
    """Returns the text that comes with the package."""
    return TextFile(demo_folder() / HELD_OUT)


def _tokens(text: str | TextFile, tokenizer: Any) -> Iterator[list[int]]:
    """Yields the tokens of pieces of a text, or of the documents of JSON lines: chats in their template."""
    if isinstance(text, TextFile) and text.file.suffix in LINES:
        return document_tokens(text.file, tokenizer)
    return (encode(tokenizer, piece) for piece in ([text] if isinstance(text, str) else text.pieces()))


def _first(pieces: Iterable[list[int]], needed: int | None) -> list[int]:
    """Returns the tokens of pieces, up to the first piece with which there are enough (None: of all)."""
    tokens: list[int] = []
    for piece in pieces:
        tokens += piece
        if needed is not None and len(tokens) >= needed:
            break
    return tokens


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise QuantryError(f"cannot read {file}: {reason}", fix="give a text file in UTF-8") from error

"""Windows of a text: the token ids that every model is scored on.

The whole text is tokenized once and cut front to back, so a window is the same whatever the model it is given to. What
the tokenizer itself puts before a text (a BOS, or nothing) stands before every window: a model trained with it is far
worse without, and one trained without it does not know it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import encode, prefix_of

HELD_OUT = "held-out.txt"  # of the demo model, which was not trained on it


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that are run together; positions `start` to the end are scored, each predicted from those before it."""

    tokens: tuple[int, ...]
    start: int = 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.start


def windows(text: str, tokenizer: Any, length: int, count: int | None) -> list[Window]:
    """The first `count` windows of a text (None: all), each of `length` tokens, a BOS included; a rest is left out."""
    prefix = prefix_of(tokenizer)
    start = max(1, len(prefix))
    if length <= start:
        raise QuantryError(
            f"a window of {length} tokens has none to score", fix=f"give a --length of at least {start + 1}"
        )
    if count is not None and count < 1:
        raise QuantryError(f"{count} windows are nothing to measure on", fix="ask for at least 1")
    tokens = _without(prefix, encode(tokenizer, text))
    step = length - len(prefix)
    found = len(tokens) // step
    if found == 0:
        raise QuantryError(
            f"the text has {len(tokens)} tokens and one window needs {step}",
            fix="use a shorter --length or a longer text",
        )
    cuts = range(0, step * min(found, found if count is None else count), step)
    return [Window((*prefix, *tokens[cut : cut + step]), start) for cut in cuts]


def default_text() -> tuple[str, str]:
    """The text that comes with the package, and its name."""
    return (demo_folder() / HELD_OUT).read_text(encoding="utf-8"), HELD_OUT


def read_text(file: Path) -> tuple[str, str]:
    """A text of the user's, and its name."""
    try:
        return file.read_text(encoding="utf-8"), file.name
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise QuantryError(f"cannot read {file}: {reason}", fix="give a text file in UTF-8") from error


def _without(prefix: Sequence[int], tokens: list[int]) -> list[int]:
    """The tokens of a text, without a prefix that it brings along itself."""
    return tokens[len(prefix) :] if prefix and tuple(tokens[: len(prefix)]) == tuple(prefix) else tokens

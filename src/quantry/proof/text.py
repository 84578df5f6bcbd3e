"""Windows of a text: the token ids that every model is scored on.

The whole text is tokenized once and cut front to back, so all models see the same windows. Every window starts with
what the tokenizer puts before a text (a BOS, or nothing): a model trained with a BOS is far worse without one.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import encode, prefix_of

HELD_OUT = "held-out.txt"  # a text that the demo model was not trained on


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens of one forward pass; those from `start` to the end are scored, each predicted from all before it."""

    tokens: tuple[int, ...]
    start: int = 1

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.start


def windows(text: str, tokenizer: Any, length: int, count: int | None) -> list[Window]:
    """Cuts the first `count` windows (None: all) of `length` tokens each, BOS included; a shorter rest is dropped.

    Raises QuantryError if a window has no token to score, if `count` is below 1, or if the text is too short.
    """
    prefix = prefix_of(tokenizer)
    start = max(1, len(prefix))
    if length <= start:
        raise QuantryError(
            f"a window of {length} tokens has no token to score", fix=f"give a --length of at least {start + 1}"
        )
    if count is not None and count < 1:
        raise QuantryError(f"{count} windows leave nothing to measure", fix="ask for at least 1")
    tokens = encode(tokenizer, text)
    if tuple(tokens[: len(prefix)]) == tuple(prefix):  # every window gets its own
        tokens = tokens[len(prefix) :]
    step = length - len(prefix)
    available = len(tokens) // step
    if available == 0:
        raise QuantryError(
            f"the text has {len(tokens)} tokens and one window needs {step}",
            fix="use a shorter --length or a longer text",
        )
    cuts = range(0, step * min(available, available if count is None else count), step)
    return [Window((*prefix, *tokens[cut : cut + step]), start) for cut in cuts]


def load_text(file: str | Path | None) -> tuple[str, str]:
    """Returns the text of a file, or of the package where none is given, and its name."""
    return default_text() if file is None else read_text(Path(file).expanduser())


def default_text() -> tuple[str, str]:
    """Returns the text that comes with the package, and its name."""
    return (demo_folder() / HELD_OUT).read_text(encoding="utf-8"), HELD_OUT


def read_text(file: Path) -> tuple[str, str]:
    """Returns the text of a file, and its name. Raises QuantryError if it cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8"), file.name
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise QuantryError(f"cannot read {file}: {reason}", fix="give a text file in UTF-8") from error

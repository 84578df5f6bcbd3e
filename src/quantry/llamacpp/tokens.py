"""The tokens of a GGUF file: text, type and score of each, and the tokenizer files that give them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gguf import TokenType

from quantry.errors import CheckpointError, ConfigError
from quantry.llamacpp.families import family, known
from quantry.storage.reading import read_json

COPY = "copy it again from the original checkpoint"
CARRY = "use a format that carries tokenizer.json along, such as compressed-tensors"
LIMIT = 10_000_000  # tokens; the largest vocabularies have 262,208
UNUSED_SCORE, ADDED_SCORE = -10000.0, -1000.0
# added tokens of Gemma, DeepSeek Coder and Command R that are special although they are not marked so
LOOK_SPECIAL = ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
ENDS_OF_SPECIAL = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))


@dataclass(frozen=True)
class TokenizerFiles:
    """The folder of a checkpoint, and what its config says about the tokenizer."""

    folder: Path
    architecture: str
    size: int | None  # rows of the embedding

    @cached_property
    def settings(self) -> dict[str, Any]:
        return self.read("tokenizer_config.json") if self.has("tokenizer_config.json") else {}

    @cached_property
    def tokenizer(self) -> dict[str, Any]:
        return self.read("tokenizer.json")

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def read(self, name: str) -> dict[str, Any]:
        return read_json(self.folder / name, fix=COPY, error=CheckpointError)


def files_of(folder: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Returns the tokenizer files of a checkpoint; raises ConfigError if its vocabulary has an impossible size."""
    names, inner = config.get("architectures"), config.get("text_config")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    size = text.get("vocab_size")
    if size is None and architecture in known():
        size = family(config).defaults.get("vocab_size")
    if size is not None and (type(size) is not int or not 0 < size <= LIMIT):
        raise ConfigError(f"config has vocab_size {str(size)[:40]}, not 1 to {LIMIT}", fix="restore config.json")
    return TokenizerFiles(folder, architecture, size)


@dataclass(slots=True)
class Tokens:
    """Text, type and score of each token; a row of the embedding without a token is padding."""

    size: int
    texts: list[bytes] = field(init=False)
    scores: list[float] = field(init=False)
    types: list[TokenType] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [f"[PAD{number}]".encode() for number in range(self.size)]
        self.scores = [UNUSED_SCORE] * self.size
        self.types = [TokenType.UNUSED] * self.size

    def put(self, number: int, text: str, token_type: TokenType, score: float = ADDED_SCORE) -> None:
        if not 0 <= number < self.size:
            raise CheckpointError(
                f"the tokenizer gives {text[:40]!r} the number {number}, and the model has {self.size} tokens",
                fix="restore the tokenizer files that belong to the model, or enlarge its embedding",
            )
        self.texts[number], self.types[number], self.scores[number] = text.encode(), token_type, score

    def check(self) -> None:
        """Raises CheckpointError if two tokens have the same text: llama.cpp would end the process."""
        if len(set(self.texts)) < self.size:
            first = {text: number for number, text in reversed(list(enumerate(self.texts)))}
            number, text = next((number, text) for number, text in enumerate(self.texts) if first[text] != number)
            raise CheckpointError(f"tokens {first[text]} and {number} are both {text.decode()[:40]!r}", fix=CARRY)


def added(text: str, special: bool) -> tuple[str, TokenType]:
    """Returns the text and type of an added token; llama.cpp looks for it before it replaces spaces."""
    looks = text in LOOK_SPECIAL or any(text.startswith(a) and text.endswith(b) for a, b in ENDS_OF_SPECIAL)
    return (text, TokenType.CONTROL) if special or looks else (text.replace("▁", " "), TokenType.USER_DEFINED)

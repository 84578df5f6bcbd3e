"""Tokenizers of checkpoints: loading, encoding, and the tokens they put before a text."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quantry.errors import STOPS, CheckpointError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, from tokenizer.json if possible: family classes would rebuild its parts.

    Raises CheckpointError if it cannot be read.
    """
    loader = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, trust_remote_code=False)
        tokenizer("a", verbose=False)  # settings of the wrong type are seen at the first text
    except BaseException as error:  # the libraries have no error class for it, and a panic is no Exception
        if isinstance(error, STOPS):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be read: {reason}", fix="copy its files from the original model"
        ) from error
    return tokenizer


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the tokens of a text of any length; `verbose=False` stops the warning about texts beyond the context."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def prefix_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text, by a trial: its flags and its template may disagree."""
    plain, complete = encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    places = range(len(complete) - len(plain) + 1)
    place = next((place for place in places if complete[place : place + len(plain)] == plain), 0)
    return tuple(complete[:place])

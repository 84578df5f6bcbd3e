"""Tokenizers of checkpoints: loaded as they are, and what they put before a text."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quantry.errors import CheckpointError


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder; classes of families would take tokenizer.json's parts and put them together anew."""
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        made: PreTrainedTokenizerBase = kind.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries have no class of their own for it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(
            f"the tokenizer of {folder} cannot be read: {reason}", fix="copy its files from the original model"
        ) from error
    return made


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text of any length: `verbose` is where transformers warns of one longer than the context."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def prefix_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """What the tokenizer puts before a text; told from a text, since flags and template need not agree."""
    plain, dressed = encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    places = range(len(dressed) - len(plain) + 1)
    place = next((place for place in places if dressed[place : place + len(plain)] == plain), 0)
    return tuple(dressed[:place])

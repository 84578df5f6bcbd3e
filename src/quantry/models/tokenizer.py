"""Tokenizers of checkpoints: loading, encoding, and the tokens they put before a text."""

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from quantry.errors import STOPS, CheckpointError
from quantry.models import chat_template
from quantry.models.chat_template import Messages
from quantry.storage.address_space import check_address_space


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, from tokenizer.json if possible: family classes would rebuild its parts.

    Raises CheckpointError if it cannot be read, QuantryError if there is no room for it.
    """
    check_address_space()
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


def template_of(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns the chat template, of several the default one; None if there is none."""
    template = tokenizer.chat_template
    return (template.get("default") if isinstance(template, dict) else template) or None


def render_chat(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, template: str | None = None, generation: bool = False
) -> str:
    """Renders messages with the tokenizer's chat template or another; with `generation` up to where the answer begins.

    Raises CheckpointError if there is none, TemplateRefusalError and TemplateLimitError as `chat_template.render` does.
    """
    chosen = template or template_of(tokenizer)
    if chosen is None:
        raise CheckpointError("the model has no chat template", fix="give plain text instead of messages")
    return chat_template.render(chosen, messages, tokenizer.special_tokens_map, generation=generation)


def prefix_of(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that the tokenizer puts before a text, by a trial: its flags and its template may disagree."""
    plain, complete = encode(tokenizer, "a"), list(tokenizer("a")["input_ids"])
    places = range(len(complete) - len(plain) + 1)
    place = next((place for place in places if complete[place : place + len(plain)] == plain), 0)
    return tuple(complete[:place])

"""The text that a model is calibrated on, as windows of token ids of one length.

Documents are drawn in a seeded order, tokenized and concatenated; windows are cut from that. What the tokenizer puts
before a text (a BOS, or nothing) comes once before every window and nowhere else. Chats go through the chat template
exactly once, and the window's BOS replaces the template's own.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantry.errors import QuantryError
from quantry.models.chat_template import TemplateRefusalError
from quantry.models.reader import DEMO
from quantry.models.tokenizer import encode, prefix_of, render_chat, template_of
from quantry.quantizing.calibration.documents import SHAPES, Documents, Record, open_documents

SAMPLES, LENGTH = 128, 2048
SEED = 0
BREAK = "\n\n"  # between plain documents
STEP = 64  # documents tokenized at a time
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
PROBE = [{"role": "user", "content": "a"}]


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """Windows of tokens, and where they come from."""

    tokens: tuple[tuple[int, ...], ...]
    name: str
    kind: str  # text, jsonl, parquet, datasets
    documents: int  # in the windows
    truncated: int  # documents cut by the end of a window
    template: bool  # chats have the form of the chat template
    bos: int | None  # the token before every window
    chat: bool  # the tokenizer has a chat template
    notes: tuple[str, ...] = ()
    parts: tuple["CalibrationText", ...] = ()  # of a mixture
    weights: tuple[float, ...] = ()  # of the parts
    labels: tuple[int, ...] = ()  # the part that each window is from
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        digest = sha256(json.dumps(self.tokens, separators=(",", ":")).encode()).hexdigest()
        object.__setattr__(self, "fingerprint", digest)

    @property
    def length(self) -> int:
        """The tokens of a window, including a BOS."""
        return len(self.tokens[0])

    @property
    def count(self) -> int:
        """The tokens of all windows."""
        return self.length * len(self.tokens)


def load(
    data: str | Path | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    context: int | None = None,
    mixed: int | None = None,
) -> CalibrationText:
    """Cuts windows of `length` tokens, or of the model's `context` if that is shorter, from a file or a folder.

    `data` is a text file (documents end at blank lines), JSON lines, a parquet file, or a folder saved by `datasets`;
    None or "demo" is the text that comes with the package, which may give fewer windows. `mixed` are the samples of a
    mixture that these are a part of. Raises QuantryError for data that cannot be read or is too short.
    """
    if samples < 1:
        raise QuantryError(f"{samples} samples are nothing to calibrate on", fix="give --samples of at least 1")
    documents = open_documents(data)
    prefix = prefix_of(tokenizer)
    window = min(length, context or length)
    if window <= len(prefix) + 1:
        raise QuantryError(f"a window of {window} tokens holds next to nothing", fix="give a longer --length")
    reader = _Reader(documents, tokenizer, prefix)
    step = window - len(prefix)
    stream, ends = _stream(documents.count, reader, samples * step, seed)
    whole = len(stream) // step
    if whole < samples and ((data is not None and str(data) != DEMO) or not whole):
        share = f"{samples} samples" if mixed is None else f"its {samples} of {mixed} samples"
        fewer = "" if not whole else f", at most {whole} --samples" if mixed is None else ", a lower weight"
        raise QuantryError(
            f"{documents.name} has {len(stream):,} tokens and {share} of {window} need {samples * step:,}",
            fix=f"give more data{fewer} or a shorter --length",
        )
    taken = min(samples, whole)
    windows = tuple((*prefix, *stream[cut : cut + step]) for cut in range(0, taken * step, step))
    starts = [0, *ends[:-1]]
    used = [(start, end) for start, end in zip(starts, ends, strict=True) if start < taken * step]
    return CalibrationText(
        tokens=windows,
        name=documents.name,
        kind=documents.kind,
        documents=len(used),
        truncated=sum(start // step != (end - 1) // step for start, end in used),
        template=reader.rendered or _has_markers(windows, tokenizer),
        bos=prefix[0] if prefix else None,
        chat=template_of(tokenizer) is not None,
        notes=_notes(samples, taken, length, window),
    )


def document_tokens(data: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Yields the tokens of each document, in the order of the file, without what comes before every window."""
    documents = open_documents(data)
    reader = _Reader(documents, tokenizer, prefix_of(tokenizer))
    for start in range(0, documents.count, STEP):
        yield from reader.tokens(range(start, min(documents.count, start + STEP)))


def _stream(count: int, reader: "_Reader", needed: int, seed: int) -> tuple[list[int], list[int]]:
    """Returns tokens of documents in a seeded order until there are enough, and where each document ends."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    stream: list[int] = []
    ends: list[int] = []
    for start in range(0, len(order), STEP):
        for ids in reader.tokens(order[start : start + STEP]):
            if ids:
                stream += ids
                ends.append(len(stream))
        if len(stream) >= needed:
            break
    return stream, ends


class _Reader:
    """Turns documents into tokens."""

    def __init__(self, documents: Documents, tokenizer: PreTrainedTokenizerBase, prefix: tuple[int, ...]) -> None:
        self._documents, self._tokenizer, self._prefix = documents, tokenizer, prefix
        self.rendered = False  # set when a chat has gone through the template

    def tokens(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """Yields the tokens of some documents, without what comes before every window."""
        texts = [self._text(number) for number in numbers]
        many = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for number, ids in zip(numbers, many, strict=True):
            yield self._bare(list(ids), number)

    def _bare(self, ids: list[int], number: int) -> list[int]:
        bos = self._tokenizer.bos_token_id
        if bos is not None and any(left == right == bos for left, right in pairwise(ids)):
            raise QuantryError(
                f"{self._where(number)} has two {self._tokenizer.bos_token} in a row",
                fix="remove them from the data: they are added where they belong",
            )
        length = len(self._prefix)
        return ids[length:] if length and tuple(ids[:length]) == self._prefix else ids

    def _text(self, number: int) -> str:
        document = self._documents.read(number)
        if isinstance(document, str):
            return document + BREAK
        kind, content = content_of(document, self._where(number))
        if kind == "text":
            return str(content) + BREAK
        if template_of(self._tokenizer):
            return self._render(content, number)
        if kind == "prompt":
            return "".join(message["content"] for message in content) + BREAK
        raise QuantryError(
            f"{self._where(number)} is a chat and the tokenizer has no chat template",
            fix='give records with "text", or add chat_template.jinja to the model',
        )

    def _render(self, messages: list[dict[str, str]], number: int) -> str:
        try:
            text = render_chat(self._tokenizer, messages)
        except TemplateRefusalError as error:
            raise QuantryError(
                f"the chat template refuses {self._where(number)}: {error.reason}", fix="correct or remove that record"
            ) from error
        self.rendered = True
        return text

    def _where(self, number: int) -> str:
        return f"{self._documents.name}, document {number + 1}"


def content_of(record: Record, where: str) -> tuple[str, Any]:
    """Returns what a record holds: a text, or messages that are a chat or a prompt with its completion."""
    if isinstance(record.get("text"), str):
        return "text", record["text"]
    chat = record.get("messages") if record.get("messages") is not None else record.get("conversations")
    if isinstance(chat, list | tuple) and chat:
        return "chat", [_message(message, where) for message in chat]
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return "chat", [_message(message, where) for message in [*prompt, *completion]]
    if isinstance(prompt, str) and isinstance(completion, str):
        return "prompt", [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    keys = ", ".join(sorted(map(str, record)))[:80] or "nothing"
    raise QuantryError(f"{where} has {keys}", fix=f"records need {SHAPES}")


def _message(message: Any, where: str) -> dict[str, str]:
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise QuantryError(
            f"{where} has the message {str(message)[:60]!r}", fix='each needs "role" and "content", both text'
        )
    return {"role": ROLES.get(role, role), "content": content}


def _has_markers(windows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Says if plain text contains the special tokens that the chat template puts around a message."""
    if not template_of(tokenizer):
        return False
    try:
        rendered = encode(tokenizer, render_chat(tokenizer, PROBE))
    except TemplateRefusalError:  # it wants more than one message
        return False
    ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    added = {number for text, number in tokenizer.get_added_vocab().items() if text.strip()}  # Gemma adds line breaks
    markers = added.intersection(rendered) - ends
    return any(not markers.isdisjoint(window) for window in windows)


def _notes(samples: int, taken: int, length: int, window: int) -> tuple[str, ...]:
    notes = []
    if window < length:
        notes.append(f"windows have {window} tokens, not {length}: that is the model's context")
    if taken < samples:
        notes.append(f"the built-in text gives {taken} of {samples} samples")
    return tuple(notes)

"""Data as token ids, and which of them the loss is on: answers of the assistant in a chat, everything in plain text.

A chat goes through the model's chat template, as an engine sends it. An answer begins where the template's generation
prompt ends, and ends with the token that closes the turn, so that the model learns to stop; the line break that a
template writes after it is never generated, and counts as prompt. Some templates rewrite earlier turns (they drop
reasoning, for example): such a chat becomes one row for each answer, each as it was when that answer was due.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from os.path import commonprefix
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from quantry.errors import CheckpointError, QuantryError
from quantry.models.chat_template import TemplateRefusalError
from quantry.models.reader import DEMO, demo_folder
from quantry.models.tokenizer import encode, prefix_of, render_chat, template_of
from quantry.quantizing.calibration.documents import BUILT_IN, Documents, open_documents
from quantry.quantizing.calibration.text import BREAK, content_of

IGNORED = -100  # the label of a token without loss, as torch's cross entropy has it
Span = tuple[int, int]  # characters of an answer
Messages = Sequence[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence to train on; a label is the token itself or IGNORED."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]

    @property
    def scored(self) -> int:
        """The tokens that the loss is on; nothing predicts the first."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a file: those to train on, and those that are held back."""

    name: str
    sha256: str
    training: tuple[Row, ...]
    held_back: tuple[Row, ...]
    truncated: int  # rows cut to the length

    @property
    def longest(self) -> int:
        return max(len(row.ids) for row in (*self.training, *self.held_back))


def read_rows(data: str | Path, tokenizer: PreTrainedTokenizerBase, length: int, share: float, seed: int) -> Rows:
    """Reads chats, prompts with completions or text; holds back a share of it, at least one row.

    Raises QuantryError for data that cannot be read or has nothing to learn from.
    """
    documents = open_documents(data)
    if not tokenizer.is_fast:
        raise CheckpointError("the model's tokenizer gives no offsets", fix="save it as tokenizer.json")
    reader = _Reader(documents, tokenizer, length)
    groups = list(reader.windows() if documents.kind == "text" else reader.records())
    if not groups:
        raise QuantryError(f"{documents.name} is empty", fix="give chats as JSON lines, or a text file")
    held = _drawn(len(groups), share, seed)
    if len(held) == len(groups):
        raise QuantryError(
            f"{documents.name} gives 1 row, and one is held back to measure on",
            fix="give more data, or a shorter --length for a text",
        )
    training = tuple(row for place, group in enumerate(groups) if place not in held for row in group)
    held_back = tuple(row for place, group in enumerate(groups) if place in held for row in group)
    return Rows(documents.name, digest(data), training, held_back, reader.truncated)


def digest(data: str | Path) -> str:
    """Returns the SHA-256 of a file, or of all files of a folder."""
    path = demo_folder() / BUILT_IN if str(data) == DEMO else Path(data).expanduser()
    found = sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            found.update(file.read_bytes())
    return found.hexdigest()


def _drawn(count: int, share: float, seed: int) -> set[int]:
    return set(random.Random(seed).sample(range(count), max(1, round(share * count))))


class _Reader:
    """Turns documents into rows of at most `length` tokens."""

    def __init__(self, documents: Documents, tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self._documents, self._tokenizer, self._length = documents, tokenizer, length
        self._template, self._prefix = template_of(tokenizer), prefix_of(tokenizer)
        self._closing = tuple(text for text in tokenizer.get_added_vocab() if text.strip())
        self.truncated = 0

    def windows(self) -> Iterator[tuple[Row, ...]]:
        """Yields windows of a text file, each a group of its own."""
        texts = (str(self._documents.read(number)) for number in range(self._documents.count))
        for row in self._cut(encode(self._tokenizer, BREAK.join(texts))):
            yield (row,)

    def records(self) -> Iterator[tuple[Row, ...]]:
        """Yields the rows of each record."""
        for number in range(self._documents.count):
            yield self._record(number, f"{self._documents.name}, document {number + 1}")

    def _record(self, number: int, where: str) -> tuple[Row, ...]:
        document = self._documents.read(number)
        if isinstance(document, str):
            return self._text(document, where)
        kind, content = content_of(document, where)
        if kind == "text":
            return self._text(content, where)
        if not any(turn["role"] == "assistant" and turn["content"].strip() for turn in content):
            raise QuantryError(
                f"{where} has no answer to learn from", fix='give it a message of the role "assistant", or remove it'
            )
        if self._template is not None:
            return self._fitted(list(self._chat(content, where)), where)
        if kind == "prompt":
            prompt, answer = (turn["content"] for turn in content)
            text = prompt + answer + (self._tokenizer.eos_token or "")
            return self._fitted([self._row(text, [(len(prompt), len(text))], self._prefix)], where)
        raise QuantryError(
            f"{where} is a chat and the model has no chat template",
            fix='add chat_template.jinja to the model, or give "prompt" and "completion" or "text"',
        )

    def _text(self, text: str, where: str) -> tuple[Row, ...]:
        end = self._tokenizer.eos_token_id
        ids = encode(self._tokenizer, text)
        rows = tuple(self._cut([*ids, *([] if end is None else [end])])) if ids else ()
        if not rows:
            raise QuantryError(f"{where} is empty", fix="remove it")
        return rows

    def _cut(self, ids: Sequence[int]) -> Iterator[Row]:
        """Yields all of a text in windows; a last token alone predicts nothing."""
        step = self._length - len(self._prefix)
        if step < 1:
            raise QuantryError(f"--length {self._length} holds next to nothing", fix="give a longer one")
        for start in range(0, len(ids), step):
            window = (*self._prefix, *ids[start : start + step])
            if len(window) > 1:
                yield Row(window, window)

    def _chat(self, messages: Messages, where: str) -> Iterator[Row]:
        turns = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
        answers = [self._answer(messages[: number + 1], where) for number in turns]
        whole = answers[-1][0]
        if all(whole.startswith(text) for text, _ in answers):
            yield self._row(whole, [span for _, span in answers])
        else:  # the template rewrites earlier turns
            for text, span in answers:
                yield self._row(text, [span])

    def _answer(self, messages: Messages, where: str) -> tuple[str, Span]:
        """Returns a chat that ends in an answer, and where in it that is."""
        prompt = self._rendered(messages[:-1], where, generation=True)
        text = self._rendered(messages, where)
        start = len(commonprefix([prompt, text]))  # noqa: RUF071 - it may open a thought that a transcript lacks
        last = (messages[-1]["content"].strip().splitlines() or [""])[-1]
        if last not in text[start:]:
            raise QuantryError(f"the chat template drops the answer of {where}", fix="correct the template")
        closed = text.rstrip()
        return text, (start, len(closed) if closed.endswith(self._closing) else len(text))

    def _rendered(self, messages: Messages, where: str, *, generation: bool = False) -> str:
        try:
            return render_chat(self._tokenizer, messages, generation=generation)
        except TemplateRefusalError as error:
            raise QuantryError(
                f"the chat template refuses {where}: {error.reason}", fix="correct or remove that record"
            ) from error

    def _row(self, text: str, spans: Sequence[Span], prefix: tuple[int, ...] = ()) -> Row:
        """Tokenizes a text as a whole; a token that reaches into an answer belongs to it."""
        made = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        labels = [
            number if any(begin < last and end > first for first, last in spans) else IGNORED
            for number, (begin, end) in zip(made["input_ids"], made["offset_mapping"], strict=True)
        ]
        return Row((*prefix, *made["input_ids"]), (*(IGNORED for _ in prefix), *labels))

    def _fitted(self, rows: Sequence[Row], where: str) -> tuple[Row, ...]:
        """Cuts rows to the length; drops those of a long chat that lose their answer, unless all do."""
        cut = [Row(row.ids[: self._length], row.labels[: self._length]) for row in rows]
        kept = tuple(row for row in cut if row.scored)
        if not kept:
            raise QuantryError(
                f"{where} has {len(rows[0].ids):,} tokens, and nothing of its answer is in the first {self._length:,}",
                fix="give a longer --length, or shorten or remove that record",
            )
        self.truncated += sum(len(row.ids) > self._length for row in rows)
        return kept

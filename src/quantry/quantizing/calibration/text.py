"""The text that a model is calibrated on, as windows of token ids that are all of one length.

Documents are drawn in a seeded order, tokenized and laid end to end; windows are cut from that. What the tokenizer
itself puts before a text (a BOS, or nothing) stands once before every window and nowhere else. Chats go through the
chat template exactly once, and the template's own BOS gives way to the window's.
"""

import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from quantry.errors import QuantryError
from quantry.models.reader import DEMO, demo_folder
from quantry.models.tokenizer import encode, prefix_of

BUILT_IN = "calibration.txt"
SAMPLES, LENGTH = 128, 2048
BREAK = "\n\n"  # between plain documents
BLANK = re.compile(r"\n[ \t\r]*\n\s*")
STEP = 64  # documents tokenized at a time
ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
SHAPES = '"text", "messages", "conversations", or "prompt" and "completion"'
PROBE = [{"role": "user", "content": "a"}]

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    """Windows of tokens, and what is known of where they are from."""

    tokens: tuple[tuple[int, ...], ...]
    name: str
    kind: str  # text, jsonl, parquet, datasets
    documents: int  # that went into the windows
    truncated: int  # of them, those that the end of a window cut
    template: bool  # chats are in the form of the chat template, by us or already in the text
    bos: int | None  # the token that stands before every window
    chat: bool  # the tokenizer has a chat template
    notes: tuple[str, ...] = ()
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        digest = sha256(json.dumps(self.tokens, separators=(",", ":")).encode()).hexdigest()
        object.__setattr__(self, "fingerprint", digest)

    @property
    def length(self) -> int:
        """The tokens of a window, a BOS included."""
        return len(self.tokens[0])

    @property
    def count(self) -> int:
        """The tokens of all windows."""
        return self.length * len(self.tokens)


@dataclass(frozen=True, slots=True)
class _Source:
    """Documents by number; each is read when it is asked for."""

    name: str
    kind: str
    count: int
    read: Callable[[int], str | Record]


def load(
    data: str | Path | None,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    context: int | None = None,
) -> Data:
    """Windows of `length` tokens (of `context`, the model's limit, where that is less) from a file or a folder.

    `data` is a text file (documents end at blank lines), JSON lines, a parquet file, or a folder that `datasets` has
    saved; None or "demo" is the text that comes with the package, of which fewer windows are taken where it is short.
    """
    if samples < 1:
        raise QuantryError(f"{samples} samples are nothing to calibrate on", fix="give --samples of at least 1")
    source = _open(data)
    prefix = prefix_of(tokenizer)
    window = min(length, context or length)
    if window <= len(prefix) + 1:
        raise QuantryError(f"a window of {window} tokens holds next to nothing", fix="give a longer --length")
    reader = _Reader(source, tokenizer, prefix)
    step = window - len(prefix)
    stream, ends = _stream(source, reader, samples * step, seed)
    found = len(stream) // step
    if found < samples and ((data is not None and str(data) != DEMO) or not found):
        raise QuantryError(
            f"{source.name} has {len(stream):,} tokens and {samples} samples of {window} need {samples * step:,}",
            fix=f"give more data, --samples of at most {found}, or a shorter --length",
        )
    taken = min(samples, found)
    windows = tuple((*prefix, *stream[cut : cut + step]) for cut in range(0, taken * step, step))
    starts = [0, *ends[:-1]]
    used = [(start, end) for start, end in zip(starts, ends, strict=True) if start < taken * step]
    return Data(
        tokens=windows,
        name=source.name,
        kind=source.kind,
        documents=len(used),
        truncated=sum(start // step != (end - 1) // step for start, end in used),
        template=reader.rendered or _has_markers(windows, tokenizer),
        bos=prefix[0] if prefix else None,
        chat=bool(tokenizer.chat_template),
        notes=_notes(samples, taken, length, window),
    )


def _stream(source: _Source, reader: "_Reader", needed: int, seed: int) -> tuple[list[int], list[int]]:
    """Documents in a seeded order until there are enough tokens, and where each of them ends."""
    order = list(range(source.count))
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

    def __init__(self, source: _Source, tokenizer: PreTrainedTokenizerBase, prefix: tuple[int, ...]) -> None:
        self._source, self._tokenizer, self._prefix = source, tokenizer, prefix
        self.rendered = False  # whether a chat has gone through the template

    def tokens(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """The tokens of some documents, none of which begins with what stands before every window."""
        texts = [self._text(number) for number in numbers]
        many = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        for number, ids in zip(numbers, many, strict=True):
            yield self._bare(list(ids), number)

    def _bare(self, ids: list[int], number: int) -> list[int]:
        bos = self._tokenizer.bos_token_id
        if bos is not None and any(one == two == bos for one, two in pairwise(ids)):
            raise QuantryError(
                f"{self._where(number)} has two {self._tokenizer.bos_token} in a row",
                fix="remove them from the data: they are put where they belong",
            )
        length = len(self._prefix)
        return ids[length:] if length and tuple(ids[:length]) == self._prefix else ids

    def _text(self, number: int) -> str:
        document = self._source.read(number)
        if isinstance(document, str):
            return document + BREAK
        kind, content = _content(document, self._where(number))
        if kind == "text":
            return str(content) + BREAK
        if self._tokenizer.chat_template:
            return self._render(content, number)
        if kind == "prompt":
            return "".join(message["content"] for message in content) + BREAK
        raise QuantryError(
            f"{self._where(number)} is a chat and the tokenizer has no chat template",
            fix='give records with "text", or add chat_template.jinja to the model',
        )

    def _render(self, messages: list[dict[str, str]], number: int) -> str:
        try:
            text = str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # templates raise what they like
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
            raise QuantryError(
                f"the chat template refuses {self._where(number)}: {reason}", fix="mend or remove that record"
            ) from error
        self.rendered = True
        return text

    def _where(self, number: int) -> str:
        return f"{self._source.name}, document {number + 1}"


def _content(record: Record, where: str) -> tuple[str, Any]:
    """What a record holds: a text, or messages that are a chat or a prompt with its completion."""
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
    """A message in the words of chat templates."""
    role = message.get("role", message.get("from")) if isinstance(message, Mapping) else None
    content = message.get("content", message.get("value")) if isinstance(message, Mapping) else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise QuantryError(
            f"{where} has the message {str(message)[:60]!r}", fix='each needs "role" and "content", both text'
        )
    return {"role": ROLES.get(role, role), "content": content}


def _has_markers(windows: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether text that was not rendered here has the special tokens that the chat template puts around a message."""
    if not tokenizer.chat_template:
        return False
    try:
        rendered = encode(tokenizer, str(tokenizer.apply_chat_template(PROBE, tokenize=False)))
    except Exception:  # a template that wants more than one message; then it cannot be told
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


def _open(data: str | Path | None) -> _Source:
    if data is None or str(data) == DEMO:
        return _open_text(demo_folder() / BUILT_IN)
    path = Path(data).expanduser()
    if not path.exists():
        raise QuantryError(f"there is no {path}", fix="give a text file, JSON lines, parquet or a folder of datasets")
    if path.is_dir():
        return _open_folder(path)
    if path.suffix in (".jsonl", ".ndjson"):
        return _open_lines(path)
    if path.suffix == ".parquet":
        return _open_parquet([path], path.name)
    if path.suffix == ".json":
        return _open_json(path)
    return _open_text(path)


def _open_text(path: Path) -> _Source:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, "give a text file in UTF-8") from error
    documents = [part for part in BLANK.split(text) if part.strip()]
    return _Source(path.name, "text", len(documents), documents.__getitem__)


def _open_lines(path: Path) -> _Source:
    """JSON lines, of which only those that are drawn are parsed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error, "check the file") from error
    lines = [(number, line) for number, line in enumerate(data.splitlines()) if line.strip()]

    def read(index: int) -> Record:
        number, line = lines[index]
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, error, f"line {number + 1} must be one JSON object") from error
        if not isinstance(record, dict):
            raise QuantryError(
                f"{path.name}, line {number + 1} is a JSON {type(record).__name__}", fix=f"records need {SHAPES}"
            )
        return record

    return _Source(path.name, "jsonl", len(lines), read)


def _open_json(path: Path) -> _Source:
    """A JSON list of records, or JSON lines under that name."""
    try:
        records = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return _open_lines(path)
    except OSError as error:
        raise _unreadable(path, error, "check the file") from error
    many = [records] if isinstance(records, dict) else records
    if not isinstance(many, list) or not all(isinstance(record, dict) for record in many):
        raise QuantryError(f"{path.name} is no list of records", fix=f"records need {SHAPES}")
    return _Source(path.name, "jsonl", len(many), many.__getitem__)


def _open_folder(path: Path) -> _Source:
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    tables = sorted(path.glob("**/*.parquet"))
    if saved:
        return _open_saved(path)
    if tables:
        return _open_parquet(tables, path.name)
    raise QuantryError(
        f"{path} holds no data set", fix="give a folder written by save_to_disk, one with parquet files, or a file"
    )


def _open_saved(path: Path) -> _Source:
    datasets = _library("datasets", str(path))
    try:
        found: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # of many libraries
        raise _unreadable(path, error, "save the data set again with save_to_disk") from error
    if isinstance(found, datasets.DatasetDict):
        found = found["train"] if "train" in found else found[sorted(found)[0]]
    return _Source(path.name, "datasets", len(found), found.__getitem__)


def _open_parquet(tables: Sequence[Path], name: str) -> _Source:
    arrow, parquet = _library("pyarrow", name), _library("pyarrow.parquet", name)
    try:
        table: Any = arrow.concat_tables([parquet.read_table(path) for path in tables])
    except Exception as error:  # of many libraries
        raise _unreadable(tables[0], error, "write the file again") from error
    return _Source(name, "parquet", table.num_rows, lambda row: table.slice(row, 1).to_pylist()[0])


def _library(module: str, wanted_by: str) -> Any:
    """A library that only some kinds of data need."""
    name = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise QuantryError(
            f"{wanted_by} needs the {name} library, which is not installed",
            fix=f"pip install {name}, or give JSON lines",
        ) from error


def _unreadable(path: Path, error: Exception, fix: str) -> QuantryError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return QuantryError(f"{path.name} cannot be read: {str(reason)[:120]}", fix=fix)

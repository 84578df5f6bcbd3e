"""The model: its tokenizer, its turn queue and the generation of an answer, token by token."""

import json
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event, Lock
from typing import Any

from quantry.errors import QuantryError
from quantry.models.chat_template import Renderer, TemplateLimitError, TemplateRefusalError

from .folder import BUILD, read_limits, read_surroundings
from .requests import CompletionRequest, GoneError, RefusedError, one_line

LOOK = 0.05  # seconds between two looks at whether a waiting client is still there
PREFILL = 256  # tokens of a prompt that are read at once: between two pieces a client may leave


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A generated token, and the log-probabilities of the likeliest ones at its place."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """What a step adds to an answer; `finish` is why it ends."""

    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish: str | None = None


class StopFilter:
    """Passes a text on up to the first stop word, and holds back what may be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.stopped = False

    def add(self, text: str) -> str:
        self._held += text
        ends = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(ends)
        return self._give(min(ends) if ends else len(self._held) - self._beginning())

    def rest(self) -> str:
        """Returns what was held back, once nothing can follow any more."""
        return "" if self.stopped else self._give(len(self._held))

    def _give(self, size: int) -> str:
        given, self._held = self._held[:size], self._held[size:]
        return given

    def _beginning(self) -> int:
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(sizes, default=0)


class TurnQueue:
    """Lets one request compute at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._change = Condition()
        self._waiting: deque[object] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @contextmanager
    def turn(self, gone: Callable[[], bool]) -> Iterator[None]:
        ticket = object()
        with self._change:
            self._waiting.append(ticket)
        try:
            with self._change:
                while self._waiting[0] is not ticket:
                    self._change.wait(LOOK)
                    if gone():
                        raise GoneError
            yield
        finally:
            with self._change:
                self._waiting.remove(ticket)
                self._change.notify_all()


class GenaiModel:
    """A model of ONNX Runtime GenAI, its tokenizer, and the queue of requests before it."""

    def __init__(self, folder: Path, name: str | None, threads: int | None, context: int | None) -> None:
        self.context, self.vocabulary, self._ends = read_limits(folder, context)
        self._around = read_surroundings(folder)
        self.name = name or folder.resolve().name
        self.queue, self.ending = TurnQueue(), Event()
        self._library = _library()
        try:
            config = self._library.Config(str(folder))
            if threads:
                options = {"session_options": {"intra_op_num_threads": threads}}
                config.overlay(json.dumps({"model": {"decoder": options}}))
            self._model = self._library.Model(config)
            self._tokenizer = self._library.Tokenizer(self._model)
            self._bare = self._library.Tokenizer(self._model)
            self._bare.update_options(add_special_tokens="false", skip_special_tokens="false")
        except Exception as error:  # the library raises its own kinds, and RuntimeError
            raise QuantryError(f"ONNX Runtime GenAI does not load {folder}: {one_line(error)}", fix=BUILD) from error
        self._tokenizing, self._chats = Lock(), Renderer(folder=folder)

    @property
    def version(self) -> str:
        return str(self._library.__version__)

    def encode(self, text: str, param: str) -> tuple[int, ...]:
        """Returns the tokens of a text, with those that a tokenizer puts around it."""
        if self._around is None:
            return self._encoded(self._tokenizer, text, param)
        before, after = self._around
        return before + self._encoded(self._bare, text, param) + after

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Returns the tokens of a conversation in the model's own form, up to where the answer begins."""
        _plain("".join(text for message in messages for text in message.values()), "messages")
        try:
            text = self._chats.render("", messages, {}, generation=True)
        except TemplateRefusalError as error:  # it has none, or the roles are not to its liking
            raise RefusedError(
                400, f"the model's chat template does not take this: {error.reason}", param="messages"
            ) from error
        except TemplateLimitError as error:
            raise RefusedError(500, str(error)) from error
        return self._encoded(self._bare, text, "messages")  # the template has written what stands in front itself

    def close(self) -> None:
        """Ends the process that renders chats."""
        self._chats.close()

    def answer(
        self, request: CompletionRequest, prompt: Sequence[int], gone: Callable[[], bool]
    ) -> Iterator[AnswerPiece]:
        """Generates what follows a prompt, token by token; only the request whose turn it is may call it."""
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(**request.options(prompt))
        generator = self._library.Generator(self._model, params)
        for start in range(0, len(prompt), PREFILL):
            self._still_wanted(gone)
            generator.append_tokens(list(prompt[start : start + PREFILL]))
        words, shown = self._tokenizer.create_stream(), StopFilter(request.stops)
        scored: tuple[ScoredToken, ...] = ()
        for count in range(1, request.tokens + 1):
            self._still_wanted(gone)
            logits = generator.get_logits() if request.likeliest is not None else None
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            if request.likeliest is not None:
                scored = (score(logits, token, request.likeliest),)
            ended = token in self._ends
            text = shown.add("" if ended else words.decode(token))
            if ended or shown.stopped or count == request.tokens:
                why = "stop" if ended or shown.stopped else "length"
                yield AnswerPiece(text + shown.rest(), scored, why)
                return
            yield AnswerPiece(text, scored)

    def name_of(self, token: int, *, as_ids: bool) -> str:
        if as_ids:
            return f"token_id:{token}"
        with self._tokenizing:
            return str(self._bare.decode([token]))

    def _still_wanted(self, gone: Callable[[], bool]) -> None:
        if self.ending.is_set() or gone():
            raise GoneError

    def _encoded(self, tokenizer: Any, text: str, param: str) -> tuple[int, ...]:
        _plain(text, param)
        with self._tokenizing:
            return tuple(map(int, tokenizer.encode(text)))


def score(logits: Any, token: int, count: int) -> ScoredToken:
    """Returns log-probabilities from logits, before temperature and the like."""
    import numpy as np

    row = np.asarray(logits, dtype=np.float64).reshape(-1)
    row = row - row.max()
    row -= np.log(np.exp(row).sum())
    best = np.argsort(-row, kind="stable")[:count]
    return ScoredToken(token, float(row[token]), tuple((int(place), float(row[place])) for place in best))


def _plain(text: str, param: str) -> None:
    """Raises RefusedError for a text that the library would cut: it reads UTF-8 up to the first NUL."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RefusedError(400, f"{param} has half of a surrogate pair, which is no text", param=param) from error
    if "\0" in text:
        raise RefusedError(400, f"{param} has the character NUL: leave it out", param=param)


def _library() -> Any:
    try:
        import onnxruntime_genai  # type: ignore[import-not-found]
    except ImportError as error:
        raise QuantryError(
            f"{sys.executable} lacks onnxruntime_genai ({error})", fix="pip install onnxruntime-genai"
        ) from error
    return onnxruntime_genai

"""An OpenAI-compatible server for ONNX Runtime GenAI, which has none of its own.

    python -m quantry.serving.onnx_server --model FOLDER --host 127.0.0.1 --port 8000 [--served-model-name NAME]
                                          [--threads N] [--context N]          (the key, if any, in QUANTRY_API_KEY)

It runs with the engine's own python, where Quantry may not be installed: nothing of Quantry is imported, and the file
can be run by its path as well. Beside the standard library it needs onnxruntime_genai, and numpy, which comes with it.

Sequences are computed one at a time, in the order in which they came: the library batches only what starts together.
A client that is gone is noticed before every token, whether it waits or is being answered, and makes room for the next.

What a request asks for is done or refused; nothing that would change the answer is passed over in silence.
"""

import argparse
import hmac
import ipaddress
import json
import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Condition, Event, Lock, Thread
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

KEY = "QUANTRY_API_KEY"
CONFIG = "genai_config.json"
BODY = 16 << 20  # bytes of a request
PATIENCE = 60.0  # seconds for a client to send its request, or to take what it is sent
LOOK = 0.05  # seconds between two looks at whether a waiting client is still there
GRACE = 5.0  # seconds for the last token at the end
PIECE = 256  # tokens of a prompt that are read at once: between two pieces a client may leave
USUAL_TOKENS = 16  # of a completion, as OpenAI has it; a chat goes on to the end of the context
STOPS = 16
LIKELIEST = 20  # tokens whose log-probabilities may be asked for at a position
GREEDY = 1e-5  # the temperature below which sampling is the likeliest token
LOCAL = ("localhost", "127.0.0.1", "::1")
# What changes an answer and is not done here, and the values that ask for nothing.
UNDONE: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logit_bias": ({},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "tools": ([],), "functions": ([],), "response_format": ({"type": "text"},),
    "min_tokens": (0,), "min_p": (0,), "guided_json": (), "guided_regex": (), "guided_choice": (), "audio": (),
}  # fmt: skip

Json = dict[str, Any]


class RefusedError(Exception):
    """A request that is answered with an error, as OpenAI words it."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def to_dict(self) -> Json:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class GoneError(Exception):
    """The client has left, or the server ends."""


class StartError(Exception):
    """What is said, in one line, before the program ends with code 2."""


# ---- requests ----


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be served."""

    prompts: tuple[tuple[int, ...], ...]
    chat: bool
    tokens: int  # of an answer, at most
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is all
    seed: int | None = None
    repetition: float = 1.0
    stops: tuple[str, ...] = ()
    likeliest: int | None = None  # tokens whose log-probabilities are told beside the chosen one's; None tells none
    as_ids: bool = False  # tokens in log-probabilities are named by their numbers
    ignore_eos: bool = False
    stream: bool = False
    usage: bool = True  # at the end of a stream

    def options(self, prompt: Sequence[int]) -> Json:
        """Of the library's search."""
        longest = len(prompt) + self.tokens
        chosen: Json = {"max_length": longest, "min_length": longest if self.ignore_eos else 0, "num_beams": 1}
        chosen["repetition_penalty"] = self.repetition
        if self.temperature < GREEDY:
            return chosen | {"do_sample": False}
        chosen |= {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return chosen | {"random_seed": -1 if self.seed is None else self.seed % (1 << 31)}


def read_request(body: Json, engine: "Engine", *, chat: bool) -> Asked:
    """What is asked for, checked."""
    _check_model(body, engine)
    for name, idle in UNDONE.items():
        if (value := body.get(name)) is not None and value not in idle:
            raise RefusedError(400, f"{name} is not supported by this server: leave it out", param=name)
    prompts = (_conversation(body, engine),) if chat else _prompts(body, engine)
    stream = _flag(body, "stream")
    return Asked(
        prompts, chat, _tokens(body, prompts, engine.context, chat=chat),
        temperature=_number(body, "temperature", 1.0, 0, 2),
        top_p=_number(body, "top_p", 1.0, 1e-6, 1),
        top_k=max(0, _whole(body, "top_k", 0, -1, 1 << 30)),
        seed=_whole(body, "seed", 0, -(1 << 63), 1 << 63) if body.get("seed") is not None else None,
        repetition=_number(body, "repetition_penalty", 1.0, 0.01, 10),
        stops=_stops(body),
        likeliest=_likeliest(body, chat=chat),
        as_ids=_flag(body, "return_tokens_as_token_ids"),
        ignore_eos=_flag(body, "ignore_eos"),
        stream=stream,
        usage=not stream or _include_usage(body),
    )  # fmt: skip


def _check_model(body: Json, engine: "Engine") -> None:
    wanted = body.get("model")
    if wanted is not None and wanted != engine.name:
        raise RefusedError(
            404, f"there is no model {wanted!r} here, only {engine.name!r}", param="model", code="model_not_found"
        )


def _prompts(body: Json, engine: "Engine") -> tuple[tuple[int, ...], ...]:
    """A text, numbers of tokens, or a list of either."""
    given = body.get("prompt")
    several = isinstance(given, list) and given and not _is_whole(given[0])
    found = []
    for one in given if isinstance(given, list) and several else [given]:
        if isinstance(one, str):
            found.append(engine.encode(one, "prompt"))
        elif isinstance(one, list) and all(_is_whole(number) for number in one):
            found.append(_known(one, engine.vocabulary))
        else:
            raise RefusedError(400, "prompt is not a text, a list of token numbers, or a list of those", param="prompt")
    if not all(found):
        raise RefusedError(400, "prompt is empty: give at least one token", param="prompt")
    return tuple(found)


def _known(numbers: Sequence[int], vocabulary: int) -> tuple[int, ...]:
    if wrong := next((one for one in numbers if not 0 <= one < vocabulary), None):
        raise RefusedError(400, f"prompt has token {wrong}, and tokens are 0 to {vocabulary - 1}", param="prompt")
    return tuple(numbers)


def _conversation(body: Json, engine: "Engine") -> tuple[int, ...]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError(400, "messages is not a list of at least one message", param="messages")
    return engine.encode_chat([_message(one) for one in messages])


def _message(one: Any) -> dict[str, str]:
    if not isinstance(one, dict) or not isinstance(one.get("role"), str):
        raise RefusedError(400, "a message has no role", param="messages")
    content = one.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise RefusedError(
                400, "a message has a part that is no text: this server reads texts only", param="messages"
            )
        content = "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise RefusedError(400, "the content of a message is not a text", param="messages")
    return {"role": one["role"], "content": content or ""}


def _tokens(body: Json, prompts: Sequence[Sequence[int]], context: int, *, chat: bool) -> int:
    """How long an answer may be; prompt and answer must fit the context together."""
    longest = max(map(len, prompts))
    if longest >= context:
        raise RefusedError(
            400, f"the prompt has {longest} tokens, and with at least one of the answer the context is {context}",
            param="messages" if chat else "prompt", code="context_length_exceeded",
        )  # fmt: skip
    room = context - longest
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    wanted = _whole(body, name, room if chat else min(USUAL_TOKENS, room), 1, 1 << 62)
    if wanted > room:
        raise RefusedError(
            400, f"{name} of {wanted} and a prompt of {longest} tokens are more than the context of {context}: "
            f"ask for {room} or fewer", param=name, code="context_length_exceeded",
        )  # fmt: skip
    return wanted


def _stops(body: Json) -> tuple[str, ...]:
    given = body.get("stop")
    found = [] if given is None else [given] if isinstance(given, str) else given
    if not isinstance(found, list) or len(found) > STOPS or not all(isinstance(one, str) and one for one in found):
        raise RefusedError(400, f"stop is not a text or a list of at most {STOPS} texts", param="stop")
    return tuple(found)


def _likeliest(body: Json, *, chat: bool) -> int | None:
    if not chat:
        return _whole(body, "logprobs", 0, 0, LIKELIEST) if body.get("logprobs") is not None else None
    if not _flag(body, "logprobs"):
        if body.get("top_logprobs"):
            raise RefusedError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return _whole(body, "top_logprobs", 0, 0, LIKELIEST)


def _include_usage(body: Json) -> bool:
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise RefusedError(400, "stream_options is not an object", param="stream_options")
    return _flag(options or {}, "include_usage")


def _flag(body: Json, name: str) -> bool:
    value = body.get(name)
    if not isinstance(value, bool | None):
        raise RefusedError(400, f"{name} is not true or false", param=name)
    return bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(body: Json, name: str, usual: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return usual
    if not _is_whole(value) or not low <= value <= high:
        raise RefusedError(400, f"{name} is not a whole number from {low} to {high}", param=name)
    return int(value)


def _number(body: Json, name: str, usual: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise RefusedError(400, f"{name} is not a number from {low} to {high}", param=name)
    return float(value)


# ---- generation ----


@dataclass(frozen=True, slots=True)
class Scored:
    """A generated token, and the log-probabilities of the likeliest ones at its place."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a step adds to an answer; `finish` is why it ends."""

    text: str
    scored: tuple[Scored, ...] = ()
    finish: str | None = None


class Shown:
    """A text on its way to the client: it ends before a stop word, and what may be the start of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held = stops, ""
        self.stopped = False

    def add(self, text: str) -> str:
        self._held += text
        ends = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        self.stopped = bool(ends)
        return self._give(min(ends) if ends else len(self._held) - self._beginning())

    def rest(self) -> str:
        """At the end nothing can follow any more."""
        return "" if self.stopped else self._give(len(self._held))

    def _give(self, size: int) -> str:
        given, self._held = self._held[:size], self._held[size:]
        return given

    def _beginning(self) -> int:
        sizes = (size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size]))
        return max(sizes, default=0)


class Line:
    """Those who want to compute: one does, the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._change = Condition()
        self._standing: deque[object] = deque()

    def __len__(self) -> int:
        return len(self._standing)

    @contextmanager
    def turn(self, gone: Callable[[], bool]) -> Iterator[None]:
        me = object()
        with self._change:
            self._standing.append(me)
        try:
            with self._change:
                while self._standing[0] is not me:
                    self._change.wait(LOOK)
                    if gone():
                        raise GoneError
            yield
        finally:
            with self._change:
                self._standing.remove(me)
                self._change.notify_all()


class Engine:
    """A model of ONNX Runtime GenAI, its tokenizer, and the line before it."""

    def __init__(self, folder: Path, name: str | None, threads: int | None, context: int | None) -> None:
        self.context, self.vocabulary, self._ends = _limits(folder, context)
        self.name = name or folder.resolve().name
        self.line, self.ending = Line(), Event()
        self._library = _library()
        try:
            config = self._library.Config(str(folder))
            if threads:
                config.overlay(_with_threads(threads))
            self._model = self._library.Model(config)
            self._tokenizer = self._library.Tokenizer(self._model)
            self._bare = self._library.Tokenizer(self._model)
            self._bare.update_options(add_special_tokens="false", skip_special_tokens="false")
        except Exception as error:  # the library raises its own kinds, and RuntimeError
            raise StartError(f"ONNX Runtime GenAI does not load {folder}: {_one_line(error)}") from error
        self._around = _around(folder)
        self._tokenizing = Lock()

    @property
    def version(self) -> str:
        return str(self._library.__version__)

    def encode(self, text: str, param: str) -> tuple[int, ...]:
        """The tokens of a text, with those that a tokenizer puts in front."""
        if self._around is None:
            return self._encoded(self._tokenizer, text, param)
        before, after = self._around
        return before + self._encoded(self._bare, text, param) + after

    def encode_chat(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The tokens of a conversation in the model's own form, up to where the answer begins."""
        _plain("".join(text for message in messages for text in message.values()), "messages")
        with self._tokenizing:
            try:
                text = self._tokenizer.apply_chat_template(json.dumps(messages), add_generation_prompt=True)
            except Exception as error:  # of the template: it has none, or the roles are not to its liking
                raise RefusedError(
                    400, f"the model's chat template does not take this: {_one_line(error)}", param="messages"
                ) from error
        return self._encoded(self._bare, text, "messages")  # the template has written what stands in front itself

    def answer(self, asked: Asked, prompt: Sequence[int], gone: Callable[[], bool]) -> Iterator[Piece]:
        """What follows a prompt, token by token; for whoever has the turn."""
        params = self._library.GeneratorParams(self._model)
        params.set_search_options(**asked.options(prompt))
        generator = self._library.Generator(self._model, params)
        for start in range(0, len(prompt), PIECE):
            self._still_wanted(gone)
            generator.append_tokens(list(prompt[start : start + PIECE]))
        words, shown = self._tokenizer.create_stream(), Shown(asked.stops)
        scored: tuple[Scored, ...] = ()
        for count in range(1, asked.tokens + 1):
            self._still_wanted(gone)
            logits = generator.get_logits() if asked.likeliest is not None else None
            generator.generate_next_token()
            token = int(generator.get_next_tokens()[0])
            if asked.likeliest is not None:
                scored = (score(logits, token, asked.likeliest),)
            ended = token in self._ends
            text = shown.add("" if ended else words.decode(token))
            if ended or shown.stopped or count == asked.tokens:
                why = "stop" if ended or shown.stopped else "length"
                yield Piece(text + shown.rest(), scored, why)
                return
            yield Piece(text, scored)

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


def score(logits: Any, token: int, count: int) -> Scored:
    """Log-probabilities from logits, before temperature and the like."""
    import numpy as np

    row = np.asarray(logits, dtype=np.float64).reshape(-1)
    row = row - row.max()
    row -= np.log(np.exp(row).sum())
    best = np.argsort(-row, kind="stable")[:count]
    return Scored(token, float(row[token]), tuple((int(one), float(row[one])) for one in best))


def _plain(text: str, param: str) -> None:
    """What cannot be handed to the library whole: it takes texts up to the first NUL, in UTF-8."""
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
        raise StartError(
            f"{sys.executable} lacks onnxruntime_genai ({error}); pip install onnxruntime-genai"
        ) from error
    return onnxruntime_genai


def _limits(folder: Path, wanted: int | None) -> tuple[int, int, frozenset[int]]:
    """Context, size of the vocabulary, and the tokens that end an answer."""
    try:
        model = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model"]
        longest, vocabulary, ends = int(model["context_length"]), int(model["vocab_size"]), model["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartError(
            f"{folder} is no folder of ONNX Runtime GenAI: {CONFIG} cannot be read ({_one_line(error)}); build "
            "one with python -m onnxruntime_genai.models.builder"
        ) from error
    if wanted is not None and not 2 <= wanted <= longest:
        raise StartError(f"--context {wanted} is not 2 to {longest}, what the model was made for")
    return wanted or longest, vocabulary, frozenset(ends if isinstance(ends, list) else [ends])


def _around(folder: Path) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The tokens that a tokenizer puts before and after a text, by its file; None where there is none.

    The library reads them from other places and was seen to leave them out (0.18.0): texts lacked their first token.
    """
    try:
        found = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")).get("post_processor") or {}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartError(f"{folder / 'tokenizer.json'} cannot be read: {_one_line(error)}") from error
    steps = [one for one in found.get("processors", [found]) if one.get("type") == "TemplateProcessing"]
    sides: tuple[list[int], list[int]] = [], []
    for step in steps:
        place = 0
        for part in step["single"]:
            if "Sequence" in part:
                place = 1
            else:
                sides[place].extend(step["special_tokens"][part["SpecialToken"]["id"]]["ids"])
    return tuple(sides[0]), tuple(sides[1])


def _with_threads(threads: int) -> str:
    return json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}})


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# ---- counts ----


@dataclass(slots=True)
class Counts:
    """What has happened since the start, for Prometheus."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    prompt_tokens: int = 0
    generated_tokens: int = 0
    abandoned: int = 0
    _lock: Lock = field(default_factory=Lock)

    def request(self, path: str, status: int) -> None:
        with self._lock:
            self.requests[path, status] += 1

    def add(self, *, prompt: int = 0, generated: int = 0, abandoned: int = 0) -> None:
        with self._lock:
            self.prompt_tokens += prompt
            self.generated_tokens += generated
            self.abandoned += abandoned

    def page(self, standing: int) -> str:
        with self._lock:
            answered = {f'{{path="{path}",status="{code}"}}': n for (path, code), n in sorted(self.requests.items())}
            rows: list[tuple[str, str, str, dict[str, int]]] = [
                ("requests_total", "counter", "Requests that were answered", answered),
                ("requests_abandoned_total", "counter", "Requests whose client left", {"": self.abandoned}),
                ("prompt_tokens_total", "counter", "Tokens of prompts that were read", {"": self.prompt_tokens}),
                ("generated_tokens_total", "counter", "Tokens that were generated", {"": self.generated_tokens}),
                ("requests_running", "gauge", "Requests that compute", {"": min(1, standing)}),
                ("requests_waiting", "gauge", "Requests that wait for their turn", {"": max(0, standing - 1)}),
            ]
        return "".join(_metric(f"onnxruntime_{name}", kind, about, values) for name, kind, about, values in rows)


def _metric(name: str, kind: str, about: str, values: dict[str, int]) -> str:
    samples = "".join(f"{name}{labels} {value}\n" for labels, value in values.items())
    return f"# HELP {name} {about}.\n# TYPE {name} {kind}\n{samples}"


# ---- answers ----


class Words:
    """How OpenAI words the answers of one request, whole or in pieces."""

    def __init__(self, asked: Asked, engine: Engine) -> None:
        self.asked, self.engine = asked, engine
        self._id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._offsets: Counter[int] = Counter()
        self._begun: set[int] = set()  # answers whose first piece was sent

    def whole(self, choices: list[Json], generated: int) -> Json:
        return {**self._head(streamed=False), "choices": choices, "usage": self.usage(generated)}

    def usage(self, generated: int) -> Json:
        read = sum(map(len, self.asked.prompts))
        return {"prompt_tokens": read, "completion_tokens": generated, "total_tokens": read + generated}

    def choice(self, index: int, pieces: Sequence[Piece]) -> Json:
        """A whole answer, or the next pieces of one."""
        text = "".join(piece.text for piece in pieces)
        told: Json = {"index": index, "finish_reason": pieces[-1].finish, "logprobs": None}
        if self.asked.likeliest is not None:
            told["logprobs"] = self._of_chat(pieces) if self.asked.chat else self._of_text(index, pieces)
        if not self.asked.chat:
            return {**told, "text": text}
        role = {} if index in self._begun else {"role": "assistant"}
        self._begun.add(index)
        return {**told, "delta" if self.asked.stream else "message": {**role, "content": text}}

    def chunk(self, choices: list[Json], **more: Any) -> Json:
        return {**self._head(streamed=True), "choices": choices, **more}

    def _head(self, *, streamed: bool) -> Json:
        kind = "text_completion"
        if self.asked.chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self.engine.name}

    def _name(self, token: int) -> str:
        return self.engine.name_of(token, as_ids=self.asked.as_ids)

    def _of_chat(self, pieces: Sequence[Piece]) -> Json:
        rows = [
            {**self._told(one.token, one.logprob), "top_logprobs": [self._told(*best) for best in one.likeliest]}
            for piece in pieces
            for one in piece.scored
        ]
        return {"content": rows}

    def _told(self, token: int, logprob: float) -> Json:
        name = self._name(token)
        whole = "\N{REPLACEMENT CHARACTER}" not in name  # a part of a character has no text to take bytes from
        return {"token": name, "logprob": logprob, "bytes": list(name.encode()) if whole else None}

    def _of_text(self, index: int, pieces: Sequence[Piece]) -> Json:
        scored = [one for piece in pieces for one in piece.scored]
        offsets = []
        for piece in pieces:
            offsets += [self._offsets[index]] * len(piece.scored)
            self._offsets[index] += len(piece.text)
        return {
            "tokens": [self._name(one.token) for one in scored],
            "token_logprobs": [one.logprob for one in scored],
            "top_logprobs": [{self._name(token): value for token, value in one.likeliest} for one in scored],
            "text_offset": offsets,
        }


class Server(ThreadingHTTPServer):
    """Listens; a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, engine: Engine, key: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.engine, self.key, self.counts, self.since = engine, key, Counts(), int(time.time())
        super().__init__((host.strip("[]"), port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks is the client's affair; anything else is a mistake of ours and is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "quantry-onnxruntime"
    sys_version = ""
    timeout = PATIENCE
    disable_nagle_algorithm = True  # tokens are small and must not wait for each other

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *words: Any) -> None:  # noqa: A002
        """Requests are told of in our own words, without what a client chose to write."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server refuses by itself, in the same form as the rest."""
        self.close_connection = True
        self._refuse(RefusedError(code, message or HTTPStatus(code).phrase))

    def _serve(self) -> None:
        self._started, self._status, self._begun = time.monotonic(), 0, False
        path = urlsplit(self.path).path
        try:
            self._route(path, self._body())
        except RefusedError as refusal:
            self._refuse(refusal)
        except (GoneError, OSError):  # an OSError is the client's socket
            self._leave()
        except Exception as error:
            print(f"ERROR {type(error).__name__}: {_one_line(error)}", file=sys.stderr, flush=True)
            self._refuse(RefusedError(500, f"ONNX Runtime GenAI fails: {_one_line(error)}"))
        self.server.counts.request(path if path in ROUTES else "other", self._status)

    def _route(self, path: str, body: bytes) -> None:
        if path != "/health":
            self._check_key()
        known = f"/v1/models/{self.server.engine.name}"
        methods = ROUTES.get(path) or ({"GET": Handler._model} if unquote(path) == known else None)
        if methods is None:
            raise RefusedError(404, f"there is no {path} here; there are {', '.join(ROUTES)}")
        if self.command not in methods:
            allowed = ", ".join(methods)
            raise RefusedError(405, f"{path} takes {allowed}, not {self.command}", Allow=allowed)
        methods[self.command](self, body)

    def _check_key(self) -> None:
        key = self.server.key
        if key is None:
            origin = self.headers.get("Origin")
            if origin is not None and urlsplit(origin).hostname not in LOCAL:
                raise RefusedError(403, "pages of other sites may not ask a server without a key")
            return
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
            raise RefusedError(
                401, "the API key is missing or wrong: send Authorization: Bearer KEY",
                code="invalid_api_key", WWW_Authenticate="Bearer",
            )  # fmt: skip

    def _body(self) -> bytes:
        """Read whatever comes of it: the rest of a connection cannot be understood otherwise."""
        if self.command == "GET" and "Content-Length" not in self.headers:
            return b""
        size = self.headers.get("Content-Length", "")
        if not (size.isascii() and size.isdigit()):
            self.close_connection = True
            raise RefusedError(411, "Content-Length is missing or no number")
        if int(size) > BODY:
            self.close_connection = True
            left = min(int(size), 4 * BODY)  # read all the same, so that the client hears the answer
            while left and (block := self.rfile.read(min(left, 1 << 16))):
                left -= len(block)
            raise RefusedError(413, f"the request has {size} bytes, and {BODY} are taken")
        return self.rfile.read(int(size))

    # ---- paths ----

    def _health(self, _: bytes) -> None:
        self._json({"status": "ok"})

    def _metrics(self, _: bytes) -> None:
        page = self.server.counts.page(len(self.server.engine.line))
        self._send(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _models(self, _: bytes) -> None:
        self._json({"object": "list", "data": [self._card()]})

    def _model(self, _: bytes) -> None:
        self._json(self._card())

    def _card(self) -> Json:
        engine = self.server.engine
        return {
            "id": engine.name, "object": "model", "created": self.server.since, "owned_by": "quantry",
            "max_model_len": engine.context,
        }  # fmt: skip

    def _completions(self, body: bytes) -> None:
        self._answer(read_request(_object(body), self.server.engine, chat=False))

    def _chat(self, body: bytes) -> None:
        self._answer(read_request(_object(body), self.server.engine, chat=True))

    # ---- answers ----

    def _answer(self, asked: Asked) -> None:
        words, found = Words(asked, self.server.engine), _Found()
        with self.server.engine.line.turn(self._gone):
            for index, prompt in enumerate(asked.prompts):
                self.server.counts.add(prompt=len(prompt))
                self._one(words, index, prompt, found)
        if not asked.stream:
            self._json(words.whole(found.choices, found.generated))
        else:
            if asked.usage:
                self._event(words.chunk([], usage=words.usage(found.generated)))
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        self._tell(sum(map(len, asked.prompts)), found.generated)

    def _one(self, words: Words, index: int, prompt: Sequence[int], found: "_Found") -> None:
        """One answer: sent piece by piece, or kept until it is whole."""
        pieces: list[Piece] = []
        for piece in self.server.engine.answer(words.asked, prompt, self._gone):
            found.generated += 1
            self.server.counts.add(generated=1)
            pieces.append(piece)
            if words.asked.stream and (piece.text or piece.scored or piece.finish):
                self._event(words.chunk([words.choice(index, pieces)]))
                pieces = []
        if not words.asked.stream:
            found.choices.append(words.choice(index, pieces))

    def _event(self, data: Json | str) -> None:
        if not self._begun:  # late, so that what fails before the first token has a status of its own
            self._begun = True
            self._head(200, "text/event-stream", Cache_Control="no-cache", Transfer_Encoding="chunked")
        line = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _gone(self) -> bool:
        """Whether the client has closed its side; one that waits sends nothing."""
        self.connection.settimeout(0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(self.timeout)

    def _leave(self) -> None:
        self.close_connection = True
        self._status = self._status or 499  # as others count it: the client closed its request
        self.server.counts.add(abandoned=1)
        print("a client left before its answer was whole", flush=True)

    def _refuse(self, refusal: RefusedError) -> None:
        try:
            if getattr(self, "_begun", False):  # the status is sent already: the stream says it
                self.close_connection = True
                self._event(refusal.to_dict())
                self.wfile.write(b"0\r\n\r\n")
            else:
                self._json(refusal.to_dict(), refusal.status, **refusal.headers)
        except OSError:
            self._leave()

    def _json(self, data: Json, status: int = 200, **headers: str) -> None:
        self._send(status, json.dumps(data).encode(), "application/json", **headers)

    def _send(self, status: int, body: bytes, kind: str, **headers: str) -> None:
        self._head(status, kind, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def _head(self, status: int, kind: str, **headers: str) -> None:
        self._status = status
        self.send_response(status)
        for name, value in {"Content-Type": kind, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _tell(self, prompt: int, generated: int) -> None:
        seconds = time.monotonic() - self._started
        print(f"answered: {prompt} tokens of prompt, {generated} generated, {seconds:.2f} s", flush=True)


@dataclass(slots=True)
class _Found:
    """What has come of a request so far."""

    generated: int = 0
    choices: list[Json] = field(default_factory=list)


ROUTES: dict[str, dict[str, Callable[[Handler, bytes], None]]] = {
    "/health": {"GET": Handler._health},
    "/metrics": {"GET": Handler._metrics},
    "/v1/models": {"GET": Handler._models},
    "/v1/completions": {"POST": Handler._completions},
    "/v1/chat/completions": {"POST": Handler._chat},
}


def _object(body: bytes) -> Json:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is no JSON: {_one_line(error)}") from error
    if not isinstance(found, dict):
        raise RefusedError(400, "the request is no JSON object")
    return found


# ---- the program ----


def main(words: Sequence[str]) -> int:
    """Serves until a signal."""
    given = _parser().parse_args(words)
    key = os.environ.get(KEY) or None
    if key is None and not _is_local(given.host):
        raise StartError(f"--host {given.host} can be reached from outside and there is no key; set {KEY}")
    engine = Engine(given.model, given.served_model_name, given.threads, given.context)
    try:
        server = Server(given.host, given.port, engine, key)
    except (OSError, OverflowError) as error:
        raise StartError(f"cannot listen on port {given.port} of {given.host}: {error}; use another --port") from error
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"onnxruntime-genai {engine.version}, model {engine.name!r}, context {engine.context}", flush=True)
    Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    return _end(server)


def _end(server: Server) -> int:
    """The token that is being computed is the last one."""
    server.engine.ending.set()
    server.shutdown()
    server.server_close()
    end = time.monotonic() + GRACE
    while len(server.engine.line) and time.monotonic() < end:
        time.sleep(LOOK)
    return 0


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onnx_server", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int)
    return parser


def _program() -> NoReturn:
    try:
        code = main(sys.argv[1:])
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    _program()

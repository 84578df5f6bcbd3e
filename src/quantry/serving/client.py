"""A client of servers with OpenAI's API: sends a question, and streams the answer with the times it took.

Requests to this machine ignore the proxy of the environment, which could not reach it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx

from quantry.engines.contract.options import is_loopback
from quantry.errors import QuantryError

CONNECT, READ = 5.0, 600.0  # seconds to reach a server, and between two pieces of an answer: prompts may be long
UNREAL = 1e6  # tokens a second that no server gives: it divides by nothing
LONGEST = 300  # characters of a server's message that are passed on
START = "start one with quantry serve MODEL, or give the URL of one that runs"
KEY = "give --api-key, or set QUANTRY_API_KEY"
END = "[DONE]"
THOUGHTS = ("reasoning_content", "reasoning")  # where servers put what a model thinks before it answers
Message = Mapping[str, str]  # role and content


class ServerError(QuantryError):
    """A server cannot be reached, or refuses a request."""


class TextPiece(NamedTuple):
    """A part of an answer, or of the thoughts before it."""

    text: str
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer with its times. `tokens` is the server's own count, or the number of pieces if it counts none."""

    text: str
    tokens: int
    first_s: float  # from the request to the first piece
    seconds: float  # from the request to the last
    reported: float | None = None  # tokens a second after the first, by the server's own clock

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token, the server's own figure if it gives one; None for an answer of one token."""
        if self.reported is not None:
            return self.reported
        after = self.seconds - self.first_s
        return (self.tokens - 1) / after if self.tokens > 1 and after > 0 else None


class Stream:
    """An answer as it arrives: iterating gives its pieces, `answer` what has arrived so far."""

    def __init__(self, pieces: Iterator[Mapping[str, Any]]) -> None:
        self._chunks = pieces
        self._words: list[str] = []
        self._count, self._reported = 0, 0
        self._pace: float | None = None
        self._begun = perf_counter()
        self._first = self._last = self._begun

    def __iter__(self) -> Iterator[TextPiece]:
        for chunk in self._chunks:
            self._reported = _count(chunk) or self._reported
            self._pace = _pace(chunk) or self._pace
            for piece in _pieces(chunk):
                self._last = perf_counter()
                self._first = self._last if not self._count else self._first
                self._count += 1
                if not piece.thought:
                    self._words.append(piece.text)
                yield piece

    def close(self) -> None:
        """Ends the connection; a server stops an answer that nobody reads."""
        close = getattr(self._chunks, "close", None)
        if close is not None:
            close()

    def whole(self) -> Answer:
        """Waits for the end and returns the answer."""
        for _ in self:
            pass
        return self.answer

    @property
    def answer(self) -> Answer:
        """What has arrived so far."""
        tokens = max(self._reported, self._count)
        times = (self._first - self._begun, self._last - self._begun)
        return Answer("".join(self._words), tokens, *times, self._pace)


class Server:
    """A connection to a server. Requests go to `model`, by default the first one that the server lists."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        self.url = address(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            limits = httpx.Timeout(READ, connect=CONNECT)
            local = is_loopback(urlsplit(self.url).hostname or "")
            self._client = httpx.Client(timeout=limits, headers=headers, trust_env=not local)
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ServerError(f"{self.url} cannot be asked: {error}", fix="check the key and HTTP_PROXY") from error
        self.model = model or self._first_model()

    def chat(self, messages: Sequence[Message], **options: Any) -> Stream:
        """Streams the answer to a conversation; `options` are those of the API, such as max_tokens."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **options})

    def complete(self, prompt: str, **options: Any) -> Stream:
        """Streams the continuation of a text."""
        return self._stream("/v1/completions", {"prompt": prompt, **options})

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def models(self) -> tuple[str, ...]:
        """Returns the models that the server lists; none if its list cannot be read."""
        with _network_errors(self.url):
            reply = self._client.get(f"{self.url}/v1/models")
            self._check(reply)
            try:
                return tuple(str(row["id"]) for row in reply.json()["data"])
            except (ValueError, KeyError, TypeError):
                return ()

    def _first_model(self) -> str:
        listed = self.models()
        if not listed:
            raise ServerError(
                f"{self.url} answers, but names no model at /v1/models", fix="give --model, or another URL"
            )
        return listed[0]

    def _stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        request = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        return Stream(self._chunks(path, request))

    def _chunks(self, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yields the events of a stream; closing the iterator closes the connection."""
        with _network_errors(self.url), self._client.stream("POST", f"{self.url}{path}", json=body) as reply:
            self._check(reply)
            for line in reply.iter_lines():
                field, _, words = line.partition(":")
                if field not in ("data", "error") or not words.strip():
                    continue  # a comment that keeps the line open
                if words.strip() == END:
                    return
                yield _event(words.strip(), failed=field == "error")

    def _check(self, reply: httpx.Response) -> None:
        if reply.is_success:
            return
        reply.read()
        if reply.status_code in (401, 403):
            raise ServerError(f"{self.url} asks for a key ({reply.status_code})", fix=KEY)
        raise ServerError(
            f"{self.url} refuses ({reply.status_code}): {reason(reply.text)}", fix="ask for less, or " + START
        )


@contextmanager
def _network_errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerError(f"no server answers at {url} ({_plain(error)})", fix=START) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url} broke off: {_plain(error)}", fix="see its log; " + START) from error


def address(url: str) -> str:
    """Returns the URL before the paths of the API: with a scheme, without /v1. Raises ServerError if it is not one."""
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or too large
        valid = False
    if not valid or re.search(r"[\s?#]", whole):
        raise ServerError(f"{url[:80]!r} is not the address of a server", fix="give one such as http://127.0.0.1:8080")
    return re.sub(r"(/v1)?/*$", "", whole)


def _event(words: str, failed: bool) -> Mapping[str, Any]:
    try:
        event = json.loads(words)
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise ServerError(f"the server sends {words[:60]!r} in a stream", fix="give the URL of an OpenAI API")
    if failed or event.get("error"):
        raise ServerError(f"the server breaks off: {reason(words)}", fix="see its log")
    return event


def _pieces(chunk: Mapping[str, Any]) -> Iterator[TextPiece]:
    """Yields what a chunk adds: the delta of a chat, or the text of a completion."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = next((delta[name] for name in THOUGHTS if delta.get(name)), None)
        if thought:
            yield TextPiece(str(thought), thought=True)
        if text := delta.get("content") or choice.get("text"):
            yield TextPiece(str(text))


def _count(chunk: Mapping[str, Any]) -> int:
    """Returns the tokens of an answer, in the chunk that reports them; 0 in others."""
    return int((chunk.get("usage") or {}).get("completion_tokens") or 0)


def _pace(chunk: Mapping[str, Any]) -> float | None:
    """Returns the tokens a second that llama.cpp measures itself: pieces may arrive together on a busy machine."""
    timings = chunk.get("timings")
    pace = timings.get("predicted_per_second") if isinstance(timings, dict) else None
    return float(pace) if isinstance(pace, int | float) and 0 < pace < UNREAL else None


def reason(words: str) -> str:
    """Returns the message in an error of the API, or the whole text if it is no such error."""
    try:
        message = json.loads(words)
        while isinstance(message, dict):
            message = message.get("error") or message.get("message") or message.get("detail") or str(message)
    except (ValueError, RecursionError):
        message = words
    return " ".join(str(message).split())[:LONGEST]


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__

"""Talking to a server that speaks OpenAI's API: a question, and its answer as it comes, with the times it took.

A server on this machine is asked without the proxy that the environment may name: a proxy would not find it.
"""

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

import httpx

from quantry.errors import QuantryError

CONNECT, READ = 5.0, 600.0  # seconds to reach a server, and between two pieces of an answer: prompts may be long
LONGEST = 300  # characters of a server's words that are passed on
START = "start one with quantry serve MODEL, or give the URL of one that runs"
KEY = "give --api-key, or set QUANTRY_API_KEY"
END = "[DONE]"
THOUGHTS = ("reasoning_content", "reasoning")  # where servers put what a model thinks before it answers
Message = Mapping[str, str]  # role and content


class ServerError(QuantryError):
    """A server that cannot be reached, or refuses."""


class Piece(NamedTuple):
    """A part of an answer, or of the thoughts before it."""

    text: str
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, and when. `tokens` are those that the server counts, or pieces where it counts none."""

    text: str
    tokens: int
    first_s: float  # from the request to the first piece
    seconds: float  # from the request to the last

    @property
    def tokens_per_s(self) -> float | None:
        """The pace after the first token; None where one token is all."""
        after = self.seconds - self.first_s
        return (self.tokens - 1) / after if self.tokens > 1 and after > 0 else None


class Stream:
    """An answer as it comes: pieces as one goes through it, and the whole of it as `answer` afterwards."""

    def __init__(self, pieces: Iterator[Mapping[str, Any]]) -> None:
        self._chunks = pieces
        self._words: list[str] = []
        self._count, self._told = 0, 0
        self._begun = perf_counter()
        self._first = self._last = self._begun

    def __iter__(self) -> Iterator[Piece]:
        for chunk in self._chunks:
            self._told = _count(chunk) or self._told
            for piece in _pieces(chunk):
                self._last = perf_counter()
                self._first = self._last if not self._count else self._first
                self._count += 1
                if not piece.thought:
                    self._words.append(piece.text)
                yield piece

    def whole(self) -> Answer:
        """Waits for the end."""
        for _ in self:
            pass
        return self.answer

    @property
    def answer(self) -> Answer:
        """What has come so far."""
        tokens = max(self._told, self._count)
        return Answer("".join(self._words), tokens, self._first - self._begun, self._last - self._begun)


class Server:
    """A server by its address. `model` is the one that is asked, the first that it names unless another is wanted."""

    def __init__(self, url: str, *, key: str | None = None, model: str | None = None) -> None:
        self.url = _address(url)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            limits = httpx.Timeout(READ, connect=CONNECT)
            self._client = httpx.Client(timeout=limits, headers=headers, trust_env=not _is_near(self.url))
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise ServerError(f"{self.url} cannot be asked: {error}", fix="check the key and HTTP_PROXY") from error
        self.model = model or self._first_model()

    def chat(self, messages: Sequence[Message], **options: Any) -> Stream:
        """The answer to a conversation; `options` are those of the API, such as max_tokens."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **options})

    def complete(self, prompt: str, **options: Any) -> Stream:
        """How the model goes on after a text."""
        return self._stream("/v1/completions", {"prompt": prompt, **options})

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first_model(self) -> str:
        with _understood(self.url):
            reply = self._client.get(f"{self.url}/v1/models")
            self._check(reply)
            try:
                return str(reply.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise ServerError(
                    f"{self.url} answers, but names no model at /v1/models", fix="give --model, or another URL"
                ) from error

    def _stream(self, path: str, body: Mapping[str, Any]) -> Stream:
        told = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        return Stream(self._chunks(path, told))

    def _chunks(self, path: str, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """The events of a stream; the connection is closed with the iterator."""
        with _understood(self.url), self._client.stream("POST", f"{self.url}{path}", json=body) as reply:
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
            f"{self.url} refuses ({reply.status_code}): {_reason(reply.text)}", fix="ask for less, or " + START
        )


@contextmanager
def _understood(url: str) -> Iterator[None]:
    """What a network says, in one line."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise ServerError(f"no server answers at {url} ({_plain(error)})", fix=START) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(f"{url} broke off: {_plain(error)}", fix="see its log; " + START) from error


def _address(url: str) -> str:
    """The URL that paths of the API follow: a scheme before it, no /v1 behind it."""
    whole = url.strip() if "://" in url else f"http://{url.strip()}"
    try:
        parts = urlsplit(whole)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or re.search(r"\s", whole):
        raise ServerError(f"{url[:80]!r} is no address of a server", fix="write it like http://127.0.0.1:8080")
    return re.sub(r"(/v1)?/*$", "", whole)


def _is_near(url: str) -> bool:
    """Whether a server is on this machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _event(words: str, failed: bool) -> Mapping[str, Any]:
    try:
        found = json.loads(words)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ServerError(f"the server sends {words[:60]!r} in a stream", fix="give the URL of an OpenAI API")
    if failed or found.get("error"):
        raise ServerError(f"the server breaks off: {_reason(words)}", fix="see its log")
    return found


def _pieces(chunk: Mapping[str, Any]) -> Iterator[Piece]:
    """What a chunk adds: of a chat its delta, of a completion its text."""
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        thought = next((delta[name] for name in THOUGHTS if delta.get(name)), None)
        if thought:
            yield Piece(str(thought), thought=True)
        if text := delta.get("content") or choice.get("text"):
            yield Piece(str(text))


def _count(chunk: Mapping[str, Any]) -> int:
    """The tokens of an answer, in the chunk that tells them."""
    return int((chunk.get("usage") or {}).get("completion_tokens") or 0)


def _reason(words: str) -> str:
    """The message in an error of the API, else what was said."""
    try:
        found = json.loads(words)
        while isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or str(found)
        words = str(found)
    except (ValueError, RecursionError):
        pass
    return " ".join(words.split())[:LONGEST]


def _plain(error: Exception) -> str:
    return " ".join(str(error).split())[:LONGEST] or type(error).__name__

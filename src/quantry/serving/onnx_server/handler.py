"""HTTP: connections, paths, keys, answers whole or as a stream, and the page for Prometheus."""

import hmac
import json
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import unquote, urlsplit

from .model import AnswerPiece, GenaiModel
from .requests import CompletionRequest, GoneError, Json, RefusedError, one_line, read_request
from .responses import ResponseFormat

BODY = 16 << 20  # bytes of a request
PATIENCE = 60.0  # seconds for a client to send its request, or to take what it is sent
LOCAL = ("localhost", "127.0.0.1", "::1")


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

    def page(self, queued: int) -> str:
        with self._lock:
            answered = {f'{{path="{path}",status="{code}"}}': n for (path, code), n in sorted(self.requests.items())}
            rows: list[tuple[str, str, str, dict[str, int]]] = [
                ("requests_total", "counter", "Requests that were answered", answered),
                ("requests_abandoned_total", "counter", "Requests whose client left", {"": self.abandoned}),
                ("prompt_tokens_total", "counter", "Tokens of prompts that were read", {"": self.prompt_tokens}),
                ("generated_tokens_total", "counter", "Tokens that were generated", {"": self.generated_tokens}),
                ("requests_running", "gauge", "Requests that compute", {"": min(1, queued)}),
                ("requests_waiting", "gauge", "Requests that wait for their turn", {"": max(0, queued - 1)}),
            ]
        return "".join(
            _metric(f"onnxruntime_{name}", metric_type, about, values) for name, metric_type, about, values in rows
        )


def _metric(name: str, metric_type: str, about: str, values: dict[str, int]) -> str:
    samples = "".join(f"{name}{labels} {value}\n" for labels, value in values.items())
    return f"# HELP {name} {about}.\n# TYPE {name} {metric_type}\n{samples}"


class OnnxServer(ThreadingHTTPServer):
    """Listens; a thread for each connection."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, model: GenaiModel, key: str | None) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.model, self.key, self.counts, self.since = model, key, Counts(), int(time.time())
        super().__init__((host.strip("[]"), port), Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Shows a traceback, unless only the connection broke."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: OnnxServer
    protocol_version = "HTTP/1.1"
    server_version = "quantry-onnxruntime"
    sys_version = ""
    timeout = PATIENCE
    disable_nagle_algorithm = True  # tokens are small and must not wait for each other

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *parts: Any) -> None:  # noqa: A002
        """Logs nothing: `_log` does, without what a client chose to write."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what http.server refuses by itself in the same form as the rest."""
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
            print(f"ERROR {type(error).__name__}: {one_line(error)}", file=sys.stderr, flush=True)
            self._refuse(RefusedError(500, f"ONNX Runtime GenAI fails: {one_line(error)}"))
        self.server.counts.request(path if path in ROUTES else "other", self._status)

    def _route(self, path: str, body: bytes) -> None:
        if path != "/health":
            self._check_key()
        known = f"/v1/models/{self.server.model.name}"
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
        """Reads the whole body even if it is refused: the rest of the connection could not be parsed otherwise."""
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

    def _health(self, _: bytes) -> None:
        self._json({"status": "ok"})

    def _metrics(self, _: bytes) -> None:
        page = self.server.counts.page(len(self.server.model.queue))
        self._send(200, page.encode(), "text/plain; version=0.0.4; charset=utf-8")

    def _models(self, _: bytes) -> None:
        self._json({"object": "list", "data": [self._card()]})

    def _model(self, _: bytes) -> None:
        self._json(self._card())

    def _card(self) -> Json:
        model = self.server.model
        return {
            "id": model.name, "object": "model", "created": self.server.since, "owned_by": "quantry",
            "max_model_len": model.context,
        }  # fmt: skip

    def _completions(self, body: bytes) -> None:
        self._answer(read_request(_object(body), self.server.model, chat=False))

    def _chat(self, body: bytes) -> None:
        self._answer(read_request(_object(body), self.server.model, chat=True))

    def _answer(self, request: CompletionRequest) -> None:
        answers, generated = ResponseFormat(request, self.server.model), _Generated()
        with self.server.model.queue.turn(self._gone):
            for index, prompt in enumerate(request.prompts):
                self.server.counts.add(prompt=len(prompt))
                self._generate(answers, index, prompt, generated)
        if not request.stream:
            self._json(answers.whole(generated.choices, generated.tokens))
        else:
            if request.usage:
                self._event(answers.chunk([], usage=answers.usage(generated.tokens)))
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        self._log(sum(map(len, request.prompts)), generated.tokens)

    def _generate(self, answers: ResponseFormat, index: int, prompt: Sequence[int], generated: "_Generated") -> None:
        """Sends one answer piece by piece, or keeps it until it is whole."""
        pieces: list[AnswerPiece] = []
        for piece in self.server.model.answer(answers.request, prompt, self._gone):
            generated.tokens += 1
            self.server.counts.add(generated=1)
            pieces.append(piece)
            if answers.request.stream and (piece.text or piece.scored or piece.finish):
                self._event(answers.chunk([answers.choice(index, pieces)]))
                pieces = []
        if not answers.request.stream:
            generated.choices.append(answers.choice(index, pieces))

    def _event(self, data: Json | str) -> None:
        if not self._begun:  # late, so that an error before the first token has its own status
            self._begun = True
            self._head(200, "text/event-stream", Cache_Control="no-cache", Transfer_Encoding="chunked")
        line = f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))

    def _gone(self) -> bool:
        """Returns True if the client has closed its side; one that waits sends nothing."""
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

    def _send(self, status: int, body: bytes, content_type: str, **headers: str) -> None:
        self._head(status, content_type, Content_Length=str(len(body)), **headers)
        self.wfile.write(body)

    def _head(self, status: int, content_type: str, **headers: str) -> None:
        self._status = status
        self.send_response(status)
        for name, value in {"Content-Type": content_type, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def _log(self, prompt: int, generated: int) -> None:
        seconds = time.monotonic() - self._started
        print(f"answered: {prompt} tokens of prompt, {generated} generated, {seconds:.2f} s", flush=True)


@dataclass(slots=True)
class _Generated:
    """What was generated for a request so far."""

    tokens: int = 0
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
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is no JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise RefusedError(400, "the request is no JSON object")
    return content

"""An OpenAI endpoint: its address, the model it serves, whether it answers, and the tokenizer to count with.

Prompts of a certain length need the tokenizer of the model. A server on this machine tells where its model is:
llama.cpp at /props, vLLM as `root` of /v1/models. A GGUF file holds its tokenizer itself.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from quantry.errors import QuantryError
from quantry.models import gguf
from quantry.models.files import LocalFiles
from quantry.registry import suggest

HUB = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ANSWER = 10.0  # seconds for a list of models


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go; `root` is without /v1, since health and metrics are beside it."""

    root: str
    model: str
    key: str | None
    places: tuple[str, ...]  # where the server says its model is

    def ask(self, *, chat: bool, patience: float) -> None:
        """One short request: the engine is warm afterwards, and what it refuses is said at once."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": 2, "stream": False}
        body |= {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
        path = "chat/completions" if chat else "completions"
        answer = _request(self.root, self.key, "POST", f"/v1/{path}", patience, json=body)
        if answer.status_code != httpx.codes.OK:
            other = "leave --chat out" if chat else "give --chat if it answers chats alone"
            raise QuantryError(
                f"{self.root}/v1/{path} answers {answer.status_code}: {_words(answer)}", fix=f"mend that, or {other}"
            )


def find(url: str, model: str | None, key: str | None) -> Endpoint:
    """The endpoint at a URL, with or without /v1; its only model where none is named."""
    root = _root(url)
    answer = _request(root, key, "GET", "/v1/models", ANSWER)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise QuantryError(f"{root} answers {answer.status_code}: {_words(answer)}", fix="give its key with --api-key")
    rows = _models(root, answer)
    names = tuple(str(row["id"]) for row in rows)
    if model is None and len(names) > 1:
        raise QuantryError(f"{root} serves {len(names)} models: {', '.join(names)}", fix="choose one with --model")
    if model is not None and model not in names:
        raise QuantryError(f"{root} serves no model {model!r}", fix=suggest(model, names))
    row = next(row for row in rows if row["id"] == (model or names[0]))
    return Endpoint(root, str(row["id"]), key, tuple(_places(root, key, row)))


def tokenizer(endpoint: Endpoint, wanted: str | None, spare: Path) -> str:
    """A folder or hub id that transformers loads a tokenizer from; that of a GGUF file is written into `spare`."""
    for place in (wanted,) if wanted else endpoint.places:
        if found := _tokenizer(place, spare):
            return found
    if wanted:
        raise QuantryError(
            f"{wanted} has no tokenizer that can be read",
            fix="give a folder with tokenizer.json, a .gguf file or a hub id",
        )
    raise QuantryError(
        f"{endpoint.root} does not tell where the tokenizer of {endpoint.model} is",
        fix="name it with --tokenizer: a folder with tokenizer.json, a .gguf file or a hub id",
    )


def _tokenizer(place: str, spare: Path) -> str | None:
    path = Path(place).expanduser()
    if path.is_dir():
        if any((path / name).is_file() for name in TOKENIZERS):
            return str(path.resolve())
        file = next(iter(sorted(path.glob("*.gguf"))), None)
        return _from_gguf(file, spare) if file else None
    if path.is_file():
        return _from_gguf(path, spare) if path.suffix == ".gguf" else None
    return place if HUB.fullmatch(place) else None


def _from_gguf(file: Path, spare: Path) -> str:
    from quantry.llamacpp import to_tokenizer as retokenizing

    header = gguf.read_shards(LocalFiles(file.parent), file.name, whole=True)
    for name, data in retokenizing.tokenizer(header.metadata).items():
        (spare / name).write_bytes(data)
    return str(spare)


def _root(url: str) -> str:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large
        fine = False
    if not fine or parts.query or parts.fragment:
        raise QuantryError(f"{url!r} is not the address of a server", fix="give one such as http://127.0.0.1:8080")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}".rstrip("/")


def _request(root: str, key: str | None, method: str, path: str, patience: float, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.request(method, f"{root}{path}", headers=headers, timeout=patience, **body)
    except httpx.TimeoutException as error:
        raise QuantryError(f"{root} does not answer within {patience:g} s", fix="see that it is up") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise QuantryError(
            f"{root} cannot be reached: {str(error) or type(error).__name__}", fix="start a server with quantry serve"
        ) from error


def _models(root: str, answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        rows = answer.json()["data"]
        good = bool(rows) and all(isinstance(row["id"], str) for row in rows)
    except (ValueError, KeyError, TypeError):
        rows, good = [], False
    if answer.status_code != httpx.codes.OK or not good:
        raise QuantryError(
            f"{root}/v1/models answers {answer.status_code} and names no model: {_words(answer)}",
            fix="give the address of an OpenAI-compatible server",
        )
    return list(rows)


def _places(root: str, key: str | None, row: dict[str, Any]) -> Iterator[str]:
    """Where the model may be: as the engine tells, else by its name."""
    if row.get("owned_by") == "llamacpp":
        try:
            told = _request(root, key, "GET", "/props", ANSWER).json()
        except (QuantryError, ValueError):
            told = {}
        if isinstance(told, dict) and isinstance(told.get("model_path"), str):
            yield told["model_path"]
    if isinstance(row.get("root"), str):
        yield row["root"]
    yield str(row["id"])


def _words(answer: httpx.Response) -> str:
    """What a server says of an error, in whatever form."""
    try:
        told = answer.json()
        inner = told.get("error", told) if isinstance(told, dict) else told
        words = inner.get("message", inner) if isinstance(inner, dict) else inner
    except ValueError:
        words = answer.text
    return " ".join(str(words).split())[:200] or "nothing"

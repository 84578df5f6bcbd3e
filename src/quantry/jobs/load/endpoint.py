"""An OpenAI endpoint: its address, the model it serves, a first request, and the tokenizer that counts lengths.

Prompts of a given length need the tokenizer of the model. A server on this machine reports the path of its model:
llama.cpp at /props, vLLM as `root` of /v1/models. A GGUF file contains its tokenizer.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quantry.errors import QuantryError
from quantry.models import gguf
from quantry.models.files import LocalFiles
from quantry.registry import suggest
from quantry.serving.client import address, reason

HUB = re.compile(r"[\w.-]+/[\w.-]+")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
ANSWER = 10.0  # seconds for a list of models


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and model of a server; `root` is without /v1, since health and metrics are next to it."""

    root: str
    model: str
    key: str | None
    places: tuple[str, ...]  # paths and names of the model, as the server reports them

    def ask(self, *, chat: bool, patience: float) -> None:
        """Sends one short request, which warms up the engine. Raises QuantryError if the server refuses it."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": 2, "stream": False}
        body |= {"messages": [{"role": "user", "content": "Hello"}]} if chat else {"prompt": "Hello"}
        path = "chat/completions" if chat else "completions"
        answer = _request(self.root, self.key, "POST", f"/v1/{path}", patience, json=body)
        if answer.status_code != httpx.codes.OK:
            other = "leave --chat out" if chat else "give --chat if it only answers chats"
            raise QuantryError(
                f"{self.root}/v1/{path} answers {answer.status_code}: {_message(answer)}", fix=f"fix that, or {other}"
            )


def find(url: str, model: str | None, key: str | None) -> Endpoint:
    """Returns the endpoint at a URL, with or without /v1, and its only model if none is named.

    Raises QuantryError if it cannot be reached, needs a key, or does not serve the model.
    """
    root = address(url)
    answer = _request(root, key, "GET", "/v1/models", ANSWER)
    if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        raise QuantryError(
            f"{root} answers {answer.status_code}: {_message(answer)}", fix="give its key with --api-key"
        )
    rows = _models(root, answer)
    names = tuple(str(row["id"]) for row in rows)
    if model is None and len(names) > 1:
        raise QuantryError(f"{root} serves {len(names)} models: {', '.join(names)}", fix="choose one with --model")
    if model is not None and model not in names:
        raise QuantryError(f"{root} serves no model {model!r}", fix=suggest(model, names))
    row = next(row for row in rows if row["id"] == (model or names[0]))
    return Endpoint(root, str(row["id"]), key, tuple(_places(root, key, row)))


def problem_of(endpoint: Endpoint) -> str:
    """Returns why the endpoint answers no more; an empty text if it does."""
    try:
        find(endpoint.root, endpoint.model, endpoint.key)
    except QuantryError as error:
        return f"after the load: {error.problem}"
    return ""


def tokenizer(endpoint: Endpoint, wanted: str | None, spare: Path) -> str:
    """Returns a folder or hub id that transformers can load; writes the tokenizer of a GGUF file into `spare`.

    Raises QuantryError if the wanted tokenizer, or that of the served model, cannot be found.
    """
    for place in (wanted,) if wanted else endpoint.places:
        if loadable := _tokenizer(place, spare):
            return loadable
    if wanted:
        raise QuantryError(
            f"{wanted} has no tokenizer that can be read",
            fix="give a folder with tokenizer.json, a .gguf file or a hub id",
        )
    raise QuantryError(
        f"{endpoint.root} does not report the path of {endpoint.model}, so its tokenizer is unknown",
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
    from quantry.llamacpp import to_tokenizer  # torch

    header = gguf.read_shards(LocalFiles(file.parent), file.name, whole=True)
    for name, data in to_tokenizer.tokenizer(header.metadata).items():
        (spare / name).write_bytes(data)
    return str(spare)


def _request(root: str, key: str | None, method: str, path: str, patience: float, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return httpx.request(method, f"{root}{path}", headers=headers, timeout=patience, **body)
    except httpx.TimeoutException as error:
        raise QuantryError(f"{root} does not answer within {patience:g} s", fix="check that it is running") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise QuantryError(
            f"{root} cannot be reached: {str(error) or type(error).__name__}", fix="start a server with quantry serve"
        ) from error


def fetched(root: str, key: str | None, path: str) -> Any:
    """Returns the JSON at a path; None if there is none."""
    try:
        answer = _request(root, key, "GET", path, ANSWER)
        return answer.json() if answer.status_code == httpx.codes.OK else None
    except (QuantryError, ValueError):
        return None


def _models(root: str, answer: httpx.Response) -> list[dict[str, Any]]:
    try:
        rows = answer.json()["data"]
        valid = bool(rows) and all(isinstance(row["id"], str) for row in rows)
    except (ValueError, KeyError, TypeError):
        rows, valid = [], False
    if answer.status_code != httpx.codes.OK or not valid:
        raise QuantryError(
            f"{root}/v1/models answers {answer.status_code} and names no model: {_message(answer)}",
            fix="give the address of an OpenAI-compatible server",
        )
    return list(rows)


def _places(root: str, key: str | None, row: dict[str, Any]) -> Iterator[str]:
    """Yields where the model may be: the path that the engine reports, then its name."""
    if row.get("owned_by") == "llamacpp":
        properties = fetched(root, key, "/props")
        if isinstance(properties, dict) and isinstance(properties.get("model_path"), str):
            yield properties["model_path"]
    if isinstance(row.get("root"), str):
        yield row["root"]
    yield str(row["id"])


def _message(answer: httpx.Response) -> str:
    return reason(answer.text) or "nothing"

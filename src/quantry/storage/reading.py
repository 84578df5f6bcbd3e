"""Reads back the files that Quantry wrote, or that users write for it: of a known size and shape, or refused."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantry.errors import OutputError, QuantryError
from quantry.storage.shape import fault, plain_fault

LIMIT = 256 << 20  # bytes of a file; quantry.json of a model with 100,000 tensors has 12 MB


def read_json(
    file: Path, shape: Any = None, *, fix: str, error: type[QuantryError] = OutputError, limit: int = LIMIT
) -> dict[str, Any]:
    """Reads a JSON object of the shape that type hints give (see shape.py).

    Raises `error`, which names the file and the place in it, if it cannot be read, is too large, is no UTF-8, no JSON
    or no object, or has another shape.
    """
    return parse_object(read_bytes(file, fix=fix, error=error, limit=limit), str(file), shape, fix=fix, error=error)


def read_list(file: Path, *, fix: str, error: type[QuantryError] = OutputError, limit: int = LIMIT) -> list[Any]:
    """Reads a JSON list; it is refused for the same reasons as an object."""
    data = read_bytes(file, fix=fix, error=error, limit=limit)
    content = _parsed(data, str(file), fix, error, json.loads)
    if not isinstance(content, list):
        raise error(f"{file} is damaged: it holds a {type(content).__name__}, not a list", fix=fix)
    return content


def read_toml(file: Path, *, fix: str, error: type[QuantryError] = OutputError, limit: int = LIMIT) -> dict[str, Any]:
    """Reads a TOML file; it is refused for the same reasons as JSON."""
    data = read_bytes(file, fix=fix, error=error, limit=limit)
    return parse_object(data, str(file), fix=fix, error=error, parse=tomllib.loads)


def read_bytes(file: Path, *, fix: str, error: type[QuantryError] = OutputError, limit: int = LIMIT) -> bytes:
    """Reads a file whole. Raises `error` if it cannot be read or has more bytes than `limit`."""
    try:
        with file.open("rb") as opened:
            data = opened.read(limit + 1)
    except OSError as problem:
        raise error(f"cannot read {file}: {problem.strerror}", fix=fix) from problem
    if len(data) > limit:
        raise error(f"{file} is damaged: it has more than {limit:,} bytes", fix=fix)
    return data


def parse_object(
    data: bytes,
    name: str,
    shape: Any = None,
    *,
    fix: str,
    error: type[QuantryError] = OutputError,
    parse: Callable[[str], Any] = json.loads,
) -> dict[str, Any]:
    """Returns the object of such a file's bytes. Raises `error` as `read_json` does."""
    content = _parsed(data, name, fix, error, parse)
    if not isinstance(content, dict):
        raise error(f"{name} is damaged: it holds a {type(content).__name__}, not an object", fix=fix)
    if words := fault(content, shape) if shape is not None else "":
        raise error(f"{name} is damaged: {words}", fix=fix)
    return content


def _parsed(data: bytes, name: str, fix: str, error: type[QuantryError], parse: Callable[[str], Any]) -> Any:
    try:
        content = parse(data.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise error(f"{name} is damaged: byte {problem.start} is not UTF-8", fix=fix) from problem
    except RecursionError as problem:
        raise error(f"{name} is damaged: it is nested too deeply", fix=fix) from problem
    except ValueError as problem:
        kind = "JSON" if parse is json.loads else "TOML"
        raise error(f"{name} is damaged: it is not {kind} ({str(problem)[:80]})", fix=fix) from problem
    if words := plain_fault(content):
        raise error(f"{name} is damaged: {words}", fix=fix)
    return content

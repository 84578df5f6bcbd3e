"""Compares JSON with the shape that it should have: type hints of dataclasses, TypedDicts and plain types."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

NESTING = 64  # of objects and lists; what Quantry writes has fewer than ten
INTEGERS = 1 << 63  # sizes and counts beyond are none
UNLIMITED = "model_max_length"  # of a tokenizer; transformers writes 10^30 where there is no limit
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", NoneType: "null"}


def plain_fault(value: Any) -> str:
    """Returns what is wrong with any JSON: nested too deeply, a number out of range, text that is none; or nothing."""
    level = [("", value)]
    for _ in range(NESTING):
        for name, item in level:
            if isinstance(item, str) and not _is_text(item):
                return f"{name or 'it'} has characters that are none"
            if isinstance(item, int) and abs(item) >= INTEGERS and not name.endswith(UNLIMITED):
                return f"{name or 'it'} is a number of {len(str(item))} digits"
        level = [pair for name, item in level for pair in _inside(name, item)]
        if not level:
            return ""
    return f"it is nested deeper than {NESTING} levels"


def fault(value: Any, shape: Any, name: str = "") -> str:
    """Returns the first place where a value does not have a shape, and how; an empty text if it has."""
    origin = get_origin(shape) or shape
    if shape is Any:
        return ""
    if origin in (Union, UnionType):
        faults = [fault(value, option, name) for option in get_args(shape)]
        return "" if "" in faults else max(faults, key=lambda words: words.count(".", 0, words.find(" is ")))
    if origin is Literal:
        return "" if value in get_args(shape) else _wrong(name, value, " or ".join(map(str, get_args(shape))))
    if is_typeddict(shape) or is_dataclass(shape):
        return _record_fault(value, shape, name)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_fault(value, get_args(shape), name)
    if isinstance(origin, type) and issubclass(origin, Sequence) and origin is not str:
        return _list_fault(value, get_args(shape), name)
    return "" if _is_scalar(value, shape) else _wrong(name, value, WORDS[shape])


def _record_fault(value: Any, shape: Any, name: str) -> str:
    if not isinstance(value, Mapping):
        return _wrong(name, value, "an object")
    for key, hint in get_type_hints(shape).items():
        if key not in value and key in _required(shape):
            return f"{_path(name, key)} is missing"
        if key in value and (words := fault(value[key], hint, _path(name, key))):
            return words
    return ""


def _required(shape: Any) -> frozenset[str]:
    if is_typeddict(shape):
        return frozenset(shape.__required_keys__)
    return frozenset(
        field.name for field in fields(shape) if field.default is MISSING and field.default_factory is MISSING
    )


def _mapping_fault(value: Any, arguments: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, Mapping):
        return _wrong(name, value, "an object")
    inner = arguments[1] if arguments else Any
    return next((words for key, item in value.items() if (words := fault(item, inner, _path(name, key)))), "")


def _list_fault(value: Any, arguments: tuple[Any, ...], name: str) -> str:
    if not isinstance(value, list):
        return _wrong(name, value, "a list")
    inner = [argument for argument in arguments if argument is not Ellipsis]
    if len(inner) > 1 and len(value) != len(inner):
        return f"{name or 'it'} has {len(value)} items, not {len(inner)}"
    hints = inner if len(inner) > 1 else (inner or [Any]) * len(value)
    pairs = enumerate(zip(value, hints, strict=True))
    return next((words for at, (item, hint) in pairs if (words := fault(item, hint, _path(name, at)))), "")


def _is_scalar(value: Any, shape: type) -> bool:
    if isinstance(value, bool):
        return shape is bool
    return isinstance(value, int | float) if shape is float else isinstance(value, shape)


def _is_text(value: str) -> bool:
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


def _inside(name: str, item: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(item, dict):
        yield from ((_path(name, "a key"), key) for key in item)
        yield from ((_path(name, key), value) for key, value in item.items())
    elif isinstance(item, list):
        yield from ((_path(name, at), value) for at, value in enumerate(item))


def _path(name: str, key: Any) -> str:
    inner = str(key).encode("ascii", "backslashreplace").decode()[:60]
    return f"{name}.{inner}" if name else inner


def _wrong(name: str, value: Any, wanted: str) -> str:
    shown = ascii(value)[:40] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    return f"{name or 'it'} is {shown}, not {wanted}"

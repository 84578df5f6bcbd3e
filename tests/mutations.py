"""Damages files at random, by a seed: bytes anywhere, JSON by its structure, headers of safetensors and GGUF files."""

import json
import random
from collections.abc import Callable
from typing import Any

ODD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 3, 7, 1 << 31, 10**9, 1 << 63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "0",
    "\u00e9\u4e2d", "\ud800", "../../x", "a\nb", "A" * 5000, [], {}, [[]], [None], {"": 0}, [0] * 300, ["x", 1], {"x": {"x": {}}},
)  # fmt: skip
TAILS = (b"\xff", b"\x00", b"\xef\xbb\xbf", b"\xc3", b"}", b"[" * 100_000, b'{"a":' * 50_000, b" " * 100_000, b"\n")


def damaged_json(data: bytes, chance: random.Random) -> bytes:
    """Changes one to three places of a JSON text, or bytes of it."""
    if chance.random() < 0.25:
        return damaged_bytes(data, chance)
    content = json.loads(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        content = _changed(content, chance)
    return json.dumps(content).encode("utf-8", "surrogatepass")


def damaged_bytes(data: bytes, chance: random.Random, first: int | None = None) -> bytes:
    """Changes, cuts, repeats or adds bytes, among the `first` ones if that is given."""
    end = min(len(data), first or len(data))
    at = chance.randrange(end) if end else 0
    length = chance.choice((1, 1, 2, 4, 8, 64))
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at] + chance.randbytes(length) + data[at + length :],
        lambda: data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))] if end else []) + data[at + 1 :],
        lambda: data[:at],
        lambda: data[:at] + data[at + length :],
        lambda: data[:at] + data[max(0, at - length) : at] + data[at:],
        lambda: data[:at] + chance.choice(TAILS) + data[at:],
        lambda: chance.choice((b"", b"{}", b"[]", b"null", b'"x"', b"0", *TAILS)),
        lambda: data[:at] + chance.choice((b"0", b"-1", b"9" * 20, b"9" * 5000)) + data[at + 1 :],
    )
    return chance.choice(ways)()


def damaged_safetensors(data: bytes, chance: random.Random) -> bytes:
    """Changes the JSON header of a safetensors file, with a length that fits it, or bytes of it."""
    length = int.from_bytes(data[:8], "little")
    if chance.random() < 0.3:
        return damaged_bytes(data, chance, first=8 + length)
    header = damaged_json(data[8 : 8 + length], chance)
    told = len(header) if chance.random() < 0.9 else chance.choice((0, 1, len(header) + 1, 1 << 40, (1 << 64) - 1))
    return told.to_bytes(8, "little") + header + data[8 + length :]


def damaged_toml(data: bytes, chance: random.Random) -> bytes:
    """Changes a value or a name of a TOML text, or bytes of it."""
    if chance.random() < 0.3:
        return damaged_bytes(data, chance)
    lines = data.decode().splitlines()
    at = chance.randrange(len(lines))
    name, equals, _ = lines[at].partition("=")
    values = (
        "0",
        "-1",
        "true",
        '""',
        '"x"',
        "[]",
        "{}",
        "[[1]]",
        "1e400",
        "nan",
        "9" * 30,
        '"\\u0000"',
        "1979-05-27",
        '"' + "*" * 99 + '"',
    )
    names = ("preset", "format", "group", "rules", "match", "type", "keep", "kv", "fit", "rounder", "transform", "x")
    if equals:
        lines[at] = (
            f"{name}= {chance.choice(values)}"
            if chance.random() < 0.7
            else f"{chance.choice(names)} = {chance.choice(values)}"
        )
    else:
        lines[at] = chance.choice(("[rules]", "[[rules]]", "", "[[[", "[preset]"))
    return "\n".join(lines).encode()


def _changed(content: Any, chance: random.Random) -> Any:
    """Replaces, removes, renames or repeats one place of the content."""
    places = list(_places(content))
    if not places:
        return chance.choice(ODD)
    owner, key = chance.choice(places)
    way = chance.random()
    if way < 0.6:
        owner[key] = _like(owner[key], chance)
    elif way < 0.8:
        del owner[key]
    elif isinstance(owner, dict):
        owner[chance.choice((f"{key}x", "", str(chance.randrange(9))))] = owner.pop(key)
    else:
        owner.extend(owner[:] * chance.choice((1, 1, 20)))
    return content


def _like(value: Any, chance: random.Random) -> Any:
    """Another value: any odd one, or a number near this one."""
    if isinstance(value, int) and not isinstance(value, bool) and chance.random() < 0.5:
        return chance.choice((value + 1, value - 1, -value, 2 * value, value // 2, value * 1000, value << 40))
    if isinstance(value, str) and chance.random() < 0.3:
        return chance.choice((value[:-1], value + "x", value * 3, value.upper()))
    return json.loads(json.dumps(chance.choice(ODD)))


def _places(content: Any) -> Any:
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield content, key
        yield from _places(value)


BOMBS = (
    "{% for a in range(10**9) %}x{% endfor %}", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'x'.center(10**9) }}", "{{ 'x' * 10**10 }}", "{{ ('x\\n' * 9999) | indent(10**6) }}", "{{ range(10**9) | list }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}{{ ns.a }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ ''.__class__.__mro__ }}", "{{ '%1000000000d' % 1 }}",
    "{{ 10 ** 10 ** 8 }}", "{{ cycler.__init__.__globals__ }}", "{% include 'config.json' %}", "{{ raise_exception('no') }}",
    "{{ messages | map(attribute='content') | join(messages | string * 10**6) }}", "{{ '{:>1000000000}'.format(1) }}",
)  # fmt: skip


def hostile_template(data: bytes, chance: random.Random) -> bytes:
    """Damages a chat template, or puts something endless, huge or forbidden into it."""
    if chance.random() < 0.3:
        return damaged_bytes(data, chance)
    return chance.choice((b"", data)) + chance.choice(BOMBS).encode()

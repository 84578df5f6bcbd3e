"""The tensors that a model has, from its config.json alone.

shapes.toml lists them by family with symbolic dimensions; this module evaluates the formulas for a config. A field that
the config leaves out gets the default of its family's config class, as in the small `text_config` of a vision model;
but the sizes of a plain language model must be given.
"""

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import isfinite, prod
from typing import Any

from quantry import registry
from quantry.errors import ConfigError
from quantry.models.attention import LAYER_LIMIT, TEXT_CONFIGS, text_config
from quantry.storage import read_data
from quantry.types import TensorInfo

DTYPE, DTYPE_BYTES = "BF16", 2
EXPERT_LIMIT = 10_000  # of a layer
TENSOR_LIMIT = 250_000  # DeepSeek V3 has 46,000
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
TIED = "tie_word_embeddings"
RESTORE = "restore config.json"

LISTS = (list, tuple)

Fields = Mapping[str, Any]
Shape = tuple[str, tuple[int, ...]]

ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {ast.Gt: operator.gt, ast.GtE: operator.ge}


def tensors_of(config: Mapping[str, Any]) -> tuple[TensorInfo, ...]:
    """Returns the tensors of a 16-bit checkpoint of the model that `config` describes; they are in no file.

    Raises ConfigError for an unknown family or an invalid config.
    """
    tensors: list[TensorInfo] = []
    start = 0
    for name, shape in _shapes(complete(config)):
        _limit("tensors", len(tensors), TENSOR_LIMIT)
        nbytes = prod(shape) * DTYPE_BYTES
        tensors.append(TensorInfo(name, DTYPE, shape, "", start, nbytes))
        start += nbytes
    return tuple(tensors)


def known_families() -> tuple[str, ...]:
    """Returns the model types whose tensors are known."""
    return tuple(sorted(name for name in _table()["families"] if not _family(name).get("part")))


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config with all fields that decide shapes, including defaults of its family's config class."""
    family = _family(_model_type(config))
    key = _text_key(config)
    text = {**(config[key] if key else config), **text_config(config)}  # the latter has canonical names but no nulls
    for name in () if key else SIZES:
        if name not in text:
            raise ConfigError(f"config has no {name}", fix="copy config.json from the original model")
    language = _family(_part_type(config, "language", text)) if "vision" in family else family
    text = _filled(text, language)
    tied = config.get(TIED)
    text[TIED] = bool(text.get(TIED) if tied is None else tied)  # loaders follow the outer field
    whole = {**config, **({key: text} if key else text), TIED: text[TIED]}
    if "vision" in family:
        whole = _filled(whole, family)
        whole["vision_config"] = _filled(_vision(config), _family(_part_type(config, "vision", _vision(config))))
    return whole


def _shapes(config: Mapping[str, Any]) -> Iterator[Shape]:
    family, key = _family(_model_type(config)), _text_key(config)
    text = config[key] if key else config
    if "vision" not in family:
        yield from _stack(family, text)
        return
    vision = config["vision_config"]
    for side, fields in (("vision", vision), ("language", text)):
        prefix = family[side]["prefix"]
        for name, shape in _stack(_family(_part_type(config, side, fields)), fields):
            yield prefix + name, shape
    yield from _units(family.get("beside", ()), "", _ruled(_family(_part_type(config, "language", text)), text, 0))
    audio = config.get("audio_config")
    parts = {"text": text, "vision": vision, "audio": audio if isinstance(audio, Mapping) else {}}
    yield from _units(family["projector"], "", {**config, **parts})


def _stack(family: Fields, fields: Fields) -> Iterator[Shape]:
    count = _dimension(family["count"], fields)
    _limit("layers", count, LAYER_LIMIT)
    yield from _units(family["before"], "", _ruled(family, fields, 0))
    for layer in range(count):
        yield from _units(family["layers"], family["block"].replace("*", str(layer)), _ruled(family, fields, layer))
    yield from _units(family["after"], "", _ruled(family, fields, 0))


def _units(entries: Sequence[Any], prefix: str, fields: Fields) -> Iterator[Shape]:
    for entry in entries:
        unit = {"unit": entry} if isinstance(entry, str) else entry
        if not _value(_parsed(unit.get("if", "1")), fields):
            continue
        rows = _table()["units"][unit["unit"]].items()
        shapes = [(name, tuple(_dimension(size, fields) for size in sizes.split(" x "))) for name, sizes in rows]
        times = _dimension(unit.get("times", "1"), fields)
        _limit("experts", times, EXPERT_LIMIT)
        for index in range(times):
            for name, shape in shapes:
                yield prefix + unit.get("at", "") + name.replace("*", str(index)), shape


def _limit(what: str, count: int, limit: int) -> None:
    if count > limit:
        raise ConfigError(f"config makes {count} {what}, more than the limit of {limit}", fix=RESTORE)


def _ruled(family: Fields, fields: Fields, layer: int) -> Fields:
    ruled = {**fields, "layer": layer}
    for name, rule in family["rules"].items():
        ruled[name] = _value(_parsed(rule), ruled)
    return ruled


def _filled(fields: Fields, family: Fields) -> dict[str, Any]:
    defaults = family["defaults"]
    formulas = {name: default for name, default in defaults.items() if isinstance(default, str)}
    filled = {**{name: default for name, default in defaults.items() if name not in formulas}, **fields}
    for name, formula in formulas.items():
        if filled.get(name) is None:
            filled[name] = _value(_parsed(formula), filled)
    return filled


def _text_key(config: Fields) -> str | None:
    """Returns the field that holds the language model's part of a config, or None if the config is that part."""
    return next((key for key in TEXT_CONFIGS if isinstance(config.get(key), Mapping)), None)


def _vision(config: Fields) -> Fields:
    vision = config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {}


def _part_type(config: Fields, side: str, fields: Fields) -> str:
    """Returns the family of a part: its own model_type, unless that only repeats the name of the whole."""
    named, whole = fields.get("model_type"), _model_type(config)
    if named is None or named == whole:
        return str(_family(whole)[side]["family"])
    if "vision" in _family(str(named)):
        raise ConfigError(f"config has a {named} as the {side} part of a {whole}", fix=RESTORE)
    return str(named)


def _model_type(config: Fields) -> str:
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError("config has no model_type", fix="copy config.json from the original model")
    return name


@cache
def _family(name: str) -> dict[str, Any]:
    table = _table()["families"]
    if name not in table:
        known = known_families()
        near = ", ".join(registry.nearest(name, known))
        raise ConfigError(
            f"Quantry does not know the tensors of model type {name[:40]!r}",
            fix=f"give the folder or hub id of the weights; {len(known)} types are known, such as {near}",
        )
    row = table[name]
    base = _family(row["like"]) if "like" in row else {}
    merged = {key: {**base.get(key, {}), **row.get(key, {})} for key in ("defaults", "rules")}
    return {**base, **row, **merged}


def _dimension(formula: str, fields: Fields) -> int:
    value = _number(_parsed(formula), fields)
    if value > 0 and value == int(value):
        return int(value)
    raise _no_count(formula, value)


def _value(node: ast.expr, fields: Fields) -> Any:
    """Returns the value of a parsed formula: numbers, flags and words, and the few operators that shapes.toml uses."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return _field(fields, node.id)
        case ast.Attribute(value=ast.Name(id=part)):
            return _field(fields[part], node.attr)
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(index))):
            pair = _field(fields, name)
            return pair[index] if isinstance(pair, LISTS) and len(pair) == 2 else pair
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Name(id="layer")):
            return _of_layer(_field(fields, name), name, fields["layer"])
        case ast.Call(func=ast.Name(id="len"), args=[ast.Name(id=name)]):
            items = _field(fields, name)
            return len(items) if isinstance(items, LISTS) else items
        case ast.IfExp():
            return _value(node.body if _value(node.test, fields) else node.orelse, fields)
        case ast.UnaryOp(op=ast.Not()):
            return not _value(node.operand, fields)
        case ast.BoolOp():
            combine = all if isinstance(node.op, ast.And) else any
            return combine(_value(part, fields) for part in node.values)
        case ast.BinOp():
            return _arithmetic(node, fields)
        case ast.Compare(ops=[comparison], comparators=[other]):
            return _comparison(comparison, node.left, other, fields)
    raise ValueError(f"shapes.toml has {ast.unparse(node)!r}, which is not supported")


def _of_layer(items: Any, name: str, layer: int) -> Any:
    """Returns what a list (or a text of letters) says of a layer; None if the config has no list."""
    if items is None:
        return None
    if isinstance(items, (*LISTS, str)) and layer < len(items):
        return items[layer]
    raise ConfigError(f"config gives {name} as {str(items)[:40]!r}, with nothing for layer {layer}", fix=RESTORE)


def _arithmetic(node: ast.BinOp, fields: Fields) -> Any:
    left, right = _number(node.left, fields), _number(node.right, fields)
    if right == 0 and not isinstance(node.op, ast.Add | ast.Mult):
        raise _no_count(ast.unparse(node.right), right)
    return ARITHMETIC[type(node.op)](left, right)


def _comparison(operation: ast.cmpop, left: ast.expr, right: ast.expr, fields: Fields) -> bool:
    if isinstance(operation, ast.Eq):
        return bool(_value(left, fields) == _value(right, fields))
    if isinstance(operation, ast.NotIn):
        items = _value(right, fields)
        return not isinstance(items, LISTS) or _value(left, fields) not in items
    return bool(ORDER[type(operation)](_number(left, fields), _number(right, fields)))


def _number(node: ast.expr, fields: Fields) -> int | float:
    value = _value(node, fields)
    if type(value) in (int, float) and isfinite(value):
        return value  # type: ignore[no-any-return]
    raise _no_count(ast.unparse(node), value)


def _field(fields: Fields, name: str) -> Any:
    """Returns a field of the config: a count, a ratio, a flag, a word, None, or a list of counts."""
    if name not in fields:
        raise ConfigError(f"config has no {name}", fix="copy config.json from the original model")
    value = fields[name]
    for number in value if isinstance(value, LISTS) else [value]:
        if type(number) in (int, float) and not 0 <= number < 1 << 31:
            raise _no_count(name, number)
    return value


def _no_count(formula: str, value: Any) -> ConfigError:
    return ConfigError(f"config gives {formula} as {str(value)[:40]!r}, not a count", fix=RESTORE)


@cache
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


@cache
def _table() -> dict[str, Any]:
    return read_data("quantry.models", "shapes.toml")

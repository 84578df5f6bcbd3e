"""Smoothing pairs: where a scale can divide the inputs of linear layers without changing the model.

A linear layer computes the same from x / s if the columns of its weight are multiplied by s. Its producer must give
x / s: a norm whose weight is divided, or a linear whose rows are divided (v before o, up before down). Every other
reader of the same channels must multiply its columns by s too. smoothing.toml lists these tensors by family; this
module resolves them for one block of a checkpoint, however its experts are stored.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

from quantry.errors import ConfigError
from quantry.models.attention import text_config
from quantry.models.linears import Linear
from quantry.models.parts import TOWERS, block_of, part_of
from quantry.storage import read_data
from quantry.types import Checkpoint

Form = Literal["norm", "norm+1", "rows"]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a matrix (out, in) or vector: `source[expert]`, transposed if `flip`, then `[rows]`.

    A source of three dimensions without an `expert` stands for all experts.
    """

    module: str
    source: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """`size` channels of the producers, and all their consumers.

    With grouped queries several query heads read one value head: the producer has `heads`, each read `repeats` times in
    a row, so that a consumer has `size * repeats` columns.
    """

    name: str
    form: Form
    producers: tuple[Slot, ...]  # a weight, and its bias if it has one
    consumers: tuple[Slot, ...]
    size: int
    heads: int = 1
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Smoothing:
    """The pairs of a block, and the reason for each linear without a pair."""

    pairs: tuple[Pair, ...]
    left_out: Mapping[str, str]  # module -> reason why nothing can absorb a scale on its input


@dataclass(frozen=True, slots=True)
class _Module:
    """A linear, norm, router or stack of a block."""

    slot: Slot
    shape: tuple[int, ...]  # (out, in), or (channels,) of a norm
    bias: str | None


_Modules = Mapping[str, _Module]  # by their name within the block


def known_families() -> tuple[str, ...]:
    """Returns the model types whose pairs are listed."""
    return tuple(_table()["families"])


def smoothing(checkpoint: Checkpoint, linears: Sequence[Linear], block: int) -> Smoothing:
    """Returns the pairs of a block; `linears` are those of the checkpoint (quantry.models.linears)."""
    text = text_config(checkpoint.config)
    name, heads = str(text.get("model_type")), text.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise ConfigError(f"num_attention_heads is {str(heads)[:40]!r}, not a count", fix="restore config.json")
    modules = _modules(checkpoint, linears, block)
    family = _family(name)
    if family is None:
        return _nothing(modules, f"{name[:40]} has no row in the table of pairs")
    rows = [_table()["pairs"][pair] for pair in family["pairs"]]
    none = family.get("none", {"consumers": [], "reason": ""})
    without = [name for pattern in none["consumers"] for name in _matching(modules, pattern)]
    left_out = {modules[name].slot.module: str(none["reason"]) for name in without}
    listed = {name for row in rows for pattern in row["consumers"] for name in _matching(modules, pattern)}
    listed.update(without)
    unlisted = next((name for name, module in modules.items() if len(module.shape) > 1 and name not in listed), None)
    if unlisted:
        return _nothing(modules, f"{unlisted} is not in the table of pairs, and may read what would be scaled")
    pairs = []
    for row in rows:
        for producer in _matching(modules, row["producer"]):
            pair = _pair(row, producer, modules, heads)
            if isinstance(pair, Pair):
                pairs.append(pair)
            else:
                left_out.update(pair)
    return Smoothing(tuple(pairs), left_out)


def _nothing(modules: _Modules, reason: str) -> Smoothing:
    return Smoothing((), {module.slot.module: reason for module in modules.values() if len(module.shape) > 1})


def _modules(checkpoint: Checkpoint, linears: Sequence[Linear], block: int) -> dict[str, _Module]:
    """Returns the modules of a block: its linears, and every other weight as stored."""
    inside = {
        tensor.name: tensor
        for tensor in checkpoint.tensors
        if block_of(tensor.name) == block and part_of(tensor.name, block + 1) not in TOWERS
    }
    if not inside:
        raise ConfigError(f"the checkpoint has no tensors of block {block}", fix="restore the checkpoint")
    prefix = next(iter(inside)).partition(f".{block}.")[0] + f".{block}."
    modules = {}
    cut = set()
    for linear in linears:
        if linear.source in inside:
            slot = Slot(linear.module, linear.source, linear.expert, linear.rows, linear.flip)
            modules[linear.module] = _Module(slot, linear.shape, _bias(linear.module, inside))
            cut.add(linear.source)
    for name, tensor in inside.items():
        if name not in cut and not name.endswith(".bias"):
            module = name.removesuffix(".weight")
            modules[module] = _Module(Slot(module, name), tensor.shape, _bias(module, inside))
    return {name.removeprefix(prefix): module for name, module in modules.items()}


def _bias(module: str, tensors: Collection[str]) -> str | None:
    return f"{module}.bias" if f"{module}.bias" in tensors else None


def _matching(modules: _Modules, pattern: str) -> list[str]:
    if "*" not in pattern:
        return [pattern] if pattern in modules else []
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in modules if regex.fullmatch(name)]


def _pair(row: Mapping[str, Any], producer: str, modules: _Modules, query_heads: int) -> Pair | dict[str, str]:
    """Returns a pair, or the consumers that cannot have one with the reason."""
    number = next((part for part in producer.split(".") if part.isdigit()), "*")  # the producer's expert
    consumers = [modules[n] for pattern in row["consumers"] for n in _matching(modules, pattern.replace("*", number))]
    widths = {module.shape[-1] for module in consumers}
    width = max(widths, default=0)
    rows = _rows(row, modules[producer], width)
    size, heads, repeats = rows[1] - rows[0], 1, 1
    if row.get("heads") and size and width % size == 0:
        repeats = width // size
        heads = query_heads // repeats
    if widths != {size * repeats} or size % heads or heads * repeats != (query_heads if row.get("heads") else 1):
        by = f" by {query_heads} heads" if row.get("heads") else ""
        reason = f"{producer} gives {size} channels, which do not fit the {sorted(widths)} that are read{by}"
        return {module.slot.module: reason for module in consumers}
    return Pair(
        modules[producer].slot.module,
        row["form"],
        _producers(modules[producer], rows, "rows" in row),
        tuple(module.slot for module in consumers),
        size,
        heads,
        repeats,
    )


def _rows(row: Mapping[str, Any], producer: _Module, width: int) -> tuple[int, int]:
    total = producer.shape[0]
    starts = {
        "half": total // 2,
        "values": (total + width) // 2,  # queries, keys and values: `width` queries, the rest in halves
        "all": 0,
    }
    return starts[row.get("rows", "all")], total


def _producers(producer: _Module, rows: tuple[int, int], partial: bool) -> tuple[Slot, ...]:
    """Returns the weight of a producer, and its bias, which is scaled like the weight."""
    weight = replace(producer.slot, rows=rows) if partial else producer.slot
    if producer.bias is None:
        return (weight,)
    return weight, Slot(weight.module, producer.bias, rows=rows if partial else None)


@cache
def _family(name: str) -> Mapping[str, Any] | None:
    table = _table()["families"]
    row: Mapping[str, Any] | None = table.get(name)
    return _family(row["like"]) if row and "like" in row else row


@cache
def _table() -> dict[str, Any]:
    return read_data("quantry.models", "smoothing.toml")

"""Smoothing pairs: where the inputs of linear layers can be divided by a scale without changing the model.

A linear layer computes the same from x / s with the columns of its weight times s. Something before it must give x / s:
a norm whose weight is divided, or a linear whose rows are (v before o, up before down). Then every other reader of the
same channels must take its columns times s too. Which tensors these are is data, smoothing.toml; here it is resolved
for one block of a checkpoint, whatever way its experts are stored.
"""

import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from quantry.errors import ConfigError
from quantry.models.attention import text_config
from quantry.models.linears import Linear
from quantry.models.parts import TOWERS, block_of, part_of
from quantry.types import Checkpoint

Form = Literal["norm", "norm+1", "rows"]


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a matrix (out, in) or vector is kept: `source[expert]`, transposed if `flip`, then `[rows]`.

    A source of three dimensions without an `expert` is all of them at once.
    """

    module: str
    source: str
    expert: int | None = None
    rows: tuple[int, int] | None = None
    flip: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """`size` channels that the producers give, and all that read them.

    With grouped queries a value head is read by several query heads: `heads` of the producer, each read `repeats` times
    in a row, so that the columns of a consumer are `size * repeats`.
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
    """The pairs of a block, and for linears without one the reason."""

    pairs: tuple[Pair, ...]
    left_out: Mapping[str, str]  # module -> why nothing can absorb a scale on its input


@dataclass(frozen=True, slots=True)
class _Module:
    """A linear, norm, router or stack of a block."""

    slot: Slot
    shape: tuple[int, ...]  # (out, in), or (channels,) of a norm
    bias: str | None


_Modules = Mapping[str, _Module]  # by their name within the block


def known_families() -> tuple[str, ...]:
    """The model types whose pairs are known."""
    return tuple(_table()["families"])


def smoothing(checkpoint: Checkpoint, linears: Sequence[Linear], block: int) -> Smoothing:
    """The pairs of a block; `linears` are those of the checkpoint (quantry.models.linears)."""
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
    known = {name for row in rows for pattern in row["consumers"] for name in _matching(modules, pattern)}.union(
        without
    )
    for stranger in (name for name, module in modules.items() if len(module.shape) > 1 and name not in known):
        return _nothing(modules, f"{stranger} is not in the table of pairs, and may read what would be scaled")
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
    """What a block is made of: its linears, and every other weight as it is stored."""
    inside = {
        tensor.name: tensor
        for tensor in checkpoint.tensors
        if block_of(tensor.name) == block and part_of(tensor.name, block + 1) not in TOWERS
    }
    if not inside:
        raise ConfigError(f"the checkpoint has no tensors of block {block}", fix="restore the checkpoint")
    prefix = next(iter(inside)).partition(f".{block}.")[0] + f".{block}."
    found = {}
    cut = set()
    for linear in linears:
        if linear.source in inside:
            slot = Slot(linear.module, linear.source, linear.expert, linear.rows, linear.flip)
            found[linear.module] = _Module(slot, linear.shape, _bias(linear.module, inside))
            cut.add(linear.source)
    for name, tensor in inside.items():
        if name not in cut and not name.endswith(".bias"):
            module = name.removesuffix(".weight")
            found[module] = _Module(Slot(module, name), tensor.shape, _bias(module, inside))
    return {name.removeprefix(prefix): module for name, module in found.items()}


def _bias(module: str, tensors: Collection[str]) -> str | None:
    return f"{module}.bias" if f"{module}.bias" in tensors else None


def _matching(modules: _Modules, pattern: str) -> list[str]:
    """The modules that a pattern names."""
    if "*" not in pattern:
        return [pattern] if pattern in modules else []
    regex = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
    return [name for name in modules if regex.fullmatch(name)]


def _pair(row: Mapping[str, Any], producer: str, modules: _Modules, query_heads: int) -> Pair | dict[str, str]:
    """A pair, or the consumers that must go without one and why."""
    number = next((part for part in producer.split(".") if part.isdigit()), "*")  # of the producer's expert
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
    """The rows of a producer that give the channels."""
    total = producer.shape[0]
    starts = {
        "half": total // 2,
        "values": (total + width) // 2,  # queries, keys and values: as many queries as are read, the rest in halves
        "all": 0,
    }
    return starts[row.get("rows", "all")], total


def _producers(producer: _Module, rows: tuple[int, int], partial: bool) -> tuple[Slot, ...]:
    """The weight of a producer, and its bias: what is added to a channel is scaled with it."""
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
    return tomllib.loads(files("quantry.models").joinpath("smoothing.toml").read_text(encoding="utf-8"))

"""The work of one step of a model: which bytes it must read and how much it must compute, told from headers.

Weights are those that the quantization will store (weights.py). A step reads what its tokens need: all dense weights
once, of a mixture the experts that its tokens choose, the head (or the embedding that serves as one), and the cache of
each sequence. Towers for images, drafts for speculation and the rows of the embedding are left out.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, Literal

from quantry.formats.gguf import NAME as GGUF
from quantry.models.already_quantized import quantization, weights_of
from quantry.models.attention import block_count, text_config
from quantry.models.experts import expert_count, experts_used
from quantry.models.parts import TOWERS
from quantry.planning.memory.kv_cache import Layer, layers_of
from quantry.planning.memory.terms import CacheType
from quantry.planning.memory.weights import Same, Stored, Weight, stored
from quantry.quantizing.recipe import Recipe
from quantry.types import Checkpoint

Kind = Literal["16-bit", "8-bit", "weight-only", "blocks"]
SHARED = re.compile(r"shared|_shexp")
LEFT_OUT = TOWERS | {"MTP heads", "buffers"}
FLOATS = frozenset({"BF16", "F16", "F32"})
INPUTS = {"int": "int8", "e4m3": "fp8", "e5m2": "fp8", "e2m1": "fp4"}


@dataclass(frozen=True, slots=True)
class Part:
    """Weights that are read together: their bytes, their number, and how many of them are packed."""

    bytes: float = 0
    weights: float = 0
    packed: float = 0

    def __add__(self, other: "Part") -> "Part":
        return Part(self.bytes + other.bytes, self.weights + other.weights, self.packed + other.packed)

    def __mul__(self, share: float) -> "Part":
        return Part(self.bytes * share, self.weights * share, self.packed * share)


@dataclass(frozen=True, slots=True)
class Work:
    """A model as one step sees it. Speeds differ by `kind`: what is multiplied, and in which type."""

    kind: Kind
    detail: str  # of 16-bit weights and inputs "bf16" or "f16", of quantized inputs "int8", ..., of blocks "q4_k", ...
    layers: float
    hidden: int
    dense: Part
    experts: Part  # all that are chosen from
    head: Part
    count: int  # experts of a layer, 0 if there are none
    used: int  # experts of a token
    width: float  # numbers that go into and come out of matrices, a token
    cache: tuple[tuple[Layer, float], ...]  # layers that keep a past, equal ones counted
    pairs: float  # operations of attention for a token and one it looks at, all layers

    def touched(self, tokens: float) -> float:
        """The share of experts that are read when `tokens` choose theirs independently."""
        return 1 - (1 - self.used / self.count) ** tokens if self.count else 0

    def share(self, part: float, head: bool) -> "Work":
        """The work of a part of the layers, with the head or without."""
        return replace(
            self,
            layers=self.layers * part,
            dense=self.dense * part,
            experts=self.experts * part,
            head=self.head * head,
            width=self.width * part,
            cache=tuple((layer, number * part) for layer, number in self.cache),
            pairs=self.pairs * part,
        )

    def cache_bytes(self, context: float, kind: CacheType, devices: int = 1) -> float:
        """What a step reads of one sequence's cache, on each of some devices that share its heads."""
        mine = ((layer.on_one_of(devices), number) for layer, number in self.cache)
        return sum(
            number * (layer.state or min(context, layer.window or context) * layer.token_bytes(kind))
            for layer, number in mine
        )

    def looked_at(self, tokens: float) -> float:
        """Tokens that one token looks at, where `tokens` are before it: the mean over layers, windows considered."""
        seen = sum(number * min(tokens, layer.window or tokens) for layer, number in self.cache if not layer.state)
        return seen / sum(number for _, number in self.cache) if seen else 0.0


def work_of(checkpoint: Checkpoint, recipe: Recipe | None) -> Work:
    """The work of a model after a recipe; without one, as it is stored."""
    return _work(Same(checkpoint), recipe)


@lru_cache(maxsize=64)
def _work(same: Same, recipe: Recipe | None) -> Work:
    checkpoint = same.checkpoint
    found = stored(checkpoint, recipe, keep_odd=True)
    text = text_config(checkpoint.config)
    count, used = expert_count(text), experts_used(text)
    parts: dict[str, Part] = {}
    width = 0.0
    for weight, times in _weights(found).items():
        role = _role(weight)
        parts[role] = parts.get(role, Part()) + _part(found, weight, recipe, checkpoint) * times
        width += _width(weight, role, count, used) * times
    head = parts.get("head") or parts.get("embedding", Part())
    kind, detail = _kind(checkpoint, recipe, found)
    return Work(
        kind=kind,
        detail=detail,
        layers=block_count(checkpoint.config),
        hidden=text.get("hidden_size", 0),
        dense=parts.get("dense", Part()),
        experts=parts.get("experts", Part()),
        head=head,
        count=count if "experts" in parts else 0,
        used=min(used or 1, count) if "experts" in parts else 0,
        width=width,
        cache=tuple(Counter(layer for layer in layers_of(checkpoint.config) if layer).items()),
        pairs=_pairs(text, block_count(checkpoint.config)),
    )


def _weights(found: Stored) -> Counter[Weight]:
    """All weights with how often there are such; equal blocks are looked at once."""
    blocks = {id(block): block for block in found.blocks}
    times = Counter(id(block) for block in found.blocks)
    every: Counter[Weight] = Counter(found.outside)
    for key, block in blocks.items():
        for weight in block:
            every[weight] += times[key]
    return every


def _role(weight: Weight) -> str:
    if weight.part in LEFT_OUT:
        return "left out"
    if weight.part == "experts":
        return "dense" if SHARED.search(weight.name) else "experts"
    return weight.part if weight.part in ("head", "embedding") else "dense"


def _part(found: Stored, weight: Weight, recipe: Recipe | None, checkpoint: Checkpoint) -> Part:
    numbers = weight.count * prod(weight.shape)
    packed = weight.grid is not None or weight.dtype not in FLOATS
    if recipe is None and packed and checkpoint.format != GGUF:
        tensor = next((one for one in checkpoint.tensors if one.name == weight.name), None)
        numbers = weight.count * weights_of(checkpoint, tensor) if tensor else numbers
    return Part(found.size(weight), numbers, numbers if packed else 0)


def _width(weight: Weight, role: str, count: int, used: int) -> float:
    """Inputs and outputs of a matrix; experts by the share that a token uses."""
    if role not in ("dense", "experts") or len(weight.shape) < 2:
        return 0
    numbers = sum(weight.shape[-2:]) * weight.count * (weight.shape[0] if len(weight.shape) == 3 else 1)
    return numbers * (used or 1) / count if role == "experts" and count else numbers


def _kind(checkpoint: Checkpoint, recipe: Recipe | None, found: Stored) -> tuple[Kind, str]:
    if recipe is None:
        return _stored_kind(checkpoint, found)
    scheme = recipe.preset.scheme
    if scheme.weight.is_cast:
        return "16-bit", scheme.weight.kind
    if recipe.format == GGUF:
        return "blocks", _main_type(found)
    if scheme.activation:
        return "8-bit", INPUTS[scheme.activation.grid.kind]
    return "weight-only", found.dtype


def _stored_kind(checkpoint: Checkpoint, found: Stored) -> tuple[Kind, str]:
    """The kind of what is stored already; how inputs are treated is not told by headers and taken as 16 bit."""
    if checkpoint.format == GGUF:
        most = _main_type(found)
        return ("16-bit", most) if most.upper() in FLOATS else ("blocks", most)
    return ("weight-only" if quantization(checkpoint) else "16-bit"), found.dtype


def _main_type(found: Stored) -> str:
    """The type of most of a GGUF file: not what its mixture is named by, where rows do not suit that."""
    sizes: Counter[str] = Counter()
    for weight, times in _weights(found).items():
        sizes[weight.dtype] += found.size(weight) * times
    return sizes.most_common(1)[0][0].lower()


def _pairs(text: Mapping[str, Any], layers: int) -> float:
    """Two products for each head: of query and key, and of weight and value."""
    heads = text.get("num_attention_heads")
    heads = max(heads) if isinstance(heads, list | tuple) else heads or 0
    size = text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0)
    key = (text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0)) or size
    return 2.0 * heads * (key + (text.get("v_head_dim") or size)) * layers

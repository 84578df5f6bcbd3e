"""The work of one step of a model: the bytes it must read and the operations it must compute, from headers alone.

Weights are those that the quantization will store (memory/weights.py). A step reads what its tokens need: all dense
weights once, of a mixture the experts that its tokens choose, the head (or the embedding that serves as one), and the
cache of each sequence. Towers for images, drafts for speculation and the rows of the embedding do not count.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

from quantry.formats.gguf import NAME as GGUF
from quantry.models.already_quantized import quantization, weights_of
from quantry.models.attention import block_count, text_config
from quantry.models.caching import per_checkpoint
from quantry.models.experts import expert_count, experts_used
from quantry.models.parts import TOWERS
from quantry.planning.memory.kv_cache import CachedLayer, layers_of
from quantry.planning.memory.terms import CacheType
from quantry.planning.memory.weights import FLOATS, Stored, Weight, stored
from quantry.quantizing.recipe import Recipe
from quantry.types import Checkpoint

Kind = Literal["16-bit", "8-bit", "weight-only", "blocks"]
SHARED = re.compile(r"shared|_shexp")
LEFT_OUT = TOWERS | {"MTP heads", "buffers"}
INPUTS = {"int": "int8", "e4m3": "fp8", "e5m2": "fp8", "e2m1": "fp4"}


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights that are read together: their bytes, their number, and how many of them are packed codes."""

    bytes: float = 0
    weights: float = 0
    packed: float = 0

    def __add__(self, other: "WeightGroup") -> "WeightGroup":
        return WeightGroup(self.bytes + other.bytes, self.weights + other.weights, self.packed + other.packed)

    def __mul__(self, share: float) -> "WeightGroup":
        return WeightGroup(self.bytes * share, self.weights * share, self.packed * share)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What one step does with a model; `kind` says what is multiplied, and in which type."""

    kind: Kind
    detail: str  # of 16-bit inputs "bf16", "f16" or "mxfp4", of quantized inputs "int8", ..., of blocks "q4_k", ...
    layers: float
    hidden: int
    dense: WeightGroup
    experts: WeightGroup  # all experts that tokens choose from
    head: WeightGroup
    count: int  # experts of a layer, 0 if there are none
    used: int  # experts of a token
    width: float  # numbers that go into and come out of matrices, per token
    cache: tuple[tuple[CachedLayer, float], ...]  # layers with a cache, equal ones counted
    pairs: float  # operations of attention for one pair of tokens, all layers
    routed: float = 0  # layers with experts
    latent: float = 0  # layers whose attention keeps a latent vector (MLA)

    @property
    def bytes(self) -> float:
        """The bytes of all weights that steps may read; with `kind`, they tell shapes and schemes apart."""
        return self.dense.bytes + self.experts.bytes + self.head.bytes

    def touched(self, tokens: float) -> float:
        """Returns the share of experts that are read when `tokens` choose theirs independently."""
        return 1 - (1 - self.used / self.count) ** tokens if self.count else 0

    def share(self, part: float, head: bool) -> "StepWork":
        """Returns the work of a part of the layers, with or without the head."""
        return replace(
            self,
            layers=self.layers * part,
            dense=self.dense * part,
            experts=self.experts * part,
            head=self.head * head,
            width=self.width * part,
            cache=tuple((layer, number * part) for layer, number in self.cache),
            pairs=self.pairs * part,
            routed=self.routed * part,
            latent=self.latent * part,
        )

    def experts_alone(self, part: float) -> "StepWork":
        """Returns the work of a part of the experts, without attention and the rest of their layers."""
        nothing = WeightGroup()
        alone = replace(self.share(part, head=False), dense=nothing, head=nothing, cache=(), pairs=0.0, latent=0.0)
        return replace(alone, width=0.0)

    def cache_bytes(self, context: float, dtype: CacheType, devices: int = 1) -> float:
        """Returns what a step reads of one sequence's cache, on each of `devices` that share its heads."""
        mine = ((layer.on_one_of(devices), number) for layer, number in self.cache)
        return sum(
            number * (layer.state or min(context, layer.window or context) * layer.token_bytes(dtype))
            for layer, number in mine
        )

    def looked_at(self, tokens: float) -> float:
        """Returns how many of `tokens` earlier tokens a token attends to: the mean over layers and their windows."""
        seen = sum(number * min(tokens, layer.window or tokens) for layer, number in self.cache if not layer.state)
        return seen / sum(number for _, number in self.cache) if seen else 0.0


@per_checkpoint(64)
def work_of(checkpoint: Checkpoint, recipe: Recipe | None) -> StepWork:
    """Returns the work of a model after a recipe; without a recipe, as stored."""
    weights, text = stored(checkpoint, recipe, True), text_config(checkpoint.config)
    count, used = expert_count(text), experts_used(text)
    groups: dict[str, WeightGroup] = {}
    width = 0.0
    for weight, times in weights.counts.items():
        role = _role(weight)
        groups[role] = groups.get(role, WeightGroup()) + _group(weights, weight, recipe, checkpoint) * times
        width += _width(weight, role, count, used) * times
    kind, detail = _kind(checkpoint, recipe, weights)
    cache = Counter(layer for layer in layers_of(checkpoint.config) if layer)
    return StepWork(
        kind=kind,
        detail=detail,
        layers=block_count(checkpoint.config),
        hidden=text.get("hidden_size", 0),
        dense=groups.get("dense", WeightGroup()),
        experts=groups.get("experts", WeightGroup()),
        head=groups.get("head") or groups.get("embedding", WeightGroup()),
        count=count if "experts" in groups else 0,
        used=min(used or 1, count) if "experts" in groups else 0,
        width=width,
        cache=tuple(cache.items()),
        pairs=_pairs(text, block_count(checkpoint.config)),
        routed=_routed(weights),
        latent=sum(number for layer, number in cache.items() if layer.kind == "mla"),
    )


def _role(weight: Weight) -> str:
    if weight.part in LEFT_OUT:
        return "left out"
    if weight.part == "experts":
        return "dense" if SHARED.search(weight.name) else "experts"
    return weight.part if weight.part in ("head", "embedding") else "dense"


def _routed(weights: Stored) -> int:
    """Returns the number of layers with experts; equal blocks are looked at once."""
    times = Counter(id(block) for block in weights.blocks)
    distinct = {id(block): block for block in weights.blocks}
    return sum(times[key] for key, block in distinct.items() if any(_role(weight) == "experts" for weight in block))


def _group(weights: Stored, weight: Weight, recipe: Recipe | None, checkpoint: Checkpoint) -> WeightGroup:
    numbers = weight.count * prod(weight.shape)
    if recipe is None and weight.quantized and checkpoint.format != GGUF:
        tensor = next((tensor for tensor in checkpoint.tensors if tensor.name == weight.name), None)
        numbers = weight.count * weights_of(checkpoint, tensor) if tensor else numbers
    return WeightGroup(weights.size(weight), numbers, numbers if weight.quantized else 0)


def _width(weight: Weight, role: str, count: int, used: int) -> float:
    """Returns the inputs and outputs of a matrix; of experts, the share that a token uses."""
    if role not in ("dense", "experts") or len(weight.shape) < 2:
        return 0
    numbers = sum(weight.shape[-2:]) * weight.count * (weight.shape[0] if len(weight.shape) == 3 else 1)
    return numbers * (used or 1) / count if role == "experts" and count else numbers


def _kind(checkpoint: Checkpoint, recipe: Recipe | None, weights: Stored) -> tuple[Kind, str]:
    if recipe is None:
        return _stored_kind(checkpoint, weights)
    scheme = recipe.preset.scheme
    if scheme.weight.is_cast:
        return "16-bit", scheme.weight.kind
    if recipe.format == GGUF:
        return "blocks", _main_type(weights)
    if scheme.activation:
        return "8-bit", INPUTS[scheme.activation.grid.kind]
    return "weight-only", "mxfp4" if scheme.weight.scale == "e8m0" else weights.dtype


def _stored_kind(checkpoint: Checkpoint, weights: Stored) -> tuple[Kind, str]:
    """Returns the kind of a stored model; headers do not say how inputs are treated, so they count as 16 bit."""
    if checkpoint.format == GGUF:
        most = _main_type(weights)
        return ("16-bit", most) if most.upper() in FLOATS else ("blocks", most)
    return ("weight-only" if quantization(checkpoint) else "16-bit"), weights.dtype


def _main_type(weights: Stored) -> str:
    """Returns the type that most of a GGUF file has; its mixture's name may differ where rows do not suit it."""
    sizes: Counter[str] = Counter()
    for weight, times in weights.counts.items():
        sizes[weight.dtype] += weights.size(weight) * times
    return sizes.most_common(1)[0][0].lower()


def _pairs(text: Mapping[str, Any], layers: int) -> float:
    """Returns the operations of two products per head: query with key, and weight with value."""
    heads = text.get("num_attention_heads")
    heads = max(heads) if isinstance(heads, list | tuple) else heads or 0
    size = text.get("head_dim") or (text.get("hidden_size", 0) // heads if heads else 0)
    key = (text.get("qk_nope_head_dim", 0) + text.get("qk_rope_head_dim", 0)) or size
    return 2.0 * heads * (key + (text.get("v_head_dim") or size)) * layers

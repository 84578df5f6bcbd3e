"""The KV cache: what each layer keeps of a sequence, and what an engine allocates for it.

A token costs a layer K and V of its KV heads, or one latent vector (MLA); a sliding layer keeps a window of them and a
recurrent layer a state. Engines differ in the type they store (terms.toml), and in how they cut memory:

- *blocks* (vLLM): a pool of pages, each `block` tokens of one layer. Layers of different kinds are put into groups of
  equal size that share the pool, so that a page can serve any of them; missing layers are padding.
- *cells* (llama.cpp): every sequence gets its context, rounded up, whether it is used or not; a sliding layer gets its
  window and one batch.
- *tokens*: what is there and no more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from quantry.errors import ConfigError
from quantry.models.attention import kv_layers, layer_kinds, text_config
from quantry.planning.memory.terms import CacheType, EngineTerms
from quantry.types import LayerKind


@dataclass(frozen=True, slots=True)
class Layer:
    """What one layer keeps: of each token `heads` times `key` and `value` numbers, or a state."""

    kind: LayerKind
    heads: int = 0
    key: int = 0
    value: int = 0
    window: int | None = None
    state: int = 0  # bytes

    def on_one_of(self, devices: int) -> "Layer":
        """The part of one device; KV heads are repeated where there are fewer of them, as is the one latent vector."""
        heads = ceil(self.heads / devices)
        return Layer(self.kind, heads, self.key, self.value, self.window, ceil(self.state / devices))

    def token_bytes(self, kind: CacheType) -> int:
        """Bytes of one token; all of a kind share a row, so blocks of a type may span heads."""
        numbers = self.heads * (self.key + self.value)
        return ceil(numbers * kind.bits / 8) + self.heads * 2 * kind.head_bytes


@dataclass(frozen=True, slots=True)
class Sequences:
    """What is served: `count` sequences of `context` tokens, `step` tokens at once, of at most `slots` sequences."""

    context: int
    count: int
    step: int
    slots: int = 1
    in_flight: int = 1  # steps that are under way at once
    unified: bool = False  # whether sequences share one pool of cells


@dataclass(frozen=True, slots=True)
class Pool:
    """The cache of one device: bytes by kind of layer for all sequences, and for one."""

    kinds: Mapping[LayerKind, int]
    one: int  # bytes of one sequence of the whole context

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def layers_of(config: Mapping[str, Any], sliding: bool = True) -> tuple[Layer | None, ...]:
    """The cache of every layer, first to last; None where there is none. Without `sliding` windows are ignored."""
    text = text_config(config)
    kinds = layer_kinds(text)
    states = {group.kind: (group.state_bytes or 0) // group.layers for group in kv_layers(config)}
    return tuple(
        None if kind is None else _layer(text, kind, index, states, sliding) for index, kind in enumerate(kinds)
    )


def _layer(
    text: Mapping[str, Any], kind: LayerKind, index: int, states: Mapping[LayerKind, int], sliding: bool
) -> Layer:
    if kind == "recurrent":
        return Layer(kind, state=states[kind])
    if kind == "mla":
        return Layer(kind, 1, text["kv_lora_rank"], text["qk_rope_head_dim"])
    heads = _at(text.get("num_key_value_heads"), index) or _at(text["num_attention_heads"], index)
    heads = text.get("num_global_key_value_heads") or heads if kind == "full" else heads
    own = text.get("head_dim") or text["hidden_size"] // _at(text["num_attention_heads"], index)
    size = text.get("global_head_dim") or own if kind == "full" else own
    window = text.get("sliding_window") or text.get("attention_chunk_size") if kind == "sliding" else None
    if kind == "sliding" and not sliding:
        kind, window = "full", None
    return Layer(kind, heads, size, text.get("v_head_dim") or size, window)


def _at(value: Any, index: int) -> int:
    """A count that may differ from layer to layer; what is wrong with a config `kv_layers` has said before."""
    found = value[index] if isinstance(value, Sequence) else value
    return found or 0


def pool(layers: Sequence[Layer], terms: EngineTerms, kind: CacheType, load: Sequences, devices: int = 1) -> Pool:
    """The cache of one of `devices` that share the heads of these layers."""
    mine = [layer.on_one_of(devices) for layer in layers]
    if not mine:
        return Pool({}, 0)
    if terms.cache == "blocks":
        return _blocks(mine, terms.block, kind, load)
    if terms.cache == "cells":
        return _cells(mine, terms.block, kind, load)
    kinds: dict[LayerKind, int] = {}
    for layer in mine:
        size = layer.state or min(load.context, layer.window or load.context) * layer.token_bytes(kind)
        kinds[layer.kind] = kinds.get(layer.kind, 0) + size * load.count
    return Pool(kinds, sum(kinds.values()) // load.count)


def _cells(layers: Sequence[Layer], step: int, kind: CacheType, load: Sequences) -> Pool:
    """Each sequence has a stream of cells of its own, or all share one."""
    streams, tokens = (1, load.context * load.count) if load.unified else (load.count, load.context)
    whole = _round_up(tokens, step)
    kinds: dict[LayerKind, int] = {}
    for layer in layers:
        if layer.kind == "recurrent":
            size = layer.state * load.count
        else:
            window = (layer.window or 0) * (load.count if load.unified else 1) + load.step
            cells = _round_up(min(whole, window), step) if layer.window else whole
            size = streams * cells * layer.token_bytes(kind)
        kinds[layer.kind] = kinds.get(layer.kind, 0) + size
    return Pool(kinds, sum(kinds.values()) // load.count)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---- blocks, as vLLM makes them ----


@dataclass(frozen=True, slots=True)
class Page:
    """The pages of equal layers: bytes of one, the tokens in it, and how many one sequence may hold."""

    layer: Layer
    bytes: int
    tokens: int
    needed: int


def _blocks(layers: Sequence[Layer], block: int, kind: CacheType, load: Sequences) -> Pool:
    """Equal layers have equal pages; pages of all layers are made equal; groups of layers share a pool."""
    block = _aligned(layers, block, kind)
    alike: dict[Layer, int] = {}
    for layer in layers:
        alike[layer] = alike.get(layer, 0) + 1
    pages = _unified([_page(layer, block, kind, load) for layer in alike], kind, load)
    if len(alike) == 1 or _one_type(list(alike)):
        kinds: dict[LayerKind, int] = {}
        for page, count in zip(pages, alike.values(), strict=True):
            kinds[page.layer.kind] = kinds.get(page.layer.kind, 0) + page.bytes * page.needed * count * load.count
        return Pool(kinds, sum(kinds.values()) // load.count)
    size = _group_size(list(alike.values()))
    kinds = {}
    for page, count in zip(pages, alike.values(), strict=True):
        bytes_ = size * page.bytes * page.needed * ceil(count / size)
        kinds[page.layer.kind] = kinds.get(page.layer.kind, 0) + bytes_ * load.count
    return Pool(kinds, sum(kinds.values()) // load.count)


def _one_type(layers: Sequence[Layer]) -> bool:
    """Whether all layers need the same number of tokens: then each keeps pages of its own size."""
    return len({(layer.kind == "recurrent", layer.window) for layer in layers}) == 1


def _group_size(counts: Sequence[int]) -> int:
    """Layers in a group: those of the rarest kind, or of the commonest where padding to that wastes less than half."""
    return max(counts) if max(counts) < min(counts) * 1.5 else min(counts)


def _page(layer: Layer, block: int, kind: CacheType, load: Sequences) -> Page:
    if layer.kind == "recurrent":
        return Page(layer, layer.state, block, 1)
    return Page(layer, layer.token_bytes(kind) * block, block, _needed(layer, block, load))


def _needed(layer: Layer, block: int, load: Sequences) -> int:
    """Pages of a sequence; a window is not let go of before the steps that are under way have ended."""
    if layer.window is None:
        return ceil(load.context / block)
    return ceil(min(layer.window - 1 + load.step * load.in_flight, load.context) / block) + 1


def _unified(pages: Sequence[Page], kind: CacheType, load: Sequences) -> list[Page]:
    """Pages of one size: smaller ones take more tokens, those that cannot are padded."""
    largest = max(page.bytes for page in pages)
    if _one_type([page.layer for page in pages]):
        return list(pages)
    found = []
    for page in pages:
        if page.layer.kind == "recurrent" or largest % page.bytes:
            found.append(Page(page.layer, largest, page.tokens, page.needed))
        else:
            tokens = page.tokens * (largest // page.bytes)
            found.append(Page(page.layer, largest, tokens, _needed(page.layer, tokens, load)))
    return found


def _aligned(layers: Sequence[Layer], block: int, kind: CacheType) -> int:
    """Tokens in a page; beside recurrent layers as many as make a page of attention hold a state."""
    state = max((layer.state for layer in layers), default=0)
    token = max((layer.token_bytes(kind) for layer in layers if layer.kind != "recurrent"), default=0)
    return block if not state or not token else block * ceil(state / (block * token))


def check_states(config: Mapping[str, Any]) -> None:
    """Refuses a model whose recurrent state has an unknown size: its cache would come out too small."""
    unknown = [group for group in kv_layers(config) if group.kind == "recurrent" and group.state_bytes is None]
    if unknown:
        raise ConfigError(
            f"the size of the recurrent state of {text_config(config).get('model_type')} is not known",
            fix="plan a model with attention layers, or measure this one in its engine",
        )

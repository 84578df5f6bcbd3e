"""The KV cache: what each layer keeps of a sequence, and what an engine allocates for it.

For each token a layer keeps K and V of its KV heads, or one latent vector (MLA); a sliding layer keeps a window of
tokens and a recurrent layer a state. Engines differ in the type they store (terms.toml) and in how they divide
memory:

- *blocks* (vLLM): a pool of pages, each `block` tokens of one layer. Layers of different kinds form groups of equal
  size that share the pool, so that a page can serve any of them; padding stands in for missing layers.
- *cells* (llama.cpp): every sequence gets its whole context, rounded up, used or not; a sliding layer gets its window
  and one batch.
- *tokens*: only the tokens of the sequence.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from quantry.errors import ConfigError
from quantry.models.attention import kv_layers, layer_kinds, text_config
from quantry.planning.memory.terms import CacheType, EngineTerms
from quantry.types import LayerKind


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What one layer keeps: `heads` times `key` and `value` numbers a token, or a state."""

    kind: LayerKind
    heads: int = 0
    key: int = 0
    value: int = 0
    window: int | None = None
    state: int = 0  # bytes

    def on_one_of(self, devices: int) -> "CachedLayer":
        """Returns the part of one device; fewer KV heads than devices are repeated, as is the one latent vector."""
        heads = ceil(self.heads / devices)
        return CachedLayer(self.kind, heads, self.key, self.value, self.window, ceil(self.state / devices))

    def token_bytes(self, dtype: CacheType) -> int:
        """Returns the bytes of one token; K, and V, of all heads share a row, so blocks of a type may span heads."""
        numbers = self.heads * (self.key + self.value)
        return ceil(numbers * dtype.bits / 8) + self.heads * 2 * dtype.head_bytes


@dataclass(frozen=True, slots=True)
class Sequences:
    """The load: `count` sequences of `context` tokens, in steps of `step` tokens from at most `slots` sequences."""

    context: int
    count: int
    step: int
    slots: int = 1
    in_flight: int = 1  # steps that run at once


@dataclass(frozen=True, slots=True)
class Pool:
    """The cache of one device: bytes by kind of layer for all sequences, and bytes of one sequence."""

    kinds: Mapping[LayerKind, int]
    per_sequence: int  # of the whole context


def layers_of(config: Mapping[str, Any], sliding: bool = True) -> tuple[CachedLayer | None, ...]:
    """Returns what every layer keeps, None for one without a cache; without `sliding`, windows are ignored."""
    text = text_config(config)
    states = {group.kind: (group.state_bytes or 0) // group.layers for group in kv_layers(config)}
    layers = (
        CachedLayer(kind, state=states[kind]) if kind == "recurrent" else kind and _attention(text, kind, index)
        for index, kind in enumerate(layer_kinds(text))
    )
    return tuple(
        CachedLayer("full", layer.heads, layer.key, layer.value)
        if layer and layer.kind == "sliding" and not sliding
        else layer
        for layer in layers
    )


def _attention(text: Mapping[str, Any], kind: LayerKind, index: int) -> CachedLayer:
    if kind == "mla":
        return CachedLayer(kind, 1, text["kv_lora_rank"], text["qk_rope_head_dim"])
    queries = _at(text, "num_attention_heads", index)
    heads = _at(text, "num_key_value_heads", index) or queries
    size = text.get("head_dim") or text["hidden_size"] // queries
    window = None
    if kind == "full":
        heads, size = text.get("num_global_key_value_heads") or heads, text.get("global_head_dim") or size
    else:
        window = text.get("sliding_window") or text.get("attention_chunk_size")
    return CachedLayer(kind, heads, size, text.get("v_head_dim") or size, window)


def _at(text: Mapping[str, Any], name: str, index: int) -> int:
    """Returns a count that may differ from layer to layer, 0 if there is none. Raises ConfigError if it is no count."""
    value = text.get(name)
    if isinstance(value, list | tuple):
        if index >= len(value):
            raise ConfigError(f"config gives {name} for {len(value)} layers, and has more", fix="restore config.json")
        value = value[index]
    if value is not None and (type(value) is not int or not 0 <= value < 1 << 31):
        raise ConfigError(f"config gives {name} as {str(value)[:40]!r}, not a count", fix="restore config.json")
    return value or 0


def pool(
    layers: Sequence[CachedLayer], terms: EngineTerms, dtype: CacheType, load: Sequences, devices: int = 1
) -> Pool:
    """Returns the cache of one of `devices` that share the heads of these layers."""
    allocate = {"blocks": _blocks, "cells": _cells, "tokens": _tokens}[terms.cache]
    shares = [layer.on_one_of(devices) for layer in layers]
    kinds = allocate(shares, terms.block, dtype, load) if shares else {}
    return Pool(kinds, sum(kinds.values()) // load.count)


def _tokens(layers: Sequence[CachedLayer], block: int, dtype: CacheType, load: Sequences) -> Counter[LayerKind]:
    kinds: Counter[LayerKind] = Counter()
    for layer in layers:
        size = layer.state or min(load.context, layer.window or load.context) * layer.token_bytes(dtype)
        kinds[layer.kind] += size * load.count
    return kinds


def _cells(layers: Sequence[CachedLayer], step: int, dtype: CacheType, load: Sequences) -> Counter[LayerKind]:
    """Gives each sequence its own stream of cells."""
    whole = _round_up(load.context, step)
    kinds: Counter[LayerKind] = Counter()
    for layer in layers:
        if layer.kind == "recurrent":
            kinds[layer.kind] += layer.state * load.count
        else:
            cells = _round_up(min(whole, layer.window + load.step), step) if layer.window else whole
            kinds[layer.kind] += load.count * cells * layer.token_bytes(dtype)
    return kinds


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


# ---- blocks, as vLLM makes them ----


@dataclass(frozen=True, slots=True)
class Page:
    """The pages of equal layers: bytes of one, the tokens in it, and how many one sequence may hold."""

    layer: CachedLayer
    bytes: int
    tokens: int
    needed: int


def _blocks(layers: Sequence[CachedLayer], block: int, dtype: CacheType, load: Sequences) -> Counter[LayerKind]:
    """Gives equal layers equal pages, makes the pages of all layers equal, and lets groups of layers share a pool."""
    tokens = _aligned(layers, block, dtype)
    counts = Counter(layers)
    pages = [_page(layer, tokens, dtype, load) for layer in counts]
    size = 1
    if len({(layer.kind == "recurrent", layer.window) for layer in counts}) > 1:  # for other numbers of tokens
        pages = _unified(pages, load)
        least, most = min(counts.values()), max(counts.values())
        size = most if most < least * 1.5 else least  # the rarest layers, unless padding to the commonest wastes little
    kinds: Counter[LayerKind] = Counter()
    for page, count in zip(pages, counts.values(), strict=True):
        kinds[page.layer.kind] += size * ceil(count / size) * page.bytes * page.needed * load.count
    return kinds


def _page(layer: CachedLayer, block: int, dtype: CacheType, load: Sequences) -> Page:
    if layer.kind == "recurrent":
        return Page(layer, layer.state, block, 1)
    return Page(layer, layer.token_bytes(dtype) * block, block, _needed(layer, block, load))


def _needed(layer: CachedLayer, block: int, load: Sequences) -> int:
    """Returns the pages of a sequence; a window is not released before the steps in flight have ended."""
    if layer.window is None:
        return ceil(load.context / block)
    return ceil(min(layer.window - 1 + load.step * load.in_flight, load.context) / block) + 1


def _unified(pages: Sequence[Page], load: Sequences) -> list[Page]:
    """Makes all pages as large as the largest: smaller ones take more tokens, or are padded if they cannot."""
    largest = max(page.bytes for page in pages)
    unified = []
    for page in pages:
        if page.layer.kind == "recurrent" or largest % page.bytes:
            unified.append(Page(page.layer, largest, page.tokens, page.needed))
        else:
            tokens = page.tokens * (largest // page.bytes)
            unified.append(Page(page.layer, largest, tokens, _needed(page.layer, tokens, load)))
    return unified


def _aligned(layers: Sequence[CachedLayer], block: int, dtype: CacheType) -> int:
    """Returns the tokens of a page: beside recurrent layers, as many as make a page of attention hold a state."""
    state = max((layer.state for layer in layers), default=0)
    token = max((layer.token_bytes(dtype) for layer in layers if layer.kind != "recurrent"), default=0)
    return block if not state or not token else block * ceil(state / (block * token))


def check_states(config: Mapping[str, Any]) -> None:
    """Raises ConfigError if the size of a recurrent state is unknown: its cache would come out too small."""
    unknown = [group for group in kv_layers(config) if group.kind == "recurrent" and group.state_bytes is None]
    if unknown:
        raise ConfigError(
            f"the size of the recurrent state of {text_config(config).get('model_type')} is not known",
            fix="plan a model with attention layers, or measure this one in its engine",
        )

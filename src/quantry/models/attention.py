"""How each layer of a model caches the past, and the cost in a 16-bit cache.

A full layer caches K and V of every token, a sliding layer those of its window, multi-head latent attention (MLA) one
compressed vector a token, and a recurrent layer a state of constant size. config.json says which; where a family's
config does not, families.toml has the rule.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from quantry.errors import ConfigError
from quantry.storage import read_data
from quantry.types import KVLayers, LayerKind

CACHE_BYTES = 2  # a 16-bit cache
LAYER_LIMIT = 10_000

# canonical name -> the names older configs use for it
ALIASES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "multi_query_group_num"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "n_ctx", "max_sequence_length"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "qk_rope_head_dim": ("rope_dimension_count",),
}
LINEAR_ATTENTION = (
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
MAMBA_2 = (  # heads, their size, the size of the state, groups, the length of the convolution
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
)
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config")
LAYER_KINDS: Mapping[str, LayerKind | None] = {  # a config's name for a layer -> its cache; None: no cache
    "full_attention": "full",
    "attention": "full",
    "global_attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "sliding",
    "local_attention": "sliding",
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "mamba2": "recurrent",
    "recurrent": "recurrent",
    "conv": "recurrent",
    "hybrid": "full",
    "mlp": None,
    "moe": None,
    "M": "recurrent",  # the letters of hybrid_override_pattern
    "*": "full",
    "-": None,
    "E": None,
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the language model's part of a config, with old names of fields replaced by the usual ones."""
    for key in TEXT_CONFIGS:
        if isinstance(config.get(key), Mapping):
            return text_config(config[key])
    renamed = {name: config[old] for name, olds in ALIASES.items() for old in olds if old in config}
    return {**renamed, **{key: value for key, value in config.items() if value is not None}}


def block_count(config: Mapping[str, Any]) -> int:
    """Returns the number of decoder blocks."""
    return _layer_count(text_config(config))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Returns the longest context the model was made for, or None if the config does not say."""
    length = text_config(config).get("max_position_embeddings")
    return length if type(length) is int and length > 0 else None


def kv_layers(config: Mapping[str, Any]) -> tuple[KVLayers, ...]:
    """Returns the layers of a model, grouped by how they cache the past."""
    text = text_config(config)
    kinds = layer_kinds(text)
    groups: dict[LayerKind, tuple[int, int]] = {}
    for index, kind in enumerate(kinds):
        if kind is not None:
            layers, total = groups.get(kind, (0, 0))
            groups[kind] = (layers + 1, total + _bytes_per_token(text, kind, index))
    return tuple(
        KVLayers(
            kind=kind,
            layers=layers,
            bytes_per_token=total,
            window=_window(text) if kind == "sliding" else None,
            state_bytes=_state_bytes(text, layers) if kind == "recurrent" else None,
        )
        for kind, (layers, total) in groups.items()
    )


def layer_kinds(text: Mapping[str, Any]) -> tuple[LayerKind | None, ...]:
    """Returns how each layer caches the past, first to last; None for layers that reuse another's cache."""
    count = _layer_count(text)
    kinds = _listed_kinds(text) or _ruled_kinds(text, count)
    if len(kinds) != count:
        raise ConfigError(
            f"config lists the kinds of {len(kinds)} layers but num_hidden_layers is {count}", fix="restore config.json"
        )
    shared = text.get("num_kv_shared_layers", 0)
    own = count - shared if type(shared) is int and 0 <= shared <= count else count
    return tuple(kind if index < own else None for index, kind in enumerate(kinds))


def _listed_kinds(text: Mapping[str, Any]) -> tuple[LayerKind | None, ...]:
    listed = text.get("layer_types") or text.get("layers_block_type") or text.get("hybrid_override_pattern")
    if listed is None:
        return ()
    unknown = [name for name in listed if str(name) not in LAYER_KINDS] if isinstance(listed, Sequence) else [listed]
    if unknown:
        raise ConfigError(
            f"config has layers of an unknown type {str(unknown[0])[:40]!r}",
            fix=f"known are {', '.join(name for name in LAYER_KINDS if len(name) > 1)}",
        )
    kinds = tuple(LAYER_KINDS[str(name)] for name in listed)
    return tuple("mla" if kind == "full" and text.get("kv_lora_rank") else kind for kind in kinds)


def _ruled_kinds(text: Mapping[str, Any], count: int) -> tuple[LayerKind | None, ...]:
    rule = _families().get(str(text.get("model_type")), {})
    if rule.get("recurrent") == "all":
        return tuple("recurrent" for _ in range(count))
    if text.get("kv_lora_rank"):
        return tuple("mla" for _ in range(count))
    if "full_attention_interval" in text:
        interval = _count(text, "full_attention_interval")
        return tuple("full" if (index + 1) % interval == 0 else "recurrent" for index in range(count))
    if "attn_layer_period" in text:
        period, offset = _count(text, "attn_layer_period"), text.get("attn_layer_offset", 0)
        return tuple("full" if index % period == offset else "recurrent" for index in range(count))
    slides = _slides(text, rule.get("sliding", "never")) if _window(text) else lambda index: False
    return tuple("sliding" if slides(index) else "full" for index in range(count))


def _slides(text: Mapping[str, Any], rule: Any) -> Callable[[int], bool]:
    """Returns a function that says if the layer of an index slides, by a row of families.toml."""
    pattern = text.get("sliding_window_pattern")
    if isinstance(pattern, Sequence):  # GGUF may list it layer by layer
        return lambda index: bool(pattern[index]) if index < len(pattern) else False
    if type(pattern) is int and pattern > 0:
        return lambda index: (index + 1) % pattern != 0
    if not isinstance(rule, Mapping):
        return lambda index: bool(rule == "all")
    if "if" in rule and not text.get(rule["if"]):
        return lambda index: False
    first = _count(text, rule["from"]) if "from" in rule else 0
    last = _count(text, rule["before"]) if "before" in rule else 1 << 31
    period, full, slides = rule.get("period", 1), rule.get("full"), rule.get("slides")
    return lambda index: (
        first <= index < last and index % period != full and (slides is None or index % period == slides)
    )


def _bytes_per_token(text: Mapping[str, Any], kind: LayerKind, index: int) -> int:
    if kind == "recurrent":
        return 0
    if kind == "mla":
        return (_count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")) * CACHE_BYTES
    heads = _per_layer(text, "num_key_value_heads", index) or _per_layer(text, "num_attention_heads", index)
    if heads is None:
        raise _lacks("num_attention_heads")
    if kind == "full" and text.get("num_global_key_value_heads"):
        heads = _count(text, "num_global_key_value_heads")
    size = _head_size(text, kind, index)
    value_size = _count(text, "v_head_dim") if text.get("v_head_dim") else size
    return heads * (size + value_size) * CACHE_BYTES


def _head_size(text: Mapping[str, Any], kind: LayerKind, index: int) -> int:
    if kind == "full" and text.get("global_head_dim"):
        return _count(text, "global_head_dim")
    if text.get("head_dim"):
        return _count(text, "head_dim")
    heads = _per_layer(text, "num_attention_heads", index)
    if not heads:
        raise _lacks("num_attention_heads")
    return _count(text, "hidden_size") // heads


def _window(text: Mapping[str, Any]) -> int | None:
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    return window if type(window) is int else None


def _state_bytes(text: Mapping[str, Any], layers: int) -> int | None:
    """Returns the bytes of the state of `layers` layers: float32 state, 16-bit convolution tail, as in the engines."""
    if all(type(text.get(name)) is int for name in LINEAR_ATTENTION):
        key_heads, key_size, value_heads, value_size, kernel = (_count(text, name) for name in LINEAR_ATTENTION)
        convolved = 2 * key_heads * key_size + value_heads * value_size
        return layers * (4 * value_heads * key_size * value_size + 2 * convolved * (kernel - 1))
    for names in MAMBA_2:
        if all(type(text.get(name)) is int for name in names):
            heads, size, depth, groups, kernel = (_count(text, name) for name in names)
            return layers * (4 * heads * size * depth + 2 * (heads * size + 2 * groups * depth) * (kernel - 1))
    inner = text.get("mamba_inner_size") or text.get("intermediate_size")
    state, tail = text.get("state_size"), text.get("conv_kernel")
    if type(inner) is int and type(state) is int and type(tail) is int and text.get("model_type") == "mamba":
        return layers * (4 * inner * state + 2 * inner * (tail - 1))
    return None


def _layer_count(text: Mapping[str, Any]) -> int:
    """Returns the number of layers. Raises ConfigError above a limit, before anything is allocated for each."""
    count = _count(text, "num_hidden_layers")
    if count > LAYER_LIMIT:
        raise ConfigError(
            f"config gives num_hidden_layers as {count}, more than the limit of {LAYER_LIMIT}",
            fix="restore config.json",
        )
    return count


def _count(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if value is None:
        raise _lacks(name)
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ConfigError(f"config gives {name} as {str(value)[:40]!r}, not a count", fix="restore config.json")
    return value


def _per_layer(text: Mapping[str, Any], name: str, index: int) -> int | None:
    value = text.get(name)
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = value[index] if index < len(value) else None
        return value if type(value) is int and value >= 0 else None
    return None if value is None else _count(text, name)


def _lacks(name: str) -> ConfigError:
    return ConfigError(f"config has no {name}", fix="copy config.json from the original model")


@cache
def _families() -> dict[str, Any]:
    return read_data("quantry.models", "families.toml")

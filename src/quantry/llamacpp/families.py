"""What a config means for llama.cpp: the row of its architecture in families.toml, and the values that the row names.

Configs are read as transformers reads them: old names (rope_theta, rope_scaling) and new ones (rope_parameters), with
the family's defaults for missing fields. A model that llama.cpp would compute differently is refused here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from quantry.errors import ConfigError, UnknownNameError
from quantry.models.attention import layer_kinds, text_config
from quantry.storage import read_data

RESTORE = "restore config.json"
LARGEST = (1 << 31) - 1
LAYER_LIMIT = 10_000
ROPE_ALIASES = {"su": "longrope"}
YARN_KEYS = {  # GGUF key -> the names of its rope parameter
    "rope_scaling_yarn_ext_factor": ("extrapolation_factor",),
    "rope_scaling_yarn_attn_factor": ("attention_factor", "attn_factor"),
    "rope_scaling_yarn_beta_fast": ("beta_fast",),
    "rope_scaling_yarn_beta_slow": ("beta_slow",),
}

ROPE_FACTS = (
    "rope_scaling_type", "rope_scaling_factor", "rope_scaling_orig_ctx_len", *YARN_KEYS, "rope_scaling_attn_factors",
    "rope_freqs", "rope_factors_long", "rope_factors_short",
)  # fmt: skip

Facts = dict[str, Any]  # fields of config.json, sizes and rope parameters by name


@dataclass(frozen=True, slots=True)
class Family:
    """A table of families.toml; the comment at its head explains the columns."""

    name: str
    architecture: str
    keys: tuple[str, ...]
    layer: tuple[str, ...]
    ropes: tuple[str, ...]
    biases: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nulls: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    every: Mapping[str, Any] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[str | int]] = field(default_factory=dict)
    layered_rope: bool = False
    head_dim: str = "given"
    large: int | None = None
    expert_size: str = "moe_intermediate_size"
    permute: bool = False
    norm_offset: float = 0.0
    head: str = "optional"
    spare_rows: bool = False
    slides: bool = False


def family(config: Mapping[str, Any]) -> Family:
    """Returns the row of a config's architecture.

    Raises UnknownNameError if Quantry cannot write it as GGUF, ConfigError if the config names none.
    """
    names = _text(config).get("architectures") or config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise ConfigError("config.json names no architecture", fix=RESTORE)
    if name not in known():
        raise UnknownNameError(
            f"{name[:80]} cannot be written as GGUF: its tensors and key-values are not known",
            fix=f"known are {', '.join(known())}",
        )
    return _family(name)


def known() -> tuple[str, ...]:
    """Returns the names of all architectures that can be written, sorted."""
    return tuple(sorted(name for name in table() if name[0].isupper()))


@cache
def table() -> dict[str, Any]:
    """Returns the content of families.toml."""
    return read_data("quantry.llamacpp", "families.toml")


@cache
def _family(name: str) -> Family:
    row = _row(name)
    shapes = {**table()["shapes"], **row.pop("shapes", {})}
    lists = table()["lists"]
    for column in ("keys", "layer", "biases"):
        row[column] = [part for entry in row.get(column, ()) for part in lists.get(entry, [entry])]
    frozen: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    return Family(name=name, shapes=shapes, **frozen)


def _row(name: str) -> dict[str, Any]:
    row = dict(table()[name])
    base = _row(row.pop("like")) if "like" in row else {}
    merged = {key: {**base.get(key, {}), **row.get(key, {})} for key in ("defaults", "fixed", "shapes")}
    return {**base, **row, **merged}


def facts(config: Mapping[str, Any]) -> Facts:
    """Returns every field, size and rope parameter that the key-values and shapes of a model are made of.

    Raises ConfigError if the config is damaged or describes a model that llama.cpp computes differently.
    """
    row = family(config)
    model = _fields(_text(config), row)
    _check_fields(model, row)
    model |= _sizes(model, row)
    model |= _rope_facts(model, row)
    if row.every:
        model |= _pattern_facts(model, row)
    _check_fixed(model, row)
    return model


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Lists what llama.cpp computes differently in long contexts and a GGUF file cannot change."""
    row, model = family(config), facts(config)
    longest, window, lines = model["max_position_embeddings"], model.get("sliding_window") or 0, []
    kinds = layer_kinds(text_config({**model, "text_config": None}))
    if not row.slides and "sliding" in kinds and window < longest:
        lines.append(
            f"llama.cpp attends to the whole context where the model sees the last {window} tokens: answers differ in"
            " longer contexts"
        )
    if _rope_type(model["full_rope"], row, row.ropes) == "dynamic":
        lines.append(f"llama.cpp does not stretch the rope of contexts over {longest} tokens as the model does")
    return tuple(lines)


def _text(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


def _fields(text: Mapping[str, Any], row: Family) -> Facts:
    """Returns the fields of a config by their usual names, with defaults for missing ones."""
    fields = {**row.defaults, **text}
    fields |= {name: text[other] for name, other in table()["aliases"].items() if text.get(other) is not None}
    fields |= {name: value for name, value in row.nulls.items() if fields.get(name) is None}
    if fields.get("num_key_value_heads") is None:
        fields["num_key_value_heads"] = fields.get("num_attention_heads")
    if fields.get("is_causal") is not False:
        fields["is_causal"] = None  # files mention only that a model is not causal
    return fields | _ropes(fields, row)


def _ropes(fields: Facts, row: Family) -> Facts:
    """Returns the rope parameters of full and sliding layers, where old and new configs have them."""
    given, scaling = _mapping(fields, "rope_parameters"), _mapping(fields, "rope_scaling")
    if row.layered_rope:  # here transformers ignores `type`, the old name of rope_type
        full = {"rope_type": "default", **_mapping(given, "full_attention"), **scaling}
        sliding = _mapping(given, "sliding_attention")
        local = sliding.get("rope_theta", fields.get("rope_local_base_freq"))
    else:
        flat = scaling or given
        full, sliding, local = _mapping(flat, "full_attention") or flat, {}, None
    own = {name: full.get(name, fields.get(name)) for name in ("rope_theta", "partial_rotary_factor")}
    return {"full_rope": full, "sliding_rope": sliding, "rope_local_base_freq": local, **own}


def _mapping(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"config.json has {name} {str(value)[:40]!r}, not an object", fix=RESTORE)
    return dict(value)


def _check_fields(model: Facts, row: Family) -> None:
    groups = table()["fields"]
    for name in (*groups["required"], *row.required):
        if model.get(name) is None:
            raise ConfigError(f"config.json of {row.name} has no {name}", fix=RESTORE)
        if model[name] == 0:
            raise ConfigError(f"config.json has {name} 0", fix=RESTORE)
    for name in groups["counts"]:
        if model.get(name) is not None:
            _count(model[name], name)
    for name in groups["numbers"]:
        if model.get(name) is not None:
            _number(model[name], name)
    if model["num_hidden_layers"] > LAYER_LIMIT:
        raise ConfigError(f"num_hidden_layers {model['num_hidden_layers']} is over {LAYER_LIMIT}", fix=RESTORE)


def _count(value: Any, name: str) -> int:
    """Returns a whole number; raises ConfigError for any other value."""
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise ConfigError(f"config.json has {name} {str(value)[:40]!r}, not a whole number", fix=RESTORE)
    return value


def _number(value: Any, name: str) -> float:
    """Returns a number above zero; raises ConfigError for any other value."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e30:
        raise ConfigError(f"config.json has {name} {str(value)[:40]!r}, not a number above 0", fix=RESTORE)
    return value


def _sizes(model: Facts, row: Family) -> Facts:
    hidden, heads, kv_heads = model["hidden_size"], model["num_attention_heads"], model["num_key_value_heads"]
    given = (model.get("head_dim") or None) if row.head_dim != "never" else None
    if given is None and hidden % heads:
        raise ConfigError(f"hidden_size {hidden} is not divided by num_attention_heads {heads}", fix=RESTORE)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not divided by num_key_value_heads {kv_heads}", fix=RESTORE)
    head = given or hidden // heads
    if head % 2:
        raise ConfigError(f"heads of size {head} cannot be rotated in pairs", fix=RESTORE)
    return {
        "head_dim": head if row.head_dim == "always" else given,
        "head_size": head,
        "queries": heads * head,
        "keys": kv_heads * head,
        "queries_keys_values": (heads + 2 * kv_heads) * head,
        "gate_up": 2 * model["intermediate_size"],
        "expert_size": model.get(row.expert_size),
        "query_scalar": hidden // heads if model["num_hidden_layers"] == row.large else head,
        "rope_dimension_count": int((model["partial_rotary_factor"] or 1.0) * heads * head) // heads,
    }


def _rope_facts(model: Facts, row: Family) -> Facts:
    rope_type, rope = _rope_type(model["full_rope"], row, row.ropes), model["full_rope"]
    _rope_type(model["sliding_rope"], row, ("default",))
    context = rope.get("original_max_position_embeddings", model["max_position_embeddings"])
    made: Facts = dict.fromkeys(ROPE_FACTS)
    if "original_max_position_embeddings" in row.defaults:  # the family keeps it outside the rope parameters
        made["rope_scaling_orig_ctx_len"] = context = model["original_max_position_embeddings"]
    if rope_type in ("linear", "yarn"):
        made |= {"rope_scaling_type": rope_type, "rope_scaling_factor": _number(rope.get("factor"), "rope factor")}
    if rope_type == "yarn":
        _check_yarn(rope, made["rope_scaling_factor"])
        made["rope_scaling_orig_ctx_len"] = _count(context, "original_max_position_embeddings")
        for key, names in YARN_KEYS.items():
            value = next((rope[name] for name in names if rope.get(name) is not None), None)
            made[key] = None if value is None else _number(value, names[0])
    if rope_type == "llama3":
        made["rope_freqs"] = _llama3(rope, model["rope_theta"], model["head_size"], context)
    if rope_type == "longrope":
        made |= _longrope(rope, model["rope_dimension_count"], model["max_position_embeddings"], context)
    return made


def _check_yarn(rope: Mapping[str, Any], factor: float) -> None:
    """Raises ConfigError if attention is sharpened in another way than llama.cpp derives from the factor."""

    def sharper(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    wanted, scales = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if wanted is None and all(scales):
        top, bottom = (sharper(_number(scale, "mscale")) for scale in scales)
        wanted = top / bottom
    if wanted is not None and not math.isclose(_number(wanted, "attention_factor"), sharper(1), rel_tol=1e-3):
        raise ConfigError(
            f"yarn with attention factor {wanted:.4g} cannot be written as GGUF: llama.cpp computes {sharper(1):.4g}",
            fix="use another format",
        )


def _rope_type(rope: Mapping[str, Any], row: Family, known: Sequence[str]) -> str:
    written = str(rope.get("rope_type") or rope.get("type") or "default").lower()
    rope_type = ROPE_ALIASES.get(written, written)
    if rope_type not in known:
        raise ConfigError(
            f"{row.name} with rope type {rope_type[:40]!r} cannot be written as GGUF: llama.cpp's {row.architecture}"
            f" has {', '.join(known)}",
            fix="use another format",
        )
    return rope_type


def _llama3(rope: Mapping[str, Any], theta: float, size: int, context: Any) -> tuple[float, ...]:
    """Returns how much Llama 3 slows each frequency: fast ones not at all, slow ones by `factor`, smoothly between.

    Computes in float32 with reciprocals as torch does, which gives the factors of Llama 3.1 to 3.3 bit for bit.
    """
    from numpy import errstate, float32

    one = float32(1)
    factor, low, high = (
        _number(rope.get(name, default), name)
        for name, default in (("factor", 8.0), ("low_freq_factor", 1.0), ("high_freq_factor", 4.0))
    )
    length = _count(context, "original_max_position_embeddings")
    factors = []
    with errstate(all="ignore"):  # a wave that is too short for float32 counts as fast
        for index in range(0, size, 2):
            power = float32(math.pow(theta, float(float32(index) / float32(size))))
            wave = (one / (one / power)) * float32(2 * math.pi)
            smooth = ((one / wave) * float32(length) - float32(low)) / float32(high - low) if high > low else one
            between = one / ((one - smooth) / float32(factor) + smooth)
            factors.append(1.0 if wave < length / high else factor if wave > length / low else float(between))
    return tuple(factors)


def _longrope(rope: Mapping[str, Any], rotated: int, longest: int, context: int) -> Facts:
    """Returns the factors of each frequency for short and long contexts, and how much attention is sharpened."""
    made: Facts = {}
    if context < 2:
        raise ConfigError(f"config.json has original_max_position_embeddings {context}", fix=RESTORE)
    for name in ("long", "short"):
        factors = rope.get(f"{name}_factor")
        if not isinstance(factors, list) or len(factors) != rotated // 2:
            count = len(factors) if isinstance(factors, list) else "no"
            raise ConfigError(f"longrope has {count} {name} factors, not {rotated // 2}", fix=RESTORE)
        made[f"rope_factors_{name}"] = tuple(float(_number(factor, f"{name}_factor")) for factor in factors)
    sharper = math.sqrt(1 + math.log(longest / context) / math.log(context)) if longest > context else 1.0
    return {**made, "rope_scaling_attn_factors": sharper}


def _pattern_facts(model: Facts, row: Family) -> Facts:
    """Raises ConfigError if layers alternate differently than llama.cpp assumes; `off`: no layer slides."""
    period, last, rest = (row.every[name] for name in ("period", "last", "rest"))
    listed = model.get(row.every["field"])
    if listed is None:
        interval = model.get(row.every.get("interval", ""), period)
        step = interval if type(interval) is int and interval > 0 else LAYER_LIMIT
        listed = [rest if (index + 1) % step else last for index in range(model["num_hidden_layers"])]
    if "off" in row.every and listed == [last] * model["num_hidden_layers"]:
        return {row.every["off"]: None}
    if listed != [rest if (index + 1) % period else last for index in range(model["num_hidden_layers"])]:
        raise ConfigError(
            f"{row.name} with its own {row.every['field']} cannot be written as GGUF: llama.cpp takes {last!r} for"
            f" every {period}th layer and {rest!r} for the others",
            fix="use another format",
        )
    return {}


def _check_fixed(model: Facts, row: Family) -> None:
    for name, values in row.fixed.items():
        allowed = [model.get(value, value) if isinstance(value, str) else value for value in values]
        if model.get(name) is not None and model[name] not in allowed:
            raise ConfigError(
                f"{row.name} with {name} {str(model[name])[:40]} cannot be written as GGUF: llama.cpp computes"
                f" {row.architecture} with {' or '.join(map(str, allowed)) or 'none'}",
                fix="use another format",
            )

"""The numbers in a config.json that models are built by: sizes below a limit, factors of 0 or more; or refused."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

from quantry.errors import ConfigError

# The largest models known have 262,144 tokens, 18,432 channels, 126 layers and 512 experts. A size beyond its limit
# would be memory that no machine has, asked for in the middle of a job or by a library that aborts.
LIMITS = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 1 << 26),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 1 << 20),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "d_ff", "d_inner"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "n_heads"), 1 << 16),
    **dict.fromkeys(("head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 1 << 16),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "global_head_dim", "state_size", "conv_kernel"), 1 << 20),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1 << 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "sliding_window"), 1 << 40),
}  # layers have theirs in attention.py

SINGLE = frozenset({"hidden_size", "vocab_size"})  # others may be listed by layer
FACTORS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps", "rope_theta")


def check_numbers(config: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError, which names the key, if a number of a config or of its parts is none or beyond its limit."""
    for part in (config, *(value for value in config.values() if isinstance(value, Mapping))):
        for key, limit in LIMITS.items():
            values = part.get(key)
            for value in values if isinstance(values, list) and key not in SINGLE else (values,):
                if value is not None and not _is_size(value, limit):
                    raise ConfigError(
                        f"{name} gives {key} as {ascii(value)[:40]}, not a whole number up to {limit:,}",
                        fix="copy it from the original model",
                    )
        for key in FACTORS:  # a negative one ends llama.cpp in one of its threads
            value = part.get(key)
            if value is not None and not (_is_number(value) and isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{name} gives {key} as {ascii(value)[:40]}, not a number of 0 or more",
                    fix="copy it from the original model",
                )


def _is_size(value: Any, limit: int) -> bool:
    return _is_number(value) and -1 <= value <= limit and value == int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

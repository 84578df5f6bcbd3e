"""The number of experts of a mixture, and of those a token uses, by the keys that families write into config.json."""

from collections.abc import Mapping
from typing import Any

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
USED = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k")


def expert_count(text: Mapping[str, Any]) -> int:
    """Returns the number of routed experts of a layer, from the text part of a config; 0 for a dense model."""
    return _first(text, COUNTS)


def experts_used(text: Mapping[str, Any]) -> int:
    """Returns the number of routed experts that a token goes through; 0 for a dense model."""
    return _first(text, USED)


def _first(text: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return next((text[key] for key in keys if type(text.get(key)) is int and text[key] > 0), 0)

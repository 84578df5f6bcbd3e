"""Scales of an FP8 KV cache in compressed-tensors: `.k_scale` and `.v_scale` of each attention module."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from quantry.errors import ConfigError
from quantry.formats._compressed_tensors_config import NAME, grid_of
from quantry.formats.contract import STORED, Layout, refuse, spell
from quantry.types import Grid

if TYPE_CHECKING:
    from torch import Tensor

KEYS_VALUES = ("k_proj", "v_proj", "qkv_proj")  # an attention module with one of them has a cache to scale


def modules(linears: Iterable[str]) -> tuple[str, ...]:
    """Returns the attention modules whose keys and values get a scale, from the names of linear layers."""
    names = [name.rpartition(".") for name in linears]
    return tuple(dict.fromkeys(parent for parent, _, leaf in names if leaf in KEYS_VALUES))


def layout(module: str, heads: int, grid: Grid) -> Layout:
    """Returns the scales of keys and values: one each, or one per key-value head if the grid's block is (1, 0)."""
    refuse(module, NAME, refusal(grid))
    shape = (heads, 1, 1) if grid.block == (1, 0) else (1,)
    return {f"{module}.{side}_scale": (STORED[grid.scale], shape) for side in "kv"}


def encode(module: str, keys: "Tensor", values: "Tensor") -> "dict[str, Tensor]":
    """Returns the stored scales of an attention module, from `numerics.static.cache_scale` of its keys and values."""
    return {f"{module}.k_scale": keys.contiguous(), f"{module}.v_scale": values.contiguous()}


def refusal(grid: Grid) -> str | None:
    """Says why a KV cache of this grid cannot be described, or None: vLLM reads E4M3 per tensor or per head."""
    wanted = grid.kind == "e4m3" and grid.symmetric and grid.block in ((0, 0), (1, 0))
    if wanted and grid.scale in ("f16", "bf16", "f32"):
        return None
    return f"compressed-tensors holds a KV cache of e4m3 per tensor or per head, not {spell(grid)}"


def grid(settings: Mapping[str, Any]) -> Grid | None:
    """Reads how the KV cache of a checkpoint is quantized; None if it is not."""
    arguments = settings.get("kv_cache_scheme")
    if arguments is None:
        return None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"kv_cache_scheme is {str(arguments)[:40]!r}, not an object", fix="restore config.json")
    by_head = {"attn_head": "channel"}  # a head is a row of keys
    strategy = arguments.get("strategy")
    return grid_of("the KV cache", {**arguments, "strategy": by_head.get(str(strategy), strategy)})

"""How much KV cache fits a device beside a model, in several types of cache."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from quantry.planning.deployment import Deployment
from quantry.planning.memory.footprint import cache_bytes, kv_capacity, max_concurrency, room


@dataclass(frozen=True, slots=True)
class CacheRoom:
    """What one type of KV cache takes, and how much of it fits. Field names are the JSON names."""

    bytes_per_token: int  # of all layers, for a token that all of them keep
    bytes_per_sequence: int  # of the whole context, as the engine allocates it
    tokens: int  # that fit beside everything else
    sequences: int  # of the whole context that fit at once


def cache_rooms(deployment: Deployment, context: int, caches: Sequence[str]) -> dict[str, Any]:
    """Returns the device, the bytes of it that may be filled, and a `CacheRoom` for each type of cache.

    Raises QuantryError if the memory model does not know the shape.
    """
    rows = {cache: asdict(_room(replace(deployment, kv=cache), context)) for cache in caches}
    return {"device": deployment.device.name, "bytes": room(deployment), "caches": rows}


def _room(deployment: Deployment, context: int) -> CacheRoom:
    token, sequence = cache_bytes(deployment, context)
    return CacheRoom(token, sequence, kv_capacity(deployment, context), int(max_concurrency(deployment, context)))

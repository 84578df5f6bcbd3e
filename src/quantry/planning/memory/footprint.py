"""What a served model needs of memory, term by term: weights, KV cache, activations, overhead.

No term is "times 1.2": weights are the tensors that will be stored (weights.py) as the engine loads them (loaded.py),
the cache follows from the layers and from how the engine allocates (kv_cache.py), activations and overhead from
formulas and constants of each engine (buffers.py, terms.toml). A paged cache holds the tokens that sequences are
expected to reach, and at least one whole context; other caches hold the context of every sequence. `Footprint.parts`
names every term; the terms of the host beside a GPU end in "(host)".
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quantry.errors import QuantryError
from quantry.models.attention import block_count, text_config
from quantry.models.caching import per_checkpoint
from quantry.planning.deployment import Deployment
from quantry.planning.memory.buffers import buffers
from quantry.planning.memory.kv_cache import CachedLayer, Sequences, check_states, layers_of, pool
from quantry.planning.memory.loaded import loaded_weights
from quantry.planning.memory.stages import Stage, stages
from quantry.planning.memory.terms import MIB, CacheType, cache_type, default_batch
from quantry.planning.memory.weights import stored
from quantry.types import Checkpoint, Footprint, Workload

HOST = "(host)"


def footprint(deployment: Deployment, workload: Workload) -> Footprint:
    """Returns the memory of a deployment under a load, over all devices and on the fullest.

    Raises QuantryError if the load is not positive, or if heads, layers or groups do not suit the devices.
    """
    parts: Counter[str] = Counter()
    fullest = 0
    shares = list(_shares(deployment, workload))
    for share in shares:
        for name, size in share.parts.items():
            parts[f"{name} {HOST}" if share.stage.host else name] += size * share.stage.tensor
        if not share.stage.host or len(shares) == 1:
            fullest = max(fullest, sum(share.parts.values()))
    return Footprint(
        weights=_sum(parts, "weights"),
        kv_cache=_sum(parts, "KV cache"),
        activations=_sum(parts, "activations"),
        overhead=_sum(parts, "overhead"),
        per_device=fullest,
        parts=dict(parts),
    )


def host_memory(needed: Footprint) -> int:
    """Returns the bytes of a footprint that the host beside a GPU holds."""
    return sum(size for name, size in needed.parts.items() if name.endswith(HOST))


def cache_bytes(deployment: Deployment, context: int) -> tuple[int, int]:
    """Returns the bytes of cache for one token, in the layers that keep each, and for one sequence of `context` tokens.

    Both are over all devices.
    """
    weights = stored(deployment.checkpoint, deployment.recipe, deployment.keep_odd)
    dtype = cache_type(deployment.kv, deployment.terms, weights.dtype)
    token = sum(layer.token_bytes(dtype) for layer in layers_of(deployment.checkpoint.config) if layer)
    return token, sum(
        share.per_sequence * share.stage.tensor for share in _shares(deployment, Workload(context, prompt=context))
    )


def base_cache(deployment: Deployment) -> str:
    """Returns the 16-bit type of KV cache that the engine takes unless another is asked for."""
    weights = stored(deployment.checkpoint, deployment.recipe, deployment.keep_odd)
    return cache_type("auto", deployment.terms, weights.dtype).name


def kv_capacity(deployment: Deployment, context: int) -> int:
    """Returns the tokens of cache that fit beside everything else, for sequences of `context` tokens."""
    sequence, free = _tightest(deployment, context)
    if sequence == 0:
        return context
    tokens = int(max(0, free) / sequence * context)
    block = deployment.terms.block if deployment.terms.cache == "blocks" else 1
    return tokens // block * block


def max_concurrency(deployment: Deployment, context: int) -> float:
    """Returns how many sequences of `context` tokens fit at once."""
    sequence, free = _tightest(deployment, context)
    return max(0.0, free / sequence) if sequence else float("inf")


def room(deployment: Deployment) -> int:
    """Returns the bytes of a device that the engine may fill."""
    terms = deployment.terms
    utilization = deployment.settings.utilization or terms.utilization
    return int(deployment.device.usable * utilization - terms.margin_mib * MIB)


def most_layers(deployment: Deployment, workload: Workload) -> int:
    """Returns how many layers of llama.cpp fit on a GPU, counting the head as one; the rest stays on the host."""
    fits = 0
    low, high = 1, block_count(deployment.checkpoint.config) + 1
    while low <= high:
        middle = (low + high) // 2
        tried = replace(deployment, offload_layers=middle)
        if footprint(tried, workload).per_device <= room(tried):
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    return fits


# ---- the share of each device ----


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """What one device holds, by name of the term; `stage.tensor` devices hold as much."""

    stage: Stage
    parts: Mapping[str, int]
    per_sequence: int  # bytes of cache


def _shares(deployment: Deployment, workload: Workload) -> Iterator[DeviceShare]:
    terms, load = deployment.terms, _load(deployment, workload)
    weights = stored(deployment.checkpoint, deployment.recipe, deployment.keep_odd)
    dtype = cache_type(deployment.kv, terms, weights.dtype)
    config = deployment.checkpoint.config
    names = {str(config.get("model_type")), str(text_config(config).get("model_type"))}
    layers = _checked_layers(deployment.checkpoint, any(map(terms.slides, names)))
    rotated = _rotated(dtype, layers)
    for stage in stages(deployment, len(weights.blocks)):
        mine = [layer for layer in layers[stage.blocks.start : stage.blocks.stop] if layer]
        cache = pool(mine, terms, dtype, load, stage.tensor)
        counted = mine or [layer for layer in layers if layer][:1]
        parts = {
            **loaded_weights(deployment, weights, stage),
            **{f"KV cache: {kind}": size for kind, size in cache.kinds.items()},
            **buffers(deployment, load, stage, counted, rotated),
        }
        yield DeviceShare(stage, parts, cache.per_sequence)


def _load(deployment: Deployment, workload: Workload) -> Sequences:
    """Returns the load as the engine schedules it. Raises QuantryError if it is not positive."""
    for name in ("context", "concurrency", "prompt"):
        value = getattr(workload, name)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise QuantryError(f"a {name} of {value} is not a number of 1 or more", fix=f"give a positive --{name}")
    terms, settings = deployment.terms, deployment.settings
    context, count = workload.context, workload.concurrency
    tokens, sequences = default_batch(terms, deployment.device)
    if terms.activations == "prompt":
        return Sequences(context, count, settings.tokens or min(workload.prompt, context) * count, count)
    if terms.cache == "cells":
        return Sequences(context, count, min(settings.tokens or tokens, context * count), settings.sequences or count)
    slots = settings.sequences or max(sequences, count)
    step = settings.tokens or min(tokens, slots * context)
    flight = deployment.pipeline_parallel + 1
    if count * workload.held < context:  # one sequence may always reach its whole context
        return Sequences(context, 1, step, min(slots, step), in_flight=flight)
    return Sequences(workload.held, count, step, min(slots, step), in_flight=flight)


@per_checkpoint(16)
def _checked_layers(checkpoint: Checkpoint, sliding: bool) -> tuple[CachedLayer | None, ...]:
    check_states(checkpoint.config)
    return layers_of(checkpoint.config, sliding)


def _rotated(dtype: CacheType, layers: Sequence[CachedLayer | None]) -> int:
    """Returns the head size where llama.cpp rotates the heads of a quantized cache, else 0."""
    sizes = {layer.key for layer in layers if layer and layer.kind != "mla"}
    size = min(sizes, default=0)
    return size if dtype.bits < 16 and len(sizes) == 1 and size % 64 == 0 else 0


def _sum(parts: Mapping[str, int], term: str) -> int:
    return sum(size for name, size in parts.items() if name.startswith(f"{term}:"))


def _tightest(deployment: Deployment, context: int) -> tuple[int, float]:
    """Returns the bytes of one sequence on the device with the least room for it, and the bytes free for all."""
    limit = room(deployment)
    tightest: tuple[float, int, float] | None = None
    for share in _shares(deployment, Workload(context, prompt=context)):
        if share.stage.host and share.stage.device.kind == "gpu":
            continue
        rest = sum(share.parts.values()) - _sum(share.parts, "KV cache")
        free = (limit - rest) * deployment.terms.cache_share
        if share.per_sequence and (tightest is None or free / share.per_sequence < tightest[0]):
            tightest = (free / share.per_sequence, share.per_sequence, free)
    return (tightest[1], tightest[2]) if tightest else (0, 0.0)

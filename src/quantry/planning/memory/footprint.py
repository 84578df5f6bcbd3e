"""What a served model needs of memory, term by term: weights, KV cache, activations, overhead.

Nothing here is "times 1.2": weights are the tensors that will be stored (weights.py), the cache follows from the layers
and the engine's way to allocate (cache.py), activations and overhead from formulas and constants of each engine
(buffers.py, terms.toml). `Footprint.parts` names every term; those of the host beside a GPU end in "(host)".
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from quantry.devices import Device
from quantry.engines.contract.catalogue import engine as engine_facts
from quantry.errors import QuantryError
from quantry.models.attention import block_count, context_length, text_config
from quantry.models.parts import TOWERS
from quantry.planning.memory.buffers import Place, buffers, widths
from quantry.planning.memory.kv_cache import Layer, Sequences, check_states, layers_of, pool
from quantry.planning.memory.terms import (
    MIB,
    CacheType,
    EngineTerms,
    Load,
    Settings,
    cache_type,
    default_batch,
    job_terms,
    loads,
    terms,
)
from quantry.planning.memory.weights import (
    NOT_LOADED,
    Stored,
    Weight,
    check_heads,
    head_counts,
    shard,
    stored,
    tensor_bytes,
)
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import STORED, main_dtype
from quantry.types import Checkpoint, Footprint, Workload

__all__ = [
    "Deployment",
    "JobCost",
    "Settings",
    "footprint",
    "footprint_of",
    "host_memory",
    "job_cost",
    "kv_capacity",
    "max_concurrency",
    "most_layers",
    "notes",
    "room",
    "smallest_memory",
    "weights_bytes",
]

FLOATS = frozenset({"F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class JobCost:
    """What the quantization job itself needs, in bytes at its peak; `vram` is 0 on a CPU."""

    ram: int
    vram: int
    disk: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A model in an engine on devices: all that decides its memory but the load."""

    checkpoint: Checkpoint
    recipe: Recipe | None  # None: the checkpoint as it is
    engine: str
    device: Device
    version: str | None = None
    kv: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    offload_layers: int | None = None  # of llama.cpp: how many layers a GPU holds, the head counted as one
    settings: Settings = field(default_factory=Settings)
    keep_odd: bool = False

    @property
    def terms(self) -> EngineTerms:
        return terms(self.engine, self.version, self.device)

    @property
    def whole_layers(self) -> bool:
        """True where each device gets whole layers, and none is cut."""
        return engine_facts(self.engine).plan.whole_layers


def weights_bytes(checkpoint: Checkpoint, recipe: Recipe | None, keep_odd: bool = False) -> int:
    """The bytes of all tensors of a checkpoint after a recipe, as they will be stored; without one, as they are."""
    return stored(checkpoint, recipe, keep_odd).bytes


def footprint(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    engine: str,
    workload: Workload,
    *,
    device: Device,
    version: str | None = None,
    kv: str = "auto",
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    offload_layers: int | None = None,
    settings: Settings | None = None,
    keep_odd: bool = False,
) -> Footprint:
    """The memory of a served model, over all devices and on the fullest."""
    found = Deployment(
        checkpoint, recipe, engine, device, version, kv, tensor_parallel, pipeline_parallel, offload_layers,
        settings or Settings(), keep_odd,
    )  # fmt: skip
    return footprint_of(found, workload)


def footprint_of(deployment: Deployment, workload: Workload) -> Footprint:
    """The footprint of a deployment under a load."""
    parts: Counter[str] = Counter()
    fullest = 0
    shares = list(_shares(deployment, workload))
    for share in shares:
        for name, size in share.parts.items():
            parts[f"{name} (host)" if share.place.host else name] += size * share.place.tensor
        if not share.place.host or len(shares) == 1:
            fullest = max(fullest, sum(share.parts.values()))
    return Footprint(
        weights=_sum(parts, "weights"),
        kv_cache=_sum(parts, "KV cache"),
        activations=_sum(parts, "activations"),
        overhead=_sum(parts, "overhead"),
        per_device=fullest,
        parts=dict(parts),
    )


def host_memory(found: Footprint) -> int:
    """What the host beside a GPU holds of a footprint."""
    return sum(size for name, size in found.parts.items() if name.endswith("(host)"))


def kv_capacity(deployment: Deployment, context: int) -> int:
    """Tokens of the cache that fit beside everything else, for sequences of `context` tokens."""
    one, free = _one_and_free(deployment, context)
    if one == 0:
        return context
    tokens = int(max(0, free) / one * context)
    block = deployment.terms.block if deployment.terms.cache == "blocks" else 1
    return tokens // block * block


def max_concurrency(deployment: Deployment, context: int) -> float:
    """How many sequences of `context` tokens fit at once."""
    one, free = _one_and_free(deployment, context)
    return max(0.0, free / one) if one else float("inf")


def room(deployment: Deployment) -> int:
    """Bytes of a device that the engine may fill."""
    found = deployment.terms
    utilization = deployment.settings.utilization or found.utilization
    return int(deployment.device.usable * utilization - found.margin_mib * MIB)


def smallest_memory(deployment: Deployment, workload: Workload) -> int:
    """The usable memory that a device must have for this load."""
    found, needed = deployment.terms, footprint_of(deployment, workload)
    cache = max(_sum(share.parts, "KV cache") for share in _shares(deployment, workload))
    spread = cache * (1 / found.cache_share - 1)
    utilization = deployment.settings.utilization or found.utilization
    return int((needed.per_device + spread + found.margin_mib * MIB) / utilization)


def most_layers(deployment: Deployment, workload: Workload) -> int:
    """How many layers of llama.cpp fit on a GPU, the head counted as one; the rest stays with the host."""
    fits = 0
    low, high = 1, block_count(deployment.checkpoint.config) + 1
    while low <= high:
        middle = (low + high) // 2
        tried = replace(deployment, offload_layers=middle)
        if footprint_of(tried, workload).per_device <= room(tried):
            fits, low = middle, middle + 1
        else:
            high = middle - 1
    return fits


def notes(checkpoint: Checkpoint, workload: Workload) -> tuple[str, ...]:
    """What a person should know of a load that is possible but odd."""
    longest = context_length(checkpoint.config)
    if longest is None or workload.context <= longest:
        return ()
    return (f"a context of {workload.context} is more than the {longest} tokens that the model was made for",)


def job_cost(checkpoint: Checkpoint, recipe: Recipe, device: str = "cpu", keep_odd: bool = False) -> JobCost:
    """Peak memory and disk of quantizing: one layer at a time is in memory, and only the result is written."""
    found, row = stored(checkpoint, recipe, keep_odd), job_terms()
    kind = _work(checkpoint, recipe, found)
    rate = next(one for one in row["rates"] if kind in one["kinds"])
    worked = [one for one in found if kind == "cast" or one.grid is not None or one.dtype not in FLOATS]
    largest = max((prod(weight.shape) for weight in worked), default=0)
    return JobCost(
        ram=int(rate["process_mib"] * MIB + largest * rate["ram"]),
        vram=0 if device == "cpu" else int(row["context_mib"] * MIB + largest * rate["vram"]),
        disk=found.bytes,
    )


def _work(checkpoint: Checkpoint, recipe: Recipe, found: Stored) -> str:
    """What is done to a layer, by the name of its row in terms.toml."""
    if recipe.format in ("gguf", "bitsandbytes"):
        return recipe.format
    if recipe.preset.scheme.weight.is_cast:
        return "copy" if STORED[found.dtype] == main_dtype(checkpoint) else "cast"
    return recipe.preset.fit or "mse"


# ---- the share of each device ----


@dataclass(frozen=True, slots=True)
class Share:
    """What one device holds, by name of the term; `place.tensor` devices hold as much."""

    place: Place
    parts: Mapping[str, int]
    one: int  # bytes of cache of one sequence


def _shares(deployment: Deployment, workload: Workload) -> Iterator[Share]:
    """The devices of a deployment and what they hold."""
    found = deployment.terms
    weights = stored(deployment.checkpoint, deployment.recipe, deployment.keep_odd)
    load = _load(deployment, workload)
    kind = cache_type(deployment.kv, found, weights.dtype)
    layers = _layers(deployment)
    for place, blocks, embedding, head in _places(deployment, len(weights.blocks)):
        mine = [layer for layer in layers[blocks.start : blocks.stop] if layer]
        cache = pool(mine, found, kind, load, place.tensor)
        parts: Counter[str] = Counter(_weights(deployment, weights, place, blocks, embedding, head))
        parts.update({f"KV cache: {name}": size for name, size in cache.kinds.items()})
        seen = mine or [layer for layer in layers if layer][:1]
        activations, overhead = buffers(
            deployment.checkpoint, found, load, deployment.settings, place, seen, _rotated(kind, layers)
        )
        yield Share(place, {**parts, **activations, **overhead}, cache.one)


def _checked(workload: Workload) -> Workload:
    for word in ("context", "concurrency", "prompt"):
        value = getattr(workload, word)
        if type(value) is not int or not 1 <= value < 1 << 31:
            raise QuantryError(f"a {word} of {value} is not a number of 1 or more", fix=f"give a positive --{word}")
    return workload


def _load(deployment: Deployment, workload: Workload) -> Sequences:
    """The load as the engine schedules it."""
    found, settings, workload = deployment.terms, deployment.settings, _checked(workload)
    tokens, sequences = default_batch(found, deployment.device)
    if found.activations == "prompt":
        step = settings.tokens or min(workload.prompt, workload.context) * workload.concurrency
        return Sequences(workload.context, workload.concurrency, step, workload.concurrency)
    if found.cache == "cells":
        step = min(settings.tokens or tokens, workload.context * workload.concurrency)
        return Sequences(workload.context, workload.concurrency, step, settings.sequences or workload.concurrency)
    slots = settings.sequences or max(sequences, workload.concurrency)
    step = settings.tokens or min(tokens, slots * workload.context)
    in_flight = deployment.pipeline_parallel + 1
    return Sequences(workload.context, workload.concurrency, step, min(slots, step), in_flight)


def _layers(deployment: Deployment) -> tuple[Layer | None, ...]:
    config = deployment.checkpoint.config
    check_states(config)
    names = {str(config.get("model_type")), str(text_config(config).get("model_type"))}
    return layers_of(config, sliding=any(map(deployment.terms.slides, names)))


def _rotated(kind: CacheType, layers: Sequence[Layer | None]) -> int:
    """llama.cpp rotates the heads of a quantized cache where their size allows it."""
    sizes = {layer.key for layer in layers if layer and layer.kind != "mla"}
    size = min(sizes, default=0)
    return size if kind.bits < 16 and len(sizes) == 1 and size % 64 == 0 else 0


def _places(deployment: Deployment, blocks: int) -> Iterator[tuple[Place, range, bool, bool]]:
    """Each kind of device: where it stands, its blocks, and whether it has the embedding and the head."""
    tensor, stages, device = deployment.tensor_parallel, deployment.pipeline_parallel, deployment.device
    if not deployment.whole_layers:
        check_heads(deployment.checkpoint.config, tensor)
    if type(stages) is not int or not 1 <= stages <= blocks:
        raise QuantryError(f"{stages} pipeline stages for {blocks} layers", fix=f"use 1 to {blocks}")
    if deployment.offload_layers is not None and not deployment.whole_layers:
        raise QuantryError(f"{deployment.engine} does not offload single layers", fix="use llama.cpp")
    if deployment.offload_layers and device.kind == "cpu":
        raise QuantryError(f"{device.name} has no GPU to offload layers to", fix="leave --offload-layers out")
    if deployment.whole_layers and device.kind == "gpu":
        yield from _offloaded(deployment, blocks)
        return
    many = tensor * stages if not deployment.whole_layers else 1
    start = 0
    for stage, count in enumerate(_stages(blocks, stages if many > 1 else 1)):
        first, last = stage == 0, start + count == blocks
        place = Place(device, tensor if many > 1 else 1, count, first, last, many)
        yield place, range(start, start + count), first, last
        start += count


def _stages(blocks: int, stages: int) -> list[int]:
    """Layers of each stage, as vLLM shares them out: what is over goes to the middle, then to the front."""
    counts = [blocks // stages] * stages
    for index in range(2, blocks % stages + 2):
        counts[-index] += 1
    return counts


def _offloaded(deployment: Deployment, blocks: int) -> Iterator[tuple[Place, range, bool, bool]]:
    """llama.cpp beside GPUs: the host has the embedding and the first layers, each GPU some of the others."""
    count, device = deployment.tensor_parallel * deployment.pipeline_parallel, deployment.device
    wanted = blocks + 1 if deployment.offload_layers is None else deployment.offload_layers
    if type(wanted) is not int or not 0 <= wanted <= blocks + 1:
        raise QuantryError(f"{wanted} layers to offload of {blocks} and the head", fix=f"use 0 to {blocks + 1}")
    kept = min(blocks, blocks + 1 - wanted)
    yield Place(device, 1, kept, True, wanted == 0, count, host=True), range(kept), True, wanted == 0
    begin = kept
    for index in range(count if wanted else 0):
        items = range(kept, blocks + 1)
        end = kept + -(-len(items) * (index + 1) // count)
        has_head = index == count - 1
        mine = range(begin, min(end, blocks))
        yield Place(device, 1, len(mine), index == 0, has_head, count, alone=False), mine, False, has_head
        begin = mine.stop


# ---- weights of a device ----


def _weights(
    deployment: Deployment, found: Stored, place: Place, blocks: range, embedding: bool, head: bool
) -> dict[str, int]:
    """The bytes of the weights of one device, by kind."""
    step = deployment.terms.vocabulary_step
    rules = loads(deployment.engine, found.format)
    _, kv_heads = head_counts(deployment.checkpoint.config)
    parts: Counter[str] = Counter()
    sizes: dict[Weight, int] = {}
    for weight in _held(found, blocks, embedding, head):
        if weight not in sizes:
            shape = shard(weight, place.tensor, kv_heads, step)
            sizes[weight] = weight.count * _loaded(found, weight, shape, rules, place.device)
        parts[_kind(weight)] += sizes[weight]
    parts.update(_made(deployment, place))
    return dict(parts)


def _held(found: Stored, blocks: range, embedding: bool, head: bool) -> Iterator[Weight]:
    """The weights of some blocks, and of what stands before and after them; a tied head needs the embedding again."""
    for index in blocks:
        yield from (weight for weight in found.blocks[index] if weight.part not in NOT_LOADED)
    for weight in found.outside:
        if weight.part in NOT_LOADED:
            continue
        before = weight.part == "embedding" or weight.part in TOWERS
        tied = found.tied and weight.part == "embedding" and head and not embedding
        if (before and embedding) or (head and not before) or tied:
            yield weight


def _kind(weight: Weight) -> str:
    if weight.part in ("embedding", "head"):
        return "weights: embedding and head"
    if weight.part in TOWERS:
        return "weights: vision and audio"
    quantized = weight.grid is not None or weight.dtype not in FLOATS
    return "weights: quantized layers" if quantized else "weights: layers in 16 bit"


def _loaded(found: Stored, weight: Weight, shape: tuple[int, ...], rules: Sequence[Load], device: Device) -> int:
    """The bytes of a weight in memory, which an engine may hold in another form than it is stored."""
    entries = found.entries(weight, shape)
    if weight.grid is None or not rules:
        return sum(tensor_bytes(dtype, size) for _, dtype, size in entries)
    fitting = [rule for rule in rules if _applies(rule, weight, entries, device)]
    whole = next((rule for rule in fitting if not rule.ends), None)
    if whole and whole.dtype:
        return tensor_bytes(whole.dtype, shape)
    kinds = {name.removeprefix(weight.name): (dtype, size) for name, dtype, size in entries}
    for rule in fitting:
        if rule.ends in kinds:
            dtype, size = kinds[rule.like or rule.ends]
            kinds[rule.ends] = (rule.dtype or dtype, size)
    return sum(tensor_bytes(dtype, size) for dtype, size in kinds.values())


def _applies(rule: Load, weight: Weight, entries: Sequence[tuple[str, str, tuple[int, ...]]], device: Device) -> bool:
    assert weight.grid is not None
    packed = any(name.endswith("_packed") for name, _, _ in entries)
    return (
        (not rule.kinds or weight.grid.kind in rule.kinds)
        and (not rule.families or device.family in rule.families)
        and not (rule.unpacked and packed)
    )


def _made(deployment: Deployment, place: Place) -> dict[str, int]:
    """What engines compute from the config when they load a model."""
    if deployment.terms.activations != "step":
        return {}
    sizes = widths(deployment.checkpoint.config)
    made = {"weights: rotary table": sizes.positions * sizes.rotary * 2}
    if sizes.absorbed:
        made["weights: second form of MLA"] = sizes.absorbed // place.tensor * 2 * place.layers
    return made


def _sum(parts: Mapping[str, int], kind: str) -> int:
    return sum(size for name, size in parts.items() if name.startswith(f"{kind}:"))


def _one_and_free(deployment: Deployment, context: int) -> tuple[int, float]:
    """Bytes of one sequence on the device that has the least room for it, and how many there are for all."""
    limit = room(deployment)
    tightest: tuple[float, int, float] | None = None
    for share in _shares(deployment, Workload(context)):
        if share.place.host and share.place.device.kind == "gpu":
            continue
        rest = sum(share.parts.values()) - _sum(share.parts, "KV cache")
        free = (limit - rest) * deployment.terms.cache_share
        if share.one and (tightest is None or free / share.one < tightest[0]):
            tightest = (free / share.one, share.one, free)
    return (tightest[1], tightest[2]) if tightest else (0, 0.0)

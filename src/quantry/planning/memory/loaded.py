"""The weights on each device once an engine has loaded them.

A weight that is cut over devices is laid out by its format like any other, in its smaller shape, so scales and zero
points come out right.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from quantry.devices import Device
from quantry.errors import WeightError
from quantry.models.parts import TOWERS
from quantry.models.writer import Entry
from quantry.planning.deployment import Deployment
from quantry.planning.facts import INPUTS_CUT, KEYS_VALUES, UNCUT
from quantry.planning.memory.buffers import widths
from quantry.planning.memory.stages import Stage, head_counts
from quantry.planning.memory.terms import LoadRule, load_rules
from quantry.planning.memory.weights import Stored, Weight, module_of, tensor_bytes

Cut = Literal["outputs", "inputs", "keys", "vocabulary", "none"]
CUT_PARTS = frozenset({"attention", "MLP", "experts", "recurrent"})
VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head|embed_out|wte|word_embeddings|token_embd|output)(\.weight)?$")
GGUF_INPUTS = re.compile(r"\.(attn_output|ffn_down\w*|ssm_out)\.")
GGUF_KEYS = re.compile(r"\.attn_(k|v)\.")
NOT_LOADED = frozenset({"MTP heads", "buffers"})  # drafts for speculation are loaded only on request


def loaded_weights(deployment: Deployment, weights: Stored, stage: Stage) -> dict[str, int]:
    """Returns the bytes of the weights on one device of a stage, by name of the term."""
    step = deployment.terms.vocabulary_step
    rules = load_rules(deployment.engine, weights.format)
    _, kv_heads = head_counts(deployment.checkpoint.config)
    held = {**_inside(deployment, weights, stage), **dict.fromkeys(_outside(weights, stage), 1)}
    parts: Counter[str] = Counter()
    for weight, times in held.items():
        if weight.part not in NOT_LOADED:
            shape = _shard(weight, stage.tensor, kv_heads, step)
            size = _loaded(weights.entries(weight, shape), weight, shape, rules, stage.device)
            parts[_term(weight)] += times * weight.count * size
    return {**parts, **_computed(deployment, stage)}


def _inside(deployment: Deployment, weights: Stored, stage: Stage) -> Counter[Weight]:
    """Returns the weights of a stage's blocks; the host has the experts of the first `host_experts` blocks."""
    mine, moved = weights.inside(stage.blocks), deployment.host_experts
    if stage.host:
        return mine + _experts(weights, range(moved))
    return mine - _experts(weights, range(stage.blocks.start, max(stage.blocks.start, min(moved, stage.blocks.stop))))


def _experts(weights: Stored, blocks: range) -> Counter[Weight]:
    return Counter({weight: times for weight, times in weights.inside(blocks).items() if weight.part == "experts"})


def _outside(weights: Stored, stage: Stage) -> Iterator[Weight]:
    """Yields the weights before and after the blocks; a tied head needs the embedding again on another device."""
    for weight in weights.outside:
        before = weight.part == "embedding" or weight.part in TOWERS
        tied = weights.tied and weight.part == "embedding" and stage.head and not stage.embedding
        if (before and stage.embedding) or (stage.head and not before) or tied:
            yield weight


def _term(weight: Weight) -> str:
    if weight.part in ("embedding", "head"):
        return "weights: embedding and head"
    if weight.part in TOWERS:
        return "weights: vision and audio"
    return "weights: quantized layers" if weight.quantized else "weights: layers in 16 bit"


def _loaded(
    entries: Sequence[Entry], weight: Weight, shape: tuple[int, ...], rules: Sequence[LoadRule], device: Device
) -> int:
    """Returns the bytes of a weight in memory, which an engine may hold in another form than the file."""
    if weight.grid is None or not rules:
        return sum(tensor_bytes(dtype, size) for _, dtype, size in entries)
    applied = [rule for rule in rules if _applies(rule, weight, entries, device)]
    whole = next((rule for rule in applied if not rule.ends), None)
    if whole and whole.dtype:
        return tensor_bytes(whole.dtype, shape)
    tensors = {name.removeprefix(weight.name): (dtype, size) for name, dtype, size in entries}
    for rule in applied:
        if rule.ends in tensors:
            dtype, size = tensors[rule.like or rule.ends]
            tensors[rule.ends] = (rule.dtype or dtype, size)
    return sum(tensor_bytes(dtype, size) for dtype, size in tensors.values())


def _applies(rule: LoadRule, weight: Weight, entries: Sequence[Entry], device: Device) -> bool:
    assert weight.grid is not None
    packed = any(name.endswith("_packed") for name, _, _ in entries)
    return (
        (not rule.kinds or weight.grid.kind in rule.kinds)
        and (not rule.families or device.family in rule.families)
        and not (rule.unpacked and packed)
    )


def _computed(deployment: Deployment, stage: Stage) -> dict[str, int]:
    if deployment.terms.activations != "step":
        return {}
    sizes = widths(deployment.checkpoint.config)
    tables = {"weights: rotary table": sizes.positions * sizes.rotary * 2}
    if sizes.absorbed:
        tables["weights: second form of MLA"] = sizes.absorbed // stage.tensor * 2 * stage.layers
    return tables


# ---- cut over devices ----


def cut_of(weight: Weight) -> Cut:
    """Returns how vLLM's models cut a weight over devices."""
    if len(weight.shape) < 2:
        return "none"
    if weight.part in ("embedding", "head"):
        return "vocabulary" if VOCABULARY.search(weight.name) else "none"
    if weight.part not in CUT_PARTS:
        return "none"
    leaf = module_of(weight.name).rpartition(".")[2]
    if leaf in UNCUT or (weight.part == "recurrent" and not leaf.startswith(("in_proj", "out_proj", "ssm_"))):
        return "none"
    if leaf in INPUTS_CUT or GGUF_INPUTS.search(weight.name):
        return "inputs"
    return "keys" if leaf in KEYS_VALUES or GGUF_KEYS.search(weight.name) else "outputs"


def _shard(weight: Weight, devices: int, kv_heads: int, vocabulary_step: int) -> tuple[int, ...]:
    """Returns the shape of one device's part; fewer KV heads than devices are repeated."""
    cut, shape = cut_of(weight), weight.shape
    if cut == "vocabulary":
        rows = -(-shape[0] // vocabulary_step) * vocabulary_step
        return (_divide(rows, devices, weight, "rows"), *shape[1:])
    if cut == "none" or devices == 1:
        return shape
    if cut == "inputs":
        return (*shape[:-1], _in_groups(_divide(shape[-1], devices, weight, "inputs"), devices, weight))
    parts = min(devices, kv_heads) if cut == "keys" else devices
    if len(shape) == 3:  # experts in one stack, (experts, out, in) or the other way round: only the size matters
        return (shape[0], shape[1], _divide(shape[2], parts, weight, "outputs"))
    return (_divide(shape[0], parts, weight, "outputs"), *shape[1:])


def _divide(size: int, parts: int, weight: Weight, side: str) -> int:
    if size % parts:
        raise WeightError(
            f"{weight.name} has {size} {side}, which {parts} devices do not divide",
            fix="use a tensor parallel size that divides it, or pipeline parallel",
        )
    return size // parts


def _in_groups(columns: int, devices: int, weight: Weight) -> int:
    """Returns the columns of one device. Raises WeightError if that would cut a group that shares a scale."""
    group = weight.grid.block[1] if weight.grid else 0
    if group and columns % group:
        raise WeightError(
            f"{weight.name} has {columns} inputs on each of {devices} devices, which groups of {group} do not divide",
            fix="use a smaller group, fewer devices for each layer, or pipeline parallel",
        )
    return columns

"""What an engine needs beside weights and cache: the results of one step, CUDA graphs, libraries.

Three formulas, by the way engines work; bytes of one device:

- *step* (vLLM and its like): a step of T tokens in 16 bit. While an MLP runs, the input of the layer, the residual and
  the output of attention are alive (3 hidden sizes), and gate, up and their product (3 inner sizes); in a mixture the
  tokens are spread over their experts first. After the last layer there are logits of every sequence. The larger of
  both, and the workspace of cuBLAS.
- *graph* (llama.cpp): the buffer that ggml lays out for a batch (graph.py), logits, and on a CPU the inputs of a matrix
  product in the type that its weights are multiplied with.
- *prompt* (transformers, onnxruntime): as *step*, for the whole prompt of every sequence at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantry.devices import Device
from quantry.models.attention import context_length, text_config
from quantry.models.experts import expert_count, experts_used
from quantry.planning.memory import llamacpp_graph as graph
from quantry.planning.memory.kv_cache import Layer, Sequences
from quantry.planning.memory.terms import MIB, EngineTerms, Settings, link_bytes, workspace_bytes
from quantry.types import Checkpoint

SHARED = ("shared_expert_intermediate_size",)
HALF, FLOAT = 2, 4
LARGEST_GRAPH = 512
MERGE = 4  # patches of an image that become one token


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers a token at the widest places of a model."""

    hidden: int
    dense: int  # inner size of an MLP, 0 where all are mixtures
    expert: int  # inner size of an expert
    experts: int
    used: int  # experts a token
    shared: int
    heads: int
    queries: int
    keys: int
    vocabulary: int
    latent: int = 0  # of MLA while it unpacks: all heads of q, k and v, k twice
    absorbed: int = 0  # weights of MLA that are kept in a second form
    rotary: int = 0
    positions: int = 0
    vision: int = 0  # of a patch in the vision tower


def widths(config: Mapping[str, Any]) -> Widths:
    text = text_config(config)
    heads = _number(text, "num_attention_heads")
    size = _number(text, "head_dim") or _number(text, "hidden_size") // max(1, heads)
    used, experts = experts_used(text), expert_count(text)
    inner, own = _number(text, "intermediate_size"), _number(text, "moe_intermediate_size")
    mixed = bool(experts and used)
    expert = (own or inner) if mixed else 0
    shared = next((_number(text, key) for key in SHARED if key in text), 0)
    return Widths(
        hidden=_number(text, "hidden_size"),
        dense=inner if not mixed or own else 0,
        expert=expert,
        experts=experts if mixed else 0,
        used=used if mixed else 0,
        shared=shared or _number(text, "n_shared_experts") * expert,
        heads=heads,
        queries=heads * size,
        keys=(_number(text, "num_key_value_heads") or heads) * size,
        vocabulary=_number(text, "vocab_size"),
        rotary=_number(text, "qk_rope_head_dim") or int(size * (text.get("partial_rotary_factor") or 1)),
        positions=context_length(config) or 0,
        vision=_vision(config),
        **_latent(text, heads),
    )


def _number(text: Mapping[str, Any], name: str) -> int:
    value = text.get(name)
    if isinstance(value, list | tuple):
        value = max((one for one in value if type(one) is int), default=0)
    return value if type(value) is int and value > 0 else 0


def _latent(text: Mapping[str, Any], heads: int) -> dict[str, int]:
    rank, nope = _number(text, "kv_lora_rank"), _number(text, "qk_nope_head_dim")
    if not rank:
        return {}
    rope, value = _number(text, "qk_rope_head_dim"), _number(text, "v_head_dim")
    return {"latent": heads * (2 * (nope + rope) + nope + 2 * value), "absorbed": heads * rank * (nope + value)}


def _vision(config: Mapping[str, Any]) -> int:
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        return 0
    hidden = _number(vision, "hidden_size") or _number(vision, "embed_dim")
    return 3 * hidden + 3 * (_number(vision, "intermediate_size") or 4 * hidden)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a part of the model runs: one of `tensor` devices that share layers, in one stage of a pipeline."""

    device: Device
    tensor: int
    layers: int
    first: bool
    last: bool
    devices: int  # in all
    host: bool = False  # the processor beside a GPU
    alone: bool = True  # whether nothing runs on another kind of device


def buffers(
    checkpoint: Checkpoint,
    terms: EngineTerms,
    load: Sequences,
    settings: Settings,
    place: Place,
    layers: Sequence[Layer],
    rotated: int,
) -> tuple[dict[str, int], dict[str, int]]:
    """Activations and overhead of one device, each by name."""
    sizes = widths(checkpoint.config)
    if terms.activations == "graph":
        batch = ggml_batch(checkpoint, load, settings, sizes, layers, place.alone, rotated)
        return _ggml(batch, terms, load, place, sizes)
    return _activations(terms, load, place, sizes), _overhead(terms, load, settings, place, sizes)


def runner(terms: EngineTerms, sizes: Widths) -> str:
    """Which of vLLM's model runners serves a model."""
    second = terms.second_runner == "all" or (terms.second_runner == "dense" and not sizes.experts)
    return "second" if second else "first"


def _activations(terms: EngineTerms, load: Sequences, place: Place, sizes: Widths) -> dict[str, int]:
    block = load.step * HALF * block_width(sizes, place.tensor)
    logits = (
        load.slots * sizes.vocabulary * terms.logit_bytes[runner(terms, sizes) == "second"]
        + load.step * sizes.hidden * HALF
    )
    found: dict[str, int] = {}
    if place.last and logits > block:
        found[f"activations: logits of {load.slots} sequences"] = logits
    else:
        found[f"activations: a step of {load.step} tokens"] = block
    if workspace_bytes(place.device):
        found["activations: workspace of matrix products"] = workspace_bytes(place.device)
    if not place.first:
        found["activations: from the stage before"] = 2 * load.step * sizes.hidden * HALF
    if sizes.vision and place.first:
        found["activations: images"] = load.step * MERGE * sizes.vision * HALF
    return found


def block_width(sizes: Widths, devices: int) -> int:
    """Numbers a token that are alive at once in the widest layer, on one of the devices that share it."""
    expert = sizes.expert // devices
    mixture = sizes.used * (max(expert, sizes.hidden) + max(2 * expert, sizes.hidden)) + 3 * sizes.shared // devices
    attention = (2 * sizes.queries + 2 * sizes.keys) // devices - sizes.hidden
    return 3 * sizes.hidden + max(3 * sizes.dense // devices, mixture, attention, sizes.latent // devices)


def _overhead(terms: EngineTerms, load: Sequences, settings: Settings, place: Place, sizes: Widths) -> dict[str, int]:
    found = {"overhead: libraries and tables": int(terms.fixed_mib * MIB)}
    if place.devices > 1:
        found["overhead: links between devices"] = link_bytes(place.device)
    counted = terms.graphs_counted == "both" or terms.graphs_counted == runner(terms, sizes)
    if settings.graphs and place.device.kind != "cpu" and terms.graph_layer_mib and counted:
        found["overhead: CUDA graphs"] = graph_bytes(terms, load.slots, place.layers)
    return found


def graph_bytes(terms: EngineTerms, sequences: int, layers: int) -> int:
    """Graphs of whole steps and of their pieces, for the batch sizes that vLLM captures."""
    largest = min(2 * sequences, LARGEST_GRAPH)
    pieces = len([1, 2, 4, *range(8, min(largest + 1, 256), 8), *range(256, largest + 1, 16)])
    whole = len([1, 2, 4, *range(8, min(sequences + 1, 256), 8), *range(256, min(sequences, LARGEST_GRAPH) + 1, 16)])
    return int((pieces + whole) * layers * terms.graph_layer_mib * MIB)


# ---- llama.cpp ----


def _ggml(
    batch: graph.Batch, terms: EngineTerms, load: Sequences, place: Place, sizes: Widths
) -> tuple[dict[str, int], dict[str, int]]:
    computes = place.host or place.device.kind == "cpu"
    if place.host and not place.layers:  # only tokens become vectors here
        return {"activations: inputs": graph.host_bytes(batch)}, _ggml_host(terms, load, sizes)
    found = {f"activations: a batch of {batch.tokens} tokens": graph.buffer_bytes(batch)}
    if computes:
        widest = max(sizes.dense, sizes.expert * sizes.used, sizes.queries, sizes.hidden)
        found["activations: inputs of matrix products"] = batch.tokens * widest * 9 // 8
    return found, _ggml_host(terms, load, sizes) if place.alone else {}


def _ggml_host(terms: EngineTerms, load: Sequences, sizes: Widths) -> dict[str, int]:
    return {
        "overhead: logits": load.slots * sizes.vocabulary * FLOAT,
        "overhead: program and vocabulary": int(terms.host_mib * MIB),
    }


def ggml_batch(
    checkpoint: Checkpoint,
    load: Sequences,
    settings: Settings,
    sizes: Widths,
    layers: Sequence[Layer],
    embeds: bool = True,
    rotated: int = 0,
) -> graph.Batch:
    """The largest batch of llama.cpp's server, as its graph sees it."""
    attention = [layer for layer in layers if layer.kind != "recurrent"]
    first = attention[0] if attention else Layer("full")
    tokens = min(load.step, load.context * load.count)
    names = {tensor.name.rpartition("layers.0.")[2] for tensor in checkpoint.tensors if "layers.0." in tensor.name}
    return graph.Batch(
        hidden=sizes.hidden,
        inner=sizes.expert or sizes.dense,
        queries=sizes.heads * first.key if first.kind != "mla" else sizes.heads * (first.key + first.value),
        keys=first.heads * first.key,
        values=first.heads * first.value if first.kind != "mla" else first.heads * first.key,
        heads=sizes.heads,
        vocabulary=sizes.vocabulary,
        layers=len(layers),
        tokens=tokens,
        outputs=min(tokens, settings.outputs or load.slots),
        cells=_masks(attention, load),
        experts=sizes.experts,
        used=sizes.used,
        shared=sizes.shared,
        fused_attention="self_attn.qkv_proj.weight" in names,
        fused_mlp="mlp.gate_up_proj.weight" in names,
        rotated=rotated,
        flash=settings.flash,
        embeds=embeds,
    )


def _masks(layers: Sequence[Layer], load: Sequences) -> tuple[int, ...]:
    """Cells of one stream for full and for sliding layers."""
    whole = _padded(load.context * (load.count if load.unified else 1))
    windows = {layer.window for layer in layers}
    scale = load.count if load.unified else 1
    return tuple(
        whole if window is None else _padded(min(whole, window * scale + load.step))
        for window in sorted(windows, key=lambda window: window is not None)
    )


def _padded(tokens: int) -> int:
    return -(-tokens // 256) * 256

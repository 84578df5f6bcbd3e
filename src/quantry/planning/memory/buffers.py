"""What an engine needs besides weights and cache: the activations of one step, CUDA graphs, libraries.

Three formulas, one for each way engines work; in bytes of one device:

- *step* (vLLM and similar): a step of T tokens in 16 bit. While an MLP runs, the input of the layer, the residual and
  the output of attention are alive (3 hidden sizes), and gate, up and their product (3 inner sizes); in a mixture of
  experts the tokens are first spread over their experts. After the last layer come the logits of every sequence. The
  larger of both counts, plus the workspace of cuBLAS.
- *graph* (llama.cpp): the buffer that ggml lays out for a batch (llamacpp_graph.py), logits, and on a CPU the inputs
  of a matrix product in the type that its weights are multiplied with.
- *prompt* (transformers, onnxruntime): as *step*, for the whole prompts of all sequences at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantry.models.attention import context_length, text_config
from quantry.models.experts import expert_count, experts_used
from quantry.planning.deployment import Deployment
from quantry.planning.memory.kv_cache import CachedLayer, Sequences
from quantry.planning.memory.llamacpp_graph import GraphBatch, buffer_bytes, host_bytes
from quantry.planning.memory.stages import Stage
from quantry.planning.memory.terms import MIB, EngineTerms, link_bytes, workspace_bytes

HALF, FLOAT = 2, 4
LARGEST_GRAPH = 512
MERGE = 4  # patches of an image that become one token


@dataclass(frozen=True, slots=True)
class Widths:
    """Numbers per token at the widest places of a model."""

    hidden: int
    dense: int  # inner size of an MLP, 0 where all layers are mixtures
    expert: int  # inner size of an expert
    experts: int
    used: int  # experts per token
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
    """Reads the widths of a model from its config."""
    text = text_config(config)
    heads = _number(text, "num_attention_heads")
    size = _number(text, "head_dim") or _number(text, "hidden_size") // max(1, heads)
    used, experts = experts_used(text), expert_count(text)
    inner, own = _number(text, "intermediate_size"), _number(text, "moe_intermediate_size")
    mixed = bool(experts and used)
    expert = (own or inner) if mixed else 0
    shared = _number(text, "shared_expert_intermediate_size") or _number(text, "n_shared_experts") * expert
    return Widths(
        hidden=_number(text, "hidden_size"),
        dense=inner if not mixed or own else 0,
        expert=expert,
        experts=experts if mixed else 0,
        used=used if mixed else 0,
        shared=shared,
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
        value = max((number for number in value if type(number) is int), default=0)
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


def buffers(
    deployment: Deployment, load: Sequences, stage: Stage, layers: Sequence[CachedLayer], rotated: int
) -> dict[str, int]:
    """Returns the activations and the overhead of one device, by name.

    `layers` are those of the device, `rotated` is the head size where llama.cpp rotates a quantized cache, else 0.
    """
    terms, sizes = deployment.terms, widths(deployment.checkpoint.config)
    if terms.activations == "graph":
        batch = ggml_batch(deployment, load, layers, embeds=stage.alone, rotated=rotated)
        return _ggml(batch, terms, load, stage, sizes)
    return _activations(terms, load, stage, sizes) | _overhead(terms, load, stage, sizes)


def _second_runner(terms: EngineTerms, sizes: Widths) -> bool:
    """Returns True if vLLM's second model runner serves the model."""
    return terms.second_runner == "all" or (terms.second_runner == "dense" and not sizes.experts)


def _activations(terms: EngineTerms, load: Sequences, stage: Stage, sizes: Widths) -> dict[str, int]:
    block = load.step * HALF * block_width(sizes, stage.tensor)
    logit_bytes = terms.logit_bytes[1 if _second_runner(terms, sizes) else 0]
    logits = load.slots * sizes.vocabulary * logit_bytes + load.step * sizes.hidden * HALF
    parts: dict[str, int] = {}
    if stage.head and logits > block:
        parts[f"activations: logits of {load.slots} sequences"] = logits
    else:
        parts[f"activations: a step of {load.step} tokens"] = block
    workspace = workspace_bytes(stage.device)
    if workspace:
        parts["activations: workspace of matrix products"] = workspace
    if not stage.embedding:
        parts["activations: from the stage before"] = 2 * load.step * sizes.hidden * HALF
    if sizes.vision and stage.embedding:
        parts["activations: images"] = load.step * MERGE * sizes.vision * HALF
    return parts


def block_width(sizes: Widths, devices: int) -> int:
    """Returns the numbers per token that are alive at once in the widest layer, on one of `devices` that share it."""
    expert = sizes.expert // devices
    mixture = sizes.used * (max(expert, sizes.hidden) + max(2 * expert, sizes.hidden)) + 3 * sizes.shared // devices
    attention = (2 * sizes.queries + 2 * sizes.keys) // devices - sizes.hidden
    return 3 * sizes.hidden + max(3 * sizes.dense // devices, mixture, attention, sizes.latent // devices)


def _overhead(terms: EngineTerms, load: Sequences, stage: Stage, sizes: Widths) -> dict[str, int]:
    parts = {"overhead: libraries and tables": int(terms.fixed_mib * MIB)}
    if stage.devices > 1:
        parts["overhead: links between devices"] = link_bytes(stage.device)
    counted = terms.graphs_counted == "both" or (terms.graphs_counted == "first" and not _second_runner(terms, sizes))
    if stage.device.kind != "cpu" and terms.graph_layer_mib and counted:
        parts["overhead: CUDA graphs"] = _graph_bytes(terms, load.slots, stage.layers)
    return parts


def _graph_bytes(terms: EngineTerms, sequences: int, layers: int) -> int:
    """Returns the graphs of whole steps and of their pieces, for the batch sizes that vLLM captures."""
    pieces, whole = _captured(min(2 * sequences, LARGEST_GRAPH)), _captured(min(sequences, LARGEST_GRAPH))
    return int((pieces + whole) * layers * terms.graph_layer_mib * MIB)


def _captured(largest: int) -> int:
    """Returns how many batch sizes are captured: 1, 2, 4, then steps of 8 below 256 and of 16 from there."""
    return 3 + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))


# ---- llama.cpp ----


def _ggml(batch: GraphBatch, terms: EngineTerms, load: Sequences, stage: Stage, sizes: Widths) -> dict[str, int]:
    host = {
        "overhead: logits": load.slots * sizes.vocabulary * FLOAT,
        "overhead: program and vocabulary": int(terms.host_mib * MIB),
    }
    if stage.host and not stage.layers:  # only tokens become vectors here
        return {"activations: inputs": host_bytes(batch)} | host
    parts = {f"activations: a batch of {batch.tokens} tokens": buffer_bytes(batch)}
    if stage.host or stage.device.kind == "cpu":
        widest = max(sizes.dense, sizes.expert * sizes.used, sizes.queries, sizes.hidden)
        parts["activations: inputs of matrix products"] = batch.tokens * widest * 9 // 8
    return parts | host if stage.alone else parts


def ggml_batch(
    deployment: Deployment, load: Sequences, layers: Sequence[CachedLayer], embeds: bool = True, rotated: int = 0
) -> GraphBatch:
    """Returns the largest batch of llama.cpp's server, as its graph sees it."""
    checkpoint, settings, sizes = deployment.checkpoint, deployment.settings, widths(deployment.checkpoint.config)
    attention = [layer for layer in layers if layer.kind != "recurrent"]
    first = attention[0] if attention else CachedLayer("full")
    tokens = min(load.step, load.context * load.count)
    names = {tensor.name.rpartition("layers.0.")[2] for tensor in checkpoint.tensors if "layers.0." in tensor.name}
    return GraphBatch(
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


def _masks(layers: Sequence[CachedLayer], load: Sequences) -> tuple[int, ...]:
    whole = _padded(load.context)
    windows = sorted({layer.window for layer in layers}, key=lambda window: window is not None)
    return tuple(whole if window is None else _padded(min(whole, window + load.step)) for window in windows)


def _padded(tokens: int) -> int:
    return -(-tokens // 256) * 256

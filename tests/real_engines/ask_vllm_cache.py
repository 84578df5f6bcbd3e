"""Runs inside vLLM's environment: how its own functions lay out the KV cache of models that are not there.

    python ask_vllm_cache.py QUESTIONS.json ANSWERS.json

A question is a list of layers (kind, KV heads, size of K and V, window or state), the cache type, a context, tokens of a
step; the answer what one sequence may take at most.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.attention.mla_attention import (  # type: ignore[import-not-found, unused-ignore]
    MLACommonBackend,
)
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.attention.backends.triton_attn import (  # type: ignore[import-not-found, unused-ignore]
    TritonAttentionBackend,
)
from vllm.v1.core import kv_cache_utils as utils  # type: ignore[import-not-found, unused-ignore]
from vllm.v1.kv_cache_interface import (  # type: ignore[import-not-found, unused-ignore]
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # type: ignore[import-not-found, unused-ignore]

DTYPES = {KVQuantMode.NONE: torch.bfloat16}


def spec(layer: dict[str, Any], kind: str, block: int, page: int) -> Any:
    """A layer as its attention backend lays it out: FlashInfer for NVFP4, which is as its sources have it, or Triton."""
    found = plain(layer, kind, block, page)
    if layer["kind"] == "recurrent":
        return found
    if found.kv_quant_mode.is_nvfp4:
        return replace(
            found, num_head_slots=2 * layer["heads"], state_content_bytes=nvfp4_kv_cache_full_dim(layer["key"])
        )
    backend = MLACommonBackend if layer["kind"] == "mla" else TritonAttentionBackend
    return backend.customize_spec(found)


def plain(layer: dict[str, Any], kind: str, block: int, page: int) -> Any:
    mode = get_kv_quant_mode(kind)
    dtype = DTYPES.get(mode, torch.uint8)
    if layer["kind"] == "recurrent":
        return MambaSpec(
            block_size=block, shapes=((layer["state"],),), dtypes=(torch.uint8,), page_size_padded=page or None
        )
    if layer["kind"] == "mla":
        return MLAAttentionSpec(
            block_size=block,
            num_kv_heads=1,
            head_size=layer["key"] + layer["value"],
            head_size_v=0,
            dtype=dtype,
            kv_quant_mode=mode,
        )
    rest = {
        "block_size": block,
        "num_kv_heads": layer["heads"],
        "head_size": layer["key"],
        "head_size_v": layer["value"],
        "dtype": dtype,
        "kv_quant_mode": mode,
    }
    if layer["window"]:
        return SlidingWindowSpec(sliding_window=layer["window"], **rest)
    return FullAttentionSpec(**rest)


def answer(question: dict[str, Any]) -> dict[str, Any]:
    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=question["context"]),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            mamba_cache_mode="none",
            get_resolved_kv_cache_layout=lambda: KVCacheLayout.LBNHC,
        ),
        kv_transfer_config=None,
        speculative_config=None,
        max_in_flight_tokens=question["step"] * question["in_flight"],
    )
    layers, block, page = question["layers"], 16, 0
    state = max((layer["state"] for layer in layers), default=0)
    if state and any(layer["kind"] != "recurrent" for layer in layers):  # as platforms/interface.py aligns them
        one = max(spec(layer, question["type"], 1, 0).page_size_bytes for layer in layers if not layer["state"])
        block = 16 * -(-state // (16 * one))
        page = block * one
    specs = {f"layer.{i}": spec(layer, question["type"], block, page) for i, layer in enumerate(layers)}
    groups = utils.get_kv_cache_groups(config, specs)
    return {"one": utils._max_memory_usage_bytes_from_groups(config, groups)}


def main() -> None:
    questions = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([answer(question) for question in questions]))


if __name__ == "__main__":
    main()

"""Checkpoints of real shapes with random weights of realistic scale, for measuring speed and memory.

python benchmarks/shapes.py 1b OUT        # or 8b, 70b-4 (the widths of 70B, 4 layers), 70b-8
"""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np

from quantry.models.reader import demo_folder
from quantry.models.writer import ShardWriter, nbytes, safetensors_header

SHAPES = {  # hidden, MLP, layers, query heads, KV heads, vocabulary
    "1b": (2048, 8192, 16, 32, 8, 32000),
    "8b": (4096, 14336, 32, 32, 8, 128256),
    "70b-4": (8192, 28672, 4, 64, 8, 32000),
    "70b-8": (8192, 28672, 8, 64, 8, 32000),
}


def tensors(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    kv = hidden // heads * kv_heads
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, out in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}.self_attn.{name}_proj.weight", (out, hidden)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def write(name: str, folder: Path) -> Path:
    """Writes the checkpoint if it is not there, one shard a block; weights repeat a pool of 2**25 normal values."""
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    pool = np.random.default_rng(0).standard_normal(1 << 25, dtype=np.float32) * 0.02
    halves = (pool.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 by truncation
    entries = [(tensor, "BF16", shape) for tensor, shape in tensors(hidden, inner, layers, heads, kv_heads, vocabulary)]
    groups: dict[str, list[tuple[str, str, tuple[int, ...]]]] = {}
    for entry in entries:
        groups.setdefault(".".join(entry[0].split(".")[:3]) if ".layers." in entry[0] else entry[0], []).append(entry)
    places = {}
    for number, group in enumerate(groups.values()):
        file = f"model-{number + 1:05d}-of-{len(groups):05d}.safetensors"
        with ShardWriter(folder / file, safetensors_header(group, {"format": "pt"}), group) as writer:
            for tensor, dtype, shape in group:
                count = nbytes(dtype, shape) // 2
                start = crc32(tensor.encode()) % 1000 if count < len(halves) else 0
                data = (
                    np.resize(halves[start:], count) if count > len(halves) - start else halves[start : start + count]
                )
                writer.write(tensor, memoryview(np.ascontiguousarray(data).view(np.uint8).data))
                places[tensor] = file
            writer.close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 500000.0, "dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
    ):  # GGUF needs a vocabulary
        if (demo_folder() / name).exists():
            shutil.copy(demo_folder() / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


if __name__ == "__main__":
    print(write(sys.argv[1], Path(sys.argv[2])))

"""A Llama of plain shapes with random weights, and what an artefact decodes to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quantry.formats.contract import recognise
from quantry.models.reader import open_checkpoint
from quantry.numerics.grids import dequantize

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 384,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "dtype": "bfloat16",
}  # fmt: skip
BLOCK = {
    "input_layernorm.weight": (256,), "self_attn.q_proj.weight": (256, 256), "self_attn.k_proj.weight": (128, 256),
    "self_attn.v_proj.weight": (128, 256), "self_attn.o_proj.weight": (256, 256), "self_attn.q_proj.bias": (256,),
    "post_attention_layernorm.weight": (256,), "mlp.gate_proj.weight": (384, 256), "mlp.up_proj.weight": (384, 256),
    "mlp.down_proj.weight": (256, 384),
}  # fmt: skip


def write_model(folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int = 0) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: (torch.randn(shape, generator=generator) * 0.03).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "preprocessor_config.json").write_text("{}")
    return folder


def llama_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "model.embed_tokens.weight": (128, 256),
        **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()},
        "model.norm.weight": (256,),
        "lm_head.weight": (128, 256),
        "model.rotary_emb.inv_freq": (32,),
    }


def decoded(folder: Path) -> dict[str, torch.Tensor]:
    """Every quantized weight of an artefact, decoded from its bytes by its format."""
    checkpoint = open_checkpoint(folder)
    settings = checkpoint.config["quantization_config"]
    codec = recognise(settings["quant_method"])
    assert codec is not None
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored.update(load_file(file))
    return {
        module: dequantize(
            codec.decode(module, {k: v for k, v in stored.items() if k.startswith(f"{module}.")}, scheme, None)
        )
        for module, scheme in codec.schemes(settings, checkpoint.tensors).items()
    }

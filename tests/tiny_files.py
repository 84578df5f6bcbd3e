"""The config and the tensor shapes of the tiny Llama that the `make_folder` fixture writes."""

from collections.abc import Callable
from math import prod
from pathlib import Path

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BLOCK = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
}
SHAPES = {
    "model.embed_tokens.weight": (96, 64),
    **{f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in BLOCK.items()},
    "model.norm.weight": (64,),
}
PARAMETERS = sum(prod(shape) for shape in SHAPES.values())

MakeFolder = Callable[..., Path]

"""Parts, parameters and KV bytes, held against transformers' own modules and caches."""

import json
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from quantry.errors import QuantryError
from quantry.models.already_quantized import weights_of
from quantry.models.anatomy import dissect, inspect
from quantry.models.attention import kv_layers, layer_kinds
from quantry.models.parts import part_of
from quantry.types import Checkpoint, TensorInfo
from tiny_files import LLAMA, PARAMETERS, MakeFolder

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 64}, "qwen2": {}, "qwen3": {}, "gemma2": {"sliding_window": 64},
    "gemma3_text": {"sliding_window": 64}, "phi3": {}, "smollm3": {}, "olmo2": {}, "granite": {}, "starcoder2": {},
    "cohere2": {"sliding_window": 64}, "gpt_neox": {}, "gpt2": {}, "falcon": {"new_decoder_architecture": True},
    "mixtral": EXPERTS, "qwen3_moe": EXPERTS, "qwen2_moe": EXPERTS, "gpt_oss": {**EXPERTS, "sliding_window": 64},
    "deepseek_v3": MLA,
}  # fmt: skip


def tiny(family: str) -> Any:
    settings = {**SMALL, **FAMILIES[family]}
    if family in ("gpt2", "gpt_neox", "falcon"):
        settings["num_kv_heads"] = settings.pop("num_key_value_heads")
        settings.pop("head_dim")
    if family != "falcon":
        settings.pop("num_kv_heads", None)
    return AutoConfig.for_model(family, **settings)


def checkpoint_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: str = "F16") -> Checkpoint:
    tensors = tuple(
        TensorInfo(name, dtype, shape, "f", 0, 2 * torch.Size(shape).numel()) for name, shape in shapes.items()
    )
    return Checkpoint("test", "safetensors", {}, tensors, config, None, False, lambda *_: b"")


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_and_parameters_of(family: str) -> None:
    config = tiny(family)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    anatomy = dissect(checkpoint_of(config.to_dict(), shapes))
    assert anatomy.parameters == model.num_parameters()
    assert anatomy.blocks == 6
    found = {part.name: part.tensors for part in anatomy.parts}
    assert "other" not in found
    assert {"embedding", "attention", "norms"} <= set(found)
    assert ("experts" in found) == ("num_experts_per_tok" in FAMILIES[family])
    assert ("MLP" in found) == (family not in ("mixtral", "qwen3_moe", "gpt_oss", "qwen2_moe"))
    assert ("head" in found) == (not config.tie_word_embeddings)


# transformers itself caches the decompressed heads of MLA and the repeated heads of Falcon; engines do not
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("deepseek_v3", "falcon")])
def test_kv_bytes_equal_a_real_cache(family: str) -> None:
    """Run 10 tokens through a real model and weigh its cache."""
    config = tiny(family)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).half().float().eval()
    cache: Any = DynamicCache(config=config)
    model(torch.arange(10)[None], past_key_values=cache)
    stored = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers)
    assert sum(layers.bytes_per_token for layers in kv_layers(config.to_dict())) * 10 == stored * 2


ROWS = tomllib.loads(files("quantry.models").joinpath("families.toml").read_text(encoding="utf-8"))
GGUF_NAMES = {"gpt-oss": "gpt_oss"}  # what transformers calls them


@pytest.mark.parametrize("switched", [False, True], ids=["default", "use_sliding_window"])
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if "sliding" in row])
def test_every_sliding_row_equals_transformers_cache(family: str, switched: bool) -> None:
    """Every row of families.toml against the layers that transformers' own cache makes for such a model."""
    switch = {"use_sliding_window": True, "max_window_layers": 5} if switched else {}
    shared = {"num_kv_shared_layers": 2} if family == "gemma3n_text" else {}
    many = {**SMALL, "num_hidden_layers": 12, "sliding_window": 64, **shared, **switch}
    config = AutoConfig.for_model(GGUF_NAMES.get(family, family), **many).get_text_config()
    cache: Any = DynamicCache(config=config)
    expected = ["sliding" if layer.is_sliding else "full" for layer in cache.layers]
    silent = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    assert [kind for kind in layer_kinds({**silent, "sliding_window": 64}) if kind] == expected
    named = {**silent, "sliding_window": 64, "model_type": family}
    assert [kind for kind in layer_kinds(named) if kind] == expected


@pytest.mark.parametrize("family", ["mamba", "mamba2", "falcon_mamba", "rwkv"])
def test_recurrent_rows(family: str) -> None:
    assert ROWS[family] == {"recurrent": "all"}
    (layers,) = kv_layers({"model_type": family, "num_hidden_layers": 4})
    assert (layers.kind, layers.layers, layers.bytes_per_token) == ("recurrent", 4, 0)


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3-8B": ({"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}, 131_072),
    "Llama-2-7B": ({"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}, 524_288),
    "DeepSeek-V3": ({"num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 7168}, 61 * 576 * 2),
    "Falcon-40B": ({"n_layer": 60, "n_head": 128, "n_head_kv": 8, "hidden_size": 8192}, 60 * 2 * 8 * 64 * 2),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256},
        12 * 2 * 2 * 256 * 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("model", PUBLISHED)
def test_published_kv_shapes(model: str) -> None:
    config, expected = PUBLISHED[model]
    assert sum(layers.bytes_per_token for layers in kv_layers(config)) == expected


def test_gemma_3_keeps_a_window() -> None:
    config = {
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 1024,
        }
    }
    sliding, full = kv_layers(config)
    assert (sliding.kind, sliding.layers, sliding.window) == ("sliding", 29, 1024)
    assert (full.kind, full.layers) == ("full", 5)
    assert full.bytes_per_token == 5 * 2 * 4 * 256 * 2


def test_recurrent_state_is_constant() -> None:
    config = {
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    recurrent, full = kv_layers(config)
    assert (recurrent.bytes_per_token, full.layers) == (0, 1)
    assert recurrent.state_bytes == 3 * (32 * 128 * 128 * 4 + (2 * 16 * 128 + 32 * 128) * 3 * 2)


NAMES = {
    "model.vision_tower.encoder.layers.3.self_attn.q_proj.weight": "vision tower",
    "visual.blocks.30.mlp.fc1.weight": "vision tower",
    "visual.merger.mlp.0.weight": "projector",
    "model.multi_modal_projector.linear_1.weight": "projector",
    "mtp.layers.0.self_attn.q_proj.weight": "MTP heads",
    "model.layers.61.self_attn.kv_b_proj.weight": "MTP heads",
    "model.layers.60.mlp.experts.3.up_proj.weight": "experts",
    "model.layers.60.mlp.gate.e_score_correction_bias": "router",
    "model.layers.3.mlp.shared_experts.up_proj.weight": "experts",
    "model.layers.3.block_sparse_moe.gate.weight": "router",
    "model.layers.3.block_sparse_moe.experts.0.w1.weight": "experts",
    "model.layers.3.linear_attn.in_proj_qkvz.weight": "recurrent",
    "model.layers.3.self_attn.q_norm.weight": "norms",
    "model.layers.3.self_attn.rotary_emb.inv_freq": "buffers",
    "blk.3.ffn_gate_exps.weight": "experts",
    "blk.3.ffn_gate_inp.weight": "router",
    "blk.3.ffn_gate_shexp.weight": "experts",
    "blk.3.ffn_down.weight": "MLP",
    "blk.3.attn_k.bias": "attention",
    "blk.3.ssm_conv1d.weight": "recurrent",
    "blk.61.nextn.eh_proj.weight": "MTP heads",
    "v.blk.2.attn_q.weight": "vision tower",
    "mm.0.weight": "projector",
    "output.weight": "head",
    "rope_freqs.weight": "buffers",
}


@pytest.mark.parametrize("name", NAMES)
def test_part_of(name: str) -> None:
    assert part_of(name, blocks=61) == NAMES[name]


def test_every_llama_tensor_name_of_gguf_has_a_part() -> None:
    for arch in (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.QWEN3MOE, gguf.MODEL_ARCH.GEMMA3, gguf.MODEL_ARCH.DEEPSEEK2):
        for kind in gguf.MODEL_TENSORS[arch]:
            name = gguf.TENSOR_NAMES[kind].format(bid=0) + ".weight"
            assert part_of(name, blocks=1) != "other", name


def test_a_real_folder(make_folder: MakeFolder) -> None:
    anatomy = inspect(make_folder(shards=2))
    assert (anatomy.parameters, anatomy.bytes, anatomy.tensors) == (PARAMETERS, 2 * PARAMETERS, 20)
    assert anatomy.bits_per_weight == 16
    assert (anatomy.tied_head, anatomy.chat_template, anatomy.tokenizer) == (True, False, "tokenizer.json")
    assert anatomy.kv_bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert anatomy.quantization is None


def test_a_tied_head_that_is_stored_counts_once() -> None:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (96, 64), "lm_head.weight": (96, 64)}
    anatomy = dissect(checkpoint_of(LLAMA, shapes))
    assert (anatomy.parameters, anatomy.bytes) == (96 * 64, 2 * 2 * 96 * 64)


def test_a_gguf(gguf_file: Path) -> None:
    anatomy = inspect(gguf_file)
    assert (anatomy.architecture, anatomy.parameters) == ("llama", 2 * 32 * 64 + 64)
    assert anatomy.quantization is not None
    assert (anatomy.quantization.method, anatomy.quantization.bits) == ("gguf-q8_0", 8.5)
    assert (anatomy.tokenizer, anatomy.chat_template, anatomy.tied_head) == ("gguf:gpt2", True, True)
    assert inspect(gguf_file.parent).parts == anatomy.parts


def packed(method: dict[str, Any], tensors: dict[str, tuple[str, tuple[int, ...]]]) -> tuple[int, Any]:
    sizes = {"I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "F16": 2, "F32": 4, "I64": 8}
    infos = tuple(
        TensorInfo(f"model.layers.0.{name}", dtype, shape, "f", 0, torch.Size(shape).numel() * sizes[dtype])
        for name, (dtype, shape) in tensors.items()
    )
    checkpoint = Checkpoint(
        "t", "safetensors", {}, infos, {**LLAMA, "quantization_config": method}, None, False, lambda *_: b""
    )
    return sum(weights_of(checkpoint, info) for info in infos), dissect(checkpoint).quantization


GROUP = {"weights": {"num_bits": 4, "group_size": 32}, "targets": ["Linear"]}
OTHER_GROUP = {"weights": {"num_bits": 8, "group_size": 32}, "targets": ["re:.*k_proj$"]}
QUANTIZED: dict[str, tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...]]], float]] = {
    "gptq": ({"bits": 4, "group_size": 32}, {"self_attn.q_proj.qweight": ("I32", (8, 64)), "self_attn.q_proj.qzeros": ("I32", (2, 8)), "self_attn.q_proj.scales": ("F16", (2, 64)), "self_attn.q_proj.g_idx": ("I32", (64,))}, 4),
    "gptq 3 bit": ({"quant_method": "gptq", "bits": 3, "group_size": 32}, {"self_attn.q_proj.qweight": ("I32", (6, 64))}, 3),
    "awq": ({"bits": 4, "group_size": 32}, {"self_attn.q_proj.qweight": ("I32", (64, 8)), "self_attn.q_proj.scales": ("F16", (2, 64))}, 4),
    "compressed-tensors": ({"config_groups": {"a": GROUP}}, {"self_attn.q_proj.weight_packed": ("I32", (64, 8)), "self_attn.q_proj.weight_scale": ("F16", (64, 2)), "self_attn.q_proj.weight_shape": ("I64", (2,))}, 4),
    "compressed-tensors mixed": ({"quant_method": "compressed-tensors", "config_groups": {"a": GROUP, "b": OTHER_GROUP}}, {"self_attn.q_proj.weight_packed": ("I32", (32, 8)), "self_attn.k_proj.weight_packed": ("I32", (32, 16))}, 6),
    "bitsandbytes": ({"load_in_4bit": True}, {"self_attn.q_proj.weight": ("U8", (2048, 1)), "self_attn.q_proj.weight.absmax": ("U8", (64,)), "self_attn.q_proj.weight.quant_state.bitsandbytes__nf4": ("U8", (90,))}, 4),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"self_attn.q_proj.weight": ("I8", (64, 64)), "self_attn.q_proj.SCB": ("F32", (64,)), "self_attn.q_proj.weight_format": ("U8", ())}, 8),
    "fp8": ({}, {"self_attn.q_proj.weight": ("F8_E4M3", (64, 64)), "self_attn.q_proj.weight_scale_inv": ("F32", (1, 1))}, 8),
    "mxfp4": ({}, {"mlp.experts.gate_up_proj_blocks": ("U8", (2, 64, 1, 16)), "mlp.experts.gate_up_proj_scales": ("U8", (2, 64, 1))}, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", QUANTIZED)
def test_existing_quantization(name: str) -> None:
    method, tensors, bits = QUANTIZED[name]
    weights, found = packed({"quant_method": name, **method}, tensors)
    assert weights == 4096
    assert (found.method, found.bits) == (str(method.get("quant_method", name)), bits)
    assert found.group_size == (32 if name.startswith(("gptq", "awq", "comp")) else None)


BAD_CONFIGS = {
    "not JSON": "{",
    "holds a list": "[]",
    "no num_hidden_layers": json.dumps({"model_type": "llama"}),
    "more than the limit of 10000": json.dumps({**LLAMA, "num_hidden_layers": 2_000_000_000}),
    "num_hidden_layers as '-1'": json.dumps({**LLAMA, "num_hidden_layers": -1}),
    "num_hidden_layers as 'True'": json.dumps({**LLAMA, "num_hidden_layers": True}),
    "no num_attention_heads": json.dumps({k: v for k, v in LLAMA.items() if "heads" not in k}),
    "no hidden_size": json.dumps({k: v for k, v in LLAMA.items() if k != "hidden_size"}),
    "unknown type 'magic'": json.dumps({**LLAMA, "layer_types": ["magic"] * 2}),
    "kinds of 1 layers": json.dumps({**LLAMA, "layer_types": ["full_attention"]}),
    "no quant_method": json.dumps({**LLAMA, "quantization_config": {"bits": 4}}),
    "not an object": json.dumps({**LLAMA, "quantization_config": "gptq"}),
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_bad_configs(make_folder: MakeFolder, message: str) -> None:
    folder = make_folder()
    (folder / "config.json").write_text(BAD_CONFIGS[message])
    with pytest.raises(QuantryError, match=message):
        inspect(folder)

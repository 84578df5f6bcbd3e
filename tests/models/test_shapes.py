"""Models without weights: tensors compared with those that transformers saves, counts with the published ones."""

import json
import subprocess
import sys
import tomllib
from importlib.resources import files
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from depth import cases, examples
from quantry.errors import CheckpointError, ConfigError, ModelNotFoundError, QuantryError
from quantry.models import shapes
from quantry.models.anatomy import dissect
from quantry.models.shapes import complete, known_families, tensors_of
from quantry.planning.models import find_model, from_config, known_models, open_model
from tiny_files import LLAMA, PARAMETERS, MakeFolder

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MLA = {
    "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 24,
    "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
HYBRID = {
    "hybrid_override_pattern": "M-*E", "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
    "n_routed_experts": 4, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "attention_bias": False,
    "head_dim": 16, "mlp_bias": False, "num_hidden_layers": 4, "tie_word_embeddings": False,
}  # fmt: skip
GRANITE = {
    "layer_types": ["mamba", "attention", "mamba", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8,
    "mamba_n_groups": 2, "shared_intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 16,
}  # fmt: skip
LANGUAGE: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "mixtral": EXPERTS, "qwen2": {}, "qwen2_moe": EXPERTS, "qwen3": {}, "qwen3_moe": EXPERTS,
    "gemma": {}, "gemma2": {}, "gemma3_text": {}, "phi3": {}, "smollm3": {}, "olmo2": {}, "granite": {},
    "deepseek_v2": MLA, "deepseek_v3": MLA, "gpt_oss": EXPERTS, "ministral3": {"head_dim": 24}, "olmo3": {},
    "minimax_m2": {**EXPERTS, "head_dim": 16}, "qwen3_next": {**EXPERTS, **DELTA, "head_dim": 24},
    "glm4_moe": {**MLA, "head_dim": 24, "use_qk_norm": True, "attention_bias": True},
    "nemotron_h": HYBRID, "granitemoehybrid": {**EXPERTS, **GRANITE},
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "wide heads, biases, tied": {
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 24, "attention_bias": True, "mlp_bias": True,
        "qkv_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 4, "decoder_sparse_step": 2,
        "mlp_only_layers": [1], "q_lora_rank": None, "first_k_dense_replace": 3,
    },
    "no grouping, one layer, untied": {
        "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": False, "num_hidden_layers": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 0,
    },
}  # fmt: skip
CLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 14}
QWEN3 = {**QWEN, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64, "num_position_embeddings": 36}
LLAMA4 = {
    **CLIP,
    "intermediate_size": 128,
    "projector_input_dim": 24,
    "projector_output_dim": 24,
    "vision_output_dim": 24,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "global_head_dim": 24,
    "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0,
}  # fmt: skip
GEMMA4_TOWER = {**CLIP, "num_key_value_heads": 1, "head_dim": 24, "position_embedding_size": 8}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {"vision_config": CLIP, "mm_tokens_per_image": 1},
    "gemma3 without a head": {"vision_config": {**CLIP, "vision_use_head": False}, "mm_tokens_per_image": 1},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {**CLIP, "model_type": "clip_vision_model"}},
    "llava of mistral": {"text_config": {"model_type": "mistral"}, "vision_config": {**CLIP, "model_type": "siglip_vision_model"}, "multimodal_projector_bias": False},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {**CLIP, "model_type": "pixtral"}},
    "qwen2_vl": {"text_config": MROPE, "vision_config": {**QWEN, "embed_dim": 32, "hidden_size": 64, "mlp_ratio": 3}},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": {**QWEN, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48}},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": {**CLIP, "model_type": "clip_vision_model"}},
    "qwen3_vl": {"text_config": {}, "vision_config": {**QWEN3, "deepstack_visual_indexes": [0, 1]}},
    "qwen3_vl_moe": {"text_config": {**EXPERTS, "mlp_only_layers": [1]}, "vision_config": {**QWEN3, "deepstack_visual_indexes": [1]}},
    "qwen3_5": {"text_config": {**DELTA, "num_hidden_layers": 4}, "vision_config": QWEN3},
    "qwen3_5_moe": {"text_config": {**EXPERTS, **DELTA, "layer_types": ["full_attention", "linear_attention", "full_attention"]}, "vision_config": QWEN3},
    "llama4": {"text_config": {**EXPERTS, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2, "attention_bias": True}, "vision_config": LLAMA4},
    "gemma4": {"text_config": {**GEMMA4, "attention_k_eq_v": True}, "vision_config": {**GEMMA4_TOWER, "standardize": True}},
    "gemma4 with experts": {"text_config": {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}, "vision_config": GEMMA4_TOWER},
    "gemma4 that hears": {
        "text_config": {**GEMMA4, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 112}, "vision_config": GEMMA4_TOWER,
        "audio_config": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 24, "conv_kernel_size": 5},
    },
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": {**CLIP, "image_size": [28, 42], "patch_size": [14, 14]}},
    "internvl with norms": {
        "text_config": {"model_type": "llama"}, "downsample_ratio": 0.25,
        "vision_config": {**CLIP, "use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": True, "use_mean_pooling": False, "use_mask_token": True},
    },
}  # fmt: skip
Saved = tuple[dict[str, tuple[int, ...]], dict[str, Any]]


def save(config: Any, auto: Any, folder: Path) -> Saved:
    """The tensors and the config.json that transformers writes for a model."""
    auto.from_config(config).save_pretrained(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes, json.loads((folder / "config.json").read_text())


def shapes_of(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    tensors = tensors_of(config)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    return {tensor.name: tensor.shape for tensor in tensors}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", LANGUAGE)
def test_tensors_are_those_that_transformers_saves(family: str, variant: str, tmp_path: Path) -> None:
    fields = {**SMALL, **LANGUAGE[family], **VARIANTS[variant]}
    if family.startswith("deepseek"):
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if family in ("nemotron_h", "granitemoehybrid"):  # the layers of a pattern, and nothing else that it cannot have
        fields |= {key: LANGUAGE[family][key] for key in ("head_dim", "num_hidden_layers")}
    if family == "nemotron_h":
        fields |= HYBRID
    saved, config = save(AutoConfig.for_model(family, **fields), AutoModelForCausalLM, tmp_path)
    if family == "nemotron_h":  # transformers 5 leaves the count to the list of layers; hub configs have both
        config["num_hidden_layers"] = len(config["layers_block_type"])
    found = shapes_of(config)
    if family in ("deepseek_v3", "glm4_moe"):  # transformers knows of multi-token prediction but does not save it
        assert config["num_nextn_predict_layers"] == 1
        found = shapes_of({**config, "num_nextn_predict_layers": 0})
    assert found == saved


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", VISION)
def test_towers_are_those_that_transformers_saves(case: str, tied: bool, tmp_path: Path) -> None:
    changes, tied = VISION[case], tied and case != "llama4"  # whose head is never tied
    text = {**SMALL, "head_dim": 16, **changes.get("text_config", {})}
    config = AutoConfig.for_model(
        case.partition(" ")[0], **{**changes, "text_config": text, "tie_word_embeddings": tied}
    )
    saved, written = save(config, AutoModelForImageTextToText, tmp_path)
    if case.startswith("gemma4"):  # hub configs name the heads of full layers; transformers 5 lists layer by layer
        written["text_config"] |= {key: GEMMA4[key] for key in ("global_head_dim", "num_global_key_value_heads")}
        saved = {name: shape for name, shape in saved.items() if not name.endswith(("_min", "_max"))}  # clipping bounds
    # hub checkpoints of CLIP and SigLIP towers, and transformers up to 4, have `vision_model.` in these names
    assert {
        name.replace("vision_tower.vision_model.", "vision_tower."): shape for name, shape in shapes_of(written).items()
    } == saved


def test_tensors_follow_each_other() -> None:
    tensors = tensors_of({**SMALL, "model_type": "llama"})
    assert {(tensor.dtype, tensor.file) for tensor in tensors} == {("BF16", "")}
    ends = [tensor.start + tensor.nbytes for tensor in tensors]
    assert [tensor.start for tensor in tensors] == [0, *ends[:-1]]
    assert ends[-1] == 2 * sum(tensor.numel for tensor in tensors)


def test_old_names_of_fields() -> None:
    old = {"num_hidden_layers": "n_layers", "num_key_value_heads": "num_kv_heads"}
    config = {**SMALL, "model_type": "llama"}
    assert tensors_of({old.get(key, key): value for key, value in config.items()}) == tensors_of(config)


def test_a_layer_for_multi_token_prediction_is_counted_as_stored() -> None:
    config = {**SMALL, **MLA, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1}
    extra = {
        name.removeprefix("model.layers.3."): shape for name, shape in shapes_of(config).items() if ".layers.3." in name
    }
    block = {
        name.removeprefix("model.layers.2."): shape for name, shape in shapes_of(config).items() if ".layers.2." in name
    }
    assert block.items() <= extra.items()
    assert {name: shape for name, shape in extra.items() if name not in block} == {
        "embed_tokens.weight": (128, 64), "enorm.weight": (64,), "hnorm.weight": (64,), "eh_proj.weight": (64, 128),
        "shared_head.norm.weight": (64,), "shared_head.head.weight": (128, 64),
    }  # fmt: skip
    assert {part.name for part in dissect(from_config(config, "tiny")).parts} >= {"MTP heads", "router", "experts"}


# the defaults of shapes.toml must be those of the config classes
TABLE = tomllib.loads(files("quantry.models").joinpath("shapes.toml").read_text(encoding="utf-8"))["families"]
TOWERS = [
    "clip_vision_model",
    "siglip_vision_model",
    "pixtral",
    "qwen2_vl_vision",
    "qwen2_5_vl_vision",
    "internvl_vision",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
    "llama4_vision_model",
    "gemma4_vision",
]
PARENTS = {
    tower: tower.removesuffix("_vision") for tower in TOWERS if tower.endswith("_vision") and tower != "gemma4_vision"
}
# a config that does not mention layers for multi-token prediction has none; lists of layers follow from other fields
OURS = {"num_nextn_predict_layers", "layer_types", "layers_block_type", "moe_layers"}
INNER = [
    "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text", "qwen3_5_text", "qwen3_5_moe_text",
    "llama4_text", "gemma4_text",
]  # fmt: skip


@pytest.mark.parametrize("family", [*LANGUAGE, *INNER])
def test_defaults_of_language_models(family: str) -> None:
    known = AutoConfig.for_model(family).to_dict()
    filled = complete({"model_type": "llava", "text_config": {"model_type": family}})["text_config"]
    same = {key for key in filled if known.get(key) is not None} - OURS
    assert {"hidden_size", "vocab_size", "num_attention_heads"} <= same
    assert ("num_hidden_layers" in same) == (family != "nemotron_h")  # which counts its list of layers
    assert {key: filled[key] for key in same} == {key: known[key] for key in same}


@pytest.mark.parametrize("tower", TOWERS)
def test_defaults_of_towers(tower: str) -> None:
    parent = PARENTS.get(tower)
    known = AutoConfig.for_model(parent).vision_config.to_dict() if parent else AutoConfig.for_model(tower).to_dict()
    filled = complete({"model_type": "llava", "text_config": {}, "vision_config": {"model_type": tower}})[
        "vision_config"
    ]
    same = {key for key in filled if key in known}
    assert {"hidden_size", "patch_size"} <= same
    assert {key: filled[key] for key in same} == {key: known[key] for key in same}


def test_every_family_of_the_table_is_tested() -> None:
    # not in transformers: their published counts below
    outside = {"internlm2", "intern_vit_6b", "internvl_chat", "kimi_k2"}
    wholes = {case.partition(" ")[0] for case in VISION}
    assert set(TABLE) == {*LANGUAGE, *TOWERS, *wholes, *INNER} | outside
    assert set(known_families()) == {*LANGUAGE, *wholes, "internlm2", "internvl_chat", "kimi_k2"}
    assert {str(model.config["model_type"]) for model in known_models().values()} >= {"internvl_chat", "kimi_k2"}


MODELS = known_models()


@pytest.mark.parametrize("name", MODELS)
def test_published_count(name: str) -> None:
    model, checkpoint = MODELS[name], open_model(name)
    found = sum(tensor.numel for tensor in checkpoint.tensors) + sum(model.besides.values())
    assert found == model.published if model.exact else abs(found / model.published - 1) < 0.01
    assert model.repo.count("/") == 1
    assert "2026" in model.source
    anatomy = dissect(checkpoint)
    assert anatomy.parameters + sum(model.besides.values()) == found
    assert anatomy.quantization is None
    assert ({"vision tower", "projector"} <= {part.name for part in anatomy.parts}) == model.vision


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith(("internvl", "kimi"))])
def test_rows_have_no_misspelt_field(name: str) -> None:
    config = MODELS[name].config
    known = AutoConfig.for_model(config["model_type"]).to_dict()
    inner = {key for part in known.values() if isinstance(part, dict) for key in part}
    parts = [part["model_type"] for part in config.values() if isinstance(part, dict) and "model_type" in part]
    inner |= {key for part in parts for key in AutoConfig.for_model(part).to_dict()}
    nested = {key for part in config.values() if isinstance(part, dict) for key in part}
    # read by the models although their config classes do not list them
    assert {*config, *nested} - {*known, *inner} <= {
        "head_dim", "num_experts", "vision_use_head", "full_attention_interval", "mtp_num_hidden_layers",
        "num_nextn_predict_layers", "nextn_copies", "hybrid_override_pattern", "global_head_dim",
        "num_global_key_value_heads", "num_hidden_layers",
    }  # fmt: skip


FULL_SIZE = (
    "llama-3.2-3b", "qwen3-30b-a3b", "gemma-3-27b", "deepseek-v3", "gpt-oss-120b", "mixtral-8x22b", "qwen2.5-vl-7b",
    "llava-1.5-13b", "phi-4", "qwen3-next-80b-a3b", "glm-4.5-air", "llama-4-scout", "granite-4.0-h-small",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(FULL_SIZE, quick=("deepseek-v3", "gpt-oss-120b", "qwen2.5-vl-7b")))
def test_full_size_equals_transformers(name: str) -> None:
    config = dict(MODELS[name].config)
    auto: Any = AutoModelForImageTextToText if MODELS[name].vision else AutoModelForCausalLM
    if name.startswith("qwen2.5-vl"):  # the hub's flat config
        config["text_config"] = {
            key: value for key, value in config.items() if key not in ("vision_config", "model_type")
        }
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    found = shapes_of({**MODELS[name].config, "num_nextn_predict_layers": 0})
    buffers = sum(prod(shape) for tensor, shape in found.items() if "e_score_correction" in tensor)
    assert sum(prod(shape) for shape in found.values()) - buffers == model.num_parameters()


PUBLISHED_KV = {
    "llama-3-8b": [("full", 32, None, 131_072)],
    "llama-3.1-70b": [("full", 80, None, 80 * 2 * 8 * 128 * 2)],
    "deepseek-v3": [
        ("mla", 61, None, 61 * (512 + 64) * 2)
    ],  # latent and rotary part of a token, DeepSeek-V3 report 2.1.1
    "gemma-3-27b": [("sliding", 52, 1024, 52 * 2 * 16 * 128 * 2), ("full", 10, None, 10 * 2 * 16 * 128 * 2)],  # 5 to 1
    "gemma-3-4b": [("sliding", 29, 1024, 29 * 2 * 4 * 256 * 2), ("full", 5, None, 5 * 2 * 4 * 256 * 2)],
    "gpt-oss-20b": [("sliding", 12, 128, 12 * 2 * 8 * 64 * 2), ("full", 12, None, 12 * 2 * 8 * 64 * 2)],
    "mistral-7b-v0.1": [("sliding", 32, 4096, 131_072)],
    "mistral-7b-v0.3": [("full", 32, None, 131_072)],
    "qwen2.5-vl-7b": [("full", 28, None, 28 * 2 * 4 * 128 * 2)],
    "internvl2.5-8b": [("full", 32, None, 131_072)],
    "llama-4-scout": [("sliding", 36, 8192, 36 * 2 * 8 * 128 * 2), ("full", 12, None, 12 * 2 * 8 * 128 * 2)],  # chunks
    "olmo-3-7b": [("sliding", 24, 4096, 24 * 2 * 32 * 128 * 2), ("full", 8, None, 8 * 2 * 32 * 128 * 2)],
    "gemma-4-31b": [("sliding", 50, 1024, 50 * 2 * 16 * 256 * 2), ("full", 10, None, 10 * 2 * 4 * 512 * 2)],
    "glm-4.5": [("full", 92, None, 92 * 2 * 8 * 128 * 2)],
    "kimi-k2": [("mla", 61, None, 61 * (512 + 64) * 2)],
    "qwen3-next-80b-a3b": [("recurrent", 36, None, 0), ("full", 12, None, 12 * 2 * 2 * 256 * 2)],
    "nemotron-nano-9b-v2": [("recurrent", 27, None, 0), ("full", 4, None, 4 * 2 * 8 * 128 * 2)],
    "granite-4.0-h-small": [("recurrent", 36, None, 0), ("full", 4, None, 4 * 2 * 8 * 128 * 2)],
}


@pytest.mark.parametrize("name", PUBLISHED_KV)
def test_kv_of_known_models(name: str) -> None:
    layers = dissect(open_model(name)).kv_layers
    assert [(group.kind, group.layers, group.window, group.bytes_per_token) for group in layers] == PUBLISHED_KV[name]


def test_a_config_as_the_hub_has_it() -> None:
    """Nested configs on the hub leave out what their class fills in: Gemma 3 4B has no heads, no vocabulary."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    }
    anatomy = dissect(from_config({"model_type": "gemma3", "text_config": text, "vision_config": vision}, "gemma"))
    assert anatomy.parameters == 4_300_079_472
    assert anatomy.tied_head
    assert sum(group.bytes_per_token for group in anatomy.kv_layers) == 34 * 2 * 4 * 256 * 2


NAMES = {
    "llama-3.1-70b": "llama-3.1-70b",
    "Llama 3.1 70B": "llama-3.1-70b",
    "llama3.1:70b": "llama-3.1-70b",
    "LLAMA_3.1_70B": "llama-3.1-70b",
    "llama_3_8b": "llama-3-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama-3.1-70b",
    "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b-2507",
    "mixtral 8x7b": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "mistral 7b": "mistral-7b-v0.3",
    "mistralai/Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "deepseek v3": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "gpt-oss-20b": "gpt-oss-20b",
    "gptoss 120B": "gpt-oss-120b",
    "gemma-3-27b": "gemma-3-27b",
    "google/gemma-3-4b-it": "gemma-3-4b",
    "qwen2.5-vl-7b": "qwen2.5-vl-7b",
    "qwen 2.5 vl 7b": "qwen2.5-vl-7b",
    "llava-1.5-7b": "llava-1.5-7b",
    "OpenGVLab/InternVL2_5-8B": "internvl2.5-8b",
    "phi4": "phi-4",
    "allenai/OLMo-2-1124-7B-Instruct": "olmo-2-7b",
    "HuggingFaceTB/SmolLM2-135M": "smollm2-135m",
    "llama 38b": None,
    "llama-3.1-7b": None,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": "deepseek-r1-distill-qwen-7b",  # not the shape of DeepSeek R1
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "bartowski/google_gemma-3-27b-it-GGUF": "gemma-3-27b",
    "internvl-2-26b": "internvl2-26b",
    "llava-1.6": "llava-1.6-mistral-7b",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "qwen3-30b-a3b-2507",
    "qwen3-next-80b-a3b-thinking": "qwen3-next-80b-a3b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama-4-scout",
    "qwen2.5-7b-instruct-1m": None,  # another context
    "someone_gemma-3-27b-it": None,
    "Llama-3.1-8B-AWQ-something-else": None,
    "deepseek-ai/DeepSeek-V3.2-Exp": None,  # another attention
    "": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_loosely(name: str) -> None:
    model = find_model(name)
    assert (model and model.name) == NAMES[name]


def test_every_name_and_repository_finds_its_row() -> None:
    for model in MODELS.values():
        for name in (model.name, model.name.replace("-", " ").upper(), model.repo, *model.variants, *model.aliases):
            match = find_model(name)
            assert match is not None, name
            assert match.name == model.name, name


TYPOS = {
    "lama-3.1-70b": "did you mean llama-3.1-70b",
    "gema 3 27b": "did you mean gemma-3-27b",
    "llama-3.1-71b": "did you mean llama-3.1-7",
    "mixtrall 8x7b": "did you mean mixtral-8x7b",
    "something else": "a well-known model such as",
    " ": "a well-known model such as",
    "/nowhere/llama-3.1-8b": "no such model: /nowhere/llama-3.1-8b",
    "x" * 300: "check the path",
    "~no-such-user/model": "check the path",
}


@pytest.mark.parametrize("name", TYPOS)
def test_unknown_names(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=TYPOS[name]):
        open_model(name)


def test_a_local_folder_goes_before_the_catalogue(make_folder: MakeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_folder(name="llama-3-8b")
    monkeypatch.chdir(folder.parent)
    assert dissect(open_model("llama-3-8b")).parameters == PARAMETERS
    assert dissect(open_model("demo")).architecture == "LlamaForCausalLM"
    assert open_model("demo").tokenizer == "tokenizer.json"


def test_a_config_without_weights(make_folder: MakeFolder) -> None:
    folder = make_folder()
    real = open_model(folder)
    (folder / "model.safetensors").unlink()
    for path in (folder, folder / "config.json", str(folder)):
        bare = open_model(path)
        assert {tensor.name: tensor.shape for tensor in bare.tensors} == {
            tensor.name: tensor.shape for tensor in real.tensors
        }
        assert dissect(bare).kv_layers == dissect(real).kv_layers
        assert bare.source == str(path)
        with pytest.raises(CheckpointError, match="known by its shape only"):
            bare.read("", 0, 2)


def test_pickles_are_no_bare_config(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        open_model(folder)


def test_a_quantized_config_gives_the_model_it_stands_for() -> None:
    config = {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "gptq", "bits": 4}}
    checkpoint = from_config(config, "tiny")
    assert checkpoint.metadata["stored"] == "gptq-int4"
    assert dissect(checkpoint).quantization is None
    assert open_model("gpt-oss-20b").metadata == {
        "shape": "gpt-oss-20b",
        "repo": "openai/gpt-oss-20b",
        "stored": "mxfp4",
    }


LLAVA = {"model_type": "llava", "text_config": {}, "vision_config": {}}
BAD: dict[str, dict[str, Any]] = {
    "tensors of model type 'unheard-of'.*40 types are known, such as [a-z0-9_]+, [^,]*, [^,]*, [^,]*$": {**LLAMA, "model_type": "unheard-of"},
    "no model_type": {"hidden_size": 64},
    "config has no vocab_size": {key: value for key, value in {**SMALL, "model_type": "llama"}.items() if key != "vocab_size"},
    "hidden_size as 'wide'": {**SMALL, "model_type": "llama", "hidden_size": "wide"},
    "hidden_size as '-64'": {**SMALL, "model_type": "llama", "hidden_size": -64},
    "num_attention_heads as '0'": {**SMALL, "model_type": "llama", "num_attention_heads": 0},
    "intermediate_size as 'True'": {**SMALL, "model_type": "llama", "intermediate_size": True},
    "intermediate_size as '96.5'": {**SMALL, "model_type": "llama", "intermediate_size": 96.5},
    "1000000 layers, more than the limit of 10000": {**SMALL, "model_type": "llama", "num_hidden_layers": 1_000_000},
    "1000000 experts, more than the limit": {**SMALL, **EXPERTS, "model_type": "mixtral", "num_local_experts": 1_000_000},
    "model type 'dinov2'": {**LLAVA, "vision_config": {"model_type": "dinov2"}},
    "a gemma3 as the language part of a llava": {**LLAVA, "text_config": {"model_type": "gemma3"}},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_configs(message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        tensors_of(BAD[message])
    assert "\n" not in str(caught.value)


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "TENSOR_LIMIT", 500)
    with pytest.raises(ConfigError, match="501 tensors, more than the limit of 500"):
        tensors_of({**SMALL, **EXPERTS, "model_type": "mixtral", "num_local_experts": 50, "num_hidden_layers": 99})


@pytest.mark.parametrize("text", ["{", "[]", '"llama"', "{}"])
def test_bad_config_files(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError):
            open_model(path)


ODD = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.lists(st.integers(-2, 40), max_size=3)
)
FIELDS = sorted(
    {name for row in TABLE.values() for name in row.get("defaults", {})}
    | {"text_config", "vision_config", "llm_config", "model_type"}
)
TYPES = st.sampled_from(sorted(TABLE))
PARTS = st.dictionaries(st.sampled_from(FIELDS), ODD | TYPES, max_size=4)


@examples(600)
@given(TYPES, st.dictionaries(st.sampled_from(FIELDS), ODD | PARTS, max_size=4))
def test_odd_configs(family: str, changes: dict[str, Any]) -> None:
    try:
        anatomy = dissect(from_config({**SMALL, **EXPERTS, **MLA, "model_type": family, **changes}, "fuzz"))
    except QuantryError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert anatomy.parameters >= 0


def test_a_shape_needs_no_torch() -> None:
    code = (
        "import sys\nfrom quantry.planning.models import open_model\nopen_model('deepseek-v3')\nopen_model('llava-1.5-7b')\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'transformers', 'numpy', 'safetensors'})"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""

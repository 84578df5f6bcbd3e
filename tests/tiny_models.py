"""A tiny random model of every architecture that Quantry writes as GGUF, with the tokenizer its family has.

Weights are drawn so that logits differ widely between tokens and norms are not all ones: a forgotten permutation, norm
or bias shows in the logits. Models have few layers, but both sliding and full, roped and unroped ones.
"""

from dataclasses import dataclass, field
from json import loads
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from tiny_tokenizers import write_tokenizer

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
}  # fmt: skip
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 64}
ROUTERS = (".gate.weight", ".router.weight")  # drawn so that experts are seldom close to a tie
VISION = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LAYERED = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
    "full_attention": {**LINEAR, "rope_theta": 1000000.0},
}


@dataclass(frozen=True)
class Tiny:
    """A tiny model: its type, its tokenizer, and how its config differs from SMALL."""

    model_type: str
    tokenizer: str
    settings: dict[str, Any] = field(default_factory=dict)


ARCHITECTURES = {
    "LlamaForCausalLM": Tiny("llama", "bpe-llama-bpe"),
    "MistralForCausalLM": Tiny("mistral", "spm-llama", {"head_dim": 32}),
    "MixtralForCausalLM": Tiny("mixtral", "spm-llama", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2ForCausalLM": Tiny("qwen2", "bpe-qwen2", {"tie_word_embeddings": True}),
    "Qwen2MoeForCausalLM": Tiny("qwen2_moe", "bpe-qwen2", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48}),
    "Qwen3ForCausalLM": Tiny("qwen3", "bpe-qwen2", {"head_dim": 32, "tie_word_embeddings": True}),
    "Qwen3MoeForCausalLM": Tiny("qwen3_moe", "bpe-qwen2", {**EXPERTS, "num_experts": 4, "head_dim": 32, "norm_topk_prob": True}),
    "Gemma2ForCausalLM": Tiny("gemma2", "spm-gemma", GEMMA),
    "Gemma3ForCausalLM": Tiny("gemma3_text", "spm-gemma", {**GEMMA, "num_hidden_layers": 6}),
    "Gemma3ForConditionalGeneration": Tiny("gemma3", "spm-gemma", {**GEMMA, "num_hidden_layers": 6}),
    "Phi3ForCausalLM": Tiny("phi3", "spm-phi3", {"sliding_window": 256}),
    "SmolLM3ForCausalLM": Tiny("smollm3", "bpe-llama-bpe", {"num_hidden_layers": 5}),
    "Olmo2ForCausalLM": Tiny("olmo2", "bpe-dbrx"),
    "GraniteForCausalLM": Tiny("granite", "bpe-refact", MULTIPLIERS),
    "GraniteMoeForCausalLM": Tiny("granitemoe", "bpe-refact", {**MULTIPLIERS, "num_local_experts": 4, "tie_word_embeddings": True}),
    "GraniteMoeSharedForCausalLM": Tiny("granitemoeshared", "bpe-refact", {**MULTIPLIERS, "num_local_experts": 4, "shared_intermediate_size": 48}),
}  # fmt: skip


def write_model(folder: Path, architecture: str, seed: int = 0, **overrides: Any) -> Any:
    """Writes the checkpoint of a tiny model into a folder; returns the model in float32, with the weights written."""
    tiny = ARCHITECTURES[architecture]
    size = write_tokenizer(folder, tiny.tokenizer)
    settings = {**SMALL, "vocab_size": -(-size // 32) * 32, **_ids(folder), **tiny.settings, **overrides}
    if tiny.model_type == "gemma3":
        settings = {"text_config": settings, "vision_config": VISION, "mm_tokens_per_image": 4}
    config = transformers.AutoConfig.for_model(tiny.model_type, **settings)
    model = getattr(transformers, architecture)(config)
    draw(model, seed)
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    return model.float().eval()


def _ids(folder: Path) -> dict[str, int | None]:
    """Returns the ids of the tokenizer's special tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    named = loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    roles = ("bos_token", "eos_token", "pad_token")
    return {f"{role}_id": tokenizer.token_to_id(named[role]) if named.get(role) else None for role in roles}


def draw(model: Any, seed: int) -> None:
    """Draws the weights of a model."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = "gemma" in model.config.model_type
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 0.2 * noise + (0 if zero_centred else 1)
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif "embed" in name or "lm_head" in name:
            value = (0.15 if zero_centred else 0.3) * noise  # Gemma scales embeddings up
        else:
            value = noise * weight.shape[-1] ** -0.5 * (3 if name.endswith(ROUTERS) else 1)
        weight.data = value.bfloat16().float()


def longrope(count: int) -> dict[str, Any]:
    """Returns rope parameters with a factor for each frequency."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [round(1.0 + 0.05 * index, 2) for index in range(count)],
        "long_factor": [round(1.3 + 2.7 * index, 2) for index in range(count)],
    }

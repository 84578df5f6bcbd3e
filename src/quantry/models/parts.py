"""The part of a model that a tensor belongs to, from its name in safetensors or GGUF.

The first pattern that matches the name decides, so special patterns come before general ones: a projector before the
vision tower, an expert before the MLP, a norm before its attention.
"""

import re
from functools import cache

PATTERNS: dict[str, tuple[str, ...]] = {
    "buffers": (r"inv_freq", r"rope_(freqs|factors)", r"masked_bias", r"\.attn\.bias$", r"position_ids$"),
    "projector": (
        r"multi_modal_projector|mm_projector|vision_proj|deepstack_merger|visual\.merger",
        r"(^|\.)(projector|connector|aligner|resampler|mlp1|embed_vision)\.",
        r"^mm\.",
    ),
    "vision tower": (r"(^|\.)(vision_(tower|model|encoder)|visual|image_encoder|vit|vpm)\.", r"^v\."),
    "audio tower": (r"(^|\.)(audio_(tower|model|encoder)|apm)\.", r"^a\."),
    "MTP heads": (r"(^|\.)mtp[._]", r"\.nextn\.", r"(^|\.)(eh_proj|enorm|hnorm|shared_head)\."),
    "router": (
        r"\.(mlp|moe|block_sparse_moe|feed_forward|ffn)\.(gate|router)\.",
        r"\.router\.|shared_expert_gate|e_score_correction_bias",
        r"_gate_inp|exp_probs_b",
    ),
    "experts": (r"\.experts[._]", r"\.shared_(experts?|mlp)\.", r"_exps\b|_shexp\b"),
    "norms": (r"norm", r"(^|\.)ln_\w+\."),
    "head": (r"(^|\.)(lm_head|embed_out)\.", r"^output\."),
    "embedding": (
        r"embed_(tokens|in|positions)|word_embeddings|tok_embeddings|(^|\.)w[tp]e\.",
        r"(token|position)_embd|per_layer_(token|model_proj)",
    ),
    "recurrent": (r"\.(mamba|mixer|linear_attn|ssm|conv1d|time_mix|channel_mix)\b", r"\.ssm_"),
    "attention": (r"\.(self_attn|self_attention|attention|attn)\b", r"\.attn_"),
    "MLP": (r"\.(mlp|feed_forward|ffn|block_sparse_moe)\b", r"\.(fc1|fc2|dense_(h_to_4h|4h_to_h))\.", r"\.ffn_"),
}
PARTS = tuple((part, re.compile("|".join(patterns))) for part, patterns in PATTERNS.items())
OTHER = "other"
ORDER = (*PATTERNS, OTHER)
NUMBER = re.compile(r"\.\d+(?=\.)")  # of a block or an expert: no pattern depends on it
BLOCK = re.compile(r"(?:^|\.)(?:layers|blk|h|blocks|layer)\.(\d+)\.")
TOWERS = frozenset({"projector", "vision tower", "audio tower"})


def part_of(name: str, blocks: int) -> str:
    """Returns the part that tensor `name` of a model with `blocks` decoder blocks belongs to."""
    part = _by_pattern(NUMBER.sub(".0", name))
    if part in TOWERS:
        return part
    index = block_of(name)
    return "MTP heads" if index is not None and index >= blocks else part


def block_of(name: str) -> int | None:
    """Returns the index of the block that tensor `name` is in, or None."""
    match = BLOCK.search(name)
    return int(match[1]) if match and len(match[1]) < 6 else None


def decoder_block(name: str, blocks: int) -> int | None:
    """Does the same, but returns None for towers and MTP heads."""
    index = block_of(name)
    return None if index is None or index >= blocks or part_of(name, blocks) in TOWERS else index


@cache
def _by_pattern(name: str) -> str:
    return next((part for part, pattern in PARTS if pattern.search(name)), OTHER)

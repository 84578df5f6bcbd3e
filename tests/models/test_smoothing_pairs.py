"""Every smoothing pair of every architecture: models with scaled channels compute what they did before."""

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantry.errors import ConfigError
from quantry.methods.transforms import _scaling
from quantry.models.attention import block_count
from quantry.models.linears import linears
from quantry.models.reader import open_checkpoint
from quantry.models.smoothing import Form, Pair, Slot, Smoothing, known_families, smoothing
from quantry.types import Checkpoint
from shared import TinyModel
from stacked_experts import stacked
from tiny_models import ARCHITECTURES

TOKENS = torch.arange(3, 43)[None]
POST_NORM = {"Olmo2ForCausalLM"}
STACKED = {"GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"}


def blocks_of(folder: Path) -> list[Smoothing]:
    checkpoint = open_checkpoint(str(folder))
    blocks = block_count(checkpoint.config)
    layers = linears(checkpoint, blocks)
    return [smoothing(checkpoint, layers, block) for block in range(blocks)]


def random_scale(pair: Pair) -> Tensor:
    """From a quarter to four, the same for the same pair."""
    generator = torch.Generator().manual_seed(sum(pair.name.encode()))
    return 4 ** (2 * torch.rand(pair.size, generator=generator) - 1)


def working_copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Float32 copies of matrices and biases; norms keep their dtype."""
    wide = {name: tensor.ndim > 1 or name.endswith(".bias") for name, tensor in tensors.items()}
    return {
        name: tensor.to(torch.float32 if wide[name] else tensor.dtype, copy=True) for name, tensor in tensors.items()
    }


def scaled(tensors: dict[str, Tensor], pairs: list[Pair]) -> dict[str, Tensor]:
    made = working_copy(tensors)
    for pair in pairs:
        _scaling.scale_pair(made, {}, pair, random_scale(pair))
    return made


def logits(folder: Path, architecture: str) -> Tensor:
    transformers.utils.logging.disable_progress_bar()
    model: Any = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        result: Tensor = model(TOKENS).logits
    return result


def after(folder: Path, target: Path, architecture: str, pairs: list[Pair]) -> Tensor:
    """The logits of the model in `folder` with its pairs scaled."""
    copytree(folder, target)
    made = scaled(load_file(folder / "model.safetensors"), pairs)
    save_file(
        {name: tensor.contiguous() for name, tensor in made.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return logits(target, architecture)


def distance(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scaled_models_compute_the_same(architecture: str, tiny: TinyModel, tmp_path: Path) -> None:
    folder = tiny(architecture)
    blocks = blocks_of(folder)
    pairs = [pair for block in blocks for pair in block.pairs]
    before = logits(folder, architecture)
    assert distance(after(folder, tmp_path / "scaled", architecture, pairs), before) < 1e-4
    per_block = 2 if architecture in POST_NORM else 3 if architecture == "GraniteMoeForCausalLM" else 4
    assert all(len(block.pairs) >= per_block for block in blocks)


@pytest.mark.parametrize(
    ("architecture", "consumer"),
    [
        ("Qwen2MoeForCausalLM", "mlp.gate"),
        ("Qwen2MoeForCausalLM", "mlp.shared_expert_gate"),
        ("Qwen2MoeForCausalLM", "mlp.shared_expert.up_proj"),
        ("GraniteMoeSharedForCausalLM", "block_sparse_moe.router.layer"),
        ("Qwen3ForCausalLM", "self_attn.k_proj"),
    ],
)
def test_a_forgotten_reader_would_show(architecture: str, consumer: str, tiny: TinyModel, tmp_path: Path) -> None:
    folder = tiny(architecture)
    pairs = [pair for block in blocks_of(folder) for pair in block.pairs]
    broken = [replace(p, consumers=tuple(s for s in p.consumers if not s.module.endswith(consumer))) for p in pairs]
    assert broken != pairs
    before = logits(folder, architecture)
    assert distance(after(folder, tmp_path / "scaled", architecture, broken), before) > 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_linear_is_read_by_a_pair_or_has_a_reason(architecture: str, tiny: TinyModel) -> None:
    checkpoint = open_checkpoint(str(tiny(architecture)))
    for block, pairs in enumerate(blocks_of(tiny(architecture))):
        read = [slot.module for pair in pairs.pairs for slot in pair.consumers]
        assert len(read) == len(set(read))
        inside = {linear.module for linear in linears(checkpoint, 99) if f"layers.{block}." in linear.module}
        assert inside <= set(read) | set(pairs.left_out)
        assert not set(read) & set(pairs.left_out)
        assert bool(pairs.left_out) == (architecture in POST_NORM | STACKED)
        assert all("residual stream" in why or "stacked" in why for why in pairs.left_out.values())


def test_every_family_of_the_table_has_a_tiny_model() -> None:
    assert set(known_families()) | {"gemma3"} == {model.model_type for model in ARCHITECTURES.values()}


@pytest.mark.parametrize("flip", [False, True])
def test_experts_stored_as_stacks(flip: bool, tiny: TinyModel, tmp_path: Path) -> None:
    folder = tiny("Qwen2MoeForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    plain = scaled(tensors, [pair for block in blocks_of(folder) for pair in block.pairs])
    copytree(folder, tmp_path / "stacked")
    save_file(stacked(tensors, flip), tmp_path / "stacked" / "model.safetensors", {"format": "pt"})
    pairs = [pair for block in blocks_of(tmp_path / "stacked") for pair in block.pairs]
    assert len(pairs) == 2 * (3 + 4 + 1)
    made = scaled(stacked(tensors, flip), pairs)
    expected = stacked(plain, flip)
    assert set(made) == set(expected) != set(tensors)
    for name, tensor in expected.items():
        assert torch.equal(made[name], tensor), name


def test_norms_stay_in_their_dtype_and_the_scale_gives_way() -> None:
    norm = torch.tensor([0.7, 1.3, 0.0, -0.4]).bfloat16()
    forms: tuple[Form, ...] = ("norm", "norm+1")
    for form in forms:
        pair = Pair("n", form, (slot("n"),), (slot("w"),), 4)
        block = {"n.weight": norm, "w.weight": torch.ones(3, 4)}
        made = working_copy(block)
        scale = _scaling.scale_pair(made, {}, pair, torch.tensor([3.0, 0.37, 5.0, 7.7]))
        assert made["n.weight"].dtype == torch.bfloat16
        gain, divided = (norm.double() + (form == "norm+1") for norm in (block["n.weight"], made["n.weight"]))
        assert torch.allclose(divided * scale.double(), gain, rtol=1e-6)
        assert torch.equal(made["w.weight"], scale.expand(3, 4))
        assert torch.equal(block["w.weight"], torch.ones(3, 4))


def test_a_channel_that_would_vanish_is_left_alone() -> None:
    pair = Pair("n", "norm+1", (slot("n"),), (slot("w"),), 2)
    block = {"n.weight": torch.tensor([0.5, 0.5]).bfloat16(), "w.weight": torch.ones(1, 2)}
    made = working_copy(block)
    assert _scaling.scale_pair(made, {}, pair, torch.tensor([1e6, 2.0])).tolist() == [1.0, 2.0]
    assert made["n.weight"].tolist() == [0.5, -0.25]


def slot(module: str) -> Slot:
    return Slot(module, f"{module}.weight")


def test_unknown_families_and_matrices_are_left_out_with_a_reason(tiny: TinyModel) -> None:
    checkpoint = open_checkpoint(str(tiny("LlamaForCausalLM")))
    layers = linears(checkpoint, 2)
    other = smoothing(replace(checkpoint, config={**checkpoint.config, "model_type": "novel"}), layers, 0)
    assert other.pairs == ()
    assert len(other.left_out) == 7
    assert set(other.left_out.values()) == {"novel has no row in the table of pairs"}
    strange = replace(checkpoint.tensors[0], name="model.layers.0.mlp.adapter.weight", shape=(8, 64))
    with_stranger = smoothing(replace(checkpoint, tensors=(*checkpoint.tensors, strange)), layers, 0)
    assert with_stranger.pairs == ()
    assert "mlp.adapter is not in the table" in next(iter(with_stranger.left_out.values()))
    assert len(smoothing(replace(checkpoint, tensors=(*checkpoint.tensors, strange)), layers, 1).pairs) == 4


def test_heads_that_do_not_fit_are_left_out(tiny: TinyModel) -> None:
    checkpoint = open_checkpoint(str(tiny("LlamaForCausalLM")))
    odd = with_heads(checkpoint, 3)
    result = smoothing(odd, linears(odd, 2), 0)
    assert [pair.name.rpartition(".")[2] for pair in result.pairs] == [
        "input_layernorm",
        "post_attention_layernorm",
        "up_proj",
    ]
    reason = "self_attn.v_proj gives 32 channels, which do not fit the [64] that are read by 3 heads"
    assert result.left_out == {"model.layers.0.self_attn.o_proj": reason}
    for heads in (0, None, "4"):
        with pytest.raises(ConfigError, match="num_attention_heads is"):
            smoothing(with_heads(checkpoint, heads), linears(checkpoint, 2), 0)
    with pytest.raises(ConfigError, match="no tensors of block 7"):
        smoothing(checkpoint, linears(checkpoint, 2), 7)


def with_heads(checkpoint: Checkpoint, heads: Any) -> Checkpoint:
    return replace(checkpoint, config={**checkpoint.config, "num_attention_heads": heads})

"""Checkpoints that are quantized already: their scheme is recognised, and they are planned as they are."""

from pathlib import Path

import pytest

from demo_artefacts import quantized_demo
from quantry.errors import CheckpointError
from quantry.models.reader import open_checkpoint
from quantry.planning.existing import existing
from quantry.planning.memory.weights import weights_bytes
from quantry.planning.models import open_model
from quantry.planning.plan import plan

SCHEMES = ("w8a8", "w4a16", "fp8-dynamic")


@pytest.mark.parametrize("preset", SCHEMES)
def test_our_own_artefacts(preset: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = open_checkpoint(quantized_demo(tmp_path_factory, preset))
    read = existing(checkpoint)
    assert read is not None
    shape, recipe = read
    assert recipe.preset.name == preset
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors)
    assert weights_bytes(shape, recipe, keep_odd=True) == pytest.approx(stored, rel=0.02)


def test_sixteen_bit_is_not_quantized() -> None:
    assert existing(open_model("demo")) is None
    assert existing(open_model("llama-3.1-8b")) is None


def test_weights_of_published_models() -> None:
    """As their makers give them: 12.8 GiB and 60.8 GiB of MXFP4, 689 GB of FP8."""
    for name, size in (("gpt-oss-20b", 13.8e9), ("gpt-oss-120b", 65.3e9), ("deepseek-v3", 689e9)):
        read = existing(open_model(name))
        assert read is not None
        assert weights_bytes(*read, keep_odd=True) == pytest.approx(size, rel=0.03), name


@pytest.mark.parametrize(("name", "gpu"), [("gpt-oss-120b", "H100"), ("deepseek-v3", "8x H200")])
def test_nothing_is_quantized_again(name: str, gpu: str) -> None:
    found = plan(name, gpu=gpu)
    assert {option.preset for option in found.options} == {"as-is"}
    assert all(list(option.commands) == ["serve"] for option in found.options)
    assert all(found.model["opened_as"] in option.commands["serve"] for option in found.options)


def test_an_unknown_scheme_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,'
        '"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,'
        '"quantization_config": {"quant_method": "aqlm"}}'
    )
    with pytest.raises(CheckpointError, match="quantized as aqlm"):
        plan(tmp_path, gpu="H100")

"""Conversions: the same values in other bytes, or a refusal; another grid only when asked for, with what it costs."""

import json
from pathlib import Path

import pytest
import torch

import quantry
from command import command as run
from killed_jobs import contents
from quantizing.written_llama import CONFIG, llama_shapes, write_model
from quantry.errors import QuantryError
from quantry.numerics.grids import dequantize
from quantry.quantizing.quantized_model import QuantizedModel


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", CONFIG, llama_shapes())


def values(folder: Path) -> dict[str, torch.Tensor]:
    model = QuantizedModel(folder)
    decoded = {module: dequantize(model.read(module)) for module in model.schemes}
    return decoded | {tensor.name: model.tensor(tensor.name).float() for tensor in model.plain}


def same(one: Path, other: Path) -> bool:
    left, right = values(one), values(other)
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


LOSSLESS = [
    ("w4a16", "gptq", "compressed-tensors"),
    ("w4a16", "compressed-tensors", "gptq"),
    ("w8a16", "gptq", "compressed-tensors"),
    ("w3a16", "compressed-tensors", "gptq"),
    ("w4a16-asym", "compressed-tensors", "gptq"),
    ("w4a16-asym", "gptq", "compressed-tensors"),
    ("w2a16", "gptq", "compressed-tensors"),
]


@pytest.mark.parametrize(("preset", "first", "second"), LOSSLESS)
def test_lossless_and_back(llama: Path, tmp_path: Path, preset: str, first: str, second: str) -> None:
    one, other, back = tmp_path / "one", tmp_path / "other", tmp_path / "back"
    quantry.quantize(llama, one, preset=preset, format=first)
    artefact = quantry.convert(one, other, to=second)
    assert (artefact.format, artefact.quantized_layers) == (second, 14)
    assert same(one, other)
    quantry.convert(other, back, to=first)
    assert contents(one)["model.safetensors"] == contents(back)["model.safetensors"]
    assert json.loads(contents(one)["config.json"]) == json.loads(contents(back)["config.json"])


def test_shapes_without_unpacking(llama: Path, tmp_path: Path) -> None:
    for preset, form in [
        ("w3a16", "gptq"),
        ("w4a16-asym", "awq"),
        ("w3a16", "compressed-tensors"),
        ("nf4", "bitsandbytes"),
        ("llm-int8", "bitsandbytes"),
        ("nvfp4", "compressed-tensors"),
        ("w8a8", "compressed-tensors"),
    ]:
        quantry.quantize(llama, tmp_path / f"{preset}-{form}", preset=preset, format=form)
        model = QuantizedModel(tmp_path / f"{preset}-{form}")
        for module in model.schemes:
            assert model.shape(module) == model.read(module).shape


def test_a_lying_state_is_named(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantry.quantize(llama, tmp_path / "one", preset="nf4")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight.quant_state.bitsandbytes__nf4"
    text = bytes(tensors[name].tolist()).replace(b"384", b"999")
    tensors[name] = torch.tensor(list(text), dtype=torch.uint8)
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    with pytest.raises(QuantryError, match="up_proj.weight has 49152 bytes for 999 x 256 codes"):
        quantry.convert(tmp_path / "one", tmp_path / "two", to="bf16")


def test_awq_to_compressed_tensors(llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "awq", preset="w4a16-asym", format="awq")
    quantry.convert(tmp_path / "awq", tmp_path / "ct", to="compressed-tensors")
    assert same(tmp_path / "awq", tmp_path / "ct")
    assert json.loads((tmp_path / "ct" / "config.json").read_text())["dtype"] == "float16"


def test_symmetric_codes_fit_awq(llama: Path, tmp_path: Path) -> None:
    """bf16 scales that float16 holds exactly go into AWQ; the weights of this model are well inside its range."""
    quantry.quantize(llama, tmp_path / "gptq", preset="w4a16", format="gptq")
    quantry.convert(tmp_path / "gptq", tmp_path / "awq", to="awq")
    before, after = values(tmp_path / "gptq"), values(tmp_path / "awq")
    for module in QuantizedModel(tmp_path / "gptq").schemes:
        assert torch.equal(before[module], after[module])


@pytest.mark.parametrize(
    ("preset", "form"), [("w4a16", "gptq"), ("fp8-dynamic", "compressed-tensors"), ("nf4", "bitsandbytes")]
)
def test_back_to_16_bit(llama: Path, tmp_path: Path, preset: str, form: str) -> None:
    quantry.quantize(llama, tmp_path / "one", preset=preset, format=form)
    quantry.convert(tmp_path / "one", tmp_path / "plain", to="bf16")
    anatomy = quantry.inspect(tmp_path / "plain")
    assert (anatomy.quantization, anatomy.bits_per_weight) == (None, 16)
    assert anatomy.parameters == quantry.inspect(llama).parameters
    expected = values(tmp_path / "one")
    from safetensors.torch import load_file

    stored = load_file(tmp_path / "plain" / "model.safetensors")
    for module in QuantizedModel(tmp_path / "one").schemes:
        assert torch.equal(stored[f"{module}.weight"], expected[module].bfloat16())


def test_another_grid_only_when_asked_for(llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "one", preset="w8a16")
    with pytest.raises(QuantryError, match="awq cannot hold this checkpoint.*--requantize PRESET"):
        quantry.convert(tmp_path / "one", tmp_path / "two", to="awq")
    assert not (tmp_path / "two").exists()
    artefact = quantry.convert(tmp_path / "one", tmp_path / "two", to="awq", requantize="w4a16-asym")
    assert len(artefact.notes) == 1
    assert artefact.notes[0].startswith("Rounded a second time: the relative error added to the weights is 0.0")
    assert artefact.notes[0] in (tmp_path / "two" / "README.md").read_text()
    assert json.loads((tmp_path / "two" / "quantry.json").read_text())["notes"] == list(artefact.notes)


def test_scales_that_would_be_rounded_are_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantry.quantize(llama, tmp_path / "one", preset="w4a16", format="gptq")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    tensors = {name: tensor.half() * 1.001 if name.endswith("scales") else tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    with pytest.raises(QuantryError, match="has f16 scales that bf16 cannot hold exactly"):
        quantry.convert(tmp_path / "one", tmp_path / "two", to="compressed-tensors")
    assert not list(tmp_path.glob("two*"))


def test_refusals(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="not a quantized safetensors checkpoint"):
        quantry.convert(llama, tmp_path / "out", to="gptq")
    quantry.quantize(llama, tmp_path / "one", preset="w4a16")
    with pytest.raises(QuantryError, match="unknown format 'gtpq'; did you mean gptq"):
        quantry.convert(tmp_path / "one", tmp_path / "out", to="gtpq")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "hqq"
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    with pytest.raises(QuantryError, match="quantized with 'hqq', which is not read"):
        quantry.convert(tmp_path / "one", tmp_path / "out", to="gptq")


def test_command(llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "one", preset="w4a16")
    done = run("convert", str(tmp_path / "one"), "-o", str(tmp_path / "two"), "--to", "gptq")
    assert done.returncode == 0, done.stderr
    assert "14 layers quantized" in done.stdout
    again = run("convert", str(tmp_path / "one"), "-o", str(tmp_path / "two"), "--to", "bf16")
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)

"""Models of every format, decoded: against checkpoints that are written out by hand, and against gguf's own library."""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

import quantry
from demo_artefacts import quantized_demo
from depth import cases
from plain_models import loaded, logits, plain_int8, quantizing_experts, windows
from quantry.blockwise import walk
from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError
from quantry.models.reader import demo_folder
from quantry.numerics.grids import dequantize
from quantry.quantizing.quantized_model import QuantizedModel
from quantry.quantizing.sources import open_source, tokenizer
from tiny_models import ARCHITECTURES, write_model
from tiny_tokenizers import write_tokenizer

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
DECODED = [
    ("w4a16", "compressed-tensors"),
    ("w4a16-asym", "compressed-tensors"),
    ("w4a16", "gptq"),
    ("w4a16-asym", "awq"),
    ("fp8-dynamic", "compressed-tensors"),
    ("fp8-block", "compressed-tensors"),
    ("w8a8", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("nvfp4", "compressed-tensors"),
    ("nf4", "bitsandbytes"),
    ("llm-int8", "bitsandbytes"),
]
QUICK_FORMATS = [
    ("w4a16-asym", "awq"),
    ("fp8-block", "compressed-tensors"),
    ("w8a8", "compressed-tensors"),
    ("nf4", "bitsandbytes"),
]
QUICK_FAMILIES = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3MoeForCausalLM")
TEXT = "It's 10:45; they've sold 2,048 tickets. naïve café 天地玄黃\n\n  end"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", **WIDE)
    return folder


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    write_model(folder, "Qwen3MoeForCausalLM", **WIDE, moe_intermediate_size=128)
    return folder


@pytest.fixture(scope="module")
def q4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as a GGUF file."""
    return quantized_demo(tmp_path_factory, "gguf-q4_k_m")


def written_out(artefact: Path, out: Path) -> Path:
    """The 16-bit checkpoint that an artefact stands for, in float32."""
    model = QuantizedModel(artefact)
    tensors = {f"{module}.weight": dequantize(model.read(module)) for module in model.schemes}
    tensors |= {tensor.name: model.tensor(tensor.name).float().clone() for tensor in model.plain}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = {key: value for key, value in model.checkpoint.config.items() if key != "quantization_config"}
    (out / "config.json").write_text(json.dumps(config))
    return out


def plain_e4m3(inputs: Tensor, group: int | None = None) -> Tensor:
    """Inputs rounded token by token, or group by group of a token, to FP8 and back."""
    cut = inputs.reshape(-1, group or inputs.shape[-1])
    scale = cut.abs().amax(-1, keepdim=True) / 448
    return ((cut / scale).to(torch.float8_e4m3fn).float() * scale).view(inputs.shape)


SIMULATED: dict[str, Any] = {
    "w8a8": plain_int8,
    "fp8-dynamic": plain_e4m3,
    "fp8-block": lambda inputs: plain_e4m3(inputs, 128),
}


def simulating(model: Any, preset: str) -> Any:
    """The model with the inputs of its linear layers quantized by hooks."""
    for name, module in model.named_modules():
        if preset in SIMULATED and name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: SIMULATED[preset](inputs[0]))
        if preset in SIMULATED and name.endswith(".experts"):
            module.forward = quantizing_experts(module)
    return model


@pytest.mark.parametrize(("preset", "form"), cases(DECODED, QUICK_FORMATS))
def test_a_quantized_folder_is_what_its_bytes_stand_for(preset: str, form: str, llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "out", preset=preset, format=form)
    source = open_source(tmp_path / "out")
    plain = written_out(tmp_path / "out", tmp_path / "plain")
    stored = load_file(plain / "model.safetensors")
    assert set(source.names) == set(stored) == set(open_source(llama).names)
    assert all(torch.equal(source.read(name).float(), stored[name]) for name in source.names)
    assert (source.path, source.format) == (tmp_path / "out", "safetensors")
    assert len(source.schemes) == 14
    assert set(source.activations) == (set(source.schemes) if preset in SIMULATED else set())
    assert "quantization_config" not in source.config
    model = simulating(loaded(plain), preset)
    texts = windows(200, (40, 11))
    for index, made in walk.run(source, texts):
        torch.testing.assert_close(made, logits(model, texts[index]), rtol=1e-5, atol=2e-5)


def test_quantized_inputs_of_experts(moe: Path, tmp_path: Path) -> None:
    quantry.quantize(moe, tmp_path / "out", preset="w8a8")
    source = open_source(tmp_path / "out")
    assert "model.layers.1.mlp.experts.3.down_proj" in source.activations
    model = simulating(loaded(written_out(tmp_path / "out", tmp_path / "plain")), "w8a8")
    texts = windows(200, (30,))
    torch.testing.assert_close(dict(walk.run(source, texts))[0], logits(model, texts[0]), rtol=1e-5, atol=2e-5)
    whole = walk.whole(source)
    torch.testing.assert_close(logits(whole, texts[0]), logits(model, texts[0]), rtol=1e-5, atol=2e-5)


def test_a_16_bit_checkpoint_is_itself(llama: Path) -> None:
    source = open_source(llama)
    stored = load_file(llama / "model.safetensors")
    assert set(source.names) == set(stored)
    assert all(torch.equal(source.read(name), stored[name]) for name in source.names)
    assert source.read("model.norm.weight").dtype == torch.bfloat16
    assert (source.schemes, source.activations, source.format) == ({}, {}, "safetensors")


def test_what_is_read_is_a_copy(llama: Path, tmp_path: Path) -> None:
    """Pages of the file do not stay in memory with it."""
    shutil.copytree(llama, tmp_path / "model")
    tensor = open_source(tmp_path / "model").read("model.norm.weight")
    with (tmp_path / "model" / "model.safetensors").open("r+b") as file:
        file.write(b"\0" * (llama / "model.safetensors").stat().st_size)
    assert torch.equal(tensor, load_file(llama / "model.safetensors")["model.norm.weight"])


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, QUICK_FAMILIES))
def test_a_gguf_file_of_16_bit_is_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    """Names, order of rows, experts, norms and config come back: the logits are those of the checkpoint."""
    write_model(tmp_path / "model", architecture)
    quantry.quantize(tmp_path / "model", tmp_path / "out", preset="gguf-bf16")
    source = open_source(tmp_path / "out")
    assert (source.format, source.schemes, source.activations) == ("gguf", {}, {})
    model = loaded(tmp_path / "model")
    texts = windows(200, (90, 20))
    for index, made in walk.run(source, texts):
        torch.testing.assert_close(made, logits(model, texts[index]), rtol=1e-4, atol=1e-4)


def by_hand(file: Path) -> dict[str, Tensor]:
    """The demo's checkpoint out of its GGUF file, with gguf's own decoding."""
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    made = {}
    for tensor in gguf.GGUFReader(file).tensors:
        weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        head, _, rest = tensor.name.partition(".")
        if head != "blk":
            made[{"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[head] + ".weight"] = weight
            continue
        index, name, _ = rest.split(".")
        if name in ("attn_q", "attn_k"):  # rotary pairs lie side by side in the file
            heads = weight.shape[0] // 64
            weight = weight.view(heads, 32, 2, -1).transpose(1, 2).reshape(weight.shape)
        made[f"model.layers.{index}.{names[name]}.weight"] = weight
    return made


def test_a_gguf_file_is_what_its_bytes_stand_for(q4: Path, tmp_path: Path) -> None:
    (file,) = q4.glob("*.gguf")
    source, expected = open_source(q4), by_hand(file)
    assert source.path == open_source(file).path == file
    assert set(source.names) == set(expected)
    for name in source.names:
        assert source.read(name).dtype == torch.float32
        torch.testing.assert_close(source.read(name), expected[name], rtol=0, atol=1e-6)
    assert {scheme.weight.kind for scheme in source.schemes.values()} == {"q4_k", "q6_k"}
    assert {scheme.weight.bits for scheme in source.schemes.values()} == {4, 6}
    assert set(source.schemes) == {name.removesuffix(".weight") for name in source.names if "norm" not in name}
    save_file(expected, tmp_path / "model.safetensors", {"format": "pt"})
    shutil.copy(demo_folder() / "config.json", tmp_path)
    texts = windows(4096, (100,))
    made = dict(walk.run(source, texts))[0]
    torch.testing.assert_close(made, logits(loaded(tmp_path), texts[0]), rtol=1e-4, atol=1e-4)


def test_f16_of_the_demo_is_the_demo_in_float16(tmp_path: Path) -> None:
    quantry.quantize("demo", tmp_path / "out", preset="gguf-f16")
    source, stored = open_source(tmp_path / "out"), load_file(demo_folder() / "model.safetensors")
    assert set(source.names) == set(stored)
    assert all(
        torch.equal(source.read(name), stored[name].half().float()) for name in source.names if "norm" not in name
    )


@pytest.mark.parametrize("kind", ["bpe-llama-bpe", "bpe-qwen2", "spm-llama", "spm-gemma", "spm-phi3", "bpe-dbrx"])
def test_a_tokenizer_is_its_tokenizer_json(kind: str, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    write_tokenizer(tmp_path / "model", kind)
    settings = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "Qwen2Tokenizer"  # a class that cuts text in a way of its own
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    made = tokenizer(open_source(tmp_path / "model"))
    plain = Tokenizer.from_file(str(tmp_path / "model" / "tokenizer.json"))
    assert made(TEXT)["input_ids"] == plain.encode(TEXT).ids
    assert made(TEXT, add_special_tokens=False)["input_ids"] == plain.encode(TEXT, add_special_tokens=False).ids


def test_the_tokenizer_and_template_of_a_gguf_file_are_the_models(q4: Path) -> None:
    one, other = tokenizer(open_source("demo")), tokenizer(open_source(q4))
    assert one(TEXT)["input_ids"] == other(TEXT)["input_ids"]
    talk = [{"role": "user", "content": "Hello"}]
    shown = [made.apply_chat_template(talk, tokenize=False, add_generation_prompt=True) for made in (one, other)]
    assert shown[0] == shown[1] != ""


@pytest.mark.parametrize("damage", ["{", "{}", None])
def test_a_tokenizer_that_cannot_be_read_is_refused(damage: str | None, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "model")
    for file in (tmp_path / "model").glob("tokenizer*"):
        file.unlink()
    if damage is not None:
        (tmp_path / "model" / "tokenizer.json").write_text(damage)
    with pytest.raises(CheckpointError, match="tokenizer of .*model cannot be read"):
        tokenizer(open_source(tmp_path / "model"))


class StoppedError(Exception):
    pass


def stop(done: int, total: int, name: str) -> None:
    raise StoppedError


@pytest.mark.parametrize("preset", ["w4a16", "gguf-q8_0"])
def test_an_unfinished_artefact_is_refused(preset: str, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(StoppedError):
        quantry.quantize(llama, out, preset=preset, progress=stop)
    for place in (out, tmp_path / "out.partial", out / "model.gguf"):
        with pytest.raises(QuantryError, match="is not finished.*run the quantize command again"):
            open_source(place)
    out.mkdir()
    with pytest.raises(QuantryError, match="is not finished"):
        open_source(out)
    quantry.quantize(llama, out, preset=preset)
    assert open_source(out).names


def test_a_finished_artefact_beside_an_unfinished_one_is_read(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "quantry-job.json").write_text("{}")
    assert open_source(tmp_path / "out").names


def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no such model"):
        open_source(tmp_path / "none")


@pytest.mark.parametrize("preset", ["w4a16", "gguf-q8_0", None])
def test_a_truncated_shard_is_refused(preset: str | None, llama: Path, tmp_path: Path) -> None:
    if preset:
        quantry.quantize(llama, tmp_path / "out", preset=preset)
    else:
        shutil.copytree(llama, tmp_path / "out")
    (file,) = [*(tmp_path / "out").glob("*.safetensors"), *(tmp_path / "out").glob("*.gguf")]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError):
        open_source(tmp_path / "out")


def test_static_scales_are_refused_when_they_are_asked_for(llama: Path, tmp_path: Path) -> None:
    quantry.quantize(llama, tmp_path / "out", preset="fp8-dynamic")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] |= {"dynamic": False, "strategy": "tensor"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    source = open_source(tmp_path / "out")
    with pytest.raises(CheckpointError, match="static scale for its input"):
        walk.Walk(source)

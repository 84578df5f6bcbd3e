"""`quantry merge` against peft: the merged weights are those of peft in float32, and the logits those of the adapter."""

import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

import killed_jobs
import quantry
from command import command
from killed_jobs import kill_and_resume, started
from quantry.errors import QuantryError
from quantry.models.adapter import changes, open_adapter, scale_of
from quantry.models.identity import identity
from quantry.models.reader import demo_folder, open_checkpoint

PROMPT = torch.tensor([[1, 17, 230, 41, 5, 999, 12, 3000]])
LORA: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "target_modules": ["q_proj", "o_proj", "gate_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "gate_proj": 6},
        "alpha_pattern": {"o_proj": 3, "layers.[12].mlp.gate_proj": 24},
    },
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "both trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "norms trained whole": {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [17, 5]}},
}
UNTIED = {"head", "embedding", "embedding trained whole", "both trained whole"}


def trained(folder: Path, base: Path, *, more_tokens: int = 0, **settings: Any) -> Any:
    """Writes an adapter whose every tensor is far from its beginning; returns the model with it, not merged."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if more_tokens:
        model.resize_token_embeddings(model.config.vocab_size + more_tokens, mean_resizing=False)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=10, **settings))
    with torch.no_grad():
        for value in (value for value in wrapped.parameters() if value.requires_grad):
            value.add_(torch.randn_like(value) * 0.05)
    wrapped.save_pretrained(str(folder))
    return wrapped.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(PROMPT).logits[0].double()  # type: ignore[no-any-return]


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in float32, so that a merge is exact."""
    folder = tmp_path_factory.mktemp("base") / "demo32"
    AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(demo_folder()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", LORA)
def test_merged_model_is_the_model_with_its_adapter(name: str, base: Path, tmp_path: Path) -> None:
    wrapped = trained(tmp_path / "adapter", base, **LORA[name])
    quantry.merge(base, tmp_path / "adapter", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is (name not in UNTIED)
    assert config["dtype"] == "float32"
    expected, found, bare = logits(wrapped), logits(loaded(tmp_path / "out")), logits(loaded(base))
    assert (found - expected).abs().max() < 2e-3
    assert (bare - expected).abs().max() > 0.05


@pytest.mark.parametrize("name", ["plain", "rslora", "patterns", "dora"])
def test_weights_are_those_of_peft(name: str, base: Path, tmp_path: Path) -> None:
    wrapped = trained(tmp_path / "adapter", base, **LORA[name])
    quantry.merge(base, tmp_path / "adapter", tmp_path / "out")
    theirs, ours = wrapped.merge_and_unload().state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert ours.keys() == theirs.keys() - {"lm_head.weight"}
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


def test_sixteen_bit_weights_are_rounded_once(base: Path, tmp_path: Path) -> None:
    wrapped = trained(tmp_path / "adapter", demo_folder(), **LORA["plain"])
    artefact = quantry.merge("demo", tmp_path / "adapter", tmp_path / "out")
    theirs, ours = wrapped.merge_and_unload().state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert {value.dtype for value in ours.values()} == {torch.bfloat16}
    for key, value in ours.items():
        assert torch.equal(value, theirs[key].bfloat16()), key
    assert artefact.bits_per_weight == pytest.approx(16, abs=0.01)


def test_added_tokens_stay_tied_and_bring_their_tokenizer(base: Path, tmp_path: Path) -> None:
    wrapped = trained(tmp_path / "adapter", base, more_tokens=3, **LORA["plain"])
    words = AutoTokenizer.from_pretrained(base)
    words.add_tokens(["<one>", "<two>", "<three>"])
    words.save_pretrained(tmp_path / "adapter")
    quantry.merge(base, tmp_path / "adapter", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == json.loads((base / "config.json").read_text())["vocab_size"] + 3
    assert AutoTokenizer.from_pretrained(tmp_path / "out").convert_tokens_to_ids("<two>") == len(words) - 2
    assert (logits(loaded(tmp_path / "out")) - logits(wrapped)).abs().max() < 2e-3


def test_scales_of_peft(base: Path, tmp_path: Path) -> None:
    for number, extra in enumerate(({}, {"use_rslora": True})):
        folder = tmp_path / str(number)
        wrapped = trained(folder, base, **LORA["patterns"] | extra)
        config = open_adapter(folder).config
        layers = {
            name: module
            for name, module in wrapped.base_model.model.named_modules()
            if isinstance(getattr(module, "scaling", None), dict)
        }
        assert layers
        for name, module in layers.items():
            assert scale_of(config, name) == module.scaling["default"], name


@pytest.mark.parametrize("settings", [{"bias": "all"}, {"bias": "lora_only"}, {"lora_bias": True}], ids=str)
def test_biases(settings: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = Qwen2Config(
        vocab_size=4096, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(tmp_path / "base")
    wrapped = trained(tmp_path / "adapter", tmp_path / "base", target_modules=["q_proj", "v_proj"], **settings)
    quantry.merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "out")
    assert torch.allclose(logits(loaded(tmp_path / "out")), logits(wrapped), atol=1e-4)
    theirs, ours = wrapped.merge_and_unload().state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())


def test_merged_model_is_quantized_and_verified_against_itself(tmp_path: Path) -> None:
    trained(tmp_path / "adapter", demo_folder(), **LORA["head"])
    quantry.merge("demo", tmp_path / "adapter", tmp_path / "merged")
    quantry.quantize(tmp_path / "merged", tmp_path / "out", preset="gguf-q8_0")
    proof = quantry.verify(tmp_path / "out", windows=2, length=64, record=False)
    assert proof.reference == str(tmp_path / "merged")
    assert proof.kl < 0.01


def test_merging_again_finds_the_same_job(base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "adapter", base, **LORA["plain"])
    first = quantry.merge(base, tmp_path / "adapter", tmp_path / "out")
    again = quantry.merge(base, tmp_path / "adapter", tmp_path / "out")
    assert again.files == first.files
    trained(tmp_path / "adapter", base, **LORA["rslora"])
    with pytest.raises(QuantryError, match="another recipe"):
        quantry.merge(base, tmp_path / "adapter", tmp_path / "out")


def test_killed_merges_end_with_the_same_bytes(base: Path, tmp_path: Path) -> None:
    trained(tmp_path / "adapter", base, **LORA["plain"])

    def start(out: Path) -> Any:
        return started(killed_jobs.merge, base, tmp_path / "adapter", out, {"shard_bytes": 4 << 20})

    files, _ = kill_and_resume(start, tmp_path, "merge", rounds=4, shares=(0.05, 0.95))
    assert sum(name.endswith(".safetensors") for name in files) > 2


def edited(key: str, value: object) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))

    return edit


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    return write


def halved(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if "lora_B" in key)
    del tensors[key]


def narrowed(tensors: dict[str, torch.Tensor]) -> None:
    key = next(key for key in tensors if "lora_A" in key)
    tensors[key] = tensors[key][:, :-1].contiguous()


def moved(tensors: dict[str, torch.Tensor]) -> None:
    for key in [key for key in tensors if "layers.0." in key]:
        tensors[key.replace("layers.0.", "layers.77.")] = tensors.pop(key)


def infinite(tensors: dict[str, torch.Tensor]) -> None:
    next(value for key, value in tensors.items() if "lora_A" in key)[0, 0] = float("inf")


def of_other_weights(folder: Path) -> None:
    (folder / "quantry-adapt.json").write_text(json.dumps({"base": {"name": "another", "identity": "0" * 64}}))


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncated, "truncated|bytes"),
    "pickle": (pickled, "pickled"),
    "half a pair": (changed(halved), "no lora_B"),
    "wrong shape": (changed(narrowed), "4 x 767"),
    "of another base": (changed(moved), "layers.77.* does not have"),
    "of other weights": (of_other_weights, "trained on other weights"),
    "infinite": (changed(infinite), "NaN or infinite"),
    "another rank": (edited("r", 8), "rank 8"),
    "no rank": (edited("r", 0), "r 0"),
    "not LoRA": (edited("peft_type", "IA3"), "IA3"),
    "experts": (edited("target_parameters", ["experts.gate_up_proj"]), "stacked experts"),
    "a pattern that is none": (edited("rank_pattern", {"(": 3}), "pattern"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    trained(folder, demo_folder(), **LORA["plain"])
    return folder


@pytest.mark.parametrize("name", BROKEN)
def test_broken_adapters_are_refused(name: str, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    damage, words = BROKEN[name]
    damage(tmp_path / "adapter")
    with pytest.raises(QuantryError, match=words):
        quantry.merge("demo", tmp_path / "adapter", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quantized_base_is_refused(adapter: Path, tmp_path: Path) -> None:
    quantry.quantize("demo", tmp_path / "int4", preset="w4a16")
    with pytest.raises(QuantryError, match="is quantized.*merge into the 16-bit original"):
        quantry.merge(tmp_path / "int4", adapter, tmp_path / "out")


def test_command(adapter: Path, tmp_path: Path) -> None:
    done = command("merge", "demo", str(adapter), "-o", str(tmp_path / "out"), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["preset"] == "merged"
    wrong = command("merge", "demo", str(tmp_path / "nothing"), "-o", str(tmp_path / "other"))
    assert (wrong.returncode, len(wrong.stderr.strip().splitlines())) == (2, 1)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "adapter" in card
    assert str(tmp_path) not in card + (tmp_path / "out" / "quantry.json").read_text()


def test_changes_name_every_kind(adapter: Path) -> None:
    found = changes(open_adapter(adapter), open_checkpoint("demo"))
    assert found.head is None
    assert all(change.low_rank and change.low_rank.scale == 2.5 for change in found.by_tensor.values())


def test_lineage_reaches_from_the_base_to_the_converted_artefact(tmp_path: Path) -> None:
    trained(tmp_path / "adapter", demo_folder(), **LORA["plain"])
    training = {"base": {"name": "demo"}, "data": {"name": "rows.jsonl", "sha256": "ab" * 32}}
    (tmp_path / "adapter" / "quantry-adapt.json").write_text(json.dumps(training))
    quantry.merge("demo", tmp_path / "adapter", tmp_path / "merged")
    quantry.quantize(tmp_path / "merged", tmp_path / "int4", preset="w4a16-gptq", samples=2, length=64)
    quantry.convert(tmp_path / "int4", tmp_path / "gptq", to="gptq")
    note = json.loads((tmp_path / "gptq" / "quantry.json").read_text())
    merged, quantized = note["lineage"]
    digest = sha256((tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()
    assert merged["adapter"]["sha256"] == digest
    assert merged["adapter"]["data"] == training["data"]
    assert (merged["made"], merged["source"], quantized["source"]) == ("merged", "demo", "merged")
    assert merged["source_identity"] == identity(open_checkpoint("demo"))
    assert quantized["source_identity"] == identity(open_checkpoint(tmp_path / "merged"))
    assert quantized["calibration"]["fingerprint"]
    weights = sha256((tmp_path / "int4" / "model.safetensors").read_bytes()).hexdigest()
    assert quantized["files"] == {"model.safetensors": weights}
    shown = " ".join(command("inspect", tmp_path / "gptq").stdout.split())
    assert f"merged from demo ({merged['source_identity'][:12]}), adapter adapter ({digest[:12]})" in shown
    assert "rows.jsonl" in (tmp_path / "gptq" / "README.md").read_text()
    assert str(tmp_path) not in json.dumps(note)
    assert "lineage" not in json.loads((tmp_path / "merged" / "quantry.json").read_text())

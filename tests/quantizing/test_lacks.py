"""What does not fit is said by name: plans of other models, rules without a layer, checkpoints that cannot be served."""

import json
import shutil
from pathlib import Path

import pytest

import quantry
from command import command
from quantizing.written_llama import CONFIG, llama_shapes, write_model
from quantry.devices.catalogue import parse
from quantry.errors import CheckpointError, RecipeError, WeightError
from quantry.models.reader import open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.planning.deployment import Deployment
from quantry.planning.feasibility import feasible
from quantry.quantizing.recipe import Recipe, presets


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", CONFIG, llama_shapes())


def test_the_plan_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    planned = quantry.plan("demo", gpu="RTX 3060").to_dict()
    file.write_text(json.dumps(planned))
    assert quantry.quantize("demo", tmp_path / "out", plan=file, dry_run=True).preset == planned["options"][0]["preset"]
    with pytest.raises(RecipeError, match=r"is the plan of demo, with 7344384 parameters, and .*llama has"):
        quantry.quantize(llama, tmp_path / "out", plan=file, dry_run=True)
    file.write_text(json.dumps({**planned, "model": {**planned["model"], "architecture": "MambaForCausalLM"}}))
    with pytest.raises(RecipeError, match="a MambaForCausalLM, and demo is a LlamaForCausalLM"):
        quantry.quantize("demo", tmp_path / "out", plan=file, dry_run=True)


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        ('match = "*.layrs.0.*"\npreset = "w8a16"', True),
        ('match = "*.layrs.0.*"\nkeep = true', True),
        ('match = "lm_head"\npreset = "w8a16"', True),
        ('match = "lm_head"\nkeep = true', False),
        ('match = "*.embed_tokens"\nkeep = true', False),
        ('match = "*.layers.0.*"\nkeep = true', False),
    ],
)
def test_a_rule_that_matches_nothing_is_refused(tmp_path: Path, rule: str, refused: bool) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(f'preset = "w4a16"\n\n[[rules]]\n{rule}\n')
    done = command("quantize", "demo", "-o", tmp_path / "out", "--recipe", file, "--dry-run")
    assert done.returncode == (2 if refused else 0), done.stderr
    assert ("matches no layer of demo; names are like model.layers.0" in done.stderr) is refused


def test_what_cannot_be_served_is_said_before_the_work(llama: Path, tmp_path: Path) -> None:
    assert quantry.quantize(llama, tmp_path / "out", preset="w8a16", dry_run=True).notes == ()
    (llama / "tokenizer.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"], "model_type": "new"}))
    told = command("quantize", llama, "-o", tmp_path / "out", "--preset", "w8a16", "--no-report")
    assert told.returncode == 0, told.stderr
    assert "has no tokenizer, so engines will not serve the artefact" in told.stdout
    assert "NewForCausalLM is an architecture that neither transformers nor llama.cpp knows" in told.stdout
    assert "NewForCausalLM" in (tmp_path / "out" / "README.md").read_text()
    shutil.rmtree(tmp_path / "out")


def test_a_plan_says_what_cannot_be_served(llama: Path) -> None:
    for model in (llama, llama / "config.json"):  # a config has no tokenizer to miss
        assert quantry.plan(model, gpu="RTX 4090").notes == ()
    (llama / "tokenizer.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"], "model_type": "new"}))
    tokenizer, architecture = "has no tokenizer, so engines will not serve", "NewForCausalLM is an architecture that"
    told = json.loads(command("plan", llama, "--gpu", "RTX 4090", "--json").stdout)["notes"]
    assert [tokenizer in told[0], architecture in told[1], len(told)] == [True, True, 2]
    shown = " ".join(command("plan", llama, "--gpu", "RTX 4090").stdout.split())
    assert tokenizer in shown
    assert architecture in shown


def test_layers_that_are_not_there_are_refused(llama: Path, tmp_path: Path) -> None:
    """Of the 9000 that the config claims, two exist: a skeleton of them would take minutes and gigabytes."""
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 9000}))
    told = command("sweep", llama, "-o", tmp_path / "out", "--presets", "w8a16")
    assert told.returncode == 2
    assert "has 9000 layers and its weights 2" in told.stderr
    assert command("quantize", llama, "-o", tmp_path / "out", "--preset", "w8a16").returncode == 2


def test_a_tokenizer_with_odd_settings_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(Path(quantry.__file__).parent / "demo", tmp_path / "demo"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": "x"}))
    with pytest.raises(CheckpointError, match="the tokenizer of .* cannot be read"):
        load_tokenizer(folder)


def test_a_tokenizer_whose_library_panics_is_refused(tmp_path: Path) -> None:
    """Its panic is no Exception: a template names a token that it does not describe."""
    folder = Path(shutil.copytree(Path(quantry.__file__).parent / "demo", tmp_path / "demo"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"]["special_tokens"] = {}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="the tokenizer of .* cannot be read: no entry found"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot encode a text: no entry found"):
        quantry.quantize(folder, tmp_path / "out", preset="gguf-q8_0")


def test_keep_odd_is_offered_only_where_it_leads_somewhere(tmp_path: Path) -> None:
    """fp8-block needs sides of 128: a model without such a layer is not sent from one flag to the other."""
    sizes = {"hidden_size": 96, "intermediate_size": 144}
    shapes = {name: tuple(side * 3 // 8 for side in shape) for name, shape in llama_shapes().items()}
    small = write_model(tmp_path / "small", {**CONFIG, **sizes}, shapes)
    with pytest.raises(WeightError, match="use a preset without such blocks, as fp8-dynamic") as first:
        quantry.quantize(small, tmp_path / "out", preset="fp8-block", dry_run=True)
    assert "--keep-odd" not in str(first.value)
    with pytest.raises(RecipeError, match="would be quantized with fp8-block; use a preset without blocks") as second:
        quantry.quantize(small, tmp_path / "out", preset="fp8-block", keep_odd=True, dry_run=True)
    assert "--keep-odd" not in str(second.value)
    recipe = Recipe(presets()["fp8-block"], "compressed-tensors")
    verdict = feasible(Deployment(open_checkpoint(small), recipe, "vllm", parse("H100").device))
    assert "not divided by blocks of 128 x 128" in verdict.reason
    assert verdict.fix == "use a preset without such blocks, as fp8-dynamic or w8a8"


def test_a_rule_with_an_endless_pattern_is_refused(tmp_path: Path) -> None:
    """Python's translation of 100,000 brackets into a regex takes minutes."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'preset = "w4a16"\n[[rules]]\nmatch = "{"[" * 100_000}"\nkeep = true\n')
    with pytest.raises(RecipeError, match=r"with 100,000 characters; use 500 at most"):
        quantry.quantize("demo", tmp_path / "out", recipe=recipe, dry_run=True)

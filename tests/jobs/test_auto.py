"""Preset auto: sizes that are met and never exceeded, mixtures that engines load, and what is refused."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import quantry
from command import command
from demo_artefacts import AUTO_FORMATS, AUTO_TEXT, measured_demo
from depth import FAMILIES, cases, deep, rounds, sampled
from divergences import divergence, logits, windows
from quantry.errors import QuantryError, RecipeError
from quantry.jobs.auto import mixer as mixer_module
from quantry.jobs.auto import mixture as mixture_module
from quantry.jobs.auto.damage import DamageMeter
from quantry.jobs.auto.mixer import AutoOptions, Mixer
from quantry.jobs.auto.sensitivity import Method, Sensitivity, unmeasured
from quantry.jobs.auto.solver import ItemOption, Solution, solve
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.writer import nbytes
from quantry.planning.budget import Budget, DeviceBudget
from quantry.planning.fits_device import fits
from quantry.planning.models import open_model
from quantry.quantizing.recipe import build
from quantry.quantizing.recipe_file import from_card
from quantry.quantizing.shards import Container, file_bytes
from quantry.quantizing.targets import target_of
from quantry.quantizing.tensor_plan import FusedLayers, Piece
from quantry.types import Artefact, Checkpoint
from shared import recorded
from tiny_models import ARCHITECTURES, write_model

TEXT, FORMATS = AUTO_TEXT, AUTO_FORMATS
DEMO = local_folder("demo")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Artefact]]:
    """A mixture of the demo; layers are measured once in a run for each format, and each mixture is made once."""

    def make(budget: str, form: str) -> Artefact:
        def quantized(folder: Path) -> Artefact:
            return quantry.quantize("demo", folder / "out", preset="auto", budget=budget, format=form, **TEXT)

        artefact: Artefact = recorded(tmp_path_factory, f"auto-{budget}-{form}", quantized)
        return artefact

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(measured_demo(tmp_path_factory)))
        yield make


def written(artefact: Artefact) -> int:
    files = [*Path(artefact.path).glob("*.gguf"), *Path(artefact.path).glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    ("form", "budget"),
    cases(
        [(form, f"{size}B") for form in FORMATS for size in (5_600_000, 9_000_000)],
        [(form, "5600000B") for form in FORMATS],
    ),
)
def test_files_have_the_size_that_was_asked_for(form: str, budget: str, made: Callable[..., Artefact]) -> None:
    asked = int(budget.removesuffix("B"))
    assert 0.995 * asked <= written(made(budget, form)) <= asked


def invented(checkpoint: Checkpoint, form: str, draw: random.Random) -> Mixer:
    """A mixer of damages that fall with the bytes."""
    blank = unmeasured(checkpoint, sixteen_bit(checkpoint), Method(form, "gptq", "awq"))
    layers = tuple(
        replace(
            layer,
            candidates=tuple(
                replace(one, damage=draw.uniform(1, 1.02) * layer.parameters / one.bytes**4) for one in layer.candidates
            ),
        )
        for layer in blank.layers
    )
    return Mixer(checkpoint, replace(blank, layers=layers), AutoOptions(), {"fp8-dynamic"})


@pytest.mark.parametrize(("form", "engine"), [("gguf", "llama.cpp"), ("compressed-tensors", "vllm")])
def test_what_fits_a_device(form: str, engine: str) -> None:
    """By the planner's own figures; one per cent more does not."""
    checkpoint, fit = open_model("llama-3.1-8b"), DeviceBudget("RTX 3060 12GB", 8192)
    mixer = invented(checkpoint, form, random.Random(2))
    recipe, solution = mixer.solve(fit)
    assert fits(fit, checkpoint, engine, recipe)
    assert recipe.budget == f"fits RTX 3060 12GB at 8192 tokens with {engine}"
    more = mixer.recipe(solve(mixer.items, int(solution.bytes * 1.01)), "more")
    assert not fits(fit, checkpoint, engine, more)


@sampled
@pytest.mark.parametrize(("form", "count"), [("gguf", 20), ("compressed-tensors", 100)])
def test_any_size_is_met(form: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is chosen, and however long the headers become by it."""
    checkpoint, draw = open_checkpoint("demo"), random.Random(1)
    mixer = invented(checkpoint, form, draw)

    def longer(container: Container, pieces: Sequence[Piece]) -> int:
        zeros = sum(isinstance(piece, FusedLayers) and not piece.grid.symmetric for piece in pieces)
        return file_bytes(container, pieces) + 1000 * zeros  # names of layers may be long

    monkeypatch.setattr(mixer_module, "file_bytes", longer)
    for _ in range(rounds(count)):
        asked = draw.randrange(5_400_000, 8_000_000)
        recipe, _ = mixer.solve(Budget(asked, "some size", files=True))
        target = target_of(checkpoint, recipe, keep_odd=True)
        size = longer(target.container(Path()), target.plan.pieces)
        assert 0.98 * asked <= size <= asked  # a layer is more than 1 % of so small a model


@pytest.mark.parametrize("form", cases(FORMATS, ("gguf",)))
def test_bits_a_weight_are_those_of_all_tensors(form: str, made: Callable[..., Artefact]) -> None:
    artefact = made("6.5bpw", form)
    assert 0.995 * 6.5 <= artefact.bits_per_weight <= 6.5
    assert artefact.bytes == sum(tensor.nbytes for tensor in open_checkpoint(artefact.path).tensors)


@deep
@pytest.mark.parametrize("form", FORMATS)
def test_more_bytes_lose_less(form: str, made: Callable[..., Artefact]) -> None:
    tokens = windows(DEMO, samples=4, length=128)
    wanted = logits(DEMO, tokens)
    lost = [divergence(wanted, logits(Path(made(budget, form).path), tokens)) for budget in ("5600000B", "9000000B")]
    assert lost[1] < 0.5 * lost[0]


@deep
def test_it_loses_less_than_llama_cpps_mixture_of_the_same_size(made: Callable[..., Artefact], tmp_path: Path) -> None:
    """Both are rounded with GPTQ: only the choice of types, and the scaling before, differ."""
    quantry.quantize("demo", tmp_path / "out", preset="gguf-q3_k_m", rounder="gptq", **TEXT)
    size = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.gguf"))
    tokens = windows(DEMO, samples=4, length=128)
    wanted = logits(DEMO, tokens)
    auto = divergence(wanted, logits(Path(made(f"{size}B", "gguf").path), tokens))
    assert auto < 0.9 * divergence(wanted, logits(tmp_path / "out", tokens))


@pytest.mark.parametrize("form", FORMATS)
def test_what_it_says_of_itself(form: str, made: Callable[..., Artefact]) -> None:
    artefact = made("6.5bpw", form)
    content = json.loads((Path(artefact.path) / "quantry.json").read_text())
    recipe = from_card(content)
    assert (artefact.preset, content["preset"], recipe.budget) == ("auto", "auto", "6.5 bits a weight")
    assert recipe.transform == "awq"
    assert {one.rounder for one in recipe.presets} == {"gptq"}
    found = Sensitivity.from_dict(json.loads((Path(artefact.path) / "sensitivity.json").read_text()))
    assert sum(len(layer.match) for layer in found.layers) == len(recipe.rules)
    assert found.source == "demo"
    assert (
        f"predicted divergence is {artefact.notes[0].split()[4]} nats"
        in (Path(artefact.path) / "README.md").read_text()
    )
    if form == "gguf":
        types = {tensor.name: tensor.dtype for tensor in open_checkpoint(artefact.path).tensors}
        assert {rule.match: rule.type or "BF16" for rule in recipe.rules}.items() <= types.items()
        assert len(set(types.values())) > 3
        assert (Path(artefact.path) / "demo-auto.gguf").is_file()
    else:
        config = json.loads((Path(artefact.path) / "config.json").read_text())["quantization_config"]
        assert len(config["config_groups"]) > 1


def test_no_path_of_the_machine_is_written(tmp_path: Path) -> None:
    write_model(tmp_path / "model", "LlamaForCausalLM")
    out = tmp_path / "out"
    quantry.quantize(tmp_path / "model", out, preset="auto", budget="9bpw", samples=4, length=64)
    for name in ("quantry.json", "README.md", "sensitivity.json"):
        assert str(tmp_path) not in (out / name).read_text(), name


@deep
def test_a_second_size_needs_no_second_measurement(
    made: Callable[..., Artefact], monkeypatch: pytest.MonkeyPatch
) -> None:
    made("6.5bpw", "gguf")
    monkeypatch.setattr(DamageMeter, "measure", lambda *_: pytest.fail("measured again"))
    assert made("7.5bpw", "gguf").bits_per_weight <= 7.5


@pytest.mark.parametrize(("form", "preset"), [("gguf", "gguf-q4_0"), ("compressed-tensors", "w8a16")])
def test_the_size_of_files_is_known_to_the_byte(form: str, preset: str, tmp_path: Path) -> None:
    """Headers, and the padding behind a tensor whose bytes are no multiple of 32."""
    write_model(tmp_path / "model", "LlamaForCausalLM", vocab_size=673)
    checkpoint = open_checkpoint(tmp_path / "model")
    recipe = build({"preset": preset, "format": form, "group": None if form == "gguf" else 32})
    target = target_of(checkpoint, recipe, keep_odd=True)
    sizes = [nbytes(kind, shape) for piece in target.plan.pieces for _, kind, shape in piece.entries]
    assert form != "gguf" or any(size % 32 for size in sizes)
    artefact = quantry.quantize(
        tmp_path / "model", tmp_path / "out", preset=preset, format=form, group=None if form == "gguf" else 32
    )
    assert file_bytes(target.container(Path()), target.plan.pieces) == written(artefact)
    assert target.plan.bytes == artefact.bytes


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "architecture", cases(["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma2ForCausalLM"], ["Qwen3MoeForCausalLM"])
)
def test_sizes_of_all_choices_are_exact(architecture: str, form: str, tmp_path: Path) -> None:
    """What a solver adds up is what the job will write, for any choice of ways."""
    write_model(tmp_path / "model", architecture)
    checkpoint = open_checkpoint(tmp_path / "model")
    blank = unmeasured(checkpoint, sixteen_bit(checkpoint), Method(form, "gptq", "awq"))
    mixer = Mixer(checkpoint, blank, AutoOptions())
    draw = random.Random(0)
    for _ in range(6):
        chosen: dict[str, ItemOption] = {item.name: draw.choice(item.options) for item in mixer.items}
        total = sum(option.bytes for option in chosen.values())
        made = mixer.recipe(Solution(chosen, total, 0.0, 0.0), "some size")
        assert target_of(checkpoint, made, keep_odd=True).plan.bytes == total


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, FAMILIES))
def test_awq_in_gguf(architecture: str, tmp_path: Path) -> None:
    """A scale that some reader of a channel does not take up would cost far more than 8 bits do."""
    source = tmp_path / "model"
    write_model(source, architecture)
    text: dict[str, Any] = {"samples": 8, "length": 64}
    tokens = windows(source, **text)
    wanted, lost = logits(source, tokens), {}
    for transform in (None, "awq"):
        out = tmp_path / str(transform)
        try:
            quantry.quantize(source, out, preset="gguf-q8_0", rounder="gptq", transform=transform, **text)
        except QuantryError as error:
            assert "llama.cpp" in str(error)  # a family it does not know
            assert not out.exists()
            return
        lost[transform] = divergence(wanted, logits(out, tokens))
    assert lost["awq"] < 2 * lost[None] + 1e-6, lost


def test_awq_moves_scales_into_the_file(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_model(source, "LlamaForCausalLM")
    for transform in (None, "awq"):
        quantry.quantize(
            source,
            tmp_path / str(transform),
            preset="gguf-q4_0",
            rounder="gptq",
            transform=transform,
            samples=8,
            length=64,
        )
    norms = [
        torch.frombuffer(bytearray(_bytes(tmp_path / folder, "blk.0.attn_norm.weight")), dtype=torch.float32)
        for folder in ("None", "awq")
    ]
    assert not torch.allclose(norms[0], norms[1], rtol=1e-3)
    fates = json.loads((tmp_path / "awq" / "quantry.json").read_text())["fates"]
    assert any("scaled with the layers around it" in fate and fate.startswith("quantized: Q4_0") for fate in fates)


def _bytes(folder: Path, name: str) -> bytes:
    checkpoint = open_checkpoint(folder)
    tensor = next(tensor for tensor in checkpoint.tensors if tensor.name == name)
    return checkpoint.read(tensor.file, tensor.start, tensor.nbytes)


@deep
@pytest.mark.usefixtures("made")
def test_only_what_the_engine_loads_there_is_chosen(tmp_path: Path) -> None:
    """vLLM has no kernel for 8-bit groups on a CPU, and one on GPUs."""
    found = {}
    for gpu in ("cpu", "H100"):
        out = tmp_path / gpu
        quantry.quantize("demo", out, preset="auto", budget="8bpw", gpu=gpu, format="compressed-tensors", **TEXT)
        recipe = from_card(json.loads((out / "quantry.json").read_text()))
        found[gpu] = {rule.preset.scheme.weight.bits for rule in recipe.rules if rule.preset}
    assert 8 in found["H100"]
    assert found["cpu"] == {4}


# ---- bad input ----

REFUSED = {
    "needs a size to aim at": ("--preset", "auto"),
    "--gpu has no use without --preset auto": ("--preset", "w4a16", "--gpu", "cpu"),
    "--budget has no use without --preset auto": ("--preset", "w4a16", "--budget", "4bpw"),
    "--group has no use with preset auto": ("--preset", "auto", "--budget", "4bpw", "--group", "64"),
    "format gptq cannot mix grids": ("--preset", "auto", "--budget", "5bpw", "--format", "gptq"),
    "'many' is not understood": ("--preset", "auto", "--budget", "many"),
    "the smallest possible is 2561504 bytes": ("--preset", "auto", "--budget", "1MB"),
    "the largest 14833120": ("--preset", "auto", "--budget", "1GB"),
    "--gpu cpu has no use": ("--preset", "auto", "--budget", "fits RTX 3060 12GB at 512", "--gpu", "cpu"),
    "unknown transform 'awk'": ("--preset", "gguf-q4_0", "--transform", "awk"),
    "keeps inputs in 16 bit": ("--preset", "gguf-q4_0", "--transform", "smoothquant"),
    "which scales the inputs": ("--preset", "gguf-q4_0", "--transform", "awq", "--imatrix", "auto"),
    "rounds nothing": ("--preset", "gguf-bf16", "--transform", "awq"),
    "room for all of the model in 16 bit": ("--preset", "auto", "--budget", "fits RTX 3060 12GB at 512"),
    "is chosen for one model and size": ("--recipe", "RECIPE"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_bad_input_is_one_line_and_leaves_nothing(words: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('preset = "auto"\n')
    options = [str(tmp_path / "recipe.toml") if option == "RECIPE" else option for option in REFUSED[words]]
    done = command("quantize", "demo", "-o", tmp_path / "out", *options)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.toml"]


def test_room_for_all_in_16_bit_is_said_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_module, "measure_opened", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(RecipeError, match="room for all of the model in 16 bit"):
        quantry.quantize("demo", "never", preset="auto", budget="fits RTX 3060 12GB at 512")


def test_a_budget_between_two_sizes_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixture_module, "measure_opened", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(RecipeError, match="ask for a size between them"):
        quantry.quantize("demo", "never", preset="auto", budget="2bpw")

"""What layers are predicted to lose: against what they do lose, against the sizes that are written, and on tiny mixtures."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from command import command
from depth import DEEP, cases, sampled
from quantizing.calibration_text import statistics
from quantry.blockwise import walk
from quantry.cli import app
from quantry.errors import CheckpointError, QuantryError, RecipeError, UnknownNameError
from quantry.formats import gguf
from quantry.jobs.auto import damage
from quantry.jobs.auto.choices import LayerChoices
from quantry.jobs.auto.damage import DamageMeter
from quantry.jobs.auto.sensitivity import LayerSensitivity, Sensitivity, sensitivity
from quantry.jobs.auto.solver import solve
from quantry.jobs.quantize import quantize
from quantry.llamacpp.tensor_map import targets
from quantry.methods.rounders import gptq
from quantry.models.reader import demo_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import PlainWeights
from quantry.numerics import ggml
from quantry.numerics.device import arithmetic
from quantry.quantizing.calibration import fisher
from quantry.quantizing.calibration.text import load
from quantry.quantizing.slices import matrix
from shared import recorded, shared
from tiny_models import write_model

GRIDS = ("Q2_K", "Q4_0", "Q6_K")
TEXT: dict[str, Any] = {"samples": 16, "length": 256}
SMALL: dict[str, Any] = {"samples": 4, "length": 64}


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(shared(tmp_path_factory, "sensitivity-cache", lambda folder: None)))
        yield


@pytest.fixture(scope="module")
def demo(_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Sensitivity:
    found: Sensitivity = recorded(
        tmp_path_factory, "sensitivity of the demo", lambda _: sensitivity("demo", grids=GRIDS, **TEXT)
    )
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    write_model(folder, "Qwen3MoeForCausalLM", moe_intermediate_size=64)
    return folder


def ranks(values: list[float]) -> Any:
    return np.argsort(np.argsort(values))


def spearman(one: list[float], other: list[float]) -> float:
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


class Measured:
    """The demo model with one tensor of its GGUF file rounded: the divergence on text that nothing was fitted to."""

    def __init__(self) -> None:
        folder = demo_folder()
        self.source = PlainWeights(open_checkpoint(folder), folder)
        self.tokenizer = load_tokenizer(folder)
        self.model = walk.whole(self.source)
        held = load(folder / "held-out.txt", self.tokenizer, samples=8 if DEEP else 4, length=128)
        self.tokens = torch.tensor(held.tokens)
        made = targets(self.source.config, open_checkpoint(folder).tensors)[0]
        self.targets = {target.name: target for target in made}
        data = load(None, self.tokenizer, **TEXT)
        self.stats = statistics(self.source, data, dtype=arithmetic(torch.device("cpu")))
        self.before = self.predictions()

    @torch.no_grad()
    def predictions(self) -> Tensor:
        logits: Tensor = self.model(input_ids=self.tokens, use_cache=False).logits
        return logits.double().log_softmax(-1)

    def divergence(self, name: str, kind: str) -> float:
        target = self.targets[name]
        (part,) = target.sources
        weight = matrix(self.source.read(part.name), part)
        arranged = gguf.arranged(weight, target)
        if target.name.startswith("blk."):
            index, module = int(name.split(".")[1]), part.name.removesuffix(".weight")
            stats, _ = self.stats.observed(index).by_module()
            data = gptq.round_blocks(arranged, kind, gptq.prepare(stats[module]))
        else:
            data = ggml.quantize(arranged, kind)
        parameter = self.model.get_parameter(part.name)
        original = parameter.data
        parameter.data = gguf.restored(gguf.decode(data, kind, weight.shape[1]), target)
        assert self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        after = self.predictions()
        parameter.data = original
        return float((self.before.exp() * (self.before - after)).sum(-1).mean())


@sampled
def test_predictions_rank_as_measurements_do(demo: Sensitivity) -> None:
    """Twelve linears in three types each, spread over kinds and depths."""
    measured = Measured()
    inside = [layer for layer in demo.layers if layer.block is not None]
    chosen = [inside[9 * number % len(inside)] for number in range(12 if DEEP else 7)]  # 7 in each of 8 blocks
    assert len({layer.part for layer in chosen}) >= 5
    pairs = [pair(layer, kind, measured) for layer in chosen for kind in GRIDS]
    found = spearman(*(list(side) for side in zip(*pairs, strict=True)))
    logs = [float(np.log2(predicted / real)) for predicted, real in pairs]
    print(f"spearman {found:.4f}, log2 of predicted/measured {np.quantile(logs, [0, 0.1, 0.5, 0.9, 1]).round(2)}")
    assert found >= 0.97
    assert abs(float(np.median(logs))) < 1  # not only the order: within a factor of two
    within = [spearman(*(list(side) for side in zip(*pairs[number::3], strict=True))) for number in range(3)]
    print("one type alone:", dict(zip(GRIDS, np.round(within, 3), strict=True)))
    assert min(within) > 0.9  # among layers in one type, which is harder
    embedding = next(
        layer for layer in demo.layers if layer.name == "token_embd.weight"
    )  # tied: it is the head as well
    for kind in GRIDS:
        predicted, real = pair(embedding, kind, measured)
        print(f"embedding as {kind}: {predicted:.3e} predicted, {real:.3e} measured")
        assert 0.7 < predicted / real < 1.4


def pair(layer: LayerSensitivity, kind: str, measured: Measured) -> tuple[float, float]:
    found = layer.candidate(kind)
    assert found is not None
    return found.damage, measured.divergence(layer.name, kind)


def test_more_bits_do_less_damage(demo: Sensitivity) -> None:
    for layer in demo.layers:
        names = [one.name for one in layer.candidates]
        assert sorted(names) == sorted([*GRIDS, "BF16"])
        by_name = {one.name: one for one in layer.candidates}
        order = [by_name[name] for name in (*GRIDS, "BF16")]
        assert [one.bytes for one in order] == sorted(one.bytes for one in order)
        assert [one.damage for one in order] == sorted((one.damage for one in order), reverse=True)
        assert [one.error for one in order] == sorted((one.error for one in order), reverse=True)
        assert by_name["BF16"].damage == 0
        assert layer.outliers is None or layer.outliers >= 1
    assert [demo.compared(layer).damage for layer in demo.ranked()] == sorted(
        (demo.compared(layer).damage for layer in demo.layers), reverse=True
    )


def test_blocks_are_sums_of_layers(demo: Sensitivity) -> None:
    blocks = demo.blocks()
    assert list(blocks) == list(range(8))
    inside = [layer for layer in demo.layers if layer.block == 3]
    for name in (*GRIDS, "BF16"):
        assert blocks[3][name] == pytest.approx(
            sum(c.damage for layer in inside for c in layer.candidates if c.name == name)
        )


def test_all_types_that_rows_allow(mixture: Path) -> None:
    found = sensitivity(mixture, rounder="nearest", **SMALL)
    for layer in found.layers:  # rows of 64 hold blocks of 32, not of 256
        assert {one.name for one in layer.candidates} == {"Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL", "BF16"}
    experts = [layer for layer in found.layers if "_exps" in layer.name]
    assert {layer.part for layer in experts} == {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
    assert {layer.parameters for layer in experts} == {4 * 64 * 64}
    assert any("ffn_gate_inp" in name for name in found.kept)


@pytest.mark.parametrize(("kind", "preset"), [("Q8_0", "gguf-q8_0"), ("BF16", "gguf-bf16")])
def test_sizes_are_those_of_a_gguf_file(kind: str, preset: str, mixture: Path, tmp_path: Path) -> None:
    found = sensitivity(mixture, grids=["q8_0"], rounder="nearest", **SMALL)
    assert uniform(found, kind) == quantize(mixture, tmp_path / "out", preset=preset, dry_run=True).bytes


@pytest.mark.parametrize(
    ("name", "preset", "group"),
    [
        ("w4a16-g32", "w4a16", 32),
        ("w4a16-asym-g64", "w4a16-asym", 64),
        ("w8a16-g32", "w8a16", 32),
        ("fp8-dynamic", "fp8-dynamic", None),
    ],
)
def test_sizes_are_those_of_a_folder(name: str, preset: str, group: int | None, mixture: Path, tmp_path: Path) -> None:
    found = folder_sensitivity(mixture)
    planned = quantize(mixture, tmp_path / "out", preset=preset, group=group, format="compressed-tensors", dry_run=True)
    assert uniform(found, name) == planned.bytes


def uniform(found: Sensitivity, name: str) -> int:
    """The bytes of all tensors if every layer is stored in one way."""
    chosen = [layer.candidate(name) for layer in found.layers]
    return sum(one.bytes for one in chosen if one) + sum(found.kept.values())


_made: dict[Path, Sensitivity] = {}


def folder_sensitivity(folder: Path) -> Sensitivity:
    if folder not in _made:
        _made[folder] = sensitivity(folder, format="compressed-tensors", **SMALL)
    return _made[folder]


def _forget(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Measures anew, and keeps nothing of it."""
    monkeypatch.setenv("QUANTRY_CACHE", str(folder))


def test_layers_of_a_folder_are_what_vllm_runs_as_one(mixture: Path) -> None:
    found = folder_sensitivity(mixture)
    parts = {layer.part for layer in found.layers}
    assert parts == {"self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.experts"}
    ways = {f"{name}-g{group}" for name in ("w4a16", "w4a16-asym", "w8a16") for group in (64, 32)}
    for layer in found.layers:  # 128 divides o_proj alone
        more = {f"{name}-g128" for name in ("w4a16", "w4a16-asym", "w8a16")} if layer.part.endswith("o_proj") else set()
        assert {one.name for one in layer.candidates} == {*ways, *more, "fp8-dynamic", "bf16"}
    experts = next(layer for layer in found.layers if layer.part == "mlp.experts")
    assert experts.parameters == 4 * 3 * 64 * 64
    assert experts.match == ("model.layers.0.mlp.experts.*",)
    rules = {one.name: one.rule for one in experts.candidates}
    assert rules["w4a16-asym-g64"] == {"preset": "w4a16-asym", "group": 64}
    assert rules["fp8-dynamic"] == {"preset": "fp8-dynamic"}
    assert rules["bf16"] == {"keep": True}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"} <= found.kept.keys()


def test_rounding_inputs_counts(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only FP8 comes with rounded inputs, which harm about as much as its weights."""
    found = folder_sensitivity(mixture)
    monkeypatch.setattr("quantry.jobs.auto.choices.FP8_NOISE", 0.0)
    _forget(monkeypatch, tmp_path)
    without = sensitivity(mixture, format="compressed-tensors", **SMALL)
    for one, other in zip(found.layers, without.layers, strict=True):
        for way, plain in zip(one.candidates, other.candidates, strict=True):
            assert (way.damage > 1.2 * plain.damage) if way.name == "fp8-dynamic" else way == plain


def test_parts_of_a_stack(tmp_path: Path) -> None:
    """Gate and up are halves of one tensor, and each has its own rows of gradients."""
    write_model(tmp_path, "GraniteMoeForCausalLM")
    found = sensitivity(tmp_path, rounder="nearest", grids=["q4_0"], **SMALL)
    harm = {layer.name: layer.candidates[0].damage for layer in found.layers if "_exps" in layer.name}
    assert len(harm) == len(set(harm.values())) == 6
    assert min(harm.values()) > 0


def test_a_budget_chooses_from_it(demo: Sensitivity) -> None:
    items = demo.items()
    smallest = sum(min(option.bytes for option in item.options) for item in items)
    largest = sum(max(option.bytes for option in item.options) for item in items)
    assert largest == uniform(demo, "BF16")
    budget = (smallest + largest) // 2
    found = solve(items, budget)
    assert found.bytes <= budget
    assert set(found.chosen) == {layer.name for layer in demo.layers} | set(demo.kept)
    assert found.damage < sum(demo.blocks()[block]["Q2_K"] for block in range(8))


def test_json_goes_both_ways(demo: Sensitivity) -> None:
    again = Sensitivity.from_dict(json.loads(json.dumps(demo.to_dict())))
    assert again == demo
    assert again.items() == demo.items()


def test_the_same_again(demo: Sensitivity) -> None:
    """From the store this time, and with another progress."""
    told: list[tuple[int, int]] = []
    again = sensitivity(
        "demo",
        grids=[name.lower() for name in GRIDS],
        **TEXT,
        progress=lambda done, total, _: told.append((done, total)),
    )
    assert again == demo
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]


def test_an_expert_counts_by_its_tokens(mixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no gradient came to any expert, storing them would cost nothing."""
    original = fisher.fisher

    def silent(*args: Any, **how: Any) -> Any:
        found = original(*args, **how)
        return replace(found, outputs={name: rows * (".experts." not in name) for name, rows in found.outputs.items()})

    before = folder_sensitivity(mixture)
    monkeypatch.setattr(fisher, "fisher", silent)
    _forget(monkeypatch, tmp_path)
    after = sensitivity(mixture, format="compressed-tensors", **SMALL)
    for one, other in zip(before.layers, after.layers, strict=True):
        if one.part == "mlp.experts":
            assert all(way.damage == 0 for way in other.candidates)
            assert all(way.damage > 0 for way in one.candidates if way.name != "bf16")
        else:
            assert one == other


@sampled
def test_some_rows_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damage of a sample, multiplied, is within a few per cent of that of the whole layer."""
    _forget(monkeypatch, tmp_path)
    monkeypatch.setattr(damage, "ROWS", 64)
    monkeypatch.setattr("quantry.jobs.auto.sensitivity.ROWS", 64)
    text: dict[str, Any] = TEXT if DEEP else {"samples": 8, "length": 64}
    some = sensitivity("demo", grids=GRIDS[:1], **text)
    monkeypatch.setattr(damage, "ROWS", 1 << 30)
    monkeypatch.setattr("quantry.jobs.auto.sensitivity.ROWS", 1 << 30)
    whole = sensitivity("demo", grids=GRIDS[:1], **text)
    ratios = [
        one.damage / other.damage
        for layer, all_rows in zip(some.layers, whole.layers, strict=True)
        for one, other in zip(layer.candidates, all_rows.candidates, strict=True)
        if other.damage > 1e-9
    ]
    assert len(ratios) > 50
    assert all(0.7 < ratio < 1.4 for ratio in ratios), (min(ratios), max(ratios))
    assert 0.97 < sum(ratios) / len(ratios) < 1.03
    assert any(ratio != 1 for ratio in ratios)


ARCHITECTURES = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Phi3ForCausalLM")


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ARCHITECTURES[1:2]))
def test_a_transform_changes_no_damage(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same error of the function costs the same, in whatever numbers the block is written."""
    write_model(tmp_path / "model", architecture)
    seen: list[tuple[Sequence[LayerChoices], DamageMeter]] = []
    real = DamageMeter.measure

    def measured(meter: DamageMeter, layers: Sequence[LayerChoices]) -> Any:
        seen.append((layers, meter))
        return real(meter, layers)

    monkeypatch.setattr(DamageMeter, "measure", measured)
    for transform in (None, "awq"):
        sensitivity(tmp_path / "model", format="compressed-tensors", transform=transform, grids=["bf16"], **SMALL)
    (layers, plain), (_, moved) = seen
    rows_moved = 0
    for layer in layers:
        for meter in (plain, moved):
            meter.enter(layer.block)
        for part in layer.slices:
            before, after = plain.weight(part).float(), moved.weight(part).float()
            ratio = after / torch.where(before == 0, 1.0, before)
            error = torch.randn(before.shape, generator=torch.Generator().manual_seed(0)) * 1e-2
            wanted = plain.damage(layer, part, error, slice(None))
            assert moved.damage(layer, part, error * ratio, slice(None)) == pytest.approx(wanted, rel=2e-2)
            rows_moved += bool(((ratio / ratio[:1]).median(dim=1).values - 1).abs().max() > 0.05)
    assert rows_moved >= 2


# ---- bad input and the command ----


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"format": "awq"}, UnknownNameError, "awq"),
        ({"rounder": "best"}, UnknownNameError, "best"),
        ({"device": "abacus"}, RecipeError, "abacus"),
        ({"grids": ["q9_k"]}, UnknownNameError, "q9_k"),
        ({"samples": 0}, QuantryError, "0 samples"),
    ],
)
def test_bad_options(options: dict[str, Any], kind: type[QuantryError], words: str) -> None:
    with pytest.raises(kind, match=words) as error:
        sensitivity("demo", **options)
    assert "\n" not in str(error.value)


def test_models_that_are_quantized_are_refused(gguf_file: Path, make_folder: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="is a GGUF file"):
        sensitivity(gguf_file)
    folder = make_folder()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        sensitivity(folder)


def test_the_command(demo: Sensitivity) -> None:
    words = ["sensitivity", "demo", "--grids", ",".join(GRIDS), "--samples", "16", "--length", "256"]
    shown = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert shown.exit_code == 0
    worst = demo.ranked()[0]
    assert worst.name in shown.output
    assert "█" * 24 in shown.output
    assert "more layers" in shown.output
    plain = CliRunner().invoke(app, [*words, "--json"])
    assert Sensitivity.from_dict(json.loads(plain.output)) == demo


def test_errors_of_the_command_are_one_line() -> None:
    done = command("sensitivity", "demo", "--format", "awq")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: unknown format 'awq'")

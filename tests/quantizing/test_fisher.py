"""The Fisher information of a model's outputs, held against plain autograd on the whole model in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from quantry.blockwise.walk import Walk
from quantry.jobs.auto.choices import FP8_NOISE
from quantry.models.reader import open_checkpoint
from quantry.models.weights import PlainWeights
from quantry.numerics.activations import simulate
from quantry.quantizing.calibration import fisher as module
from quantry.quantizing.calibration.fisher import (
    Fisher,
    damage,
    draw,
    embedding_damage,
    fisher,
    input_damage,
    load_or_compute,
)
from quantry.quantizing.calibration.store import Store
from quantry.types import Activation, Grid
from tiny_models import write_model

SEED = 3
LENGTHS = (40, 24, 40, 40, 24)
KINDS = (
    "LlamaForCausalLM",
    "MixtralForCausalLM",  # experts one by one in the checkpoint
    "Qwen3MoeForCausalLM",
    "Gemma2ForCausalLM",  # scaled embedding, bent logits, tied
    "Gemma3ForCausalLM",  # scaled embedding, norms of queries and keys
    "Phi3ForCausalLM",  # fused q/k/v
    "GraniteForCausalLM",  # multipliers everywhere
    "GraniteMoeForCausalLM",  # stacks of experts in the checkpoint
)


def windows(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, (length,), generator=generator).tolist() for length in lengths]


def walk(folder: Path, **how: Any) -> Walk:
    return Walk(PlainWeights(open_checkpoint(folder), folder), **{"batch": 2, **how})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM")
    return folder


@pytest.fixture(scope="module")
def found(llama: Path) -> Fisher:
    return fisher(walk(llama), windows(), seed=SEED)


class Noted:
    """Inputs and outputs of all linear layers of a whole model, by the name transformers gives them; and embeddings."""

    def __init__(self, model: Any) -> None:
        self.linear: list[tuple[str, Tensor, Tensor]] = []
        self.rows: list[Tensor] = []
        self._places: dict[int, str] = {}
        for name, weight in model.named_parameters():
            stem = name.removesuffix(".weight")
            for index, one in enumerate(weight if weight.ndim == 3 else [weight]):
                self._places.setdefault(one.data_ptr(), f"{stem}.{index}" if weight.ndim == 3 else stem)
        self._head = model.get_output_embeddings().weight.data_ptr()

    @contextmanager
    def watching(self) -> Iterator[None]:
        linear, embedding = nn.functional.linear, nn.functional.embedding

        def linear_noted(inputs: Tensor, weight: Tensor, *others: Any, **more: Any) -> Tensor:
            output = linear(inputs, weight, *others, **more)
            output.retain_grad()
            name = "head" if weight.data_ptr() == self._head else self._places[weight.data_ptr()]
            self.linear.append((name, inputs, output))
            return output

        def embedding_noted(*args: Any, **more: Any) -> Tensor:
            output = embedding(*args, **more)
            output.retain_grad()
            self.rows.append(output)
            return output

        nn.functional.linear = torch.nn.functional.linear = linear_noted  # type: ignore[assignment]
        nn.functional.embedding = torch.nn.functional.embedding = embedding_noted
        try:
            yield
        finally:
            nn.functional.linear = torch.nn.functional.linear = linear
            nn.functional.embedding = torch.nn.functional.embedding = embedding


def drawn(probabilities: Tensor, seed: int) -> list[int]:
    """A token for each position: the first at which the summed probabilities exceed a uniform number."""
    uniform = torch.rand(len(probabilities), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens = []
    for row, chance in zip(probabilities.double().tolist(), uniform.tolist(), strict=True):
        total, whole = 0.0, sum(row)
        for token, share in enumerate(row):
            total += share
            if total > chance * whole:
                tokens.append(token)
                break
    return tokens


def slope(kind: str, outputs: Tensor, config: Any) -> Tensor:
    """By how much a logit moves when the head's output does."""
    if kind.startswith("Granite"):
        return torch.full_like(outputs, 1 / config.logits_scaling)
    if kind.startswith("Gemma2"):
        return 1 - (outputs / float(config.final_logit_softcapping)).tanh().square()
    return torch.ones_like(outputs)


def plainly(folder: Path, kind: str) -> dict[str, Tensor]:
    """Sums over all tokens from the whole model, in float64, divided by the number of tokens."""
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    model.eval().requires_grad_(True)
    sums: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        sums[name] = sums[name] + value if name in sums else value

    texts = windows()
    for index, tokens in enumerate(texts):
        noted = Noted(model)
        with noted.watching():
            logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        logp = logits.log_softmax(-1)
        chosen = drawn(logits.detach().float().softmax(-1), SEED * module.WINDOWS + index)
        sum(logp[place, token] for place, token in enumerate(chosen)).backward()
        for name, inputs, output in noted.linear:
            rows = inputs.detach().reshape(-1, inputs.shape[-1])
            if name == "head":
                share = logp.detach().exp()
                bend = slope(kind, output.detach()[0], model.config)
                add("head", (share * (1 - share) * bend.square()).sum(0))
                add("gram", rows.T @ rows)
            elif output.grad is not None:
                add(name, output.grad.reshape(-1, output.shape[-1]).square().sum(0))
        (looked_up,) = noted.rows
        assert looked_up.grad is not None
        summed = torch.zeros(model.config.get_text_config().vocab_size, looked_up.shape[-1], dtype=torch.float64)
        for token, gradient in zip(tokens, looked_up.grad[0], strict=True):
            summed[token] += gradient  # a token that comes again has the same row
        add("embedding", summed.square())
    return {name: value / sum(map(len, texts)) for name, value in sums.items()}


def places(name: str) -> list[tuple[str, int | None]]:
    """Where transformers may keep a module of the checkpoint, and which half of the rows it has there."""
    parts = name.split(".")
    made: list[tuple[str, int | None]] = [(name, None)]
    if "experts" in parts:
        at = parts.index("experts")
        stem, number, leaf = ".".join(parts[:at]).replace("block_sparse_moe", "mlp"), parts[at + 1], parts[at + 2]
        down = leaf in ("w2", "down_proj")
        half = None if down else int(leaf in ("w3", "up_proj"))
        made.append((f"{stem}.experts.{'down_proj' if down else 'gate_up_proj'}.{number}", half))
    swaps = (("block_sparse_moe.gate", "mlp.gate"), ("router.layer", "router"))
    swaps += (("input_linear", "experts.gate_up_proj"), ("output_linear", "experts.down_proj"))  # type: ignore[assignment]
    return made + [(name.replace(*swap), None) for swap in swaps]


def same(given: Tensor, expected: Tensor) -> None:
    assert given.dtype == torch.float32
    assert given.shape == expected.shape
    assert float((given.double() - expected).norm() / expected.norm()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_against_autograd_on_the_whole_model(kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, kind)
    expected = plainly(tmp_path, kind)
    made = fisher(walk(tmp_path, dtype=torch.float64), windows(), seed=SEED)
    assert made.tokens == sum(LENGTHS)
    reached = 0
    for name, rows in made.outputs.items():
        place = next(((one, half) for one, half in places(name) if one in expected), None)
        if place is None:  # an expert without tokens
            assert "expert" in name or "linear" in name
            assert not rows.any()
            continue
        whole, half = expected[place[0]], place[1]
        same(rows, whole if half is None else whole.chunk(2)[half])
        reached += 1
    linears = [name for name in expected if name not in ("head", "gram", "embedding")]
    assert reached >= len(linears) > 4
    same(made.head, expected["head"])
    same(made.gram, expected["gram"])
    assert made.seen.tolist() == sorted({token for window in windows() for token in window})
    same(made.embedding, expected["embedding"][made.seen])


def assert_equal(one: Fisher, other: Fisher, tolerance: float = 0.0) -> None:
    assert one.tokens == other.tokens
    assert one.outputs.keys() == other.outputs.keys()
    for name, rows in one.outputs.items():
        torch.testing.assert_close(rows, other.outputs[name], rtol=tolerance, atol=tolerance * float(rows.max()))
    for part in fields(Fisher):
        if part.name not in ("tokens", "outputs"):
            mine, theirs = getattr(one, part.name).float(), getattr(other, part.name).float()
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * float(mine.max()))


def test_batches_and_files_do_not_matter(llama: Path, found: Fisher, tmp_path: Path) -> None:
    assert_equal(found, fisher(walk(llama), windows(), seed=SEED))
    assert_equal(found, fisher(walk(llama, memory=0, scratch=tmp_path), windows(), seed=SEED))
    assert list(tmp_path.iterdir()) == []
    assert_equal(found, fisher(walk(llama, batch=1), windows(), seed=SEED), 1e-3)


def test_seeds_and_draws(llama: Path, found: Fisher) -> None:
    other = fisher(walk(llama), windows(), seed=SEED + 1)
    name = next(iter(found.outputs))
    assert not torch.allclose(found.outputs[name], other.outputs[name], rtol=1e-2)
    torch.testing.assert_close(found.head, other.head)  # nothing is drawn for it
    twice = fisher(walk(llama), windows(), seed=SEED, draws=2)
    assert twice.tokens == 2 * found.tokens
    torch.testing.assert_close(twice.head, found.head, rtol=1e-4, atol=1e-9)
    assert torch.equal(twice.seen, found.seen)
    assert not torch.allclose(twice.outputs[name], found.outputs[name], rtol=1e-2)


def test_progress_counts_every_block_twice(llama: Path) -> None:
    told: list[tuple[int, int, str]] = []
    fisher(walk(llama), windows((24,)), progress=lambda *step: told.append(step))
    assert [done for done, _, _ in told] == list(range(5))
    assert {total for _, total, _ in told} == {5}


def test_tokens_are_drawn_by_their_probability() -> None:
    shares = torch.tensor([0.0, 0.5, 0.0, 0.2, 0.3, 0.0])
    many = draw(shares.expand(20_000, 6), 0)
    counts = torch.bincount(many, minlength=6) / 20_000
    assert counts[[0, 2, 5]].tolist() == [0, 0, 0]
    torch.testing.assert_close(counts, shares, atol=0.015, rtol=0)
    assert torch.equal(many, draw(shares.expand(20_000, 6), 0))
    assert not torch.equal(many, draw(shares.expand(20_000, 6), 1))


@pytest.mark.parametrize(("chance", "token"), [(0.0, 1), (0.25, 1), (0.5, 3), (1 - 2**-53, 4)])
def test_no_chance_draws_an_impossible_token(chance: float, token: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.full((count,), chance, dtype=torch.float64))
    assert draw(torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.25, 0.0]]), 0).tolist() == [token]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("chunk", [1, 60, 1 << 24])
def test_damage_is_the_explicit_sum(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    error, inputs, rows = random(7, 12), random(50, 12, seed=1), random(7, seed=2).square()
    gram = inputs.T @ inputs / 50
    expected = 0.0
    for row in range(7):
        for one in range(12):
            for other in range(12):
                expected += 0.5 * float(rows[row]) * float(error[row, one] * gram[one, other] * error[row, other])
    assert damage(error, rows, gram) == pytest.approx(expected, rel=1e-5)
    assert damage(torch.zeros(7, 12), rows, gram) == 0

    seen, information = torch.tensor([0, 2, 6]), random(3, 12, seed=3).square()
    plain = sum(
        0.5 * float(information[place, column] * error[row, column] ** 2)
        for place, row in enumerate(seen.tolist())
        for column in range(12)
    )
    assert embedding_damage(error, seen, information) == pytest.approx(plain, rel=1e-5)
    power = sum(
        0.05 * float(rows[row] * error[row, column] ** 2 * gram[column, column])
        for row in range(7)
        for column in range(12)
    )
    assert input_damage(error, rows, gram, 0.1) == pytest.approx(power, rel=1e-5)


def test_rounded_inputs_do_the_damage_that_is_predicted() -> None:
    inputs, weight, rows = random(2000, 64), random(32, 64, seed=1), random(32, seed=2).square()
    moved = (simulate(inputs, Activation(Grid("e4m3", 8, (1, 0)))) - inputs) @ weight.T
    measured = 0.5 * float((rows * moved.square().mean(0)).sum())
    assert input_damage(weight, rows, inputs.T @ inputs / 2000, FP8_NOISE) == pytest.approx(measured, rel=0.1)


def test_small_errors_do_the_damage_that_is_predicted(llama: Path) -> None:
    """The divergence of the model's predictions in float64, for a random error in each linear of the last block."""
    texts = windows((100,) * 6)
    found = fisher(walk(llama, batch=4, dtype=torch.float64), texts, draws=4)
    model = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.float64).eval()
    ratios = {}
    for number, name in enumerate(sorted(name for name in found.outputs if ".layers.1." in name)):
        layer = model.get_submodule(name)
        inputs: list[Tensor] = []
        handle = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0][0]))  # noqa: B023
        before = predictions(model, texts)
        handle.remove()
        seen = torch.cat(inputs)
        error = 0.01 * layer.weight.detach().std() * random(*layer.weight.shape, seed=number).double()
        layer.weight.data += error
        after = predictions(model, texts)
        layer.weight.data -= error
        measured = float((before.exp() * (before - after)).sum(-1).mean())
        gram = (seen.T @ seen / len(seen)).float()
        ratios[name.rpartition(".")[2]] = damage(error.float(), found.outputs[name], gram) / measured
    values = ratios.pop("v_proj")  # random attention averages all tokens, and of their errors what is alike remains
    assert 0.2 < values < 1
    assert all(0.6 < ratio < 1.6 for ratio in ratios.values()), ratios


@pytest.mark.parametrize("kind", ["Gemma3ForCausalLM", "LlamaForCausalLM"])
def test_small_errors_of_a_tied_embedding(kind: str, tmp_path: Path) -> None:
    """Used as an embedding and as the head at once. Tokens come again, with the same error: alone they would do 0.6."""
    write_model(tmp_path, kind, tie_word_embeddings=True)
    draws = torch.rand(6, 79, generator=torch.Generator().manual_seed(1))
    texts = [[2, *window] for window in (draws**10 * 240 + 3).long().tolist()]
    found = fisher(walk(tmp_path, batch=6, dtype=torch.float64), texts, draws=12)
    model = getattr(transformers, kind).from_pretrained(tmp_path, dtype=torch.float64).eval()
    weight = model.get_input_embeddings().weight
    assert weight is model.get_output_embeddings().weight
    before, measured, predicted = predictions(model, texts), 0.0, 0.0
    for seed in range(12):
        error = 1e-3 * weight.detach().std() * random(*weight.shape, seed=seed).double()
        weight.data += error
        after = predictions(model, texts)
        weight.data -= error
        measured += float((before.exp() * (before - after)).sum(-1).mean())
        predicted += damage(error.float(), found.head, found.gram)
        predicted += embedding_damage(error.float(), found.seen, found.embedding)
    assert 0.85 < predicted / measured < 1.15


@torch.no_grad()
def predictions(model: Any, texts: list[list[int]]) -> Tensor:
    many = [model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in texts]
    return torch.cat(many).log_softmax(-1)


def test_the_store(found: Fisher, tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> Fisher:
        calls.append(1)
        return found

    store = Store(tmp_path / "store")
    assert_equal(found, load_or_compute(store, "key", compute))
    assert_equal(found, load_or_compute(store, "key", compute))
    assert len(calls) == 1
    (file,) = (tmp_path / "store" / "key").iterdir()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert_equal(found, load_or_compute(store, "key", compute))
    assert len(calls) == 2
    assert_equal(found, load_or_compute(store, "key", compute))
    assert len(calls) == 2
    load_or_compute(None, "key", compute)
    load_or_compute(Store(tmp_path / "none", budget=10), "key", compute)
    load_or_compute(Store(tmp_path / "none", budget=10), "key", compute)
    assert len(calls) == 5

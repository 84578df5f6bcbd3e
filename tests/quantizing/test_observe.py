"""What calibration sees of a block, held against plain restatements in float64 and against transformers' own model."""

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from depth import FAMILIES, cases
from linear_inputs import WINDOWS, Folder, candidates, inputs_of
from quantry.blockwise.taps import LinearInputs
from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError, WeightError
from quantry.models.linears import fused_name, linears
from quantry.models.reader import demo_folder
from quantry.quantizing.calibration.observe import FINE, InputSums, ObservedBlock, add_gram, attention, collect
from quantry.quantizing.calibration.statistics import BINS, merge
from quantry.types import Stats
from tiny_models import ARCHITECTURES, write_model

MIXTURES = tuple(
    name for name, tiny in ARCHITECTURES.items() if "moe" in tiny.model_type or "mixtral" in tiny.model_type
)


@pytest.fixture(scope="module", params=cases(ARCHITECTURES, FAMILIES))
def model(request: Any, tmp_path_factory: Any) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    kind = getattr(transformers, request.param)
    return folder, kind.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()


def observe(source: Folder, windows: list[list[int]] = WINDOWS, **how: Any) -> Iterator[ObservedBlock]:
    for block in Walk(source, batch=2).blocks(windows):
        yield collect(block, **how)


def check(stats: Stats, rows: Tensor) -> None:
    """Statistics against the rows they stand for, in float64."""
    scale = float(rows.abs().max())
    assert stats.tokens == len(rows)
    assert stats.gram.dtype == torch.float32
    assert torch.equal(stats.gram, stats.gram.T)
    assert torch.equal(stats.mean_square, stats.gram.diagonal())
    for given, expected, size in (
        (stats.gram, rows.T @ rows / len(rows), scale**2),
        (stats.absmax, rows.abs().amax(0), scale),
        (stats.mean_abs, rows.abs().mean(0), scale),
    ):
        torch.testing.assert_close(given.double(), expected, rtol=2e-5, atol=2e-5 * size)


def test_every_architecture_against_its_whole_model(model: tuple[Path, Any]) -> None:
    folder, whole = model
    expected = inputs_of(whole)
    for block in observe(Folder(folder), histogram=True):
        assert block.groups
        for module, group in block.groups.items():
            rows = next((expected[name] for name in candidates(module) if name in expected), None)
            if group not in block.stats:
                assert rows is None, module
                continue
            assert rows is not None, module
            check(block.stats[group], rows)
            check_histogram(block.stats[group], rows)


def check_histogram(stats: Stats, rows: Tensor, noise: float = 1e-4) -> None:
    """At every edge, as many values lie below as in the data, but for those within half a fine bin of it, and noise."""
    assert stats.histogram is not None
    values, top = rows.abs().flatten().sort().values, float(rows.abs().max())
    slack = (1 / FINE + noise) * top  # the range may be twice the largest value
    edges = torch.arange(1, BINS, dtype=torch.float64) * (top / BINS)
    below = stats.histogram.cumsum(0)[:-1]
    assert int(stats.histogram.sum()) == rows.numel()
    assert bool((below >= torch.searchsorted(values, edges - slack)).all())
    assert bool((below <= torch.searchsorted(values, edges + slack, right=True)).all())


def test_modules_are_those_that_can_be_quantized(model: tuple[Path, Any]) -> None:
    folder, _ = model
    source = Folder(folder)
    known = {linear.module: linear for linear in linears(source.checkpoint, 1 << 10)}
    groups = {module: group for block in observe(source) for module, group in block.groups.items()}
    assert known.keys() <= groups.keys()
    for module in known:  # what engines fuse has one input
        fused = [other for other in known if fused_name(other) == fused_name(module)]
        assert {groups[other] for other in fused} == {groups[module]}


def test_groups_hold_exactly_what_shares_an_input(model: tuple[Path, Any]) -> None:
    folder, _ = model
    block = next(observe(Folder(folder)))
    leaves: dict[str, set[str]] = {}
    for module, group in block.groups.items():
        leaves.setdefault(group, set()).add(module.rpartition(".")[2])
    together = [names for names in leaves.values() if len(names) > 1]
    allowed = (
        {"q_proj", "k_proj", "v_proj"},
        {"gate_proj", "up_proj"},
        {"w1", "w3"},
        {"gate", "gate_proj", "up_proj", "shared_expert_gate"},
        {"layer", "input_linear"},  # Granite's router and its shared expert
    )
    assert all(names in allowed for names in together)
    assert len(
        {block.groups[module] for module in block.groups if module.endswith(("o_proj", "down_proj", "w2"))}
    ) == sum(module.endswith(("o_proj", "down_proj", "w2")) for module in block.groups)


@pytest.mark.parametrize("architecture", MIXTURES)
def test_experts_see_the_tokens_routed_to_them(architecture: str, tmp_path: Path) -> None:
    write_model(tmp_path, architecture)
    tokens = sum(map(len, WINDOWS))
    for block in observe(Folder(tmp_path)):
        counts = block.tokens()
        assert len(counts) == 2
        assert all(len(pool) == 4 and sum(pool.values()) == 2 * tokens for pool in counts.values())


def test_the_mixed_statistics_of_experts_are_those_of_all_tokens(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3MoeForCausalLM")
    block = next(observe(Folder(tmp_path), histogram=True))
    pool = next(pool for pool in block.tokens().values() if any("gate" in group for group in pool))
    mixed = merge(block.stats[group] for group in pool)
    router = block.stats[block.groups["model.layers.0.mlp.gate"]]  # sees every token once, experts every token twice
    assert mixed.tokens == 2 * router.tokens
    torch.testing.assert_close(mixed.gram, router.gram, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mixed.mean_abs, router.mean_abs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mixed.absmax, router.absmax)
    assert mixed.histogram is not None
    assert router.histogram is not None
    drift = (mixed.histogram.cumsum(0) - 2 * router.histogram.cumsum(0)).abs()
    assert int(drift.max()) <= 2 * int(router.histogram.max())  # a bin more or less


def test_starved_experts_borrow_and_others_do_not(tmp_path: Path) -> None:
    write_model(tmp_path, "MixtralForCausalLM")
    block = next(observe(Folder(tmp_path), WINDOWS[:1]))
    counts = {group: tokens for pool in block.tokens().values() for group, tokens in pool.items()}
    least = max(counts.values())  # which itself is enough
    stats, starved = block.by_module(least)
    assert set(starved) == {group for group, tokens in counts.items() if tokens < least}
    assert 0 < len(starved) < len(counts)
    for group in block.stats.keys() - set(starved):
        assert stats[group] is block.stats[group]
    for group in starved:
        assert stats[group].tokens == 2 * len(WINDOWS[0])


def test_an_expert_without_tokens_is_covered(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen3MoeForCausalLM", num_experts=16)
    block = next(observe(Folder(tmp_path), [WINDOWS[0][:4]]))
    missing = set(block.pools) - set(block.stats)
    assert missing
    stats, starved = block.by_module(1)
    assert missing == set(starved)
    assert all(stats[group].tokens == 8 for group in missing)


def test_heads_against_the_models_own_cache(model: tuple[Path, Any]) -> None:
    folder, whole = model
    with torch.no_grad():
        caches = [whole(input_ids=torch.tensor([window]), use_cache=True).past_key_values for window in WINDOWS]
    for block in Walk(Folder(folder), batch=2).blocks(WINDOWS):
        heads = attention(block)
        again = collect(block).heads
        assert heads is not None
        assert again is not None
        for given, other, what in ((heads.keys, again.keys, "keys"), (heads.values, again.values, "values")):
            layers = [getattr(cache.layers[block.index], what) for cache in caches]
            expected = torch.stack([layer.abs().amax((0, 2, 3)) for layer in layers]).amax(0)
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(given, other)


def test_collecting_hands_on_the_same_hidden_states(tmp_path: Path) -> None:
    write_model(tmp_path, "Qwen2MoeForCausalLM")
    plain, watched = Walk(Folder(tmp_path)), Walk(Folder(tmp_path))
    for _ in plain.blocks(WINDOWS):
        pass
    for block in watched.blocks(WINDOWS):
        first = collect(block, advance=False)
        second = collect(block)
        assert all(torch.equal(first.stats[group].gram, second.stats[group].gram) for group in first.stats)
    for (_, one), (_, other) in zip(plain.logits(), watched.logits(), strict=True):
        assert torch.equal(one, other)


def test_inputs_are_let_go_after_each_batch(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM")
    blocks = Walk(Folder(tmp_path), batch=1).blocks(WINDOWS)
    block = next(blocks)
    inputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def seen(name: str, expert: int | None, given: Tensor) -> None:
        if name.endswith("q_proj"):  # the first of a batch
            alive.append(sum(one() is not None for one in inputs))
            inputs.clear()
        inputs.append(weakref.ref(given))

    with LinearInputs(block.module, block.name, seen):
        collect(block)
    assert alive == [0] * len(WINDOWS)


@pytest.mark.parametrize("channels", [1, 191, 192, 193, 500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_panels_give_the_whole_upper_triangle(channels: int, dtype: torch.dtype) -> None:
    gram, total = torch.zeros(channels, channels), torch.zeros(channels, channels, dtype=torch.float64)
    for seed in range(3):
        rows = torch.randn(300, channels, generator=torch.Generator().manual_seed(seed)).to(dtype)
        add_gram(gram, rows)
        total += rows.double().T @ rows.double()
    error = (gram.double() - total).triu().abs().max() / total.abs().max()
    assert error < 4e-6  # a product rounded to bfloat16 would be off by 2e-3


def test_the_gram_matrix_of_few_tokens_has_a_cholesky_factor_with_damping() -> None:
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 2, 256)
    gram = torch.zeros(256, 256)
    add_gram(gram, rows)
    whole = gram.triu() + gram.triu(1).T
    torch.linalg.cholesky(whole + 0.01 * whole.diagonal().mean() * torch.eye(256))


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1.0, 37.0, 2.0), (0.0, 3.0), (1e-6, 1e4)])
def test_a_histogram_whose_range_grows(scales: tuple[float, ...]) -> None:
    sums = InputSums(7, torch.device("cpu"), True)
    parts = []
    for seed, scale in enumerate(scales):
        parts.append(torch.randn(500, 7, generator=torch.Generator().manual_seed(seed)) * scale)
        sums.add(parts[-1], "layer")
    check_histogram(sums.finish(), torch.cat(parts).double(), noise=1e-6)


def test_a_silent_input_has_its_histogram_at_zero() -> None:
    sums = InputSums(4, torch.device("cpu"), True)
    sums.add(torch.zeros(10, 4), "layer")
    histogram = sums.finish().histogram
    assert histogram is not None
    assert int(histogram[0]) == int(histogram.sum()) == 40


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_name_the_layer_and_the_cause(value: float, tmp_path: Path) -> None:
    source = Overflowing(write_demo_like(tmp_path), value)
    with pytest.raises(WeightError, match=r"model\.layers\.0\.self_attn\.q_proj.*float32.*check the weights"):
        list(observe(source))
    rows = torch.tensor([[1.0, value]], dtype=torch.float16)
    with pytest.raises(WeightError, match=r"layer .*float16, likely an overflow; compute in bfloat16"):
        InputSums(2, torch.device("cpu"), False).add(rows, "layer")


class Overflowing(Folder):
    """A model whose first norm gives values that are not finite."""

    def __init__(self, folder: Path, value: float) -> None:
        super().__init__(folder)
        self._value = value

    def read(self, name: str) -> Tensor:
        found = super().read(name)
        return torch.full_like(found, self._value) if name == "model.layers.0.input_layernorm.weight" else found


def write_demo_like(folder: Path) -> Path:
    write_model(folder, "LlamaForCausalLM")
    return folder


def test_a_layer_that_is_never_called_is_an_error(tmp_path: Path) -> None:
    write_model(tmp_path, "LlamaForCausalLM")
    blocks = Walk(Folder(tmp_path)).blocks(WINDOWS)  # held: without it the weights go
    block = next(blocks)
    layer: Any = block.module
    layer.mlp.down_proj.forward = lambda inputs: inputs @ layer.mlp.down_proj.weight.T
    with pytest.raises(QuantryError, match=r"the input of model\.layers\.0\.mlp\.down_proj is not seen"):
        collect(block, advance=False)


def test_16_bit_arithmetic_changes_the_gram_matrix_little() -> None:
    source = Folder(demo_folder())
    windows = [
        torch.randint(3, 4000, (128,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(4)
    ]
    blocks = [Walk(source, dtype=dtype).blocks(windows) for dtype in (torch.float32, torch.bfloat16)]
    for exact, half in zip(
        collect(next(blocks[0])).stats.values(), collect(next(blocks[1])).stats.values(), strict=True
    ):
        assert half.gram.dtype == torch.float32
        assert float((half.gram - exact.gram).norm() / exact.gram.norm()) < 0.01

"""AWQ: its loss against the outputs themselves, its scales against the published formula, and what it gains."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quantry.errors import WeightError
from quantry.methods.fits import absmax, clip
from quantry.methods.transforms import _scaling, awq
from quantry.models.smoothing import Pair, Slot
from quantry.numerics.grids import decode, encode
from quantry.types import Grid, Scheme, Stats

SYMMETRIC = Scheme(Grid("int", 4, (1, 16)))
AFFINE = Scheme(Grid("int", 4, (1, 16), symmetric=False))
GRIDS = {
    "group": Grid("int", 4, (1, 16)),
    "zero points": Grid("int", 4, (1, 16), symmetric=False),
    "channel": Grid("int", 8, (1, 0)),
    "tensor": Grid("e4m3", 8, (0, 0)),
    "blocks": Grid("e4m3", 8, (8, 32)),
    "mxfp4": Grid("e2m1", 4, (1, 32), scale="e8m0"),
    "nvfp4": Grid("e2m1", 4, (1, 16), scale="e4m3"),
    "odd": Grid("int", 4, (1, 40)),
}
DENSE = Pair("norm", "norm", (Slot("norm", "norm"),), (Slot("q", "q"), Slot("k", "k"), Slot("router", "router")), 64)
GROUPED = Pair("v", "rows", (Slot("v", "v"), Slot("v", "v.bias")), (Slot("o", "o"),), 32, heads=4, repeats=2)


def inputs(channels: int = 64, tokens: int = 300, seed: int = 0) -> Tensor:
    """Channels that move together; a few of them are large."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 8, generator=generator) @ torch.randn(8, channels, generator=generator)
    x = 0.3 * x + torch.randn(tokens, channels, generator=generator)
    return x * torch.exp(1.5 * torch.randn(channels, generator=generator))


def stats_of(x: Tensor) -> Stats:
    x = x.double()
    gram = (x.T @ x / len(x)).float()
    return Stats(len(x), gram, x.abs().amax(0).float(), x.abs().mean(0).float(), x.square().mean(0).float())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain_rounding(weight: Tensor, grid: Grid) -> Tensor:
    """Rounding to nearest in float64, group by group, with scales in bfloat16."""
    made = torch.empty_like(weight, dtype=torch.float64)
    for row in range(weight.shape[0]):
        for left in range(0, weight.shape[1], grid.block[1]):
            group = weight[row, left : left + grid.block[1]].double()
            low, high = -(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1) - 1
            if grid.symmetric:
                scale, zero = (group.abs().max() / (2**grid.bits - 1) * 2).float().bfloat16().double(), 0.0
            else:
                bottom, top = group.min().clamp(max=0), group.max().clamp(min=0)
                scale = ((top - bottom) / (2**grid.bits - 1)).float().bfloat16().double()
                zero = float((low - bottom / scale).round().clamp(low, high))
            made[row, left : left + grid.block[1]] = ((group / scale + zero).round().clamp(low, high) - zero) * scale
    return made


@pytest.mark.parametrize("scheme", [SYMMETRIC, AFFINE], ids=["symmetric", "zero points"])
def test_the_loss_is_the_error_of_the_outputs(scheme: Scheme) -> None:
    x, weight = inputs(), draw(24, 64)
    scales = torch.exp(0.5 * draw(5, 64, seed=3))
    found = _scaling.losses([_scaling.Consumer(weight, scheme, stats_of(x))], scales)
    for scale, loss in zip(scales, found, strict=True):
        rounded = plain_rounding(weight * scale, scheme.weight)
        exact = x.double() @ weight.double().T
        error = (x.double() / scale.double()) @ rounded.T - exact
        assert float(loss) == pytest.approx(float(error.square().sum()), rel=1e-4)


@pytest.mark.parametrize("scheme", [SYMMETRIC, AFFINE], ids=["symmetric", "zero points"])
def test_blocks_are_clipped_where_that_costs_less(scheme: Scheme) -> None:
    x, weight = inputs(), draw(24, 64)
    stats, scale = stats_of(x), torch.exp(0.5 * draw(64, seed=3))
    error = torch.zeros(24, 64).double()
    for row in range(24):
        for left in range(0, 64, 16):
            columns = slice(left, left + 16)
            group = (weight * scale)[row : row + 1, columns]
            gram = stats.gram[columns, columns].double()
            trials = []
            for fraction in (1.0, 0.8, 0.6):
                params = absmax.fit(group * fraction, scheme.weight)
                off = (decode(encode(group, scheme.weight, params), scheme.weight, params) - group)[0] / scale[columns]
                trials.append((float(off.double() @ gram @ off.double()), off.double()))
            error[row, columns] = min(trials, key=lambda trial: trial[0])[1]
    found = _scaling.losses([_scaling.Consumer(weight, scheme, stats)], scale[None], (1.0, 0.8, 0.6))
    assert float(found) == pytest.approx(float((x.double() @ error.T).square().sum()), rel=1e-4)


@pytest.mark.parametrize("name", GRIDS)
def test_losses_are_those_of_the_grid(name: str) -> None:
    grid, weight, stats = GRIDS[name], draw(24, 64), stats_of(inputs())
    scales = torch.stack([torch.ones(64), torch.full((64,), 3.0), torch.exp(draw(64, seed=9))])
    found = _scaling.losses([_scaling.Consumer(weight, Scheme(grid), stats)], scales)
    for scale, loss in zip(scales, found, strict=True):
        params = absmax.fit(weight * scale, grid)
        error = (decode(encode(weight * scale, grid, params), grid, params) / scale - weight).double()
        exact = stats.tokens * float(torch.trace(error @ stats.gram.double() @ error.T))
        assert float(loss) == pytest.approx(exact, rel=1e-4)


def test_scales_are_the_published_ones() -> None:
    x, weight = inputs(32), draw(20, 32)
    pair = replace(DENSE, size=32)
    trials = awq.candidates([_scaling.Consumer(weight, SYMMETRIC, stats_of(x))], pair)
    assert trials.shape == (40, 32)
    mean_x = x.double().abs().mean(0)
    groups = weight.double().abs().view(20, 2, 16)
    mean_w = (groups / groups.amax(2, keepdim=True)).view(20, 32).mean(0)
    for step in range(20):
        ratio = step / 20
        for row, scale in ((step, mean_x**ratio), (20 + step, mean_x**ratio / (mean_w ** (1 - ratio) + 1e-4))):
            scale = scale.clamp(min=1e-4)
            scale = scale / (scale.max() * scale.min()).sqrt()
            assert torch.allclose(trials[row].double(), scale, rtol=1e-4)
    assert torch.equal(trials[0], torch.ones(32))


def test_the_search_ends_where_trying_all_does() -> None:
    for seed in range(3):
        reader = _scaling.Consumer(draw(48, 64, seed=seed), AFFINE, stats_of(inputs(seed=seed)))
        trials = awq.candidates([reader], DENSE)
        every = _scaling.losses([reader], trials, awq.FRACTIONS)
        found = int((trials == awq.best_scale([reader], DENSE)).all(dim=1).nonzero()[0])
        assert every[found] <= 1.03 * every.min()
        assert every[found] < every[0]


def dense_block() -> tuple[dict[str, Tensor], Tensor, dict[str, Stats]]:
    """A norm with three readers, of which one is not quantized; the block, its inputs, their statistics."""
    block = {"norm": (1 + 0.1 * draw(64, seed=5)).bfloat16(), "q": draw(48, 64, seed=6).bfloat16()}
    block |= {"k": draw(24, 64, seed=7).bfloat16(), "router": draw(4, 64, seed=8).bfloat16()}
    x = inputs()
    stats = stats_of(x)
    return block, x, {"q": stats, "k": stats, "router": stats, "other": stats}


def cost(block: Mapping[str, Tensor], x: Tensor, scheme: Scheme, names: tuple[str, ...] = ("q", "k")) -> float:
    """The squared error of the outputs when the weights are clipped and rounded to nearest."""
    total = 0.0
    for name in names:
        weight = block[name].float()
        params = clip.fit(weight, scheme.weight, None, stats_of(x))
        error = decode(encode(weight, scheme.weight, params), scheme.weight, params) - weight
        total += float((x.double() @ error.double().T).square().sum())
    return total


@pytest.mark.parametrize(("scheme", "gain"), [(SYMMETRIC, 0.96), (AFFINE, 0.7)], ids=["symmetric", "zero points"])
def test_scaling_costs_less_and_computes_the_same(scheme: Scheme, gain: float) -> None:
    block, x, stats = dense_block()
    kept = {name: tensor.clone() for name, tensor in block.items()}
    made = awq.apply(block, [DENSE], stats, {"q": scheme, "k": scheme})
    assert all(torch.equal(block[name], tensor) for name, tensor in kept.items())
    scale = made.scales["norm"]
    divided = x / scale
    for name in ("q", "k", "router"):
        assert made.block[name].dtype == torch.float32
        assert torch.allclose(divided @ made.block[name].T, x @ block[name].float().T, rtol=1e-4, atol=1e-4)
    assert torch.allclose(made.block["norm"].float() * scale, block["norm"].float(), rtol=1e-6)
    assert cost(made.block, divided, scheme) < gain * cost(block, x, scheme)
    explicit = stats_of(divided)
    for field in ("gram", "absmax", "mean_abs", "mean_square"):
        assert torch.allclose(getattr(made.stats["q"], field), getattr(explicit, field), rtol=1e-4, atol=1e-6), field
    assert made.stats["q"] is made.stats["k"] is made.stats["router"]
    assert made.stats["other"] is stats["other"]


def test_heads_of_a_group_share_their_scales() -> None:
    x = inputs(64)  # of o: 8 query heads of 8 channels; pairs of them read the same value head
    block = {"v": draw(32, 40), "v.bias": draw(32, seed=1), "o": draw(48, 64, seed=2)}
    made = awq.apply(block, [GROUPED], {"o": stats_of(x)}, {"o": SYMMETRIC})
    scale = made.scales["v"]
    assert scale.shape == (32,)
    assert torch.allclose(made.block["v"] * scale[:, None], block["v"], rtol=1e-5)
    assert torch.allclose(made.block["v.bias"] * scale, block["v.bias"], rtol=1e-5)
    wide = torch.stack([scale[head // 2 * 8 : head // 2 * 8 + 8] for head in range(8)]).flatten()
    assert torch.allclose(made.block["o"], block["o"] * wide, rtol=1e-5)
    assert cost(made.block, x / wide, SYMMETRIC, ("o",)) < cost(block, x, SYMMETRIC, ("o",))


def test_folding_undoes_the_spreading() -> None:
    scale = draw(32)
    assert torch.equal(_scaling.fold(_scaling.columns(scale, GROUPED), GROUPED), scale.expand(2, 32))
    assert torch.equal(_scaling.columns(scale.expand(3, 32), GROUPED)[1], _scaling.columns(scale, GROUPED))


def test_experts_count_by_the_tokens_they_saw() -> None:
    pair = replace(DENSE, consumers=(Slot("a", "stack", 0), Slot("b", "stack", 1)))
    many, few = inputs(seed=1), inputs(tokens=30, seed=2)
    stack = draw(2, 32, 64)
    stats = {"a": stats_of(many), "b": stats_of(few)}
    block = {"norm": torch.ones(64), "stack": stack}
    found = _scaling.rounded_consumers(block, pair, stats, dict.fromkeys("ab", SYMMETRIC))
    trials = awq.candidates(found, pair)
    costs = _scaling.losses(found, trials)
    for trial, one in list(zip(trials, costs, strict=True))[::7]:
        alone = [
            _scaling.losses([_scaling.Consumer(stack[index], SYMMETRIC, seen)], trial[None])
            for index, seen in enumerate(stats.values())
        ]
        assert torch.allclose(one, sum(alone)[0], rtol=1e-5)  # type: ignore[index]
    mean = (many.abs().sum(0) + few.abs().sum(0)) / 330
    assert torch.allclose(trials[10] / trials[10, 0], (mean / mean[0]) ** 0.5, rtol=1e-3)
    made = awq.apply(block, [pair], stats, dict.fromkeys("ab", SYMMETRIC))
    assert torch.allclose(made.block["stack"], stack * made.scales["norm"], rtol=1e-5)


@pytest.mark.parametrize("tall", [1, 8, 0])
def test_a_sample_is_of_whole_blocks_and_tells_the_loss(tall: int) -> None:
    x, weight = inputs(), draw(512, 64)
    reader = _scaling.Consumer(weight, Scheme(Grid("int", 4, (tall, 16))), stats_of(x))
    sample = reader.sample(1.0)
    assert len(sample.weight) == (64 if tall else 512)
    blocks = weight.view(-1, (tall or 512) * 64)
    where = torch.cdist(sample.weight.view(-1, blocks.shape[1]), blocks).argmin(dim=1)
    assert torch.equal(blocks[where], sample.weight.view(-1, blocks.shape[1]))
    assert len(set(where.tolist())) == len(where)
    assert (int(where[0]), int(where[-1])) == (0, len(blocks) - 1)
    scales = torch.cat([torch.ones(1, 64), torch.exp(0.5 * draw(1, 64, seed=4))])
    estimate, exact = _scaling.losses([reader], scales), _scaling.loss(reader, scales, (1.0,)) * reader.stats.tokens
    assert torch.allclose(estimate, exact, rtol=0.25)
    assert torch.allclose(estimate[1] / estimate[0], exact[1] / exact[0], rtol=0.25 if tall else 1e-4)


@pytest.mark.parametrize("rows", [5, 8, 20])
def test_blocks_that_stick_out_do_not_mix_trials(rows: int) -> None:
    reader = _scaling.Consumer(draw(rows, 64), Scheme(Grid("e4m3", 8, (8, 32))), stats_of(inputs()))
    scales = torch.exp(draw(6, 64, seed=4))
    alone = torch.cat([_scaling.losses([reader], scale[None]) for scale in scales])
    assert torch.allclose(_scaling.losses([reader], scales), alone, rtol=1e-5)


def test_what_cannot_be_scaled_is_noted() -> None:
    block, _, stats = dense_block()
    empty = replace(stats["q"], tokens=0)
    cases: list[tuple[dict[str, Stats], dict[str, Scheme]]] = [
        (stats, {}),
        ({}, {"q": SYMMETRIC}),
        ({"q": empty, "k": empty}, {"q": SYMMETRIC, "k": SYMMETRIC}),
        (stats, {"q": Scheme(Grid("bf16", 16))}),
    ]
    for seen, schemes in cases:
        made = awq.apply(block, [DENSE], seen, schemes)
        assert made.scales == {}
        assert made.scales == {}
        assert all(torch.equal(made.block[name].float(), tensor.float()) for name, tensor in block.items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_statistics_that_are_not_finite_are_refused(bad: float) -> None:
    block, _, stats = dense_block()
    broken: Any = {field: getattr(stats["q"], field).clone() for field in ("gram", "absmax", "mean_abs", "mean_square")}
    for value in broken.values():
        value[3] = bad
    seen = replace(stats["q"], **broken)
    with pytest.raises(WeightError, match=r"the input of q has .* NaN or infinite; calibrate"):
        awq.apply(block, [DENSE], {"q": seen, "k": seen}, {"q": SYMMETRIC, "k": SYMMETRIC})

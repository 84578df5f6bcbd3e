"""The clip fit and the importance-weighted search, against brute force in float64."""

import pytest
import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.methods.fits import absmax, clip, mse
from quantry.numerics.grids import decode, encode
from quantry.numerics.scale_search import diagonal_blocks
from quantry.types import Grid, Params, Stats

GRIDS = {
    "symmetric": Grid("int", 4, (1, 16)),
    "zero points": Grid("int", 4, (1, 16), symmetric=False),
    "three bits": Grid("int", 3, (1, 32), scale="f16"),
    "channel": Grid("int", 4, (1, 0)),
    "tensor": Grid("e4m3", 8, (0, 0)),
    "blocks": Grid("e4m3", 8, (8, 16), scale="f32"),
    "sticking out": Grid("int", 4, (16, 40)),
    "nvfp4": Grid("e2m1", 4, (1, 16), scale="e4m3"),
    "mxfp4": Grid("e2m1", 4, (1, 32), scale="e8m0"),
}


def stats_of(inputs: Tensor) -> Stats:
    x = inputs.double()
    gram = (x.T @ x / len(x)).float()
    return Stats(len(x), gram, x.abs().amax(0).float(), x.abs().mean(0).float(), x.square().mean(0).float())


def problem(rows: int = 24, columns: int = 96, seed: int = 0) -> tuple[Tensor, Stats]:
    """A weight with a few extremes, and inputs that move together, some of them large."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    weight[torch.rand(rows, columns, generator=generator) < 0.02] *= 4
    inputs = torch.randn(400, 12, generator=generator) @ torch.randn(12, columns, generator=generator)
    inputs += torch.randn(400, columns, generator=generator)
    inputs *= torch.exp(torch.randn(columns, generator=generator))
    return weight, stats_of(inputs)


def block_errors(weight: Tensor, grid: Grid, params: Params, form: Tensor) -> Tensor:
    """d M d' summed over the rows of every block, with M the diagonal blocks of `form`, one block after the other."""
    error = decode(encode(weight, grid, params), grid, params).double() - weight.double()
    tall, wide = grid.block[0] or weight.shape[0], grid.block[1] or weight.shape[1]
    return torch.tensor(
        [
            [
                sum(
                    float(row[left : left + wide] @ form[left : left + wide, left : left + wide].double() @ row[left : left + wide])
                    for row in error[top : top + tall]
                )
                for left in range(0, weight.shape[1], wide)
            ]
            for top in range(0, weight.shape[0], tall)
        ]
    )  # fmt: skip


def shrunk(weight: Tensor, grid: Grid, fraction: float) -> Params:
    """The parameters of every block at one fraction of its range: those of a weight in which nothing exceeds it."""
    if grid.symmetric:
        return absmax.fit(
            weight * fraction, grid, weight.abs().max().float() * (fraction if grid.block == (0, 0) else 1)
        )
    return absmax.fit(weight * fraction, grid)


@pytest.mark.parametrize("name", GRIDS)
def test_clip_is_the_best_of_all_fractions(name: str) -> None:
    grid = GRIDS[name]
    weight, stats = problem()
    found = block_errors(weight, grid, clip.fit(weight, grid, None, stats), stats.gram)
    fractions = [1 - (1 - clip.SMALLEST) * step / (clip.STEPS - 1) for step in range(clip.STEPS)]
    every = torch.stack([block_errors(weight, grid, shrunk(weight, grid, f), stats.gram) for f in fractions])
    assert torch.allclose(found, every.amin(dim=0), rtol=1e-4)
    if grid.kind == "int":
        assert found.sum() < every[0].sum() * 0.9


@pytest.mark.parametrize("name", GRIDS)
def test_importance_weighs_the_squares(name: str) -> None:
    grid = GRIDS[name]
    weight, stats = problem(seed=1)
    form = torch.diag(stats.mean_square)
    found = block_errors(weight, grid, mse.fit(weight, grid, None, stats), form)
    fractions = [1 - (1 - mse.SMALLEST) * step / (mse.STEPS - 1) for step in range(mse.STEPS)]
    every = torch.stack([block_errors(weight, grid, shrunk(weight, grid, f), form) for f in fractions])
    assert torch.allclose(found, every.amin(dim=0), rtol=1e-4)
    if grid.kind == "int" and grid.block[0] == 1:
        assert found.sum() < block_errors(weight, grid, mse.fit(weight, grid), form).sum()


def test_equal_importance_changes_nothing() -> None:
    weight, _ = problem()
    even = stats_of(torch.eye(96) * 3)
    for grid in (GRIDS["symmetric"], GRIDS["zero points"]):
        plain, weighted, clipped = mse.fit(weight, grid), mse.fit(weight, grid, None, even), None
        assert torch.equal(plain.scale, weighted.scale)
        clipped = clip.fit(weight, grid, None, even)
        assert (
            block_errors(weight, grid, clipped, torch.eye(96)).sum()
            <= block_errors(weight, grid, plain, torch.eye(96)).sum() * 1.01
        )


def test_clip_costs_less_than_the_other_fits() -> None:
    weight, stats = problem(rows=64)
    for name, best in (("symmetric", 0.75), ("zero points", 0.85)):
        costs = {
            fit: float(
                block_errors(weight, GRIDS[name], module.fit(weight, GRIDS[name], None, stats), stats.gram).sum()
            )
            for fit, module in (("absmax", absmax), ("mse", mse), ("clip", clip))
        }
        assert costs["clip"] < costs["mse"] < costs["absmax"]
        assert costs["clip"] < best * costs["absmax"]


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, stats = problem(rows=64)
    for name in ("symmetric", "zero points", "blocks", "nvfp4"):
        whole = clip.fit(weight, GRIDS[name], None, stats)
        with monkeypatch.context() as patch:
            patch.setattr(clip, "CHUNK", 1000)
            parts = clip.fit(weight, GRIDS[name], None, stats)
        assert torch.equal(whole.scale.float(), parts.scale.float())


def test_bfloat16_weights_and_dead_channels() -> None:
    weight, stats = problem()
    dead = torch.zeros(96)
    silent = Stats(0, torch.zeros(96, 96), dead, dead, dead)
    for fit in (clip.fit, mse.fit):
        params = fit(weight.bfloat16(), GRIDS["symmetric"], None, silent)
        assert torch.equal(params.scale, absmax.fit(weight.bfloat16(), GRIDS["symmetric"]).scale)
        assert torch.isfinite(fit(torch.zeros(4, 96), GRIDS["zero points"], None, stats).scale.float()).all()


def test_clip_without_statistics_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs statistics.*; calibrate"):
        clip.fit(torch.ones(2, 16), GRIDS["symmetric"])


def test_diagonal_blocks() -> None:
    gram = torch.arange(49.0).view(7, 7)
    blocks = diagonal_blocks(gram, 3)
    assert torch.equal(blocks[0], gram[:3, :3])
    assert torch.equal(blocks[1], gram[3:6, 3:6])
    assert blocks[2].flatten().tolist() == [48.0, *[0.0] * 8]

"""GPTQ against a float64 restatement of the published algorithm, on every grid and block type."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from torch import Tensor

from quantry.errors import QuantryError, RecipeError, WeightError
from quantry.methods.contract import Prepared, Rounder
from quantry.methods.fits import absmax, mse
from quantry.methods.rounders import gptq, nearest
from quantry.methods.rounding import LayerInput, round_blocks, round_weight
from quantry.numerics import error_feedback as feedback
from quantry.numerics import ggml
from quantry.numerics.error_feedback import compiled, plain
from quantry.numerics.ggml import iq4, layout
from quantry.numerics.ggml import lattice as blocks
from quantry.numerics.grids import FLOAT8, code_dtype, decode, dequantize, snap
from quantry.numerics.ladders import Ladder, of_grid
from quantry.numerics.simd import AVAILABLE
from quantry.types import Grid, Params, Stats

GRIDS = {
    "int4 groups": Grid("int", 4, (1, 32)),
    "int4 zero points": Grid("int", 4, (1, 32), symmetric=False),
    "int4 channels": Grid("int", 4, (1, 0), scale="f32"),
    "int3": Grid("int", 3, (1, 64), scale="f16"),
    "int2 zero points": Grid("int", 2, (1, 16), symmetric=False),
    "int8 tensor": Grid("int", 8, (0, 0)),
    "e4m3": Grid("e4m3", 8, (1, 0)),
    "e4m3 blocks": Grid("e4m3", 8, (32, 64)),
    "e5m2": Grid("e5m2", 8, (0, 0)),
    "nvfp4": Grid("e2m1", 4, (1, 16), scale="e4m3"),
    "mxfp4": Grid("e2m1", 4, (1, 32), scale="e8m0"),
}
KINDS = tuple(layout.BLOCKS)
ROWS = 37  # not a multiple of anything
ORDERS = pytest.mark.parametrize("order", [True, False], ids=["act order", "as they come"])
EACH_GRID = pytest.mark.parametrize("name", GRIDS)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


def problem(columns: int, rows: int = ROWS, seed: int = 5) -> tuple[Tensor, Stats]:
    """A weight, and the statistics of inputs that are strongly correlated and of very different power."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1024, columns // 8, generator=generator, dtype=torch.float64)
    mixed = hidden @ torch.randn(columns // 8, columns, generator=generator, dtype=torch.float64)
    mixed += 0.7 * torch.randn(1024, columns, generator=generator, dtype=torch.float64)
    inputs = mixed * torch.rand(columns, generator=generator, dtype=torch.float64) ** 2
    weight = torch.randn(rows, columns, generator=generator) * 0.03
    return weight, statistics(inputs)


def statistics(inputs: Tensor) -> Stats:
    sizes = inputs.abs().float()
    gram = (inputs.T @ inputs / len(inputs)).float()
    return Stats(len(inputs), gram, sizes.amax(dim=0), sizes.mean(dim=0), gram.diagonal().clone())


def output_error(rounded: Tensor, weight: Tensor, stats: Stats) -> float:
    difference = (rounded - weight).double()
    return float(((difference @ stats.gram.double()) * difference).sum())


def published(weight: Tensor, stats: Stats, values: Tensor, order: bool, damping: float = 0.01) -> Tensor:
    """The weights that codes should stand for, (rows, columns): one column after another is rounded to the nearest of
    `values` (codes, rows, columns) and struck from the inverse Hessian, in float64, without factors or blocks.
    """
    gram, w, table = (part.double().numpy() for part in (stats.gram, weight.clone(), values))
    hessian = gram + np.eye(len(gram)) * damping * gram.diagonal().mean()
    inverse = np.linalg.inv(hessian)
    rounded = np.empty_like(w)
    for j in np.argsort(-gram.diagonal(), kind="stable") if order else range(len(gram)):
        distance = np.where(np.isfinite(table[:, :, j]), np.abs(table[:, :, j] - w[:, j]), np.inf)
        rounded[:, j] = np.take_along_axis(table[:, :, j], distance.argmin(axis=0)[None], axis=0)[0]
        w -= np.outer((w[:, j] - rounded[:, j]) / inverse[j, j], inverse[j])
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return torch.from_numpy(rounded)


def grid_values(grid: Grid, params: Params, shape: torch.Size) -> Tensor:
    """What every code of a grid stands for at every weight."""
    bits = {"int": grid.bits, "e2m1": 4}.get(grid.kind, 8)
    numbers = torch.arange(1 << bits) - ((1 << (bits - 1)) if grid.kind == "int" else 0)
    stored = numbers.to(torch.uint8).view(FLOAT8[grid.kind]) if grid.kind in FLOAT8 else numbers.to(code_dtype(grid))
    return torch.stack([decode(code.expand(shape).contiguous(), grid, params) for code in stored])


def block_values(kind: str, data: Tensor, columns: int) -> Tensor:
    """What every code of a block type stands for at every weight, as the gguf library reads it."""
    fields = layout.unpack(kind, data.view(-1, layout.BLOCKS[kind].bytes))
    ladder = blocks.ladder(kind)
    numbers = range(256) if kind == "Q8_0" else range(16 if ladder.rungs else int(ladder.high - ladder.low) + 1)
    tables = [
        layout.pack(kind, replace(fields, codes=torch.full_like(fields.codes, code))).view(data.shape)
        for code in numbers
        if (kind, code) != ("Q8_0", 128)  # which ggml does not use
    ]
    return torch.stack([read_by_gguf(kind, table) for table in tables])


def read_by_gguf(kind: str, data: Tensor) -> Tensor:
    return torch.from_numpy(gguf_dequantize(data.numpy(), GGMLQuantizationType[kind]))


def columns_of(kind: str) -> int:
    return 256 if layout.BLOCKS[kind].size == 256 else 160  # two blocks of columns, the second a whole one or not


# The algorithm


@EACH_GRID
@ORDERS
def test_codes_are_those_of_the_published_algorithm(name: str, order: bool) -> None:
    weight, stats = problem(160)
    grid = GRIDS[name]
    params = mse.fit(weight, grid)
    expected = published(weight, stats, grid_values(grid, params, weight.shape), order)
    exact = gptq.round_weight(weight, grid, params, gptq.prepare(stats, order=order, dtype=torch.float64))
    assert exact.params is params
    assert torch.equal(dequantize(exact).double(), expected)
    fast = gptq.round_weight(weight, grid, params, gptq.prepare(stats, order=order))
    assert fast.codes.dtype == code_dtype(grid)
    assert output_error(dequantize(fast), weight, stats) == pytest.approx(
        output_error(expected, weight, stats), rel=1e-3
    )


@EACH_KIND
@ORDERS
def test_codes_of_block_types_are_those_of_the_published_algorithm(kind: str, order: bool) -> None:
    columns = columns_of(kind)
    weight, stats = problem(columns)
    weight[3, :256] = 0  # blocks whose scale is 0
    prepared = gptq.prepare(stats, order=order, dtype=torch.float64)
    fitted = ggml.quantize(weight, kind, prepared.state.importance)
    expected = published(weight, stats, block_values(kind, fitted, columns), order)
    exact = gptq.round_blocks(weight, kind, prepared)
    assert torch.equal(read_by_gguf(kind, exact).double(), expected)
    fast = gptq.round_blocks(weight, kind, gptq.prepare(stats, order=order))
    assert output_error(read_by_gguf(kind, fast), weight, stats) == pytest.approx(
        output_error(expected, weight, stats), rel=1e-3
    )


@EACH_KIND
def test_block_types_keep_the_scales_that_were_searched_for(kind: str) -> None:
    weight, stats = problem(columns_of(kind))
    prepared = gptq.prepare(stats)
    before, after = (
        layout.unpack(kind, data.view(-1, layout.BLOCKS[kind].bytes))
        for data in (ggml.quantize(weight, kind, prepared.state.importance), gptq.round_blocks(weight, kind, prepared))
    )
    for one, other in ((before.d, after.d), (before.dmin, after.dmin), (before.scales, after.scales)):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert not torch.equal(before.codes, after.codes)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("int4 groups", 0.25), ("int4 zero points", 0.3), ("int3", 0.3), ("e4m3", 0.25), ("nvfp4", 0.3), ("mxfp4", 0.3)],
)
def test_it_beats_nearest_on_correlated_inputs(name: str, ratio: float) -> None:
    weight, stats = problem(256, rows=64)
    params = mse.fit(weight, GRIDS[name])
    ours, plainly = (
        output_error(
            dequantize(rounder.round_weight(weight, GRIDS[name], params, rounder.prepare(stats))), weight, stats
        )
        for rounder in (gptq, nearest)
    )
    assert ours < ratio * plainly


@EACH_KIND
def test_it_beats_llamacpp_with_an_imatrix_at_the_same_bytes(kind: str) -> None:
    weight, stats = problem(512, rows=64)
    ours, theirs = (
        gptq.round_blocks(weight, kind, gptq.prepare(stats)),
        nearest.round_blocks(weight, kind, nearest.prepare(stats)),
    )
    assert ours.shape == theirs.shape
    errors = [output_error(ggml.dequantize(data, kind, 512), weight, stats) for data in (ours, theirs)]
    assert errors[0] < 0.4 * errors[1]


def test_what_is_rounded_first_has_most_power() -> None:
    weight, stats = problem(160)
    prepared = gptq.prepare(stats)
    visited = stats.gram.diagonal()[prepared.state.factor.order]
    assert torch.equal(visited, visited.sort(descending=True).values)
    assert torch.equal(prepared.state.factor.order[prepared.state.factor.back], torch.arange(160))
    grid, params = GRIDS["int4 groups"], mse.fit(weight, GRIDS["int4 groups"])
    ordered, as_they_come = (
        output_error(
            dequantize(gptq.round_weight(weight, grid, params, gptq.prepare(stats, order=order))), weight, stats
        )
        for order in (True, False)
    )
    assert ordered < 0.9 * as_they_come


@ORDERS
def test_the_factor_is_that_of_the_inverse(order: bool) -> None:
    _, stats = problem(160)
    prepared = gptq.prepare(stats, 0.03, order, torch.float64)
    hessian = stats.gram.double() + 0.03 * stats.gram.double().diagonal().mean() * torch.eye(160, dtype=torch.float64)
    visit = prepared.state.factor.order
    inverse = torch.linalg.inv(hessian[visit][:, visit])
    upper = prepared.state.factor.upper
    assert torch.equal(upper, upper.triu())
    assert bool((upper.diagonal() > 0).all())
    torch.testing.assert_close(upper.T @ upper, inverse, rtol=1e-9, atol=1e-9 * float(inverse.abs().max()))
    expected = (stats.gram.double().diagonal()[visit] / upper.diagonal() ** 2).sqrt()
    torch.testing.assert_close(prepared.state.importance.double()[visit], expected, rtol=1e-6, atol=0)


# Rows


@ORDERS
@pytest.mark.parametrize("columns", [8, 96, 384])
def test_the_factor_has_every_bit_of_one_that_is_not_made_in_place(columns: int, order: bool) -> None:
    _, stats = problem(columns)
    prepared = gptq.prepare(stats, 0.01, order)
    hessian = stats.gram[prepared.state.factor.order][:, prepared.state.factor.order]
    damped = hessian.flip((0, 1)).double()
    damped.diagonal().add_(0.01 * float(hessian.diagonal().double().mean()))
    inverse = torch.linalg.solve_triangular(
        torch.linalg.cholesky(damped), torch.eye(columns, dtype=torch.float64), upper=False
    )
    assert torch.equal(prepared.state.factor.upper, inverse.flip((0, 1)).float())


def test_rows_do_not_know_of_each_other() -> None:
    weight, stats = problem(160, rows=1100)  # several chunks, over threads
    prepared, grid = gptq.prepare(stats), GRIDS["int4 zero points"]
    params = absmax.fit(weight, grid)
    assert params.zero is not None
    together = gptq.round_weight(weight, grid, params, prepared).codes
    for part in (slice(0, 1), slice(1, 500), slice(500, 1100)):
        own = Params(params.scale[part], params.zero[part])
        apart = gptq.round_weight(weight[part], grid, own, prepared).codes
        assert float((apart != together[part]).float().mean()) < 1e-3  # products may add in another order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_of_any_float_type(dtype: torch.dtype) -> None:
    weight, stats = problem(160)
    weight, grid = weight.to(dtype), GRIDS["int4 groups"]
    params = mse.fit(weight, grid)
    before = weight.clone()
    made = gptq.round_weight(weight, grid, params, gptq.prepare(stats))
    assert torch.equal(weight, before)
    assert torch.equal(made.codes, gptq.round_weight(weight.float(), grid, params, gptq.prepare(stats)).codes)
    assert torch.equal(
        gptq.round_blocks(weight, "Q4_0", gptq.prepare(stats)),
        gptq.round_blocks(weight.float(), "Q4_0", gptq.prepare(stats)),
    )


@pytest.mark.parametrize("name", ["int4 groups", "int4 zero points", "e4m3", "e5m2", "nvfp4"])
def test_without_correlations_it_is_nearest(name: str) -> None:
    weight, stats = problem(160)
    stats = replace(stats, gram=torch.diag(stats.gram.diagonal()))
    params = mse.fit(weight, GRIDS[name])
    made = dequantize(gptq.round_weight(weight, GRIDS[name], params, gptq.prepare(stats)))
    assert torch.equal(made, dequantize(nearest.round_weight(weight, GRIDS[name], params)))


# What calibration did not see


def test_channels_that_were_never_seen_are_rounded_to_nearest_and_touch_nothing() -> None:
    weight, stats = problem(160)
    dead, grid = torch.arange(5, 160, 7), GRIDS["int4 groups"]
    alive = torch.ones(160)
    alive[dead] = 0
    stats = replace(stats, gram=stats.gram * alive * alive[:, None], mean_square=stats.mean_square * alive)
    params = mse.fit(weight, grid)
    made = gptq.round_weight(weight, grid, params, gptq.prepare(stats)).codes
    assert torch.equal(made[:, dead], nearest.round_weight(weight, grid, params).codes[:, dead])
    changed = weight.clone()
    changed[:, dead] *= -0.5
    others = alive.bool()
    assert torch.equal(gptq.round_weight(changed, grid, params, gptq.prepare(stats)).codes[:, others], made[:, others])


def test_an_input_that_was_never_seen_leaves_nearest() -> None:
    weight, _ = problem(160)
    nothing = Stats(0, torch.zeros(160, 160), *(torch.zeros(160) for _ in range(3)))
    params = mse.fit(weight, GRIDS["int4 groups"])
    made = gptq.round_weight(weight, GRIDS["int4 groups"], params, gptq.prepare(nothing))
    assert torch.equal(made.codes, nearest.round_weight(weight, GRIDS["int4 groups"], params).codes)
    assert ggml.dequantize(gptq.round_blocks(weight, "Q4_0", gptq.prepare(nothing)), "Q4_0", 160).isfinite().all()


# Damping


def shifted_by(stats: Stats, fraction: float) -> Stats:
    """Statistics whose Gram matrix has its smallest eigenvalue pushed to minus a fraction of the mean diagonal."""
    gram = stats.gram.double()
    values, vectors = torch.linalg.eigh(gram)
    values[0] = -fraction * float(gram.diagonal().mean())
    return replace(stats, gram=(vectors @ torch.diag(values) @ vectors.T).float())


def test_damping_is_raised_where_the_factorization_fails_and_that_is_said() -> None:
    weight, stats = problem(160)
    assert gptq.prepare(stats).report is None
    assert gptq.prepare(stats).state.damping == 0.01
    prepared = gptq.prepare(shifted_by(stats, 0.05))
    assert prepared.report == prepared.state.damping == pytest.approx(0.1)
    (note,) = gptq.notes({"q": 0.1, "o": 1.0})
    assert note == "GPTQ needed more damping than usual for 2 inputs, the most 1 for that of o."
    assert gptq.notes({}) == ()
    assert gptq.prepare(shifted_by(stats, 0.5)).report == 1.0
    assert gptq.prepare(shifted_by(stats, 0.005), damping=0.0).report == 0.01
    params = mse.fit(weight, GRIDS["int4 groups"])
    gptq.round_weight(weight, GRIDS["int4 groups"], params, prepared)


def refusals() -> dict[str, tuple[type[QuantryError], str, Callable[[], object]]]:
    weight, stats = problem(160)
    grid = GRIDS["int4 groups"]
    params = mse.fit(weight, grid)
    broken = replace(stats, gram=stats.gram.clone().fill_(float("nan")))
    nf4 = Grid("nf4", 4, (1, 64), scale="f32")
    return {
        "indefinite": (WeightError, "not positive definite", lambda: gptq.prepare(shifted_by(stats, 2.0))),
        "nan": (WeightError, "NaN", lambda: gptq.prepare(broken)),
        "damping": (RecipeError, "damping of 1.5", lambda: gptq.prepare(stats, 1.5)),
        "negative damping": (RecipeError, "damping of -0.1", lambda: gptq.prepare(stats, -0.1)),
        "no statistics": (RecipeError, "needs statistics", lambda: gptq.round_weight(weight, grid, params)),
        "no statistics for blocks": (RecipeError, "needs statistics", lambda: gptq.round_blocks(weight, "Q4_0", None)),
        "other width": (
            WeightError,
            "160 channels for a weight of 128 columns",
            lambda: gptq.round_weight(weight[:, :128], grid, params, gptq.prepare(stats)),
        ),
        "code book": (
            RecipeError,
            "nf4",
            lambda: gptq.round_weight(weight, nf4, absmax.fit(weight, nf4), gptq.prepare(stats)),
        ),
        "row of no whole blocks": (WeightError, "160", lambda: gptq.round_blocks(weight, "Q4_K", gptq.prepare(stats))),
    }


@pytest.mark.parametrize("case", list(refusals()))
def test_what_cannot_be_done_is_refused(case: str) -> None:
    kind, words, call = refusals()[case]
    with pytest.raises(kind, match=words) as caught:
        call()
    assert caught.value.fix


# Its parts


def test_layers_that_share_an_input_prepare_it_once() -> None:
    weight, stats = problem(160)
    grid, calls = GRIDS["int4 groups"], list[Stats]()

    def prepare(rounder: Rounder, seen: Stats) -> Prepared:
        calls.append(seen)
        return rounder.prepare(seen)

    shared = LayerInput(stats, prepare)
    ours = [round_weight(weight, grid, mse, gptq, shared).codes for _ in range(2)]
    by_hand = gptq.round_weight(weight, grid, mse.fit(weight, grid, None, stats), gptq.prepare(stats)).codes
    assert torch.equal(ours[0], by_hand)
    assert torch.equal(ours[1], by_hand)
    blocks = round_blocks(weight, "Q5_0", gptq, shared)
    assert torch.equal(blocks, gptq.round_blocks(weight, "Q5_0", gptq.prepare(stats)))
    assert calls == [stats]
    round_weight(weight, grid, mse, nearest, shared)
    assert calls == [stats, stats]  # another rounder prepares something else


def test_plain_types_of_gguf_are_cast() -> None:
    weight, stats = problem(160)
    assert torch.equal(gptq.round_blocks(weight, "F16", gptq.prepare(stats)), weight.half().view(torch.uint8))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16"])
def test_nearest_blocks_are_ggmls(kind: str) -> None:
    weight, stats = problem(160)
    assert torch.equal(round_blocks(weight, kind, nearest, None), ggml.quantize(weight, kind))
    assert torch.equal(
        round_blocks(weight, kind, nearest, LayerInput(stats)), ggml.quantize(weight, kind, stats.mean_square)
    )


LADDERS = {
    **{name: of_grid(GRIDS[name]) for name in ("int4 groups", "int8 tensor", "e4m3", "e5m2", "nvfp4")},
    **{kind: blocks.ladder(kind) for kind in ("IQ4_NL", "Q6_K", "Q2_K")},
}
LOOPS = pytest.mark.parametrize(("shifted", "columns"), [(False, 128), (True, 128), (True, 40)])


@EACH_GRID
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nearest_level_is_that_of_the_grid(name: str, dtype: torch.dtype) -> None:
    grid = GRIDS[name]
    high = of_grid(grid).high
    values = torch.cat((torch.linspace(-1.3 * high, 1.3 * high, 9973), torch.arange(-64, 65) / 16, torch.zeros(1)))
    values = torch.cat((values, torch.randn(500) * 2.0**-7, torch.arange(-40, 41) * 2.0**-17))
    assert torch.equal(of_grid(grid).nearest(values.to(dtype)).float(), snap(grid)(values.clone()))


def test_the_nearest_level_of_iq4_is_ggmls() -> None:
    levels = torch.tensor(layout.IQ4, dtype=torch.float32)
    halves = torch.cat((torch.zeros(17), (levels[1:] + levels[:-1]) / 2))
    values = torch.cat((torch.linspace(-150, 150, 32 * 999), halves)).view(-1, 32)
    codes = iq4.batched.nearest(values, torch.ones(len(values), 1))
    assert torch.equal(blocks.ladder("IQ4_NL").nearest(values.clone()), levels[codes.int()])


def block_problem(ladder: Ladder, shifted: bool, columns: int, rows: int = 48) -> tuple[Tensor, ...]:
    weight, stats = problem(columns, rows)
    upper = gptq.prepare(stats).state.factor.upper.contiguous()
    generator = torch.Generator().manual_seed(3)
    step = (torch.rand(columns, rows, generator=generator) + 0.5) * (0.1 / ladder.high)
    step[5] = 0
    shift = torch.rand(columns, rows, generator=generator) * (0.05 if shifted else 0)
    return weight.t().contiguous(), step, shift, upper


@pytest.mark.parametrize("name", LADDERS)
@LOOPS
def test_machine_code_does_what_torch_does(name: str, shifted: bool, columns: int) -> None:
    assert AVAILABLE
    compare(compiled.block, LADDERS[name], shifted, columns, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", LADDERS)
@LOOPS
def test_the_gpu_does_what_torch_does(name: str, shifted: bool, columns: int) -> None:
    from quantry.numerics.error_feedback import gpu

    compare(gpu.block, LADDERS[name], shifted, columns, torch.device("cuda"))


def compare(block: feedback.BlockLoop, ladder: Ladder, shifted: bool, columns: int, device: torch.device) -> None:
    """A loop within a block against the plain one: rarely a code differs, where a sum was rounded otherwise."""
    weight, step, shift, upper = (part.to(device) for part in block_problem(ladder, shifted, columns))
    found = []
    for loop in (plain.block, block):
        levels, error = weight.clone(), torch.empty_like(weight)
        loop(ladder, levels, step, shift if shifted else None, upper, error)
        found.append((levels, error))
    same = (found[0][0] == found[1][0]).all(dim=0)
    assert float(same.float().mean()) > 0.9
    torch.testing.assert_close(found[1][1][:, same], found[0][1][:, same], rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EACH_GRID
def test_a_gpu_gives_the_same_output_error(name: str) -> None:
    weight, stats = problem(160, rows=300)
    params = mse.fit(weight, GRIDS[name])
    there = replace(stats, gram=stats.gram.cuda(), mean_square=stats.mean_square.cuda())
    sent = Params(*(None if part is None else part.cuda() for part in (params.scale, params.zero, params.outer)))  # type: ignore[arg-type]
    made = gptq.round_weight(weight.cuda(), GRIDS[name], sent, gptq.prepare(there))
    expected = gptq.round_weight(weight, GRIDS[name], params, gptq.prepare(stats))
    assert output_error(dequantize(made).cpu(), weight, stats) == pytest.approx(
        output_error(dequantize(expected), weight, stats), rel=1e-2
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@EACH_KIND
def test_a_gpu_gives_the_same_output_error_in_block_types(kind: str) -> None:
    weight, stats = problem(512, rows=300)
    there = replace(stats, gram=stats.gram.cuda(), mean_square=stats.mean_square.cuda())
    made, expected = (
        gptq.round_blocks(weight.cuda(), kind, gptq.prepare(there)).cpu(),
        gptq.round_blocks(weight, kind, gptq.prepare(stats)),
    )
    errors = [output_error(ggml.dequantize(data, kind, 512), weight, stats) for data in (made, expected)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-2)

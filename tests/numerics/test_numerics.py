"""Grids against plain float64 restatements: every value of the grid is tried, and the nearest must have been chosen."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depth import examples
from quantry.methods.fits import absmax as absmax_fit
from quantry.methods.fits import mse as mse_fit
from quantry.methods.rounders.nearest import round_weight
from quantry.numerics import codebooks, grids
from quantry.numerics.activations import simulate
from quantry.numerics.blocks import absmax, cut, join, scale_shape
from quantry.numerics.grids import SCALE_DTYPES, decode, dequantize, effective_scale, encode
from quantry.numerics.scales import affine, symmetric
from quantry.types import Activation, Grid, Params

GRIDS = {
    "int8 tensor": Grid("int", 8, (0, 0)),
    "int8 channel": Grid("int", 8, (1, 0), scale="f32"),
    "int4 group 32": Grid("int", 4, (1, 32)),
    "int4 group 64 f16": Grid("int", 4, (1, 64), scale="f16"),
    "int4 asym": Grid("int", 4, (1, 32), symmetric=False),
    "int3": Grid("int", 3, (1, 32)),
    "int2 asym": Grid("int", 2, (1, 32), symmetric=False),
    "int8 asym": Grid("int", 8, (1, 64), symmetric=False),
    "fp8 tensor": Grid("e4m3", 8, (0, 0), scale="f32"),
    "fp8 channel": Grid("e4m3", 8, (1, 0), scale="f32"),
    "fp8 block": Grid("e4m3", 8, (128, 128), scale="f32"),
    "e5m2 channel": Grid("e5m2", 8, (1, 0), scale="f32"),
    "mxfp4": Grid("e2m1", 4, (1, 32), scale="e8m0"),
    "nvfp4": Grid("e2m1", 4, (1, 16), scale="e4m3"),
    "nf4": Grid("nf4", 4, (1, 64), scale="f32"),
    "nf4 nested": Grid("nf4", 4, (1, 64), scale="f32", nested=True),
    "fp4": Grid("fp4", 4, (1, 64), scale="f32"),
}


def weights(rows: int = 136, columns: int = 192, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, columns, generator=generator) * 0.02
    values[3, 5] = 0.5  # an outlier
    values[7] = 0  # blocks of zeros
    return values.bfloat16()


def levels(grid: Grid) -> np.ndarray:
    """All values of a grid before scaling, in float64."""
    if grid.kind == "int":
        return np.arange(-(2 ** (grid.bits - 1)), 2 ** (grid.bits - 1), dtype=np.float64)
    if grid.kind in ("nf4", "fp4"):
        return np.array(codebooks.BOOKS[grid.kind], np.float32).astype(np.float64)
    if grid.kind == "e2m1":
        return np.array([s * m for s in (1, -1) for m in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
    exponent_bits, mantissa_bits, bias = {"e4m3": (4, 3, 7), "e5m2": (5, 2, 15)}[grid.kind]
    found = []
    for exponent in range(2**exponent_bits):
        for mantissa in range(2**mantissa_bits):
            if exponent == 0:
                value = mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
            else:
                value = (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)
            special = (grid.kind == "e4m3" and (exponent, mantissa) == (15, 7)) or (
                grid.kind == "e5m2" and exponent == 31
            )
            if not special:
                found += [value, -value]
    return np.array(sorted(found))


def spread64(values: Tensor, grid: Grid, shape: tuple[int, int]) -> np.ndarray:
    """A parameter for every weight, by plain index arithmetic."""
    flat = values.double().numpy()
    rows, columns = shape
    if grid.kind in ("nf4", "fp4"):
        return np.array([[flat[(r * columns + c) // grid.block[1]] for c in range(columns)] for r in range(rows)])
    tall, wide = grid.block[0] or rows, grid.block[1] or columns
    return np.array([[flat[r // tall, c // wide] for c in range(columns)] for r in range(rows)])


@pytest.mark.parametrize("name", GRIDS)
def test_nearest_of_all_values_is_chosen(name: str) -> None:
    grid, weight = GRIDS[name], weights()
    quantized = round_weight(weight, grid, absmax_fit.fit(weight, grid))
    shape = (weight.shape[0], weight.shape[1])
    exact = weight.double().numpy()
    scale = spread64(effective_scale(grid, quantized.params), grid, shape)
    zero = 0.0 if quantized.params.zero is None else spread64(quantized.params.zero, grid, shape)
    table = levels(grid)
    chosen = np.abs(exact - dequantize(quantized).double().numpy())
    best = np.min(np.abs(exact[..., None] - (table - np.expand_dims(zero, -1)) * scale[..., None]), axis=-1)
    assert np.all(chosen <= best + 1e-6 * (np.abs(scale) + np.abs(exact)))  # float32 against float64


@pytest.mark.parametrize("name", GRIDS)
def test_chunks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, weight = GRIDS[name], weights(300, 192)
    params = absmax_fit.fit(weight, grid)
    whole = encode(weight, grid, params)
    decoded = decode(whole, grid, params)
    monkeypatch.setattr(grids, "CHUNK", 1000)
    assert torch.equal(encode(weight, grid, params).view(torch.uint8), whole.view(torch.uint8))
    assert torch.equal(decode(whole, grid, params), decoded)


def test_float8_equals_torchs_cast() -> None:
    values = torch.cat([torch.randn(5000) * 10, torch.linspace(-500, 500, 3001), torch.logspace(-12, 3, 2000)])[None]
    for grid, dtype in ((GRIDS["fp8 tensor"], torch.float8_e4m3fn), (GRIDS["e5m2 channel"], torch.float8_e5m2)):
        codes = encode(values, grid, Params(torch.ones(1, 1)))
        limit = torch.finfo(dtype).max
        assert torch.equal(codes.view(torch.uint8), values.clamp(-limit, limit).to(dtype).view(torch.uint8))


def test_e2m1_halves_go_to_even() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0, -0.25, -0.75, -5.0, -0.0, 0.2500001, 0.7499999])
    expected = [0, 1, 1, 2, 2, 4, 4, 6, -0.0, -1, -4, -0.0, 0.5, 0.5]
    assert codebooks.e2m1_values(codebooks.nearest_e2m1(values.clone())).tolist() == expected
    assert codebooks.snap_e2m1(values).tolist() == expected


@pytest.mark.parametrize("name", [name for name in GRIDS if GRIDS[name].symmetric])
def test_absmax_scales_by_plain_loops(name: str) -> None:
    grid, weight = GRIDS[name], weights()
    params = absmax_fit.fit(weight, grid)
    rows, columns = weight.shape
    values = weight.double().numpy()
    if grid.kind in ("nf4", "fp4"):
        tops = np.abs(values.reshape(-1, 64)).max(1)
        if not grid.nested:
            assert np.array_equal(params.scale.double().numpy(), tops)
        else:
            assert np.allclose(params.scale.double().numpy(), tops, rtol=0, atol=0.02 * tops.max())
        return
    tall, wide = grid.block[0] or rows, grid.block[1] or columns
    tops = np.array(
        [
            [np.abs(values[r : r + tall, c : c + wide]).max() for c in range(0, columns, wide)]
            for r in range(0, rows, tall)
        ]
    )
    assert tuple(params.scale.shape) == tops.shape == scale_shape(grid, (rows, columns))
    if grid.scale == "e8m0":
        for top, stored in zip(tops.flatten(), params.scale.flatten().tolist(), strict=True):
            exponent = math.floor(math.log2(top)) if top else 2
            exponent += int(top / 2.0**exponent >= 1.75) if top else 0
            assert stored - 127 == exponent - 2
    elif grid.scale == "e4m3":
        outer = np.float32(448 * 6 / values.max())
        assert params.outer is not None
        assert params.outer.item() == outer
        expected = torch.from_numpy(np.maximum(tops / 6 * outer, 2.0**-9)).float().to(torch.float8_e4m3fn)
        assert torch.equal(params.scale.view(torch.uint8), expected.view(torch.uint8))
    else:
        largest = {"e4m3": 448, "e5m2": 57344}.get(grid.kind, (2**grid.bits - 1) / 2)
        expected = torch.from_numpy(np.where(tops > 0, tops / largest, 1)).float().to(SCALE_DTYPES[grid.scale])
        assert torch.equal(params.scale, expected)


@pytest.mark.parametrize("name", [name for name in GRIDS if not GRIDS[name].symmetric])
def test_affine_spans_the_block_and_holds_zero(name: str) -> None:
    grid = GRIDS[name]
    weight = (weights().float() + 0.03).bfloat16()
    quantized = round_weight(weight, grid, absmax_fit.fit(weight, grid))
    assert quantized.params.zero is not None
    scale = effective_scale(grid, quantized.params)
    error = cut((dequantize(quantized) - weight.float()).abs(), grid).amax(dim=(1, 3))
    assert torch.all(error <= 0.51 * scale + scale * 2**grid.bits * 2**-8)  # half a step, and the scale's own rounding
    zero = torch.zeros(1, weight.shape[1])
    row = Params(quantized.params.scale[:1], quantized.params.zero[:1])
    assert torch.equal(decode(encode(zero, grid, row), grid, row), zero)


@pytest.mark.parametrize("name", [name for name in GRIDS if GRIDS[name].kind not in ("nf4", "fp4")])
def test_mse_is_the_best_of_its_fractions(name: str) -> None:
    grid, weight = GRIDS[name], weights(8 if GRIDS[name].block[0] < 2 else 136, 192, seed=3)
    whole = weight.abs().max().float()

    def errors(params: Params) -> Tensor:
        return cut((decode(encode(weight, grid, params), grid, params).double() - weight.double()) ** 2, grid).sum(
            dim=(1, 3)
        )

    fitted = errors(mse_fit.fit(weight, grid))
    assert torch.all(fitted <= errors(absmax_fit.fit(weight, grid)) * (1 + 1e-6))
    low = cut(weight.float(), grid).amin(dim=(1, 3))
    high = cut(weight.float(), grid).amax(dim=(1, 3))
    best = torch.full_like(fitted, math.inf)
    for step in range(mse_fit.STEPS):
        fraction = 1 - (1 - mse_fit.SMALLEST) * step / (mse_fit.STEPS - 1)
        trial = (
            symmetric(absmax(weight, grid) * fraction, grid, whole)
            if grid.symmetric
            else affine(low * fraction, high * fraction, grid)
        )
        best = torch.minimum(best, errors(trial))
    assert torch.allclose(fitted, best, rtol=1e-4)


@pytest.mark.parametrize("name", ["int4 asym", "int2 asym", "int8 asym"])
def test_mse_takes_scale_and_zero_of_the_same_trial(name: str) -> None:
    grid, weight = GRIDS[name], (weights(64, 192, seed=5).float() + 0.013).bfloat16()
    low, high = cut(weight.float(), grid).amin(dim=(1, 3)), cut(weight.float(), grid).amax(dim=(1, 3))
    fractions = torch.linspace(1.0, mse_fit.SMALLEST, mse_fit.STEPS).tolist()
    trials = [affine(low * fraction, high * fraction, grid) for fraction in fractions]
    fitted = mse_fit.fit(weight, grid)
    assert fitted.zero is not None
    assert any(
        not torch.equal(trial.zero, trials[0].zero)
        for trial in trials
        if trial.zero is not None and trials[0].zero is not None
    )
    both = [(fitted.scale == trial.scale) & (fitted.zero == trial.zero) for trial in trials]
    assert torch.stack(both).any(dim=0).all()


def test_mse_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("int4 asym", "nvfp4", "mxfp4", "fp8 block"):
        grid, weight = GRIDS[name], weights(256, 192)
        whole = mse_fit.fit(weight, grid)
        monkeypatch.setattr(mse_fit, "CHUNK", 1000)
        parts = mse_fit.fit(weight, grid)
        monkeypatch.undo()
        assert torch.equal(whole.scale.view(torch.uint8), parts.scale.view(torch.uint8))


def test_a_shared_maximum_gives_a_shared_scale() -> None:
    small, large = weights(seed=1) * 0.1, weights(seed=2)
    whole = torch.maximum(small.abs().max(), large.abs().max()).float()
    for grid in (GRIDS["fp8 tensor"], GRIDS["int8 tensor"]):
        for fit in (absmax_fit.fit, mse_fit.fit):
            if fit is absmax_fit.fit:
                assert torch.equal(fit(small, grid, whole).scale, fit(large, grid, whole).scale)
    for fit in (absmax_fit.fit, mse_fit.fit):
        one, other = (fit(weight, GRIDS["nvfp4"], whole).outer for weight in (small, large))
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_scales_survive_extremes() -> None:
    tiny, huge = torch.full((1, 32), 1e-30), torch.full((1, 32), 3e38)
    for scale in ("f16", "bf16", "f32"):
        for weight in (tiny, huge, torch.zeros(1, 32)):
            grid = Grid("int", 4, (1, 32), scale=scale)
            stored = absmax_fit.fit(weight, grid).scale.float()
            assert torch.isfinite(stored).all()
            assert (stored > 0).all()


@examples(200)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 9))
def test_cut_and_join_are_inverse(rows: int, columns: int, tall: int, wide: int) -> None:
    grid = Grid("int", 4, (tall, wide))
    matrix = torch.arange(rows * columns).view(rows, columns).float()
    assert torch.equal(join(cut(matrix, grid), (rows, columns)), matrix)


def test_e8m0_scales_are_exact_powers() -> None:
    grid = GRIDS["mxfp4"]
    exponents = torch.arange(255, dtype=torch.uint8)[None]
    assert effective_scale(grid, Params(exponents)).double()[0].tolist() == [2.0 ** (e - 127) for e in range(255)]


@pytest.mark.parametrize(
    ("grid", "largest"),
    [(Grid("int", 8, (1, 0)), 127.0), (Grid("e4m3", 8, (1, 0)), 448.0), (Grid("e4m3", 8, (1, 32)), 448.0)],
)
def test_simulated_activations_by_plain_loops(grid: Grid, largest: float) -> None:
    inputs = (
        torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, 30.0])[:, None, None]
    )
    found = simulate(inputs, Activation(grid))
    wide = grid.block[1] or 64
    table = levels(grid)
    for token, row in zip(inputs.reshape(-1, 64).double().numpy(), found.reshape(-1, 64).double().numpy(), strict=True):
        for begin in range(0, 64, wide):
            group = token[begin : begin + wide]
            scale = np.abs(group).max() / largest
            nearest = table[np.abs(group[:, None] / scale - table).argmin(1)] * scale
            step = np.abs(group - row[begin : begin + wide])
            assert np.all(step <= np.abs(group - nearest) + 1e-6 * np.abs(group).max())


@pytest.mark.parametrize("name", GRIDS)
def test_rounding_costs_what_the_bits_promise(name: str) -> None:
    grid, weight = GRIDS[name], weights(seed=4)
    weight[3, 5] = 0  # without the outlier
    error = dequantize(round_weight(weight, grid, absmax_fit.fit(weight, grid))) - weight.float()
    limit = {8: 0.06, 4: 0.15, 3: 0.25, 2: 0.55}[grid.bits]
    assert error.norm() / weight.float().norm() < limit


def test_nvfp4s_outer_scale_divides() -> None:
    params = absmax_fit.fit(weights(), GRIDS["nvfp4"])
    assert params.outer is not None
    expected = params.scale.double() / params.outer.double()
    assert torch.allclose(effective_scale(GRIDS["nvfp4"], params).double(), expected, rtol=1e-6)

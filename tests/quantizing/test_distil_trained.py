"""Trained scales: at first what the file gives, always what the file will give, with the gradients of plain arithmetic."""

import pytest
import torch
from torch import Tensor

from quantry.errors import RecipeError
from quantry.formats import gguf
from quantry.methods.fits import absmax
from quantry.numerics import ggml
from quantry.numerics.ggml.layout import BLOCKS
from quantry.numerics.grids import dequantize, effective_scale, encode
from quantry.quantizing.distil.trained import LEARNED, TrainedBlocks, TrainedGrid, check_grid
from quantry.types import Grid, QTensor

GRIDS = {
    "int4": Grid("int", 4, (1, 32)),
    "int4 with zero points": Grid("int", 4, (1, 32), symmetric=False),
    "int8 by channel": Grid("int", 8, (1, 0)),
    "int8 with zero points": Grid("int", 8, (1, 64), symmetric=False, scale="f16"),
    "fp8 by channel": Grid("e4m3", 8, (1, 0)),
    "fp8 in blocks": Grid("e4m3", 8, (128, 128)),
    "nvfp4": Grid("e2m1", 4, (1, 16), scale="e4m3"),
    "mxfp4": Grid("e2m1", 4, (1, 32), scale="e8m0"),
}


def rounded(grid: Grid, seed: int = 0) -> QTensor:
    weight = torch.randn(130, 192, generator=torch.Generator().manual_seed(seed)) * 0.03
    params = absmax.fit(weight, grid, weight.abs().max())
    return QTensor(grid, encode(weight, grid, params), params)


def blocks(kind: str, seed: int = 0) -> Tensor:
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(seed)) * 0.03 + 0.01
    return ggml.quantize(weight, kind, None)


def moved(scales: TrainedGrid | TrainedBlocks, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for log in scales.logs:
            log += 0.4 * torch.randn(log.shape, generator=generator)


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_begins_as_stored_and_ends_as_trained(name: str) -> None:
    tensor = rounded(GRIDS[name])
    scales = TrainedGrid(tensor)
    assert torch.equal(scales.weight(torch.float32), dequantize(tensor))
    moved(scales)
    trained = scales.tensor()
    assert trained.codes is tensor.codes
    assert trained.params.scale.dtype == tensor.params.scale.dtype
    assert not torch.equal(trained.params.scale.float(), tensor.params.scale.float())
    assert torch.equal(scales.weight(torch.float32), dequantize(trained))


@pytest.mark.parametrize("name", GRIDS)
def test_gradients_of_a_grid_are_those_of_plain_arithmetic(name: str) -> None:
    tensor = rounded(GRIDS[name])
    scales, taught = TrainedGrid(tensor), torch.randn(130, 192, generator=torch.Generator().manual_seed(2))
    (scales.weight(torch.float32) * taught).sum().backward()  # type: ignore[no-untyped-call]
    size = tensor.grid.block[0] or 130, tensor.grid.block[1] or 192
    product = (taught.double() * dequantize(tensor).double()).tolist()
    expected = torch.zeros(effective_scale(tensor.grid, tensor.params).shape, dtype=torch.float64)
    for row, values in enumerate(product):
        for column, value in enumerate(values):
            expected[row // size[0], column // size[1]] += value
    gradient = scales.logs[0].grad
    assert gradient is not None
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_begin_as_stored_and_end_as_trained(kind: str) -> None:
    data = blocks(kind)
    scales = TrainedBlocks(data, kind, 512)
    assert torch.equal(scales.weight(torch.float32), gguf.decode(data, kind, 512))
    assert torch.equal(scales.data(), data)
    moved(scales)
    assert scales.data().shape == data.shape
    assert not torch.equal(scales.data(), data)
    assert torch.equal(scales.weight(torch.float32), gguf.decode(scales.data(), kind, 512))


@pytest.mark.parametrize("kind", BLOCKS)
def test_gradients_of_blocks_are_those_of_a_small_change(kind: str) -> None:
    """The forward is linear in d and dmin, so that a doubled one tells the derivative in float64."""
    data = blocks(kind)
    scales, taught = TrainedBlocks(data, kind, 512), torch.randn(6, 512, generator=torch.Generator().manual_seed(2))
    (scales.weight(torch.float32) * taught).sum().backward()  # type: ignore[no-untyped-call]
    before = (gguf.decode(data, kind, 512).double() * taught.double()).reshape(-1, BLOCKS[kind].size).sum(1)
    for place, name in enumerate(part for part in ("d", "dmin") if part in BLOCKS[kind].parts):
        other = TrainedBlocks(data, kind, 512)
        with torch.no_grad():
            other.logs[place] += torch.log(torch.tensor(2.0))
            after = (other.weight(torch.float32).double() * taught.double()).reshape(-1, BLOCKS[kind].size).sum(1)
        gradient = scales.logs[place].grad
        assert gradient is not None, name
        torch.testing.assert_close(gradient.double(), after - before, rtol=1e-3, atol=1e-5)


def test_grids_without_scales_of_their_own_are_refused() -> None:
    for grid, words in (
        (Grid("nf4", 4, (1, 64), scale="f32", nested=True), "rounded together"),
        (Grid("e4m3", 8, (0, 0)), "shared with other layers"),
        (Grid("bf16", 16), "no scales"),
    ):
        with pytest.raises(RecipeError, match=words):
            check_grid("model.layers.0.mlp.up_proj", grid, "--distil")
    check_grid("model.layers.0.mlp.up_proj", GRIDS["int4"], "--distil")


@pytest.mark.parametrize("name", [name for name, grid in GRIDS.items() if grid.kind in LEARNED])
def test_codes_of_a_grid_begin_as_stored_and_end_where_their_places_are(name: str) -> None:
    tensor = rounded(GRIDS[name])
    trained, original = TrainedGrid(tensor), dequantize(rounded(GRIDS[name], 5)) * 0.3 + dequantize(tensor)
    places = trained.learn_codes(original)
    assert torch.equal(trained.weight(torch.float32), dequantize(tensor))
    assert torch.equal(dequantize(trained.tensor()), dequantize(tensor))
    taught = torch.randn(130, 192, generator=torch.Generator().manual_seed(2))
    (trained.weight(torch.float32) * taught).sum().backward()  # type: ignore[no-untyped-call]
    scale = effective_scale(tensor.grid, tensor.params)
    width = tensor.grid.block[1] or 192
    torch.testing.assert_close(places.grad, taught * scale.repeat_interleave(width, 1)[:, :192])
    moved(trained)
    with torch.no_grad():
        places += torch.randn(places.shape, generator=torch.Generator().manual_seed(3))
    after = trained.tensor()
    assert 0.2 < (after.codes != tensor.codes).float().mean() < 0.95
    assert torch.equal(trained.weight(torch.float32), dequantize(after))


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_of_blocks_begin_as_stored_and_end_where_their_places_are(kind: str) -> None:
    data = blocks(kind)
    trained, stored = TrainedBlocks(data, kind, 512), gguf.decode(data, kind, 512)
    places = trained.learn_codes(stored + 0.003 * torch.randn(6, 512, generator=torch.Generator().manual_seed(5)))
    assert torch.equal(trained.weight(torch.float32), stored)
    assert torch.equal(trained.data(), data)
    moved(trained)
    with torch.no_grad():
        places += torch.randn(places.shape, generator=torch.Generator().manual_seed(3))
    made = trained.weight(torch.float32)
    assert torch.equal(made, gguf.decode(trained.data(), kind, 512))
    made.sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        places += 1000  # beyond all values: a larger place makes a weight larger, or smaller under a negative scale
        largest = trained.weight(torch.float32).detach().clone()
        places -= 2000
        smallest = trained.weight(torch.float32).detach()
    gradient = places.grad
    assert gradient is not None
    rises = (largest - smallest).view(gradient.shape)
    assert torch.equal(gradient.sign(), rises.sign())

"""ggml's block types: torch against ggml's own library byte for byte, decoding against the gguf library."""

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as gguf_dequantize
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quantry.errors import QuantryError
from quantry.numerics import ggml
from quantry.numerics import threads as rows
from quantry.numerics.ggml import exact, iq4, layout, native, simple

SIMPLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
BLOCKED = tuple(layout.BLOCKS)
ROWS, COLUMNS = 63, 768


def weights(case: str, rows: int = ROWS, columns: int = COLUMNS) -> Tensor:
    """Float32 weights of one character."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(rows, columns, generator=generator)
    blocks = x.view(-1, 32)
    match case:
        case "bfloat16":  # few different magnitudes: largest ones of both signs tie
            x = (x * 0.02).bfloat16().float()
        case "heavy tails":
            x = x / torch.randn(rows, columns, generator=generator).abs().clamp(min=1e-3)
        case "zero blocks":
            blocks[::3], blocks[1::6] = 0, -0.0
        case "signed zeros":
            x = torch.where(x > 1, x, torch.where(x > 0, 0.0, -0.0))
        case "constant blocks":
            blocks[:] = blocks[:, :1].clone()
        case "tiny":
            x = x * 1e-30
        case "around the floor":  # ggml takes a block whose magnitudes are all below 1e-15 for zeros
            x = x * 4e-16
        case "large":
            x = x * 1e4
        case "negative":
            x = -x.abs()
        case "positive":
            x = x.abs()
        case "whole numbers":
            x = (x * 2).round()
    return x


CASES = (
    "normal", "bfloat16", "heavy tails", "zero blocks", "signed zeros", "constant blocks", "tiny", "around the floor",
    "large", "negative", "positive", "whole numbers",
)  # fmt: skip


def importance(kind: str, columns: int = COLUMNS) -> Tensor | None:
    """None, or positive numbers over some orders of magnitude, or those with zeros (a whole block of them too)."""
    values = torch.rand(columns, generator=torch.Generator().manual_seed(11)) ** 4
    if kind == "zeros":
        values[::3] = 0
        values[64:128] = 0
    return None if kind == "none" else values


def by_ggml(weight: Tensor, kind: str, vector: Tensor | None = None) -> Tensor:
    """The bytes of one call to ggml for the whole matrix."""
    function = native.library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    count, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    weight = weight.float().contiguous()
    data = torch.zeros(weight.shape[0], ggml.row_bytes(kind, weight.shape[1]), dtype=torch.uint8)
    at = None if vector is None else vector.data_ptr()
    number = GGMLQuantizationType[kind].value
    size = function(number, weight.data_ptr(), data.data_ptr(), 0, *weight.shape, at)
    assert size == data.numel()
    return data


@pytest.fixture
def one_core() -> Iterator[None]:
    """Torch on one core, as in the threads of `rows.spread`: its sums run in one order then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_torch(weight: Tensor, kind: str, vector: Tensor | None = None) -> Tensor:
    return layout.pack(kind, ggml.search(kind, weight, vector)).view(weight.shape[0], -1)


def decode(data: Tensor, kind: str) -> Tensor:
    return torch.from_numpy(gguf_dequantize(data.numpy(), GGMLQuantizationType[kind]))


def agreement(data: Tensor, other: Tensor, kind: str) -> float:
    """The share of blocks with equal bytes."""
    blocks = (part.view(-1, layout.BLOCKS[kind].bytes) for part in (data, other))
    return float(torch.eq(*blocks).all(dim=1).double().mean())


def error(data: Tensor, kind: str, weight: Tensor, vector: Tensor | None) -> float:
    """The sum of squared errors, times the importance of their columns."""
    counts = torch.ones(weight.shape[1]) if vector is None else vector
    return float(((decode(data, kind).double() - weight.double()) ** 2 * counts.double()).sum())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", SIMPLE)
def test_simple_types_are_bit_equal(kind: str, case: str) -> None:
    weight = weights(case)
    assert torch.equal(by_torch(weight, kind), by_ggml(weight, kind))


def test_halves_are_rounded_away_from_zero_and_what_is_below_is_not() -> None:
    numbers = [127.0, 0.5, -0.5, 1.5, -2.5, 126.5, -126.5, 0.49999997, -0.49999997, 1.4999999, 62.499996]
    weight = torch.tensor([numbers + [0.0] * 21])
    data = by_torch(weight, "Q8_0")
    assert data[0, 2:13].view(torch.int8).tolist() == [127, 1, -1, 2, -3, 127, -127, 0, 0, 1, 62]
    assert torch.equal(data, by_ggml(weight, "Q8_0"))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=32, max_size=32), st.sampled_from(SIMPLE))
@settings(max_examples=300, deadline=None)
def test_any_block_of_a_simple_type_is_bit_equal(numbers: list[float], kind: str) -> None:
    weight = torch.tensor([numbers])
    assert torch.equal(by_torch(weight, kind), by_ggml(weight, kind))


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vector", ["positive", "zeros"])
@pytest.mark.parametrize("kind", SIMPLE[1:])
def test_searches_find_what_ggml_finds(kind: str, vector: str, case: str) -> None:
    weight, counts = weights(case), importance(vector)
    mine, theirs = by_torch(weight, kind, counts), by_ggml(weight, kind, counts)
    if kind in simple.WITH_MINIMUM and case == "signed zeros":  # the sign of a minimum that is zero may differ
        columns = weight.shape[1]
        assert torch.equal(ggml.dequantize(mine, kind, columns), ggml.dequantize(theirs, kind, columns))
    else:
        assert agreement(mine, theirs, kind) >= 0.99
    assert error(mine, kind, weight, counts) <= 1.001 * error(theirs, kind, weight, counts)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vector", ["none", "positive", "zeros"])
@pytest.mark.parametrize("kind", iq4.KINDS)
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "machine code"])
def test_uneven_levels_are_those_ggml_finds(compiled: bool, kind: str, vector: str, case: str) -> None:
    if compiled and not iq4.compiled.AVAILABLE:
        pytest.skip("needs llvmlite")
    weight, counts = weights(case), importance(vector)
    blocks = (-1, layout.BLOCKS[kind].size)
    spread_out = None if counts is None else counts.expand(weight.shape).reshape(blocks)
    fields = iq4.search(kind, weight.view(blocks), spread_out, iq4.compiled if compiled else iq4.batched)
    mine, theirs = layout.pack(kind, fields).view(ROWS, -1), by_ggml(weight, kind, counts)
    assert agreement(mine, theirs, kind) >= 0.99
    assert error(mine, kind, weight, counts) <= 1.001 * error(theirs, kind, weight, counts)


def test_importance_does_not_touch_q8_0() -> None:
    weight = weights("normal")
    assert torch.equal(by_torch(weight, "Q8_0", importance("zeros")), by_ggml(weight, "Q8_0"))


@pytest.mark.parametrize("vector", ["none", "positive"])
@pytest.mark.parametrize("shape", [(1, 256), (3, 512), (65, 256), (130, 768)])
@pytest.mark.parametrize("kind", BLOCKED)
def test_quantize_writes_what_ggml_writes(kind: str, shape: tuple[int, int], vector: str) -> None:
    weight, counts = weights("normal", *shape), importance(vector, shape[1])
    mine, theirs = ggml.quantize(weight, kind, counts), by_ggml(weight, kind, counts)
    assert mine.shape == (shape[0], ggml.row_bytes(kind, shape[1]))
    assert agreement(mine, theirs, kind) >= 0.99
    assert error(mine, kind, weight, counts) <= 1.001 * error(theirs, kind, weight, counts)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("columns", [32, 96, 160])
@pytest.mark.parametrize("kind", [kind for kind in BLOCKED if layout.BLOCKS[kind].size == 32])
def test_rows_of_a_few_blocks(kind: str, columns: int) -> None:
    weight = weights("normal", 7, columns)
    for counts in (None, importance("positive", columns)):
        assert torch.equal(ggml.quantize(weight, kind, counts), by_ggml(weight, kind, counts))
        assert torch.equal(by_torch(weight, kind, counts), by_ggml(weight, kind, counts))


@pytest.mark.parametrize("vector", ["none", "positive"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "Q4_K", "F16"])
def test_native_threads_take_the_right_rows(kind: str, vector: str) -> None:
    weight = weights("normal", 5 * native.CHUNK // 1024 + 3, 1024)[:, :512].contiguous()
    counts = importance(vector, 512)
    whole = by_ggml(weight, kind, counts)
    for threads in (1, 2, 5):
        assert torch.equal(native.quantize(weight, kind, counts, threads), whole)


def test_native_importance_starts_at_the_first_column() -> None:
    weight, long = weights("normal"), importance("positive", 3 * COLUMNS)
    assert long is not None
    part = long[COLUMNS : 2 * COLUMNS]
    found = native.quantize(weight, "Q4_0", part)
    assert torch.equal(found, by_ggml(weight, "Q4_0", part.clone()))
    assert not torch.equal(found, by_ggml(weight, "Q4_0", long[:COLUMNS].clone()))
    strided = torch.stack((part, torch.zeros(COLUMNS)), dim=1)[:, 0]
    assert torch.equal(native.quantize(weight, "Q4_0", strided), found)


@pytest.mark.parametrize("kind", ["Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_of_any_dtype_and_stride(kind: str, dtype: torch.dtype) -> None:
    weight = (weights("normal", 70, 256) * 0.02).to(dtype)
    want = by_ggml(weight, kind)
    wide = torch.cat((weight, weight), dim=1)
    forms = (weight, wide[:, 256:], weight.t().contiguous().t(), torch.cat((weight, weight))[:70])
    for form in forms:
        assert torch.equal(ggml.quantize(form, kind), want)
        assert torch.equal(native.quantize(form, kind), want)


@pytest.mark.parametrize("kind", BLOCKED)
def test_chunks_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, counts = weights("normal", 41, 512), importance("positive", 512)
    whole = ggml.quantize(weight, kind, counts)
    back = ggml.dequantize(whole, kind, 512)
    for module in (ggml, native):
        monkeypatch.setattr(module, "CHUNK", 1536)
    assert torch.equal(ggml.quantize(weight, kind, counts), whole)
    assert torch.equal(ggml.dequantize(whole, kind, 512), back)


def random_blocks(kind: str, count: int = 500) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, layout.BLOCKS[kind].bytes), generator=generator, dtype=torch.uint8)


def finite(kind: str) -> Tensor:
    """Random blocks without infinities or NaN among their 16-bit scales."""
    fields = layout.unpack(kind, random_blocks(kind))
    good = fields.d.isfinite() if fields.dmin is None else fields.d.isfinite() & fields.dmin.isfinite()
    return random_blocks(kind)[good]


@pytest.mark.parametrize("kind", BLOCKED)
def test_any_bytes_survive_unpacking(kind: str) -> None:
    data = random_blocks(kind)
    for part in (data, data[7:8], data[::3], data.t().contiguous().t()):
        assert torch.equal(layout.pack(kind, layout.unpack(kind, part)), part)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("kind", BLOCKED)
def test_fields_may_lie_elements_first(kind: str, count: int) -> None:
    data = finite(kind)[:count]
    fields = layout.unpack(kind, data)
    turned = {
        name: part.t().contiguous().as_strided(part.shape, (1, count))  # spelled out: torch takes one row as it lies
        for name in ("codes", "scales", "mins")
        if (part := getattr(fields, name)) is not None
    }
    assert torch.equal(layout.pack(kind, replace(fields, **turned)), data)
    assert torch.equal(layout.values(kind, replace(fields, **turned)), layout.values(kind, fields))


@pytest.mark.parametrize("kind", BLOCKED)
def test_fields_are_in_their_ranges(kind: str) -> None:
    fields, block = layout.unpack(kind, random_blocks(kind)), layout.BLOCKS[kind]
    assert fields.codes.shape == (500, block.size)
    assert fields.codes.dtype == torch.uint8
    assert fields.d.shape == (500,)
    assert (fields.scales is None) == (block.subs == 0)
    assert (fields.mins is None) == (kind not in ("Q2_K", "Q4_K", "Q5_K"))
    for part in (fields.scales, fields.mins):
        assert part is None or part.shape == (500, block.subs)


@pytest.mark.parametrize("kind", BLOCKED)
def test_values_are_to_the_bit_those_of_the_gguf_library(kind: str) -> None:
    data = finite(kind)
    data = data[: len(data) // 3 * 3].view(len(data) // 3, -1)
    mine = ggml.dequantize(data, kind, 3 * layout.BLOCKS[kind].size)
    assert torch.equal(mine.view(torch.int32), decode(data, kind).view(torch.int32))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["normal", "tiny", "large", "signed zeros"])
def test_plain_floats_are_cast_as_ggml_casts(kind: str, dtype: torch.dtype, case: str) -> None:
    weight = weights(case).to(dtype)
    data = ggml.quantize(weight, kind)
    assert torch.equal(data, by_ggml(weight, kind))
    assert torch.equal(data, native.quantize(weight, kind))
    assert torch.equal(ggml.dequantize(data, kind, COLUMNS), decode(data, kind))


def test_bfloat16_rounds_halves_to_even_and_keeps_nan() -> None:
    bits = torch.tensor([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x7F800001]], dtype=torch.int32)
    weight = bits.view(torch.float32)
    data = ggml.quantize(weight, "BF16").view(torch.int16)
    assert data[0, :5].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0]
    assert data.view(torch.bfloat16)[0, 5].isnan()


@pytest.mark.parametrize("kind", ggml.TYPES)
def test_sizes_are_those_of_ggml(kind: str) -> None:
    number = GGMLQuantizationType[kind]
    size, width = GGML_QUANT_SIZES[number]
    assert ggml.block_size(kind) == size
    assert ggml.row_bytes(kind, 5 * size) == 5 * width == native.row_bytes(kind, 5 * size)
    assert native.NUMBERS[kind] == number.value
    assert gguf.GGMLQuantizationType(native.NUMBERS[kind]).name == kind


def threads_elsewhere() -> int:
    """How many threads torch takes in a thread that begins now."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.get_num_threads).result()


def test_threads_of_torch_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "CHUNK", 4096)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ggml.quantize(weights("normal", 40, 512), "IQ4_NL")
        assert (torch.get_num_threads(), threads_elsewhere()) == (3, 3)
        with pytest.raises(RuntimeError, match="from 0"):
            rows.spread(100, 10, fail, threads=4)
        assert (torch.get_num_threads(), threads_elsewhere()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def fail(start: int, stop: int) -> None:
    raise RuntimeError(f"from {start} to {stop}")


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("count", "step"), [(0, 4), (1, 4), (8, 4), (9, 4)])
def test_every_row_has_its_turn_once(count: int, step: int, threads: int) -> None:
    seen: list[int] = []
    rows.spread(count, step, lambda start, stop: seen.extend(range(start, stop)), threads)
    assert sorted(seen) == list(range(count))


def refusals() -> Iterator[tuple[str, Tensor, str, Tensor | None]]:
    weight = torch.zeros(2, 64)
    yield "'Q9_0' is not a ggml type", weight, "Q9_0", None
    yield "64 weights .* Q4_K's blocks of 256", weight, "Q4_K", None
    yield "33 weights .* Q8_0's blocks of 32", torch.zeros(2, 33), "Q8_0", None
    yield r"importance .* \(32,\) .* 64 columns", weight, "Q4_0", torch.ones(32)
    yield r"importance .* \(2, 64\) .* 64 columns", weight, "IQ4_NL", torch.ones(2, 64)


@pytest.mark.parametrize(("message", "weight", "kind", "vector"), list(refusals()))
def test_what_cannot_be_written_is_refused(message: str, weight: Tensor, kind: str, vector: Tensor | None) -> None:
    with pytest.raises(QuantryError, match=message):
        ggml.quantize(weight, kind, vector)


def test_bytes_of_another_width_are_refused() -> None:
    with pytest.raises(QuantryError, match="rows of 36 bytes .* 18"):
        ggml.dequantize(torch.zeros(2, 36, dtype=torch.uint8), "Q4_0", 32)


def test_without_xllamacpp_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    native.library.cache_clear()
    with pytest.raises(QuantryError, match="xllamacpp is not installed; pip install xllamacpp"):
        native.library()


def test_the_largest_magnitude_is_the_first_of_equals() -> None:
    x = torch.tensor(
        [[1.0, -2.0, 2.0, 0.5], [-3.0, 3.0, 3.0, -3.0], [-0.0, 0.0, -0.0, -0.0], [-1.0, 0.5, 2.0, -2.5]]
    ).t()
    assert exact.extreme(x).tolist() == [-2.0, -3.0, 0.0, -2.5]
    assert np.signbit(exact.extreme(x)[2].item()) == np.False_


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vector", ["none", "positive", "zeros"])
@pytest.mark.parametrize("kind", BLOCKED)
def test_a_gpu_finds_what_ggml_finds(kind: str, vector: str) -> None:
    weight, counts = weights("normal"), importance(vector)
    mine = ggml.quantize(weight.cuda(), kind, None if counts is None else counts.cuda())
    theirs = by_ggml(weight, kind, counts)
    assert agreement(mine.cpu(), theirs, kind) >= (1.0 if kind in SIMPLE and counts is None else 0.99)
    assert error(mine.cpu(), kind, weight, counts) <= 1.001 * error(theirs, kind, weight, counts)
    assert torch.equal(ggml.dequantize(mine, kind, COLUMNS).cpu(), ggml.dequantize(mine.cpu(), kind, COLUMNS))

"""ggml's block types: torch against ggml's own library byte for byte, decoding against the gguf library."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depth import examples
from ggml_library import by_ggml, check_as_good, decode
from quantry.errors import QuantryError
from quantry.numerics import ggml
from quantry.numerics.ggml import exact, iq4, layout, native, simple
from quantry.numerics.simd import AVAILABLE
from quantry.numerics.threads import spread

SIMPLE = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
CPU = torch.device("cpu")
BLOCKED = tuple(layout.BLOCKS)
ROWS, COLUMNS = 21, 768


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


def importance(vector: str, columns: int = COLUMNS) -> Tensor | None:
    """None, or positive numbers over some orders of magnitude, or those with zeros (a whole block of them too)."""
    values = torch.rand(columns, generator=torch.Generator().manual_seed(11)) ** 4
    if vector == "zeros":
        values[::3] = 0
        values[64:128] = 0
    return None if vector == "none" else values


@pytest.fixture
def one_core() -> Iterator[None]:
    """Torch on one core, as in the threads of `spread`: its sums run in one order then."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def by_torch(weight: Tensor, type_name: str, vector: Tensor | None = None) -> Tensor:
    return layout.pack(type_name, ggml.search(type_name, weight, vector)).view(weight.shape[0], -1)


@cache
def all_cases() -> Tensor:
    """The rows of every case, stacked: rows do not depend on each other."""
    return torch.cat([weights(case) for case in CASES])


@cache
def expected(type_name: str, vector: str) -> Tensor:
    return by_ggml(all_cases(), type_name, importance(vector))


def check_every_case(data: Tensor, type_name: str, vector: str) -> None:
    """Compares each case with ggml by itself, so that a failure names it."""
    parts = (torch.split(part, ROWS) for part in (data, expected(type_name, vector), all_cases()))
    for case, mine, theirs, weight in zip(CASES, *parts, strict=True):
        if type_name in simple.WITH_MINIMUM and case == "signed zeros":  # the sign of a zero minimum may differ
            assert torch.equal(*(ggml.dequantize(part, type_name, COLUMNS) for part in (mine, theirs)))
        else:
            check_as_good(mine, theirs, type_name, weight, importance(vector))


@pytest.mark.parametrize("type_name", SIMPLE)
def test_simple_types_are_bit_equal(type_name: str) -> None:
    assert torch.equal(by_torch(all_cases(), type_name), expected(type_name, "none"))


def test_halves_are_rounded_away_from_zero_and_what_is_below_is_not() -> None:
    numbers = [127.0, 0.5, -0.5, 1.5, -2.5, 126.5, -126.5, 0.49999997, -0.49999997, 1.4999999, 62.499996]
    weight = torch.tensor([numbers + [0.0] * 21])
    data = by_torch(weight, "Q8_0")
    assert data[0, 2:13].view(torch.int8).tolist() == [127, 1, -1, 2, -3, 127, -127, 0, 0, 1, 62]
    assert torch.equal(data, by_ggml(weight, "Q8_0"))


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=32, max_size=32), st.sampled_from(SIMPLE))
@examples(300)
def test_any_block_of_a_simple_type_is_bit_equal(numbers: list[float], type_name: str) -> None:
    weight = torch.tensor([numbers])
    assert torch.equal(by_torch(weight, type_name), by_ggml(weight, type_name))


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("vector", ["positive", "zeros"])
@pytest.mark.parametrize("type_name", SIMPLE[1:])
def test_searches_find_what_ggml_finds(type_name: str, vector: str) -> None:
    check_every_case(by_torch(all_cases(), type_name, importance(vector)), type_name, vector)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("vector", ["none", "positive", "zeros"])
@pytest.mark.parametrize("type_name", iq4.TYPES)
@pytest.mark.parametrize("compiled", [False, True], ids=["torch", "machine code"])
def test_uneven_levels_are_those_ggml_finds(compiled: bool, type_name: str, vector: str) -> None:
    if compiled and not AVAILABLE:
        pytest.skip("needs llvmlite")
    weight, counts = all_cases(), importance(vector)
    blocks = (-1, layout.BLOCKS[type_name].size)
    by_weight = None if counts is None else counts.expand(weight.shape).reshape(blocks)
    fields = iq4.search(type_name, weight.view(blocks), by_weight, iq4.compiled if compiled else iq4.batched)
    check_every_case(layout.pack(type_name, fields).view(len(weight), -1), type_name, vector)


def test_importance_does_not_touch_q8_0() -> None:
    weight = weights("normal")
    assert torch.equal(by_torch(weight, "Q8_0", importance("zeros")), by_ggml(weight, "Q8_0"))


@pytest.mark.parametrize("vector", ["none", "positive"])
@pytest.mark.parametrize("type_name", BLOCKED)
def test_quantize_writes_what_ggml_writes(type_name: str, vector: str) -> None:
    for rows, columns in [(1, 256), (3, 512), (65, 256), (130, 768)]:
        weight, counts = weights("normal", rows, columns), importance(vector, columns)
        data = ggml.quantize(weight, type_name, counts)
        assert data.shape == (rows, ggml.row_bytes(type_name, columns))
        check_as_good(data, by_ggml(weight, type_name, counts), type_name, weight, counts)


@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize("columns", [32, 96, 160])
@pytest.mark.parametrize("type_name", [type_name for type_name in BLOCKED if layout.BLOCKS[type_name].size == 32])
def test_rows_of_a_few_blocks(type_name: str, columns: int) -> None:
    weight = weights("normal", 7, columns)
    for counts in (None, importance("positive", columns)):
        assert torch.equal(ggml.quantize(weight, type_name, counts), by_ggml(weight, type_name, counts))
        assert torch.equal(by_torch(weight, type_name, counts), by_ggml(weight, type_name, counts))


@pytest.mark.parametrize("vector", ["none", "positive"])
@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q5_1", "Q6_K", "Q4_K", "F16"])
def test_native_threads_take_the_right_rows(type_name: str, vector: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "CHUNK", 8192)
    weight = weights("normal", 5 * native.CHUNK // 512 + 3, 512)
    counts = importance(vector, 512)
    whole = by_ggml(weight, type_name, counts)
    for threads in (1, 2, 5):
        assert torch.equal(native.quantize(weight, type_name, counts, threads), whole)


def test_native_importance_starts_at_the_first_column() -> None:
    weight, long = weights("normal"), importance("positive", 3 * COLUMNS)
    assert long is not None
    part = long[COLUMNS : 2 * COLUMNS]
    data = native.quantize(weight, "Q4_0", part)
    assert torch.equal(data, by_ggml(weight, "Q4_0", part.clone()))
    assert not torch.equal(data, by_ggml(weight, "Q4_0", long[:COLUMNS].clone()))
    strided = torch.stack((part, torch.zeros(COLUMNS)), dim=1)[:, 0]
    assert torch.equal(native.quantize(weight, "Q4_0", strided), data)


@pytest.mark.parametrize("type_name", ["Q4_0", "IQ4_NL", "IQ4_XS", "Q4_K"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_input_of_any_dtype_and_stride(type_name: str, dtype: torch.dtype) -> None:
    weight = (weights("normal", 70, 256) * 0.02).to(dtype)
    want = by_ggml(weight, type_name)
    wide = torch.cat((weight, weight), dim=1)
    layouts = (weight, wide[:, 256:], weight.t().contiguous().t(), torch.cat((weight, weight))[:70])
    for same in layouts:
        assert torch.equal(ggml.quantize(same, type_name), want)
        assert torch.equal(native.quantize(same, type_name), want)


@pytest.mark.parametrize("type_name", BLOCKED)
def test_chunks_do_not_show(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, counts = weights("normal", 41, 512), importance("positive", 512)
    whole = ggml.quantize(weight, type_name, counts)
    back = ggml.dequantize(whole, type_name, 512)
    for module in (ggml, native):
        monkeypatch.setattr(module, "CHUNK", 1536)
    assert torch.equal(ggml.quantize(weight, type_name, counts), whole)
    assert torch.equal(ggml.dequantize(whole, type_name, 512), back)


def random_blocks(type_name: str, count: int = 500) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (count, layout.BLOCKS[type_name].bytes), generator=generator, dtype=torch.uint8)


def finite(type_name: str) -> Tensor:
    """Random blocks without infinities or NaN among their 16-bit scales."""
    fields = layout.unpack(type_name, random_blocks(type_name))
    good = fields.d.isfinite() if fields.dmin is None else fields.d.isfinite() & fields.dmin.isfinite()
    return random_blocks(type_name)[good]


@pytest.mark.parametrize("type_name", BLOCKED)
def test_any_bytes_survive_unpacking(type_name: str) -> None:
    data = random_blocks(type_name)
    for part in (data, data[7:8], data[::3], data.t().contiguous().t()):
        assert torch.equal(layout.pack(type_name, layout.unpack(type_name, part)), part)


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("type_name", BLOCKED)
def test_fields_may_lie_elements_first(type_name: str, count: int) -> None:
    data = finite(type_name)[:count]
    fields = layout.unpack(type_name, data)
    turned = {
        name: part.t().contiguous().as_strided(part.shape, (1, count))  # spelled out: torch takes one row as it lies
        for name in ("codes", "scales", "mins")
        if (part := getattr(fields, name)) is not None
    }
    assert torch.equal(layout.pack(type_name, replace(fields, **turned)), data)
    assert torch.equal(layout.values(type_name, replace(fields, **turned)), layout.values(type_name, fields))


@pytest.mark.parametrize("type_name", BLOCKED)
def test_fields_are_in_their_ranges(type_name: str) -> None:
    fields, block = layout.unpack(type_name, random_blocks(type_name)), layout.BLOCKS[type_name]
    assert fields.codes.shape == (500, block.size)
    assert fields.codes.dtype == torch.uint8
    assert fields.d.shape == (500,)
    assert (fields.scales is None) == (block.subs == 0)
    assert (fields.mins is None) == (type_name not in ("Q2_K", "Q4_K", "Q5_K"))
    for part in (fields.scales, fields.mins):
        assert part is None or part.shape == (500, block.subs)


@pytest.mark.parametrize("type_name", BLOCKED)
def test_values_are_to_the_bit_those_of_the_gguf_library(type_name: str) -> None:
    data = finite(type_name)
    data = data[: len(data) // 3 * 3].view(len(data) // 3, -1)
    mine = ggml.dequantize(data, type_name, 3 * layout.BLOCKS[type_name].size)
    assert torch.equal(mine.view(torch.int32), decode(data, type_name).view(torch.int32))


@pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["normal", "tiny", "large", "signed zeros"])
def test_plain_floats_are_cast_as_ggml_casts(type_name: str, dtype: torch.dtype, case: str) -> None:
    weight = weights(case).to(dtype)
    data = ggml.quantize(weight, type_name)
    assert torch.equal(data, by_ggml(weight, type_name))
    assert torch.equal(data, native.quantize(weight, type_name))
    assert torch.equal(ggml.dequantize(data, type_name, COLUMNS), decode(data, type_name))


def test_bfloat16_rounds_halves_to_even_and_keeps_nan() -> None:
    bits = torch.tensor([[0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0x7F800001]], dtype=torch.int32)
    weight = bits.view(torch.float32)
    data = ggml.quantize(weight, "BF16").view(torch.int16)
    assert data[0, :5].tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0]
    assert data.view(torch.bfloat16)[0, 5].isnan()


@pytest.mark.parametrize("type_name", ggml.TYPES)
def test_sizes_are_those_of_ggml(type_name: str) -> None:
    number = GGMLQuantizationType[type_name]
    size, width = GGML_QUANT_SIZES[number]
    assert ggml.block_size(type_name) == size
    assert ggml.row_bytes(type_name, 5 * size) == 5 * width == native.row_bytes(type_name, 5 * size)
    assert native.NUMBERS[type_name] == number.value
    assert gguf.GGMLQuantizationType(native.NUMBERS[type_name]).name == type_name


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
            spread(100, 10, fail, CPU, threads=4)
        assert (torch.get_num_threads(), threads_elsewhere()) == (3, 3)
    finally:
        torch.set_num_threads(before)


def fail(start: int, stop: int) -> None:
    raise RuntimeError(f"from {start} to {stop}")


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("count", "step"), [(0, 4), (1, 4), (8, 4), (9, 4)])
def test_every_row_has_its_turn_once(count: int, step: int, threads: int) -> None:
    seen: list[int] = []
    spread(count, step, lambda start, stop: seen.extend(range(start, stop)), CPU, threads)
    assert sorted(seen) == list(range(count))


def refusals() -> Iterator[tuple[str, Tensor, str, Tensor | None]]:
    weight = torch.zeros(2, 64)
    yield "'Q9_0' is not a ggml type", weight, "Q9_0", None
    yield "64 weights .* Q4_K's blocks of 256", weight, "Q4_K", None
    yield "33 weights .* Q8_0's blocks of 32", torch.zeros(2, 33), "Q8_0", None
    yield r"importance .* \(32,\) .* 64 columns", weight, "Q4_0", torch.ones(32)
    yield r"importance .* \(2, 64\) .* 64 columns", weight, "IQ4_NL", torch.ones(2, 64)


@pytest.mark.parametrize(("message", "weight", "type_name", "vector"), list(refusals()))
def test_what_cannot_be_written_is_refused(message: str, weight: Tensor, type_name: str, vector: Tensor | None) -> None:
    with pytest.raises(QuantryError, match=message):
        ggml.quantize(weight, type_name, vector)


def test_bytes_of_another_width_are_refused() -> None:
    with pytest.raises(QuantryError, match="rows have 36 bytes, .* 18"):
        ggml.dequantize(torch.zeros(2, 36, dtype=torch.uint8), "Q4_0", 32)


def test_without_xllamacpp_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    native.library.cache_clear()
    with pytest.raises(QuantryError, match="xllamacpp .* is not installed; pip install xllamacpp"):
        native.library()


def test_the_largest_magnitude_is_the_first_of_equals() -> None:
    x = torch.tensor(
        [[1.0, -2.0, 2.0, 0.5], [-3.0, 3.0, 3.0, -3.0], [-0.0, 0.0, -0.0, -0.0], [-1.0, 0.5, 2.0, -2.5]]
    ).t()
    assert exact.extreme(x).tolist() == [-2.0, -3.0, 0.0, -2.5]
    assert np.signbit(exact.extreme(x)[2].item()) == np.False_


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("vector", ["none", "positive", "zeros"])
@pytest.mark.parametrize("type_name", BLOCKED)
def test_a_gpu_finds_what_ggml_finds(type_name: str, vector: str) -> None:
    weight, counts = weights("normal"), importance(vector)
    mine = ggml.quantize(weight.cuda(), type_name, None if counts is None else counts.cuda())
    exact = type_name in SIMPLE and counts is None
    check_as_good(mine.cpu(), by_ggml(weight, type_name, counts), type_name, weight, counts, exact)
    assert torch.equal(ggml.dequantize(mine, type_name, COLUMNS).cpu(), ggml.dequantize(mine.cpu(), type_name, COLUMNS))

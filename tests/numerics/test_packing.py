"""Packings: exact inverses of each other, and equal to a bit stream written out one bit at a time."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from depth import examples
from quantry.numerics import packing

WIDTHS = (2, 3, 4, 8)
Case = tuple[Tensor, int]


@st.composite
def coded(draw: st.DrawFn, widths: tuple[int, ...] = WIDTHS) -> Case:
    """Codes of some width in any shape, and the width."""
    bits = draw(st.sampled_from(widths))
    rows, n = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    values = draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=rows * n, max_size=rows * n))
    return torch.tensor(values, dtype=torch.uint8).view(rows, n), bits


def stream(codes: list[int], bits: int) -> list[int]:
    """The words of one row: every bit of every code at its place, no tricks."""
    words = [0] * -(-len(codes) * bits // 32)
    for position, code in enumerate(codes):
        for bit in range(bits):
            place = position * bits + bit
            words[place // 32] |= (code >> bit & 1) << (place % 32)
    return [word - (1 << 32) if word >> 31 else word for word in words]


@given(coded())
@examples(150)
def test_words_are_the_dense_bit_stream_and_unpack_exactly(case: Case) -> None:
    codes, bits = case
    words = packing.pack_rows(codes, bits)
    assert words.dtype == torch.int32
    assert words.shape == (codes.shape[0], -(-codes.shape[1] * bits // 32))
    assert words.tolist() == [stream(row, bits) for row in codes.tolist()]
    assert torch.equal(packing.unpack_rows(words, bits, codes.shape[1]), codes)


@given(coded())
@examples(100)
def test_spaced_words_hold_whole_codes_only(case: Case) -> None:
    codes, bits = case
    words, each = packing.pack_rows_spaced(codes, bits), 32 // bits
    rows = [[row[start : start + each] for start in range(0, len(row), each)] for row in codes.tolist()]
    assert words.tolist() == [[stream(part, bits)[0] for part in row] for row in rows]
    assert torch.equal(packing.unpack_rows_spaced(words, bits, codes.shape[1]), codes)


@pytest.mark.parametrize(
    ("pack", "unpack", "first"),
    [
        (packing.pack_nibbles_low_first, packing.unpack_nibbles_low_first, 1),
        (packing.pack_nibbles_high_first, packing.unpack_nibbles_high_first, 16),
    ],
)
@given(case=coded((4,)))
@examples(60)
def test_nibbles_are_in_the_order_of_their_name(
    pack: Callable[[Tensor], Tensor], unpack: Callable[[Tensor, int], Tensor], first: int, case: Case
) -> None:
    codes, _ = case
    data = pack(codes)
    pairs = [[*row, 0] if len(row) % 2 else row for row in codes.tolist()]
    assert data.tolist() == [
        [a * first + b * (16 // first) for a, b in zip(row[::2], row[1::2], strict=True)] for row in pairs
    ]
    assert torch.equal(unpack(data, codes.shape[1]), codes)


def test_interleaving_puts_even_codes_before_odd_ones() -> None:
    codes = torch.arange(32, dtype=torch.uint8).view(2, 16)
    mixed = packing.interleave(codes)
    assert mixed[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert torch.equal(packing.deinterleave(mixed), codes)


@pytest.mark.parametrize("bits", WIDTHS)
def test_signed_codes_are_stored_with_half_the_range_added(bits: int) -> None:
    half = 1 << (bits - 1)
    codes = torch.arange(-half, half, dtype=torch.int16).to(torch.int8)
    assert packing.unsigned(codes, bits).tolist() == list(range(2 * half))
    assert torch.equal(packing.signed(packing.unsigned(codes, bits), bits), codes)


def test_transposed_and_sliced_codes_pack_like_copies() -> None:
    codes = torch.randint(0, 8, (40, 24), dtype=torch.uint8)
    assert torch.equal(packing.pack_rows(codes.T, 3), packing.pack_rows(codes.T.contiguous(), 3))
    assert torch.equal(packing.pack_rows(codes[:, ::2], 4), packing.pack_rows(codes[:, ::2].contiguous(), 4))
    column = codes[:, :1]  # its transpose is a single row with a stride of 1
    assert torch.equal(packing.pack_rows(column.T, 4), packing.pack_rows(column.T.clone().view(1, 40), 4))
    words = packing.pack_rows(codes, 3)
    assert torch.equal(packing.unpack_rows(words.T.contiguous().T, 3, 24), codes)

"""Packing codes of a few bits into the bytes and words of a file, and unpacking them.

All packings are little-endian bit streams along a row: code i occupies the bits from i * bits on, the lowest first, so
32 codes fill exactly `bits` words of 32 bits and 3-bit codes cross the borders of bytes and words. Whole columns of
codes are combined at a time, as bytes; a view of four bytes as one word is the same stream on a little-endian machine
(the only kind torch runs on). Codes are unsigned here: a signed code is stored with half its range added.
"""

from math import ceil

import torch
from torch import Tensor
from torch.nn.functional import pad


def unsigned(codes: Tensor, bits: int) -> Tensor:
    """Turns signed int8 codes into uint8 by adding half the range."""
    return codes.contiguous().view(torch.uint8) + (1 << (bits - 1))


def signed(codes: Tensor, bits: int) -> Tensor:
    """Inverts `unsigned`."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes (rows, n) of 2, 3, 4 or 8 bits into int32 words (rows, ceil(n * bits / 32)) without gaps."""
    words = ceil(codes.shape[1] * bits / 32)
    return _view_as(_fit(_bytes_of(codes, bits), 4 * words), torch.int32)


def unpack_rows(words: Tensor, bits: int, n: int) -> Tensor:
    """Returns the first n codes of each row of words; inverts `pack_rows`."""
    return _codes_of(_view_as(words, torch.uint8), bits)[:, :n].contiguous()


def pack_rows_spaced(codes: Tensor, bits: int) -> Tensor:
    """Packs uint8 codes (rows, n) into int32 words of 32 // bits codes each; no code crosses a border.

    Differs from `pack_rows` only at 3 bits: ten codes to a word, the two highest bits unused.
    """
    each = 32 // bits
    padded = pad(codes, (0, -codes.shape[1] % each)).view(codes.shape[0], -1, each).int()
    return (padded << _shifts(bits, codes.device)).sum(dim=2, dtype=torch.int32)


def unpack_rows_spaced(words: Tensor, bits: int, n: int) -> Tensor:
    """Returns the first n codes of each row of words; inverts `pack_rows_spaced`."""
    codes = (words[:, :, None] >> _shifts(bits, words.device)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)[:, :n].contiguous()


def pack_nibbles_low_first(codes: Tensor) -> Tensor:
    """Packs 4-bit codes (rows, n) into bytes (rows, ceil(n / 2)), the first of a pair in the low nibble."""
    return _bytes_of(codes, 4)


def unpack_nibbles_low_first(data: Tensor, n: int) -> Tensor:
    """Inverts `pack_nibbles_low_first`."""
    return _codes_of(data, 4)[:, :n].contiguous()


def pack_nibbles_high_first(codes: Tensor) -> Tensor:
    """Packs 4-bit codes (rows, n) into bytes (rows, ceil(n / 2)), the first of a pair in the high nibble."""
    return _swap(_bytes_of(codes, 4))


def unpack_nibbles_high_first(data: Tensor, n: int) -> Tensor:
    """Inverts `pack_nibbles_high_first`."""
    return _codes_of(_swap(data), 4)[:, :n].contiguous()


def interleave(codes: Tensor) -> Tensor:
    """Reorders codes (rows, n), n a multiple of 8: each eight in the order 0 2 4 6 1 3 5 7 of AWQ's words."""
    return codes.view(codes.shape[0], -1, 4, 2).transpose(2, 3).reshape(codes.shape)


def deinterleave(codes: Tensor) -> Tensor:
    """Inverts `interleave`."""
    return codes.view(codes.shape[0], -1, 2, 4).transpose(2, 3).reshape(codes.shape)


def _bytes_of(codes: Tensor, bits: int) -> Tensor:
    """Returns the bit stream of each row in bytes; the left shift of uint8 drops the bits beyond a byte."""
    if bits == 8:
        return codes
    each = 8 if bits == 3 else 8 // bits  # codes until the stream reaches a byte border again
    codes = _fit(codes, codes.shape[1] + -codes.shape[1] % each)
    if bits == 4:  # two codes are one 16-bit number, 0x0b0a: shifted onto itself, its low byte is 0xba
        pairs = _view_as(codes, torch.int16)
        return ((pairs >> 4) | pairs).to(torch.uint8)
    c = codes.view(codes.shape[0], -1, each).unbind(2)
    if bits == 2:
        return c[0] | (c[1] << 2) | (c[2] << 4) | (c[3] << 6)
    first = c[0] | (c[1] << 3) | (c[2] << 6)
    second = (c[2] >> 2) | (c[3] << 1) | (c[4] << 4) | (c[5] << 7)
    third = (c[5] >> 1) | (c[6] << 2) | (c[7] << 5)
    return torch.stack((first, second, third), dim=2).flatten(1)


def _codes_of(data: Tensor, bits: int) -> Tensor:
    """Returns all codes that the bytes of each row can hold; inverts `_bytes_of`."""
    if bits == 8:
        return data
    if bits in (2, 4):
        return torch.stack([(data >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], dim=2).flatten(1)
    data = _fit(data, data.shape[1] + -data.shape[1] % 3)
    a, b, c = data.view(data.shape[0], -1, 3).unbind(2)
    codes = (a, a >> 3, (a >> 6) | (b << 2), b >> 1, b >> 4, (b >> 7) | (c << 1), c >> 2, c >> 5)
    return torch.stack(codes, dim=2).flatten(1) & 7


def _fit(data: Tensor, width: int) -> Tensor:
    """Returns contiguous rows of exactly this width: filled with zeros, or without surplus zeros."""
    if data.shape[1] < width:
        return pad(data, (0, width - data.shape[1]))
    return data[:, :width].contiguous()


def _view_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Views the bytes of each row as another dtype, by way of a flat view, as a single row may have any stride."""
    return data.contiguous().flatten().view(dtype).view(data.shape[0], data.shape[1] * data.itemsize // dtype.itemsize)


def _swap(data: Tensor) -> Tensor:
    return (data << 4) | (data >> 4)


def _shifts(bits: int, device: torch.device) -> Tensor:
    return torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=device)

"""The blocks of ggml's types: bytes to numbers, and back.

A block is a run of codes with a 16-bit scale `d`; sub-blocks of a block of 256 have small whole-number scales. Every
type is one row of `BLOCKS`, which lists the parts of a block in order. A part is `d`, `dmin`, or a plane: a few bits of
each code (or sub-block scale), where the codes that share a byte are `stride` apart. Only the twelve bytes of Q4_K's
and Q5_K's scales ("six") have another layout.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # the values of IQ4's codes


@dataclass(frozen=True, slots=True)
class Fields:
    """The numbers of n blocks.

    `codes` are in stored form: unsigned, with half the range added in symmetric types (Q8_0: the bytes of int8).
    `scales` are the multiples of `d`: int8 with their sign for Q3_K, Q6_K and IQ4_XS, uint8 for the others; `mins` are
    multiples of `dmin`. A k-quant's value is d * scale * code - dmin * min; in Q4_1 and Q5_1 `dmin` is simply added.
    """

    codes: Tensor  # uint8 (n, block size)
    d: Tensor  # float16 (n,)
    dmin: Tensor | None = None  # float16 (n,)
    scales: Tensor | None = None  # (n, sub-blocks)
    mins: Tensor | None = None  # (n, sub-blocks)


@dataclass(frozen=True, slots=True)
class Plane:
    """`bits` bits of each number from bit `shift` on; number i shares its byte with i + stride, i + 2 * stride, ..."""

    of: str  # "codes" or "scales" (followed by the mins, if the type has any)
    shift: int
    bits: int
    stride: int


@dataclass(frozen=True, slots=True)
class BlockType:
    """One type: weights in a block, its parts in order, and the offsets added to stored codes and scales."""

    size: int
    parts: tuple[str | Plane, ...]
    zero: int = 0
    subs: int = 0
    scale_zero: int = 0
    signed: bool = False  # sub-block scales have a sign

    @property
    def bytes(self) -> int:
        return sum(self.width(part) for part in self.parts)

    @property
    def code_bits(self) -> int:
        return sum(part.bits for part in self.parts if isinstance(part, Plane) and part.of == "codes")

    @property
    def has_mins(self) -> bool:
        return self.subs > 0 and "dmin" in self.parts

    def width(self, part: str | Plane) -> int:
        """Returns the bytes of a part."""
        if isinstance(part, str):
            return 12 if part == "six" else 2
        return part.bits * (self.size if part.of == "codes" else self.subs * (1 + self.has_mins)) // 8


def _codes(shift: int, bits: int, stride: int) -> Plane:
    return Plane("codes", shift, bits, stride)


def _scales(shift: int, bits: int, stride: int) -> Plane:
    return Plane("scales", shift, bits, stride)


BLOCKS = {
    "Q8_0": BlockType(32, ("d", _codes(0, 8, 1))),
    "Q4_0": BlockType(32, ("d", _codes(0, 4, 16)), zero=8),
    "Q4_1": BlockType(32, ("d", "dmin", _codes(0, 4, 16))),
    "Q5_0": BlockType(32, ("d", _codes(4, 1, 1), _codes(0, 4, 16)), zero=16),
    "Q5_1": BlockType(32, ("d", "dmin", _codes(4, 1, 1), _codes(0, 4, 16))),
    "IQ4_NL": BlockType(32, ("d", _codes(0, 4, 16))),
    "IQ4_XS": BlockType(
        256, ("d", _scales(4, 2, 1), _scales(0, 4, 1), _codes(0, 4, 16)), subs=8, scale_zero=32, signed=True
    ),
    "Q2_K": BlockType(256, (_scales(0, 4, 16), _codes(0, 2, 32), "d", "dmin"), subs=16),
    "Q3_K": BlockType(
        256, (_codes(2, 1, 32), _codes(0, 2, 32), _scales(0, 4, 8), _scales(4, 2, 4), "d"),
        zero=4, subs=16, scale_zero=32, signed=True,
    ),
    "Q4_K": BlockType(256, ("d", "dmin", "six", _codes(0, 4, 32)), subs=8),
    "Q5_K": BlockType(256, ("d", "dmin", "six", _codes(4, 1, 32), _codes(0, 4, 32)), subs=8),
    "Q6_K": BlockType(256, (_codes(0, 4, 64), _codes(4, 2, 32), _scales(0, 8, 1), "d"), zero=32, subs=16, signed=True),
}  # fmt: skip


def pack(type_name: str, fields: Fields) -> Tensor:
    """Returns the bytes of blocks (n, bytes of a block)."""
    block, codes = BLOCKS[type_name], fields.codes
    numbers = {"codes": codes, "scales": _stored_scales(block, fields)}
    data = torch.empty(codes.shape[0], block.bytes, dtype=torch.uint8, device=codes.device)
    for part, place in _places(block):
        if isinstance(part, Plane):
            data[:, place] = _join(numbers[part.of], part)
        elif part == "six":
            data[:, place] = _join_six(numbers["scales"])
        else:
            data[:, place] = _half(fields.d if part == "d" else fields.dmin)
    return data


def unpack(type_name: str, data: Tensor) -> Fields:
    """Inverts `pack`."""
    block = BLOCKS[type_name]
    numbers: dict[str, Tensor] = {}
    for part, place in _places(block):
        bits = data[:, place].clone(memory_format=torch.contiguous_format)  # a view as words must start at a whole word
        if isinstance(part, Plane):
            plane = _split(bits, part)
            numbers[part.of] = numbers[part.of].bitwise_or_(plane) if part.of in numbers else plane
        elif part == "six":
            numbers["scales"] = _split_six(bits)
        else:
            numbers[part] = bits.view(torch.float16).squeeze(1)
    scales, mins = _true_scales(block, numbers.get("scales"))
    return Fields(numbers["codes"], numbers["d"], numbers.get("dmin"), scales, mins)


def values(type_name: str, fields: Fields) -> Tensor:
    """Returns the weights that blocks stand for, float32 (n, block size), bit for bit what ggml reads."""
    block, d = BLOCKS[type_name], fields.d.float()[:, None]
    weight = levels(type_name, fields.codes)
    if fields.scales is None:
        weight *= d
        return weight if fields.dmin is None else weight.add_(fields.dmin.float()[:, None])
    by_sub = weight.view(-1, block.subs, block.size // block.subs)
    by_sub *= (d * fields.scales.float())[:, :, None]
    if fields.mins is not None and fields.dmin is not None:
        by_sub -= (fields.dmin.float()[:, None] * fields.mins.float())[:, :, None]
    return weight


def levels(type_name: str, codes: Tensor) -> Tensor:
    """Returns the values of codes before any scale, as a new float32 tensor."""
    if type_name.startswith("IQ4"):
        table = torch.tensor(IQ4, dtype=torch.float32, device=codes.device)
        return table.index_select(0, codes.int().flatten()).view(codes.shape)
    if type_name == "Q8_0":
        return codes.contiguous().view(torch.int8).float()
    return codes.float().contiguous().sub_(BLOCKS[type_name].zero)


def _places(block: BlockType) -> Iterator[tuple[str | Plane, slice]]:
    start = 0
    for part in block.parts:
        yield part, slice(start, start + block.width(part))
        start += block.width(part)


def _join(numbers: Tensor, plane: Plane) -> Tensor:
    words, stride, mask = _wide(numbers, plane)
    lanes = words.view(numbers.shape[0], -1, 8 // plane.bits, stride)
    data = (lanes[:, :, 0] >> plane.shift).bitwise_and_(mask)
    for place in range(1, 8 // plane.bits):
        data |= (lanes[:, :, place] >> plane.shift).bitwise_and_(mask).bitwise_left_shift_(place * plane.bits)
    return data.flatten(1).view(torch.uint8)


def _split(data: Tensor, plane: Plane) -> Tensor:
    """Inverts `_join`: each number has only the bits of this plane."""
    words, stride, mask = _wide(data, plane)
    lanes = words.view(data.shape[0], -1, stride)
    numbers = lanes.new_empty(data.shape[0], lanes.shape[1], 8 // plane.bits, stride)
    for place in range(8 // plane.bits):
        part = torch.bitwise_right_shift(lanes, place * plane.bits, out=numbers[:, :, place]).bitwise_and_(mask)
        part.bitwise_left_shift_(plane.shift)
    return numbers.flatten(1).view(torch.uint8)


def _wide(data: Tensor, plane: Plane) -> tuple[Tensor, int, int]:
    """Returns the bytes eight at a time if a plane allows it, its stride in those words, and the mask of its bits."""
    mask = (1 << plane.bits) - 1
    if plane.stride % 8 or plane.bits == 8:
        return data.contiguous(), plane.stride, mask
    return data.contiguous().flatten().view(torch.int64), plane.stride // 8, mask * 0x0101010101010101


def _stored_scales(block: BlockType, fields: Fields) -> Tensor:
    """Returns sub-block scales, followed by the mins, as the unsigned numbers of a block."""
    if fields.scales is None:
        return fields.codes[:, :0]
    scales = fields.scales.to(torch.uint8) + block.scale_zero  # a negative scale wraps around, and back if 32 is added
    return scales if fields.mins is None else torch.cat((scales, fields.mins.to(torch.uint8)), dim=1)


def _true_scales(block: BlockType, stored: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if stored is None:
        return None, None
    scales = stored[:, : block.subs] - block.scale_zero
    return (scales.view(torch.int8) if block.signed else scales), (stored[:, block.subs :] if block.has_mins else None)


def _join_six(numbers: Tensor) -> Tensor:
    """Packs eight 6-bit scales and eight mins into twelve bytes.

    The first four of each fill six bits of a byte; the last four have their low bits in a byte shared by scale and min,
    and their two high bits in the room that the first four leave.
    """
    first, last = _halves(numbers)
    shared = (last[:, :4] & 15) | (last[:, 4:] << 4)
    return torch.cat((first | ((last >> 4) << 6), shared), dim=1)


def _split_six(data: Tensor) -> Tensor:
    own, shared = data[:, :8], data[:, 8:]
    last = torch.cat((shared & 15, shared >> 4), dim=1) | ((own >> 6) << 4)
    return torch.cat(_halves(torch.cat((own & 63, last), dim=1)), dim=1)


def _halves(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Splits sixteen numbers in four runs a b c d into (a c, b d); its own inverse."""
    a, b, c, d = numbers.chunk(4, dim=1)
    return torch.cat((a, c), dim=1), torch.cat((b, d), dim=1)


def _half(scale: Tensor | None) -> Tensor:
    """Returns the two bytes of each 16-bit scale."""
    assert scale is not None
    return scale.to(torch.float16).contiguous()[:, None].view(torch.uint8)

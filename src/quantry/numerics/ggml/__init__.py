"""The block types of ggml: float32, float16 or bfloat16 weights to the bytes that llama.cpp reads, and back.

On a GPU everything runs in torch. On the CPU ggml's own library does what it does fast; its searches are scalar loops,
and `search` does the same several times as fast, with the same bytes. Rows are processed in chunks, so that the job
needs little memory besides the result.
"""

import torch
from torch import Tensor

from quantry.errors import UnknownNameError, WeightError
from quantry.numerics.ggml import iq4, kquants, native, simple
from quantry.numerics.ggml.layout import BLOCKS, Fields, pack, unpack, values
from quantry.numerics.threads import as_float, buffer, spread

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K", "Q5_0", "Q5_1", "Q4_K", "Q4_0", "Q4_1", "Q3_K", "Q2_K", "IQ4_NL",
    "IQ4_XS",
)  # fmt: skip
CHUNK = 1 << 19  # weights a call on the CPU: 2 MB in float32
GPU_CHUNK = 1 << 26  # and on a GPU, where a call should outlast its launch: up to 2.6 GiB in all


def block_size(type_name: str) -> int:
    """Returns the number of weights in a block; a row must be a multiple of it."""
    _check(type_name)
    return 1 if type_name in FLOATS else BLOCKS[type_name].size


def row_bytes(type_name: str, columns: int) -> int:
    """Returns the bytes of a row of `columns` weights. Raises WeightError if blocks do not divide the row."""
    size = block_size(type_name)
    if columns % size:
        raise WeightError(
            f"a row of {columns} weights does not divide into {type_name}'s blocks of {size}",
            fix=f"choose a type whose blocks divide {columns}, or F16",
        )
    return columns * FLOATS[type_name].itemsize if type_name in FLOATS else columns // size * BLOCKS[type_name].bytes


def quantize(weight: Tensor, type_name: str, importance: Tensor | None = None) -> Tensor:
    """Turns float weights (rows, columns) into uint8 (rows, bytes of a row), on the same device.

    `importance` is the weight of a squared error in each column, (columns,) in float32. Raises WeightError if shapes do
    not match.
    """
    rows, columns = weight.shape
    width = row_bytes(type_name, columns)
    if importance is not None and importance.shape != (columns,):
        raise WeightError(
            f"the importance has shape {tuple(importance.shape)} for a weight of {columns} columns",
            fix="give one number for each column",
        )
    if type_name in FLOATS:
        return weight.to(FLOATS[type_name]).contiguous().view(torch.uint8)
    if weight.device.type == "cpu" and _native_is_faster(type_name, importance is not None):
        return native.quantize(weight, type_name, importance)
    data = torch.empty(rows, width, dtype=torch.uint8, device=weight.device)

    def work(start: int, stop: int) -> None:
        fields = search(type_name, as_float(weight[start:stop]), importance)
        data[start:stop] = pack(type_name, fields).view(stop - start, width)

    spread(rows, max(1, (CHUNK if weight.device.type == "cpu" else GPU_CHUNK) // columns), work, weight.device)
    return data


def search(type_name: str, weight: Tensor, importance: Tensor | None = None) -> Fields:
    """Returns the codes and scales that ggml's search finds, block after block, for rows in float32 (rows, columns)."""
    if type_name in simple.TYPES:
        return simple.search(type_name, weight, importance)
    blocks = weight.view(-1, BLOCKS[type_name].size)
    by_weight = None
    if importance is not None:
        by_weight = buffer("importance", tuple(weight.shape), weight).copy_(importance).view(blocks.shape)
    if type_name in iq4.TYPES:
        return iq4.search(type_name, blocks, by_weight)
    return kquants.search(type_name, blocks, by_weight)


def dequantize(data: Tensor, type_name: str, columns: int) -> Tensor:
    """Turns bytes (rows, bytes of a row) into the float32 weights they stand for, (rows, columns)."""
    rows, width = data.shape
    if width != row_bytes(type_name, columns):
        raise WeightError(
            f"rows have {width} bytes, but {columns} weights in {type_name} take {row_bytes(type_name, columns)}",
            fix="check the type and the shape of the tensor",
        )
    if type_name in FLOATS:
        return data.contiguous().view(FLOATS[type_name]).float()
    weight = torch.empty(rows, columns, device=data.device)

    def work(start: int, stop: int) -> None:
        blocks = data[start:stop].reshape(-1, BLOCKS[type_name].bytes)
        weight[start:stop] = values(type_name, unpack(type_name, blocks)).view(stop - start, columns)

    spread(rows, max(1, (CHUNK if data.device.type == "cpu" else GPU_CHUNK) // columns), work, data.device)
    return weight


def _native_is_faster(type_name: str, weighted: bool) -> bool:
    """Returns True if ggml's own library is faster than `search` on the CPU.

    Million weights a second on one core (Zen 4) of the library, torch and machine code:
    without importance Q8_0 400, 500; Q4_0 510, 360; Q4_1 1020, 400; Q5_0 370, 250; Q5_1 600, 230; IQ4 3, 16, 84;
    Q2_K 18, 17, 136; Q3_K 84, 14, 150; Q4_K 15, 14, 134; Q5_K 19, 16, 163; Q6_K 35, 21, 250;
    with importance Q4_0 and Q5_0 39, 23, 103; Q4_1 and Q5_1 8.5, 8.2; IQ4 3, 15, 79;
    Q2_K 7, 7, 66; Q3_K 27, 19, 191; Q4_K 8, 7, 79; Q5_K 8, 7, 76; Q6_K 35, 22, 227.
    """
    if type_name in iq4.TYPES:
        return False
    plain = type_name in simple.TYPES and not (weighted and type_name in simple.SYMMETRIC)
    return plain or not kquants.fast(torch.device("cpu"))


def _check(type_name: str) -> None:
    if type_name not in TYPES:
        raise UnknownNameError(
            f"{type_name!r} is not a ggml type that Quantry knows", fix=f"choose one of {', '.join(TYPES)}"
        )

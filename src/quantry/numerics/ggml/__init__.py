"""The block types of ggml: float32, float16 or bfloat16 weights to the bytes that llama.cpp reads, and back.

On a GPU everything runs in torch. On the CPU it is ggml's own library where that is fast; its searches are scalar
loops, and `search` does the same ones several times as fast. Whoever writes them, the bytes are the same. Rows go
through in chunks, so that little memory is needed besides the result.
"""

from collections.abc import Callable

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
CHUNK = 1 << 19  # weights a step on the CPU: 2 MB in float32
GPU_CHUNK = 1 << 26  # and on a GPU, where a step should outlast its launch: up to 2.6 GiB in all


def block_size(kind: str) -> int:
    """The weights in a block; a row must be a multiple."""
    _check(kind)
    return 1 if kind in FLOATS else BLOCKS[kind].size


def row_bytes(kind: str, columns: int) -> int:
    """The bytes of a row of so many weights."""
    size = block_size(kind)
    if columns % size:
        raise WeightError(
            f"a row of {columns} weights does not divide into {kind}'s blocks of {size}",
            fix=f"choose a type whose blocks divide {columns}, or F16",
        )
    return columns * FLOATS[kind].itemsize if kind in FLOATS else columns // size * BLOCKS[kind].bytes


def quantize(weight: Tensor, kind: str, importance: Tensor | None = None) -> Tensor:
    """Weights (rows, columns) in float32, float16 or bfloat16 -> uint8 (rows, bytes of a row), on the same device.

    `importance` says what a squared error in each column counts, (columns,) in float32.
    """
    rows, columns = weight.shape
    width = row_bytes(kind, columns)
    if importance is not None and importance.shape != (columns,):
        raise WeightError(
            f"the importance has shape {tuple(importance.shape)} for a weight of {columns} columns",
            fix="give one number for each column",
        )
    if kind in FLOATS:
        return weight.to(FLOATS[kind]).contiguous().view(torch.uint8)
    if weight.device.type == "cpu" and _native_is_faster(kind, importance is not None):
        return native.quantize(weight, kind, importance)
    data = torch.empty(rows, width, dtype=torch.uint8, device=weight.device)

    def work(start: int, stop: int) -> None:
        fields = search(kind, as_float(weight[start:stop]), importance)
        data[start:stop] = pack(kind, fields).view(stop - start, width)

    _through(weight, columns, work)
    return data


def search(kind: str, weight: Tensor, importance: Tensor | None = None) -> Fields:
    """The codes and scales that ggml's search finds, block after block, for rows in float32 (rows, columns)."""
    if kind in simple.KINDS:
        return simple.search(kind, weight, importance)
    blocks = weight.view(-1, BLOCKS[kind].size)
    if importance is not None:
        importance = buffer("importance", tuple(weight.shape), weight).copy_(importance).view(blocks.shape)
    return iq4.search(kind, blocks, importance) if kind in iq4.KINDS else kquants.search(kind, blocks, importance)


def dequantize(data: Tensor, kind: str, columns: int) -> Tensor:
    """Bytes (rows, bytes of a row) -> the float32 weights they stand for, (rows, columns)."""
    rows, width = data.shape
    if width != row_bytes(kind, columns):
        raise WeightError(
            f"rows of {width} bytes where {columns} weights in {kind} are {row_bytes(kind, columns)}",
            fix="check the type and the shape of the tensor",
        )
    if kind in FLOATS:
        return data.contiguous().view(FLOATS[kind]).float()
    weight = torch.empty(rows, columns, device=data.device)

    def work(start: int, stop: int) -> None:
        blocks = data[start:stop].reshape(-1, BLOCKS[kind].bytes)
        weight[start:stop] = values(kind, unpack(kind, blocks)).view(stop - start, columns)

    _through(data, columns, work)
    return weight


def _native_is_faster(kind: str, weighted: bool) -> bool:
    """Whether ggml's own library is faster than `search` on the CPU.

    Million weights a second on one core (Zen 4) of the library, torch and machine code:
    without importance Q8_0 400, 500; Q4_0 510, 360; Q4_1 1020, 400; Q5_0 370, 250; Q5_1 600, 230; IQ4 3, 16, 84;
    Q2_K 18, 17, 136; Q3_K 84, 14, 150; Q4_K 15, 14, 134; Q5_K 19, 16, 163; Q6_K 35, 21, 250;
    with importance Q4_0 and Q5_0 39, 23, 103; Q4_1 and Q5_1 8.5, 8.2; IQ4 3, 15, 79;
    Q2_K 7, 7, 66; Q3_K 27, 19, 191; Q4_K 8, 7, 79; Q5_K 8, 7, 76; Q6_K 35, 22, 227.
    """
    if kind in iq4.KINDS:
        return False
    plain = kind in simple.KINDS and not (weighted and kind in simple.SYMMETRIC)
    return plain or not kquants.fast(torch.device("cpu"))


def _through(tensor: Tensor, columns: int, work: Callable[[int, int], None]) -> None:
    """Calls work(start, stop) for chunks of the tensor's rows."""
    if tensor.device.type == "cpu":
        return spread(tensor.shape[0], max(1, CHUNK // columns), work)
    step = max(1, GPU_CHUNK // columns)
    for start in range(0, tensor.shape[0], step):
        work(start, min(start + step, tensor.shape[0]))
    return None


def _check(kind: str) -> None:
    if kind not in TYPES:
        raise UnknownNameError(f"{kind!r} is not a ggml type known here", fix=f"choose one of {', '.join(TYPES)}")

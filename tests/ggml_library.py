"""ggml's own library and the gguf library as oracles: bytes of a matrix, the weights they stand for, and errors."""

import ctypes

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from quantry.numerics.ggml.native import library


def by_ggml(weight: Tensor, type_name: str, importance: Tensor | None = None) -> Tensor:
    """Quantizes a matrix in one call to ggml."""
    function = library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    count, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]
    rows = weight.float().contiguous()
    size, width = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    data = torch.zeros(rows.shape[0], rows.shape[1] // size * width, dtype=torch.uint8)
    at = None if importance is None else importance.data_ptr()
    number = GGMLQuantizationType[type_name].value
    assert function(number, rows.data_ptr(), data.data_ptr(), 0, *rows.shape, at) == data.numel()
    return data


def decode(data: Tensor, type_name: str) -> Tensor:
    return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[type_name]))


def agreement(data: Tensor, other: Tensor, type_name: str) -> float:
    """Returns the share of blocks with equal bytes."""
    shape = (-1, _width(type_name))
    return float((data.view(shape) == other.view(shape)).all(dim=1).double().mean())


def _width(type_name: str) -> int:
    """Returns the bytes of a block."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]][1]


def error(data: Tensor, type_name: str, weight: Tensor, importance: Tensor | None) -> float:
    """Returns the sum of squared errors, times the importance of their columns."""
    counts = torch.ones(weight.shape[1]) if importance is None else importance
    return float(((decode(data, type_name).double() - weight.double()) ** 2 * counts.double()).sum())


def check_as_good(
    data: Tensor, expected: Tensor, type_name: str, weight: Tensor, importance: Tensor | None, exact: bool = False
) -> None:
    """Fails if more than 1 % of the blocks (or one) differ, or the error is larger than that of the expected bytes."""
    share, blocks = agreement(data, expected, type_name), expected.numel() // _width(type_name)
    assert share == 1 or (not exact and (1 - share) * blocks <= max(1, 0.01 * blocks) + 1e-9)
    if share < 1:
        mine, theirs = (error(part, type_name, weight, importance) for part in (data, expected))
        assert mine <= 1.001 * theirs

"""ggml's own quantizer: the shared library inside xllamacpp's wheel, called through ctypes.

`ggml_quantize_chunk` writes every type exactly as llama.cpp does. ctypes releases the interpreter's lock during a call,
so threads over rows scale.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry.errors import QuantryError
from quantry.numerics.threads import as_float, spread

CHUNK = 1 << 18  # weights a call: converted to float32 they are 1 MB, which stays in a core's cache
NUMBERS = {  # enum ggml_type
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q2_K": 10, "Q3_K": 11, "Q4_K": 12,
    "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20, "IQ4_XS": 23, "BF16": 30,
}  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """Returns the C API of ggml and llama.cpp. Raises QuantryError if xllamacpp is missing or does not load."""
    folder = _folder()
    files = sorted(path for ending in ("so", "pyd", "dylib") for path in folder.glob(f"xllamacpp*.{ending}"))
    if not files:
        raise QuantryError(f"{folder} has no xllamacpp library", fix="reinstall it: pip install -U xllamacpp")
    try:
        return ctypes.CDLL(str(files[0]))
    except OSError as error:
        raise QuantryError(f"{files[0]} does not load: {error}", fix="pip install -U xllamacpp") from error


def quantize(weight: Tensor, type_name: str, importance: Tensor | None = None, threads: int | None = None) -> Tensor:
    """Turns weights (rows, columns) of any float dtype on the CPU into uint8 (rows, bytes of a row), over threads."""
    rows, columns = weight.shape
    width = row_bytes(type_name, columns)
    data = torch.empty(rows, width, dtype=torch.uint8)
    vector = None if importance is None else importance.float().contiguous()

    def work(start: int, stop: int) -> None:
        part = as_float(weight[start:stop])
        target = data.data_ptr() + start * width
        at = None if vector is None else vector.data_ptr()
        _chunk()(NUMBERS[type_name], part.data_ptr(), target, 0, stop - start, columns, at)

    spread(rows, max(1, CHUNK // columns), work, weight.device, threads)
    return data


def row_bytes(type_name: str, columns: int) -> int:
    """Returns the bytes of a row, from the library."""
    size = library().ggml_row_size
    size.restype, size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
    return int(size(NUMBERS[type_name], columns))


@cache
def _chunk() -> Any:
    """Returns ggml_quantize_chunk(type, weights, bytes, first weight, rows, columns, importance or null)."""
    function = library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    count = ctypes.c_int64
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, count, count, count, ctypes.c_void_p]
    return function


def _folder() -> Path:
    """Returns the folder of xllamacpp, without importing it."""
    spec = find_spec("xllamacpp")
    if spec is None or spec.origin is None:
        raise QuantryError("xllamacpp (llama.cpp's library) is not installed", fix="pip install xllamacpp")
    return Path(spec.origin).parent

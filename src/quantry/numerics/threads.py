"""Rows of a matrix in chunks, over threads, with buffers that are used again.

Fresh memory would cost a chunk more time (page faults) than its arithmetic, so every thread keeps its buffers from one
chunk to the next.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor


class _Buffers(threading.local):
    """The buffers of one thread by name."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}


_buffers = _Buffers()


def spread(
    rows: int, most: int, work: Callable[[int, int], None], device: torch.device, threads: int | None = None
) -> None:
    """Calls work(start, stop) for all rows, at most `most` a call: on a CPU over threads, else one after the other.

    Within a call on a CPU torch runs on one core; afterwards it has the number of threads that it had before.
    """
    if device.type != "cpu":
        for start in range(0, rows, most):
            work(start, min(start + most, rows))
        return
    before = torch.get_num_threads()
    count = threads or before
    step = max(-(-most // 8), min(most, -(-rows // (4 * count))))  # several chunks for each thread, but not tiny ones
    chunks = [(start, min(start + step, rows)) for start in range(0, rows, step)]
    try:
        if count == 1 or len(chunks) == 1:
            torch.set_num_threads(1)
            for chunk in chunks:
                work(*chunk)
            return
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for task in [pool.submit(work, *chunk) for chunk in chunks]:
                task.result()
    finally:
        torch.set_num_threads(before)


def buffer(name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns memory of this shape, on the CPU the same each time; its content lasts until the name is used again."""
    if like.device.type != "cpu":  # torch keeps freed GPU memory itself
        return torch.empty(shape, dtype=dtype, device=like.device)
    memory, size = _buffers.by_name.get(name), prod(shape)
    if memory is None or memory.numel() < size or memory.dtype != dtype:
        memory = _buffers.by_name[name] = torch.empty(size, dtype=dtype)
    return memory[:size].view(shape)


def as_float(rows: Tensor) -> Tensor:
    """Returns rows as contiguous float32: the rows themselves, or a copy in a buffer."""
    if rows.dtype == torch.float32 and rows.is_contiguous():
        return rows
    return buffer("rows", tuple(rows.shape), rows).copy_(rows)

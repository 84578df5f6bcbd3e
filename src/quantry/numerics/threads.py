"""Rows of a matrix in chunks, over threads, with memory that is used again.

Fresh memory is what a chunk of arithmetic would spend most of its time on (page faults), so every thread keeps its
buffers from one chunk to the next.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor


class _Held(threading.local):
    """The buffers of one thread by name."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}


_held = _Held()


def spread(rows: int, most: int, work: Callable[[int, int], None], threads: int | None = None) -> None:
    """Calls work(start, stop) for all rows, at most so many a call, on so many threads (torch's number if not given).

    Within a call torch runs on one core; afterwards it has the number of threads that it had before.
    """
    before = torch.get_num_threads()
    threads = threads or before
    step = max(-(-most // 8), min(most, -(-rows // (4 * threads))))  # several turns for each thread, but not tiny ones
    todo = iter(range(0, rows, step))
    try:
        if threads == 1 or rows <= step:
            torch.set_num_threads(1)
            return _work_off(todo, step, rows, work)
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for task in [pool.submit(_work_off, todo, step, rows, work) for _ in range(threads)]:
                task.result()
    finally:
        torch.set_num_threads(before)
    return None


def buffer(name: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Memory of this shape, on the CPU the same as last time; what is in it lasts until the name is asked for again."""
    if like.device.type != "cpu":  # there torch keeps the memory itself
        return torch.empty(shape, dtype=dtype, device=like.device)
    held, size = _held.buffers.get(name), prod(shape)
    if held is None or held.numel() < size or held.dtype != dtype:
        held = _held.buffers[name] = torch.empty(size, dtype=dtype)
    return held[:size].view(shape)


def as_float(rows: Tensor) -> Tensor:
    """Rows as contiguous float32: themselves, or a copy in a buffer."""
    if rows.dtype == torch.float32 and rows.is_contiguous():
        return rows
    return buffer("rows", tuple(rows.shape), rows).copy_(rows)


def _work_off(todo: Iterator[int], step: int, rows: int, work: Callable[[int, int], None]) -> None:
    """Takes one chunk after the other from what is still to do, along with the other threads."""
    for start in todo:
        work(start, min(start + step, rows))

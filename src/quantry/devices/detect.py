"""Detection of this machine: its devices, its processor, and the measured speed of its memory.

Drivers report the GPUs, the kernel the processor. Only what this process may use counts: a container's share of cores
and memory, and the GPUs in CUDA_VISIBLE_DEVICES.
"""

import ctypes
import sys
from dataclasses import replace
from mmap import mmap
from threading import Barrier, Thread
from time import perf_counter

from quantry.devices import Device, Hardware, amd, apple, host, nvidia
from quantry.devices.catalogue import catalogue, match, parse
from quantry.devices.processors import processor_rates
from quantry.errors import QuantryError

MIB = 1024**2
BUFFERS = 1024 * MIB  # of all threads together, read and written: larger than caches, small for a server
BUFFER = (MIB, 64 * MIB)  # of one thread: at least, at most
THREADS = 64  # more do not move more
ROUNDS = 10


def detect(seconds: float = 0.2) -> Hardware:
    """Returns this machine, with the processor's bandwidth measured for `seconds`; 0 takes a typical bandwidth.

    Raises QuantryError on systems other than Linux and macOS on Apple chips.
    """
    if sys.platform == "darwin":
        mac = apple.parse_sysctl(apple.read())
        if mac is not None:
            return mac
    if not sys.platform.startswith("linux"):
        raise QuantryError(
            f"{sys.platform} is not supported: Quantry detects Linux machines and Macs with Apple chips",
            fix='describe it instead: --gpu "RTX 4090"',
        )
    return _linux(seconds)


def device_here() -> Device:
    """Returns the device that sets the limit here; a usual processor if the machine cannot be read."""
    try:
        return detect(0).device
    except QuantryError:
        return parse("cpu").device


def measure_bandwidth(seconds: float = 0.2) -> float:
    """Returns the bytes a second that all usable cores copy, counting bytes read and bytes written.

    Every thread copies its own buffer again and again; all buffers together are larger than the caches and take at most
    an eighth of the free memory. The best of ten rounds counts, so that other programs disturb it less. A model's
    weights are only read, which is about as fast as this sum.
    """
    threads = max(1, min(round(host.usable_cores()), THREADS))
    free = host.memory()[1] or BUFFERS
    buffer = min(max(min(BUFFERS, free // 8) // (2 * threads), BUFFER[0]), BUFFER[1])
    buffers = [(mmap(-1, buffer), mmap(-1, buffer)) for _ in range(threads)]
    rounds: list[Round] = []
    barrier = Barrier(threads)
    workers = [Thread(target=_copy, args=(barrier, *pair, seconds / ROUNDS, rounds)) for pair in buffers]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return max(_rate([each for each in rounds if each[0] == number]) for number in range(ROUNDS))


Round = tuple[int, float, float, int]  # number, start, end, bytes moved by one thread


def _copy(barrier: Barrier, left: mmap, right: mmap, seconds: float, rounds: list[Round]) -> None:
    """Copies for ROUNDS times `seconds`, all threads starting each round together."""
    size = len(left)
    source, target = ((ctypes.c_char * size).from_buffer(side) for side in (left, right))
    ctypes.memset(source, 1, size)  # so that every page is allocated
    ctypes.memset(target, 2, size)
    for number in range(ROUNDS):
        barrier.wait()
        moved, start = 0, perf_counter()
        while not moved or perf_counter() - start < seconds:
            ctypes.memmove(target, source, size)  # ctypes lets the other threads run
            moved += 2 * size
        rounds.append((number, start, perf_counter(), moved))


def _rate(threads: list[Round]) -> float:
    elapsed = max(end for _, _, end, _ in threads) - min(start for _, start, _, _ in threads)
    return sum(moved for *_, moved in threads) / elapsed


def _linux(seconds: float) -> Hardware:
    processor = host.read_processor()
    total, available = host.memory()
    cores = host.usable_cores()
    features, cpu = _cpu(processor, total, available, cores)
    board = known_board(host.board_name(), total, available)
    cpu = board or cpu
    if cpu.kind == "cpu" and seconds > 0:
        cpu = replace(cpu, bandwidth=measure_bandwidth(seconds), source="detected; the bandwidth is measured")
    gpus = () if board else tuple(shared_memory(gpu, total, available) for gpu in nvidia.find() + amd.find())
    return Hardware(
        devices=gpus or (cpu,),
        cpu=cpu,
        host_memory=total,
        host_available=available,
        cores=processor.cores,
        threads=processor.threads,
        usable_cores=cores,
        features=features,
    )


def known_board(name: str, total: int, available: int) -> Device | None:
    """Returns the catalogue's row for a small board (Jetson, Raspberry Pi) by the name in its device tree."""
    plain = name.split(" Rev ")[0].replace("Developer Kit", "").replace("Engineering Reference", "")
    row = match(plain, total) if plain else None
    return replace(row, usable=min(total, row.memory), free=available) if row else None


def shared_memory(gpu: Device, total: int, available: int) -> Device:
    """Returns the GPU; one without its own memory (a GB10) shares the host's, whose size helps to find its row."""
    if gpu.memory:
        return gpu
    row = match(gpu.name, total)
    return replace(row or replace(gpu, kind="unified", memory=total), usable=total, free=available)


def _cpu(processor: host.Processor, total: int, available: int, cores: float) -> tuple[tuple[str, ...], Device]:
    """Returns the processor as a device: rates are cores times clock times operations a cycle."""
    features, rates = processor_rates(processor.flags)
    family = "arm" if processor.vendor == "arm" else "x86"
    typical = next(device for device in catalogue() if device.kind == "cpu" and device.family == family)
    busy = min(cores, processor.cores)
    return features, Device(
        name=processor.name,
        vendor=processor.vendor,
        kind="cpu",
        family=family,
        capability=None,
        memory=total,
        usable=total,
        bandwidth=typical.bandwidth,
        tflops={dtype: round(busy * processor.mhz * rate / 1e6, 3) for dtype, rate in rates.items() if processor.mhz},
        source=f"detected; the bandwidth is that of {typical.name}",
        free=available,
    )

"""NVIDIA's GPUs, from the driver's library (NVML) or, if that does not load, from nvidia-smi.

A program sees NVML's total less the memory that the driver reserves. A GPU that the catalogue lacks is described by its
driver's numbers.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quantry.devices import Device, Link
from quantry.devices.catalogue import catalogue, family_of, match

QUERY = "name,uuid,memory.total,memory.free,compute_cap,clocks.max.memory,clocks.max.sm"
MIB = 1024**2
MEMORY_CLOCK, SM_CLOCK = 2, 1  # nvmlClockType_t
MEMORY_V2 = 40 | 2 << 24  # sizeof(nvmlMemory_v2_t) and its version


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as its driver describes it; 0 if the driver does not say. Bytes, bits and MHz."""

    name: str
    uuid: str
    total: int
    free: int
    reserved: int = 0
    capability: str = ""
    bus_width: int = 0
    memory_clock: int = 0
    cores: int = 0
    clock: int = 0


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _NvmlMemoryV1(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def find() -> tuple[Device, ...]:
    """Returns the NVIDIA GPUs that CUDA would show this process."""
    gpus = read_nvml()
    if gpus is None:
        gpus = read_smi()
    return tuple(to_device(gpu) for gpu in visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES")))


def visible(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Returns the GPUs in CUDA_VISIBLE_DEVICES: by index or UUID, up to the first invalid entry, as CUDA does.

    Indices follow NVML's order, by PCI address; CUDA lists the fastest first, which differs for mixed GPUs.
    """
    if setting is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for word in (word.strip() for word in setting.split(",")):
        index = int(word) if word.isdecimal() and len(word) < 5 else len(gpus)
        named = [gpu for gpu in gpus if word.startswith("GPU-") and gpu.uuid.startswith(word)]
        matching = named or list(gpus[index : index + 1])
        if not matching:
            break
        chosen.append(matching[0])
    return tuple(chosen)


def to_device(gpu: Gpu) -> Device:
    """Returns the catalogue's row for a GPU with its own memory figures, or a device from the driver's figures."""
    usable = gpu.total - gpu.reserved
    row = match(gpu.name, gpu.total)
    if row is not None:
        return replace(row, usable=usable if gpu.reserved else min(row.usable, gpu.total), free=gpu.free)
    family, times = family_of(gpu.capability)
    fp32 = gpu.cores * 2 * gpu.clock / 1e6
    bandwidth, source = gpu.bus_width / 8 * gpu.memory_clock * 1e6 * 2, "detected"  # two transfers a clock
    if not bandwidth:
        bandwidth, source = _slowest(gpu.capability), "detected; the bandwidth is that of the slowest of its kind"
    return Device(
        name=gpu.name,
        vendor="nvidia",
        kind="gpu",
        family=family,
        capability=gpu.capability or None,
        memory=gpu.total,
        usable=usable,
        bandwidth=bandwidth,
        tflops={dtype: round(fp32 * ratio, 3) for dtype, ratio in {"fp32": 1, **times}.items()} if fp32 else {},
        link=Link("pcie4", 32e9),
        source=source,
        free=gpu.free,
    )


def _slowest(capability: str) -> float:
    rows = [device for device in catalogue() if device.vendor == "nvidia" and device.kind == "gpu"]
    alike = [device for device in rows if device.capability == capability]
    return min(device.bandwidth for device in alike or rows)


def parse_smi(text: str) -> tuple[Gpu, ...]:
    """Reads the output of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` for QUERY, a line for each GPU."""
    gpus = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(", ")]
        if len(fields) != QUERY.count(",") + 1:
            continue
        name, uuid, total, free, capability, memory_clock, clock = fields
        gpu = Gpu(name, uuid, _count(total) * MIB, _count(free) * MIB, capability=capability)
        gpus.append(replace(gpu, memory_clock=_count(memory_clock), clock=_count(clock)))
    return tuple(gpus)


def read_smi() -> tuple[Gpu, ...]:
    """Returns the GPUs that nvidia-smi lists, none if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_smi(done.stdout)


def read_nvml() -> tuple[Gpu, ...] | None:
    """Returns the GPUs that NVML lists; None without the library or a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        library.nvmlDeviceGetCount_v2(ctypes.byref(count))
        return tuple(gpu for gpu in (_read_gpu(library, index) for index in range(count.value)) if gpu)
    finally:
        library.nvmlShutdown()


def _read_gpu(library: ctypes.CDLL, index: int) -> Gpu | None:
    handle = ctypes.c_void_p()
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    total, reserved, free = _read_memory(library, handle)
    return Gpu(
        name=_read_text(library.nvmlDeviceGetName, handle),
        uuid=_read_text(library.nvmlDeviceGetUUID, handle),
        total=total,
        free=free,
        reserved=reserved,
        capability=f"{major.value}.{minor.value}",
        bus_width=_read_number(library, "nvmlDeviceGetMemoryBusWidth", handle),
        memory_clock=_read_number(library, "nvmlDeviceGetMaxClockInfo", handle, MEMORY_CLOCK),
        cores=_read_number(library, "nvmlDeviceGetNumGpuCores", handle),
        clock=_read_number(library, "nvmlDeviceGetMaxClockInfo", handle, SM_CLOCK),
    )


def _read_memory(library: ctypes.CDLL, handle: ctypes.c_void_p) -> tuple[int, int, int]:
    """Returns total, reserved and free bytes; older drivers do not report what they reserve."""
    new = _NvmlMemory(version=MEMORY_V2)
    call = getattr(library, "nvmlDeviceGetMemoryInfo_v2", None)
    if call is not None and call(handle, ctypes.byref(new)) == 0:
        return new.total, new.reserved, new.free
    old = _NvmlMemoryV1()
    library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(old))
    return old.total, 0, old.free


def _read_text(call: "ctypes._NamedFuncPointer", handle: ctypes.c_void_p) -> str:
    buffer = ctypes.create_string_buffer(96)
    call(handle, buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode(errors="replace")


def _read_number(library: ctypes.CDLL, name: str, handle: ctypes.c_void_p, *arguments: int) -> int:
    """Returns one number of a GPU, 0 if the driver is too old or the GPU does not support it."""
    value = ctypes.c_uint()
    call = getattr(library, name, None)
    done = call is not None and call(handle, *arguments, ctypes.byref(value)) == 0
    return value.value if done else 0


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0

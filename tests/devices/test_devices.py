"""Devices: the catalogue's figures, names as people write them, and the real output of drivers and kernels."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import quantry.devices
from command import Completed, command
from quantry.devices import Device, amd, apple, host, nvidia
from quantry.devices.catalogue import catalogue, match, parse
from quantry.devices.detect import detect, known_board, measure_bandwidth, shared_memory
from quantry.devices.processors import processor_rates

GIB, MIB = 1024**3, 1024**2


def device(name: str) -> Device:
    return next(row for row in catalogue() if row.name == name)


# --- the catalogue ---


def test_the_catalogue_has_every_device_that_is_promised() -> None:
    names = " | ".join(row.name for row in catalogue())
    for name in (
        "H100 SXM", "H100 PCIe", "H100 NVL", "H200", "B200", "GB200", "A100 40GB SXM", "A100 40GB PCIe", "A100 80GB SXM",
        "A100 80GB PCIe", "A10G", "L4", "L40S", "RTX A6000", "RTX 6000 Ada", "T4", "V100 16GB SXM", "V100 32GB SXM",
        "RTX 3060 12GB", "RTX 3080 10GB", "RTX 3090", "RTX 4060 Ti 8GB", "RTX 4060 Ti 16GB", "RTX 4070", "RTX 4080", "RTX 4090",
        "RTX 5090", "RTX PRO 6000", "MI300X", "Jetson Orin Nano 4GB", "Jetson Orin Nano 8GB", "Jetson Orin NX 8GB",
        "Jetson Orin NX 16GB", "Jetson AGX Orin 32GB", "Jetson AGX Orin 64GB", "x86 desktop DDR4", "x86 desktop DDR5",
        "x86 server DDR5", "Raspberry Pi 5 4GB", "Raspberry Pi 5 8GB", "Raspberry Pi 5 16GB",
        *(f"M{generation}{grade}" for generation in (1, 2, 3) for grade in ("", " Pro", " Max", " Ultra")),
        "M4 16GB", "M4 Pro", "M4 Max", "M5 16GB", "M5 Pro", "M5 Max", "B300", "GB300", "RTX 5060 Ti 16GB", "RTX 5070",
        "RTX 5070 Ti", "RTX 5080", "RTX 2080 Ti", "H20", "L20", "MI325X", "MI355X", "RX 7900 XTX", "RX 7900 XT", "Arc B580",
        "Arc A770", "Gaudi 3", "DGX Spark", "Strix Halo 128GB", "Jetson Thor", "RTX 4060", "EPYC 9005", "Xeon 6900P",
        "Graviton4",
    ):  # fmt: skip
        assert name in names, name


def test_names_are_unique() -> None:
    names = [row.name for row in catalogue()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", catalogue(), ids=lambda row: row.name)
def test_every_row_is_sound(row: Device) -> None:
    assert row.source
    assert re.fullmatch(r"20\d\d(-\d\d)?", row.date)
    assert 0.6 * row.memory <= row.usable <= row.memory
    assert {"gpu": 1e11, "unified": 3e10, "cpu": 1e10}[row.kind] < row.bandwidth < 1e13
    assert (row.price is None) == (row.price_source is None)
    assert row.price is None or (0.05 < row.price < 20 and re.search(r", 20\d\d", row.price_source or ""))
    assert (row.link.kind == "none") == (row.link.bandwidth == 0)


@pytest.mark.parametrize("row", catalogue(), ids=lambda row: row.name)
def test_rates_rise_as_numbers_get_shorter(row: Device) -> None:
    assert set(row.tflops) <= {"fp32", "fp16", "bf16", "fp8", "int8", "fp4"}
    order = [row.tflops[dtype] for dtype in ("fp32", "fp16", "fp8", "fp4") if dtype in row.tflops]
    assert order == sorted(order)
    assert row.tflops.get("int8", 1e9) >= row.tflops.get("fp16", 0)
    if "bf16" in row.tflops and "fp16" in row.tflops:
        assert row.tflops["bf16"] == row.tflops["fp16"]


def test_native_dtypes_follow_the_family() -> None:
    """The dtypes with hardware support: bf16 from Ampere on, fp8 from Ada on, fp4 from Blackwell on; 7.0 and 10.3 have no int8."""
    for row in catalogue():
        if row.vendor != "nvidia":
            continue
        assert re.fullmatch(r"\d{1,2}\.\d", row.capability or "")
        compute = float(row.capability or 0)
        assert ("bf16" in row.tflops) == (compute >= 8.0), row.name
        assert ("fp8" in row.tflops) == (compute >= 8.9), row.name
        assert ("fp4" in row.tflops) == (compute >= 10.0), row.name
        assert ("int8" in row.tflops) == (compute not in (7.0, 10.3) and row.name != "GTX 1080 Ti"), row.name
    for row in catalogue():
        if row.vendor == "amd":
            assert re.fullmatch(r"gfx\d{3,4}", row.capability or ""), row.name
            assert ("fp8" in row.tflops) == (row.family in ("cdna3", "cdna4", "rdna4")), row.name


def test_platforms() -> None:
    """What engines are built for; one that has no build for a platform refuses it."""
    platforms = {row.name: row.platform for row in catalogue()}
    assert {platforms[name] for name in ("RX 7900 XTX", "Strix Halo 128GB", "MI355X")} == {"rocm"}
    assert {platforms[name] for name in ("Arc B580", "Arc A770 16GB")} == {"xpu"}
    assert platforms["Gaudi 3"] == "hpu"
    assert {platforms[name] for name in ("DGX Spark", "Jetson Thor", "GB300")} == {"cuda"}
    assert {platforms[name] for name in ("EPYC 9005", "Graviton4", "Xeon 6900P")} == {"cpu"}
    assert set(platforms.values()) == {"cuda", "rocm", "xpu", "hpu", "metal", "cpu"}


def test_known_figures() -> None:
    """A few that are printed everywhere: dense, not the sparse ones of the boxes (H100: 1,979 for fp16)."""
    assert device("H100 SXM").tflops["fp16"] == 989.4
    assert device("RTX 4090").tflops["fp8"] == 330.3  # with 32-bit accumulation; 660.6 without
    assert device("RTX 3090").bandwidth == 936e9
    assert device("H200").usable == pytest.approx(139.8 * GIB, rel=1e-9)  # what CUDA gives vLLM there
    assert device("M2 16GB").memory == 16 * GIB
    assert device("MI300X").tflops["fp8"] == 2614.9
    assert device("B200").family != device("RTX 5090").family  # sm_100 is not sm_120
    assert device("DGX Spark").bandwidth == device("Jetson Thor").bandwidth == 273e9
    assert device("Strix Halo 128GB").bandwidth == 256e9
    assert device("GB300").tflops["fp4"] == 15000  # dense; 20,000 sparse
    assert device("RX 7900 XTX").tflops["fp16"] == 122.8


# --- totals ---


def test_totals() -> None:
    machine = parse("4x A100 80GB SXM")
    one = device("A100 80GB SXM")
    assert (machine.memory, machine.usable, machine.bandwidth) == (320 * GIB, 4 * one.usable, 4 * one.bandwidth)
    assert machine.price == 4 * (one.price or 0)
    assert parse("RTX 5080").price is None
    assert machine.groups() == ((one, 4),)
    mixed = replace(machine, devices=(one, device("T4")))
    assert (mixed.device.name, mixed.groups()) == ("T4", ((one, 1), (device("T4"), 1)))


# --- NVIDIA ---

H200 = nvidia.Gpu(  # as NVML 580 gives it, 2026-11; torch sees 150,109,880,320 bytes there
    name="NVIDIA H200", uuid="GPU-5b0c2f5e-0000-4000-8000-000000000001", total=150754820096, free=150109880320,
    reserved=644939776, capability="9.0", bus_width=6016, memory_clock=3201, cores=16896, clock=1980,
)  # fmt: skip
SMI = """\
NVIDIA H200, GPU-5b0c2f5e-0000-4000-8000-000000000001, 143771, 143156, 9.0, 3201, 1980
Tesla T4, GPU-5fd13bbd-ef2f-5985-98ff-88638f51c2ce, 15360, 14923, 7.5, 5001, 1590
NVIDIA GeForce GTX 1650, GPU-de035b67-6e28-5ed3-93e9-a13461f2c540, 4096, [N/A], 7.5, [Not Supported], 2100

NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.
"""


def test_a_known_gpu_has_its_row_and_its_own_memory() -> None:
    found = nvidia.to_device(H200)
    assert found.usable == 150109880320
    assert found == replace(device("H200"), usable=150109880320, free=150109880320)


def test_an_unknown_gpu_is_described_by_its_driver() -> None:
    """The same GPU under another name: its driver's numbers come within 6 % of the datasheet's."""
    found, sheet = nvidia.to_device(replace(H200, name="NVIDIA Z1")), device("H200")
    assert (found.name, found.source, found.family, found.capability) == ("NVIDIA Z1", "detected", "hopper", "9.0")
    assert found.bandwidth == pytest.approx(sheet.bandwidth, rel=0.01)
    assert found.tflops == pytest.approx(sheet.tflops, rel=0.06)
    assert nvidia.to_device(replace(H200, name="NVIDIA Z1", capability="13.0")).family == "sm_130"


def test_nvidia_smi() -> None:
    first, second, third = nvidia.parse_smi(SMI)
    assert first == replace(H200, free=143156 * MIB, reserved=0, bus_width=0, cores=0)
    assert nvidia.to_device(first).usable == device("H200").usable  # the sheet's, as nvidia-smi does not tell
    assert nvidia.to_device(second).name == "T4"
    unknown = nvidia.to_device(third)
    assert (unknown.memory, unknown.free, unknown.bandwidth) == (4096 * MIB, 0, 320e9)
    assert "slowest" in unknown.source


DRIVER_NAMES = {  # name and MiB, as nvidia-smi lists them
    ("NVIDIA H100 80GB HBM3", 81559): "H100 SXM",
    ("NVIDIA H100 PCIe", 81559): "H100 PCIe",
    ("NVIDIA H100 NVL", 95830): "H100 NVL",
    ("NVIDIA H200", 143771): "H200",
    ("NVIDIA GH200 480GB", 97871): "GH200",
    ("NVIDIA B200", 183359): "B200",
    ("NVIDIA GB200", 189471): "GB200",
    ("NVIDIA A100-SXM4-80GB", 81920): "A100 80GB SXM",
    ("NVIDIA A100-SXM4-40GB", 40960): "A100 40GB SXM",
    ("NVIDIA A100-PCIE-40GB", 40960): "A100 40GB PCIe",
    ("NVIDIA A100 80GB PCIe", 81920): "A100 80GB PCIe",
    ("NVIDIA A10G", 23028): "A10G",
    ("NVIDIA L4", 23034): "L4",
    ("NVIDIA L40S", 46068): "L40S",
    ("Tesla T4", 15109): "T4",
    ("Tesla V100-SXM2-16GB", 16160): "V100 16GB SXM",
    ("Tesla V100-PCIE-32GB", 32510): "V100 32GB PCIe",
    ("NVIDIA RTX A6000", 49140): "RTX A6000",
    ("NVIDIA RTX 6000 Ada Generation", 46068): "RTX 6000 Ada",
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 97887): "RTX PRO 6000",
    ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 97887): "RTX PRO 6000 Max-Q",
    ("NVIDIA GeForce RTX 3080", 10240): "RTX 3080 10GB",
    ("NVIDIA GeForce RTX 3080", 12288): "RTX 3080 12GB",
    ("NVIDIA GeForce RTX 3090", 24268): "RTX 3090",
    ("NVIDIA GeForce RTX 4060 Ti", 16380): "RTX 4060 Ti 16GB",
    ("NVIDIA GeForce RTX 4060 Ti", 8188): "RTX 4060 Ti 8GB",
    ("NVIDIA GeForce RTX 5090", 32607): "RTX 5090",
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376): "RTX 4090 Laptop",
    ("NVIDIA GeForce RTX 3090 Ti", 24564): "RTX 3090 Ti",
    ("NVIDIA B300 SXM6 AC", 275040): "B300",
    ("NVIDIA GB10", 122500): "DGX Spark",
    ("NVIDIA Thor", 125772): "Jetson Thor",
    ("NVIDIA H20", 97871): "H20",
    ("NVIDIA H20", 143771): "H20 141GB",
    ("NVIDIA GeForce RTX 2080 Ti", 11264): "RTX 2080 Ti",
    ("NVIDIA GeForce RTX 5060 Ti", 16311): "RTX 5060 Ti 16GB",
    ("NVIDIA GeForce RTX 3050 Laptop GPU", 4096): None,
    ("NVIDIA RTX A6000", 24564): None,  # half of one, by a hypervisor
}


@pytest.mark.parametrize("reported", DRIVER_NAMES, ids=str)
def test_names_that_drivers_give(reported: tuple[str, int]) -> None:
    found = match(reported[0], reported[1] * MIB)
    assert (found.name if found else None) == DRIVER_NAMES[reported]


VISIBLE = {
    None: [0, 1, 2],
    "0": [0],
    "2,0": [2, 0],
    "0,9,1": [0],  # as CUDA: up to the first that is not there
    "GPU-b": [1],
    " 1 , GPU-c ": [1, 2],
    "": [],
    "-1": [],
    "NoDevFiles": [],
}


@pytest.mark.parametrize("setting", VISIBLE)
def test_cuda_visible_devices(setting: str | None) -> None:
    gpus = [replace(H200, uuid=f"GPU-{letter}") for letter in "abc"]
    assert [gpus.index(gpu) for gpu in nvidia.visible(gpus, setting)] == VISIBLE[setting]


# --- AMD ---

# as the kernel prints them, without the lines that are not read
MI300X_NODE = """\
cpu_cores_count 0
simd_count 1216
mem_banks_count 1
simd_per_cu 4
gfx_target_version 90402
vendor_id 4098
device_id 29857
max_engine_clk_fcompute 2100
local_mem_size 0
num_xcc 8
"""
RX_7900_NODE = """\
cpu_cores_count 0
simd_count 192
mem_banks_count 1
simd_per_cu 2
gfx_target_version 110000
vendor_id 4098
device_id 29772
max_engine_clk_fcompute 2482
local_mem_size 0
unique_id 11673270660693242239
num_xcc 1
"""


def write_nodes(root: Path, *nodes: tuple[str, str]) -> Path:
    """A topology as the kernel lays it out: node 0 is the processor."""
    for number, (properties, bank) in enumerate(
        [("cpu_cores_count 96\nsimd_count 0\ngfx_target_version 0\n", ""), *nodes]
    ):
        folder = root / str(number)
        (folder / "mem_banks/0").mkdir(parents=True)
        (folder / "properties").write_text(properties)
        (folder / "mem_banks/0/properties").write_text(bank)
    return root


def test_amd_gpus(tmp_path: Path) -> None:
    big = "heap_type 1\nsize_in_bytes 206141652992\nflags 0\nwidth 8192\nmem_clk_max 1300\n"
    small = "heap_type 1\nsize_in_bytes 25753026560\nflags 0\nwidth 384\nmem_clk_max 1249\n"
    xt = small.replace("25753026560", "21458059264").replace("384", "320")
    other = RX_7900_NODE.replace("device_id 29772", "device_id 1")
    known, xtx, smaller, unknown = amd.find(
        write_nodes(tmp_path, (MI300X_NODE, big), (RX_7900_NODE, small), (RX_7900_NODE, xt), (other, small))
    )
    assert (xtx.name, smaller.name) == ("RX 7900 XTX", "RX 7900 XT")  # one PCI number; memory tells them apart
    assert (known.name, known.memory, known.usable) == ("MI300X", 192 * GIB, device("MI300X").usable)
    assert (unknown.name, unknown.capability, unknown.memory) == ("AMD gfx1100", "gfx1100", 25753026560)
    assert unknown.bandwidth == pytest.approx(960e9, rel=0.01)  # the RX 7900 XTX's sheet
    assert unknown.tflops["fp32"] == pytest.approx(61.4 / 2, rel=0.01)  # its sheet counts two of them at once


def test_no_amd_gpus(tmp_path: Path) -> None:
    assert amd.find(tmp_path / "absent") == ()
    assert amd.find(write_nodes(tmp_path)) == ()


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100"), (110501, "gfx1151")]
)
def test_gfx_names(number: int, name: str) -> None:
    assert amd.gfx_name(number) == name


# --- Apple ---

M2_PRO = """\
machdep.cpu.brand_string: Apple M2 Pro
hw.memsize: 17179869184
hw.physicalcpu: 12
hw.logicalcpu: 12
sysctl: unknown oid 'hw.cpufrequency_max'
"""


def test_a_mac() -> None:
    machine = apple.parse_sysctl(M2_PRO)
    assert machine is not None
    assert (machine.device, machine.cpu) == (device("M2 Pro 16GB"), device("M2 Pro 16GB"))
    assert (machine.cores, machine.threads, machine.host_memory) == (12, 12, 16 * GIB)


def test_a_newer_mac_and_an_older_one() -> None:
    machine = apple.parse_sysctl("machdep.cpu.brand_string: Apple M9 Max\nhw.memsize: 68719476736\n")
    assert machine is not None
    assert (machine.device.name, machine.device.memory, machine.device.usable) == (
        "Apple M9 Max",
        64 * GIB,
        64 * GIB * 2 // 3,
    )
    assert apple.parse_sysctl("machdep.cpu.brand_string: Intel(R) Core(TM) i9\nhw.memsize: 68719476736\n") is None
    assert apple.parse_sysctl("") is None


# --- the host ---

EPYC = """\
processor	: 0
vendor_id	: AuthenticAMD
model name	: AMD EPYC 7R13 Processor
cpu MHz		: 2649.998
physical id	: 0
siblings	: 4
core id		: 0
cpu cores	: 2
flags		: fpu vme sse sse2 avx f16c avx2 bmi2 erms

processor	: 1
vendor_id	: AuthenticAMD
model name	: AMD EPYC 7R13 Processor
cpu MHz		: 3599.121
physical id	: 0
siblings	: 4
core id		: 1
cpu cores	: 2
flags		: fpu vme sse sse2 avx f16c avx2 bmi2 erms

processor	: 2
vendor_id	: AuthenticAMD
model name	: AMD EPYC 7R13 Processor
cpu MHz		: 2649.998
physical id	: 0
siblings	: 4
core id		: 0
cpu cores	: 2
flags		: fpu vme sse sse2 avx f16c avx2 bmi2 erms

processor	: 3
vendor_id	: AuthenticAMD
model name	: AMD EPYC 7R13 Processor
cpu MHz		: 2649.998
physical id	: 0
siblings	: 4
core id		: 1
cpu cores	: 2
flags		: fpu vme sse sse2 avx f16c avx2 bmi2 erms

"""
SAPPHIRE_RAPIDS_FLAGS = "sse2 avx2 avx512f avx512_bf16 avx_vnni avx512_vnni amx_bf16 avx512_fp16 amx_tile amx_int8"
PI_5 = """\
processor	: 0
BogoMIPS	: 108.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: 0xd0b

processor	: 1
BogoMIPS	: 108.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp
CPU implementer	: 0x41
CPU architecture: 8
CPU part	: 0xd0b

Revision	: d04170
Serial		: 0000000000000000
Model		: Raspberry Pi 5 Model B Rev 1.0
"""


def test_cpuinfo() -> None:
    epyc = host.parse_cpuinfo(EPYC)
    assert (epyc.name, epyc.vendor, epyc.cores, epyc.threads, epyc.mhz) == (
        "AMD EPYC 7R13 Processor",
        "amd",
        2,
        4,
        3599.121,
    )
    assert processor_rates(epyc.flags) == (("avx2",), {"fp32": 32})
    pi = host.parse_cpuinfo(PI_5)
    assert (pi.vendor, pi.cores, pi.threads) == ("arm", 2, 2)
    assert processor_rates(pi.flags) == (("neon", "fp16", "dotprod"), {"fp32": 16, "fp16": 32, "int8": 64})
    features, rates = processor_rates(frozenset(SAPPHIRE_RAPIDS_FLAGS.split()))
    assert features == ("avx2", "avx512", "vnni", "bf16", "amx")
    assert rates == {"fp32": 32, "int8": 2048, "bf16": 1024}
    assert host.parse_cpuinfo("").cores == 1


def write_host(root: Path, files: dict[str, str]) -> Path:
    meminfo = "MemTotal:       24684100 kB\nMemFree:        18921572 kB\nMemAvailable:   23855784 kB\n"
    for name, text in {"proc/meminfo": meminfo, "proc/cpuinfo": PI_5, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_without_a_container(tmp_path: Path) -> None:
    root = write_host(tmp_path, {"proc/self/cgroup": "0::/user.slice\n", "sys/fs/cgroup/user.slice/memory.max": "max\n",
                                 "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n"})  # fmt: skip
    assert host.memory(root) == (24684100 * 1024, 23855784 * 1024)
    assert host.usable_cores(root, threads=8) == 8


def test_a_container_of_the_second_kind(tmp_path: Path) -> None:
    """Limits stand on any level above the process; what is only cached counts as available."""
    group = "sys/fs/cgroup/kubepods/pod1"
    root = write_host(tmp_path, {
        "proc/self/cgroup": "0::/kubepods/pod1/main\n",
        f"{group}/memory.max": "8589934592\n",
        f"{group}/memory.current": "3221225472\n",
        f"{group}/memory.stat": "anon 1073741824\ninactive_file 1073741824\n",
        f"{group}/main/memory.max": "max\n",
        f"{group}/cpu.max": "150000 100000\n",
    })  # fmt: skip
    assert host.memory(root) == (8 * GIB, 6 * GIB)
    assert host.usable_cores(root, threads=8) == 1.5


def test_a_container_of_the_first_kind(tmp_path: Path) -> None:
    """The path in /proc is the host's and is not mounted inside; the limit is at the top of the mount."""
    root = write_host(tmp_path, {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1073741824\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert host.memory(root) == (4 * GIB, 3 * GIB)
    assert host.usable_cores(root, threads=8) == 2
    (root / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    (root / "sys/fs/cgroup/cpu/cpu.cfs_quota_us").write_text("-1\n")
    assert host.memory(root)[0] == 24684100 * 1024
    assert host.usable_cores(root, threads=8) == 8


def test_a_board_is_known_by_its_device_tree(tmp_path: Path) -> None:
    root = write_host(tmp_path, {"proc/device-tree/model": "Raspberry Pi 5 Model B Rev 1.0\0",
                                 "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "2400000\n"})  # fmt: skip
    assert host.read_processor(root).name == "Raspberry Pi 5 Model B Rev 1.0"
    assert host.read_processor(root).mhz == 2400
    boards = {
        ("Raspberry Pi 5 Model B Rev 1.0", 8256528): "Raspberry Pi 5 8GB",
        ("NVIDIA Jetson Orin Nano Developer Kit", 7801256): "Jetson Orin Nano 8GB",
        ("NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super", 7801256): "Jetson Orin Nano Super 8GB",
        ("NVIDIA Jetson AGX Orin Developer Kit", 64351000): "Jetson AGX Orin 64GB",
        ("NVIDIA Orin NX Developer Kit", 15900000): "Jetson Orin NX 16GB",
        ("Raspberry Pi 4 Model B Rev 1.4", 8000000): None,
        ("", 8000000): None,
    }
    for (name, kilobytes), expected in boards.items():
        board = known_board(name, kilobytes * 1024, 1)
        assert (board.name if board else None) == expected, name


def test_a_gpu_without_memory_shares_the_hosts() -> None:
    """NVML tells no memory of a GB10; its name and the host's memory find its row."""
    spark = nvidia.to_device(nvidia.Gpu("NVIDIA GB10", "GPU-x", total=0, free=0, capability="12.1"))
    found = shared_memory(spark, 128459468800, 120000000000)
    assert (found.name, found.kind, found.memory, found.usable) == ("DGX Spark", "unified", 128 * GIB, 128459468800)
    unknown = shared_memory(replace(spark, name="NVIDIA Z1"), 64 * GIB, 60 * GIB)
    assert (unknown.name, unknown.kind, unknown.memory, unknown.free) == ("NVIDIA Z1", "unified", 64 * GIB, 60 * GIB)
    assert shared_memory(device("L4"), 64 * GIB, 60 * GIB) == device("L4")


# --- this machine ---


def test_this_machine() -> None:
    machine = detect(seconds=0)
    assert machine.devices
    assert machine.device.memory > 0
    assert 1 <= (machine.cores or 0) <= (machine.threads or 0)
    assert machine.usable_cores is not None
    assert 0 < machine.usable_cores <= os.sysconf("SC_NPROCESSORS_CONF")
    assert machine.host_memory is not None
    assert machine.host_available is not None
    assert 0 < machine.host_available <= machine.host_memory <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert machine.features
    assert machine.cpu.tflops.get("fp32", 0) >= 0


def test_memory_is_really_copied() -> None:
    """Between a slow board under load and the fastest server: a sum counted twice or not at all would fall outside."""
    assert 1e8 < measure_bandwidth(0.05) < 2e12


def test_a_measured_machine_says_so() -> None:
    assert detect(seconds=0.02).cpu.source == "detected; the bandwidth is measured"


# --- the command ---


def run(*arguments: str) -> Completed:
    return command("hardware", *arguments)


def test_json_names_are_frozen() -> None:
    machine = json.loads(run("--json").stdout)
    assert set(machine) == {
        "devices", "total", "cpu", "host_memory", "host_available", "cores", "threads", "usable_cores", "features", "notes",
        "nodes",
    }  # fmt: skip
    names = {
        "name", "vendor", "kind", "family", "capability", "memory", "usable", "bandwidth", "tflops", "link", "price",
        "price_source", "source", "date", "aliases", "free",
    }  # fmt: skip
    assert set(machine["cpu"]) == names
    assert set(machine["devices"][0]) == names | {"count"}
    assert set(machine["total"]) == {"count", "memory", "usable", "bandwidth", "price"}
    assert set(machine["cpu"]["link"]) == {"kind", "bandwidth"}


def test_the_command_is_the_function() -> None:
    described = json.loads(run("--gpu", "8x H100", "--json").stdout)
    assert described == json.loads(json.dumps(quantry.devices.hardware("8x H100").to_dict()))
    (entry,) = described["devices"]
    assert entry == json.loads(json.dumps({"count": 8, **asdict(device("H100 SXM"))}))


def test_picture() -> None:
    here = run()
    assert here.returncode == 0
    for words in ("processor", "usable", "available", "GB/s (measured)", "dense TFLOP/s"):
        assert words in here.stdout
    there = run("--gpu", "4x A100[/]")  # brackets are no markup
    for words in (
        "4 x A100 80GB SXM",
        "79.1 GiB",
        "2,039 GB/s",
        "nvlink 300 GB/s",
        "datasheet, 2021-06",
        "could also be",
    ):
        assert words in there.stdout
    assert "processor" not in there.stdout


@pytest.mark.parametrize("text", ["RTX 309", "0x H100", "M2 + L4", "cpu 0GB", "", "x" * 5000, "a\nb"])
def test_bad_input_is_one_line_and_exit_2(text: str) -> None:
    done = run("--gpu", text)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith("error: ")


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys; from quantry.devices.catalogue import parse; from quantry.devices.detect import detect\n"
        "parse('2x RTX 3090'); detect(0.01)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch", "transformers", "numpy", "gguf", "typer", "rich", "safetensors"}

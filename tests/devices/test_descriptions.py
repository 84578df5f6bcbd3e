"""Descriptions of machines: names as people write them, figures, hosts, nodes, and the names that clouds give."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from quantry.devices import NODE_BANDWIDTH, Device, Hardware
from quantry.devices.catalogue import catalogue, parse
from quantry.errors import QuantryError, UnknownNameError

GIB = 1024**3


def names(machine: Hardware) -> list[tuple[str, int]]:
    return [(device.name, count) for device, count in machine.groups()]


# --- names ---

SPELLINGS = {
    "2x RTX 3090": (2, "RTX 3090"),
    "2 x rtx3090": (2, "RTX 3090"),
    "2×RTX-3090": (2, "RTX 3090"),
    "2 rtx 3090s": (2, "RTX 3090"),
    "RTX 3090 x2": (2, "RTX 3090"),
    "rtx_3090*2": (2, "RTX 3090"),
    "NVIDIA GeForce RTX 3090": (1, "RTX 3090"),
    "3090": (1, "RTX 3090"),
    "3090 24gb": (1, "RTX 3090"),
    "H100": (1, "H100 SXM"),
    "h100 sxm": (1, "H100 SXM"),
    "H100-SXM5-80GB": (1, "H100 SXM"),
    "NVIDIA H100 80GB HBM3": (1, "H100 SXM"),
    "8xH100": (8, "H100 SXM"),
    "H100x8": (8, "H100 SXM"),
    "h100 pcie": (1, "H100 PCIe"),
    "H100 94GB": (1, "H100 NVL"),
    "4 x a100-80gb": (4, "A100 80GB SXM"),
    "A100 40 GB": (1, "A100 40GB SXM"),
    "NVIDIA A100-PCIE-40GB": (1, "A100 40GB PCIe"),
    "NVIDIA A100 80GB PCIe": (1, "A100 80GB PCIe"),
    "a10g": (1, "A10G"),
    "4x L4": (4, "L4"),
    "l40s": (1, "L40S"),
    "A6000": (1, "RTX A6000"),
    "RTX 6000 Ada Generation": (1, "RTX 6000 Ada"),
    "Tesla T4": (1, "T4"),
    "tesla v100 32gb": (1, "V100 32GB SXM"),
    "V100": (1, "V100 16GB SXM"),
    "rtx 4060 ti 16gb": (1, "RTX 4060 Ti 16GB"),
    "RTX4060Ti": (1, "RTX 4060 Ti 8GB"),
    "GeForce RTX 5090": (1, "RTX 5090"),
    "rtx pro 6000": (1, "RTX PRO 6000"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (1, "RTX PRO 6000 Server"),
    "B200 192GB": (1, "B200"),
    "gb200 nvl72": (1, "GB200"),
    "AMD Instinct MI300X": (1, "MI300X"),
    "M2 16GB": (1, "M2 16GB"),
    "apple m2": (1, "M2 8GB"),
    "m3 max 128GB": (1, "M3 Max 40-core 128GB"),
    "M3 Max 36 GiB": (1, "M3 Max 30-core 36GB"),
    "Jetson Orin 8GB": (1, "Jetson Orin Nano 8GB"),
    "orin nx 16gb": (1, "Jetson Orin NX 16GB"),
    "jetson agx orin": (1, "Jetson AGX Orin 64GB"),
    "cpu": (1, "x86 desktop DDR5"),
    "raspberry pi 5 4gb": (1, "Raspberry Pi 5 4GB"),
    "L4 + L4": (2, "L4"),
    "1024x T4": (1024, "T4"),
    "Intel Arc B580": (1, "Arc B580"),
    "Radeon RX 7900 XTX": (1, "RX 7900 XTX"),
    "7900 xtx": (1, "RX 7900 XTX"),
    "Ryzen AI Max+ 395": (1, "Strix Halo 128GB"),
    "Strix Halo 64GB": (1, "Strix Halo 64GB"),
    "GB10": (1, "DGX Spark"),
    "RTX PRO 6000 Blackwell": (1, "RTX PRO 6000"),
    "Jetson AGX Thor": (1, "Jetson Thor"),
    "RTX 4060 8GB": (1, "RTX 4060"),
    "RTX 4060 laptop": (1, "RTX 4060 Laptop"),
    "RTX 5060 Ti 16GB": (1, "RTX 5060 Ti 16GB"),
    "B300 288GB": (1, "B300"),
    "2x gaudi3": (2, "Gaudi 3"),
    "Mac Studio M3 Ultra 512GB": (1, "M3 Ultra 512GB"),
    "MacBook Pro M5 Max 128 GB": (1, "M5 Max 40-core 128GB"),
    "xeon 6": (1, "Xeon 6900P"),
    "Graviton4 64GB": (1, "Graviton4"),
}


@pytest.mark.parametrize("text", SPELLINGS)
def test_names_are_read_loosely(text: str) -> None:
    machine = parse(text)
    assert (machine.count, machine.device.name) == SPELLINGS[text]


@pytest.mark.parametrize("row", catalogue(), ids=lambda row: row.name)
def test_every_device_is_found_by_its_own_name_and_no_other(row: Device) -> None:
    machine = parse(row.name)
    assert machine.devices == (row,)


TYPOS = {
    "RTX 309": "RTX 3090",
    "rtx 4900": "RTX 4090",
    "H1000": "H100 SXM",
    "A100O": "A100 80GB SXM",
    "M1300X": "MI300X",
    "jetson orion 8gb": "Jetson Orin Nano 8GB",
    "rasberry pi 5": "Raspberry Pi 5 8GB",
}


@pytest.mark.parametrize("text", TYPOS)
def test_a_typo_is_answered_with_what_is_close(text: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown device .*; did you mean .*{TYPOS[text]}"):
        parse(text)


REFUSED = {
    "": "names no device; write a name such as",
    " , ": "names no device",
    "zzzz": "unknown device 'zzzz'; write a name such as H100",
    "2x": "unknown device",
    "0x H100": "0 devices are not between 1 and 1024",
    "-1x H100": "-1 devices are not between",
    "1025x H100": "1025 devices are not between",
    f"{10**30}x H100": "devices are not between 1 and 1024",
    "M2 16GB + RTX 4090": "RTX 4090 and M2 16GB do not share a machine; plan for one kind",
    "RTX 4090 + RX 7900 XTX": "need two platforms, cuda and rocm, and an engine is built for one; plan for one kind",
    "RTX 3090 48GB": "'rtx 3090 48gb' is not made; that device has 24 GB",
    "M2 12GB": "that device has 8 GB or 16 GB or 24 GB",
    "A100 40GB 80GB": "is not made",
    "2x M2 16GB": "2x M2 16GB are 2 machines; plan for one of them",
    "cpu 0GB": "0 GB of memory are not between 0.5 and 32768; write for example",
    "RTX 3085 Ti": "unknown device",
    "NVIDIA GeForce RTX 4030 Laptop GPU": "unknown device",
    "x" * 5000: "unknown device 'x{60}'",
}


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: text[:30])
def test_bad_descriptions_are_one_clear_line(text: str) -> None:
    with pytest.raises(QuantryError, match=REFUSED[text]) as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1


WORDS = (
    "2",
    "x",
    "0",
    "rtx",
    "3090",
    "h100",
    "80gb",
    "16 GB",
    "1tb",
    "m2",
    "cpu",
    ",",
    "and",
    "+",
    "-",
    " ",
    "×",
    "²",
    " cores ",
    "8GB",
    "24GB 1008GB/s sm89",
    "sm",
    "ram",
    " nodes x ",
    "c7i.8xlarge",
    "with",
    "٣",
    "[/]",
)


@examples(400)
@given(st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=10).map("".join)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        machine = parse(text)
    except QuantryError as error:
        assert error.fix
    else:
        assert 1 <= machine.count <= 1024


def test_what_a_short_name_could_also_mean_is_said() -> None:
    assert parse("A100 40GB").notes == ("'a100 40gb' is read as A100 40GB SXM; it could also be A100 40GB PCIe",)
    assert parse("RTX 3090").notes == ()


def test_the_host_of_a_description() -> None:
    assert parse("2x RTX 3090").host_memory is None
    described = parse("RTX 3090", host_memory=64 * GIB)
    assert (described.host_memory, described.cpu.memory, described.cpu.kind) == (64 * GIB, 64 * GIB, "cpu")
    assert parse("M2 16GB").host_memory == 16 * GIB  # one memory for all
    assert parse("cpu 1TB").host_memory == 1024 * GIB
    assert parse("cpu", host_memory=8 * GIB).device.memory == 8 * GIB


# --- hosts in figures ---

HOSTS = {  # cores, GiB, GB/s
    "4 cores 8GB": (4, 8, 40),
    "cpu 4 cores 8GB": (4, 8, 40),
    "4-core cpu, 8 GB RAM": (4, 8, 40),
    "cpu 8GB": (4, 8, 40),
    "8 vCPU 32GB": (4, 32, 40),  # two of them share a core
    "2 vcpus 4gb": (1, 4, 10),
    "8 cores 32GB": (8, 32, 51.2),  # two channels
    "16 cores and 64 GB of RAM": (16, 64, 102.4),
    "32 cores 768GB": (32, 768, 204.8),  # eight channels
    "Xeon 64 cores 1TB": (64, 1024, 204.8),
    "64GB RAM": (8, 64, 51.2),
    "4 cores": (4, 16, 40),
}


@pytest.mark.parametrize("text", HOSTS)
def test_a_host_in_figures(text: str) -> None:
    machine = parse(text)
    cores, memory, bandwidth = HOSTS[text]
    assert (machine.cores, machine.host_memory, machine.device.memory) == (cores, memory * GIB, memory * GIB)
    assert machine.device.bandwidth == pytest.approx(bandwidth * 1e9)
    assert (machine.device, machine.device.kind, machine.device.platform) == (machine.cpu, "cpu", "cpu")
    assert any(f"{bandwidth:g} GB/s of memory bandwidth are assumed for" in note for note in machine.notes)
    assert any("cores are assumed" in note for note in machine.notes) == (not re.search(r"\d.(core|vcpu)", text, re.I))


def test_a_small_host_is_slower_than_a_desktop() -> None:
    assert (
        parse("4 cores 8GB").device.bandwidth < parse("cpu").device.bandwidth < parse("32 cores 768GB").device.bandwidth
    )
    assert parse("4 cores 8GB").device.tflops["fp32"] == pytest.approx(4 * 2.5 * 32 / 1e3)  # GHz, operations a cycle


@examples(100)
@given(st.integers(1, 1024), st.sampled_from((0.5, 1, 2, 3.5, 8, 12, 64, 768, 4096, 32768)))
def test_a_host_is_found_by_its_own_name(cores: int, memory: float) -> None:
    machine = parse(f"{cores} cores {memory:g}GB")
    assert parse(machine.device.name) == machine
    assert (machine.cores, machine.device.memory) == (cores, int(memory * GIB))
    more = parse(f"{min(cores + 1, 1024)} cores {memory:g}GB").device
    assert machine.device.bandwidth <= more.bandwidth
    assert machine.device.tflops["fp32"] <= more.tflops["fp32"]


# --- devices in figures ---


@pytest.mark.parametrize(
    ("text", "like"),
    [
        ("24GB 1008GB/s sm89", "RTX 4090"),
        ("80 GB 3.35 TB/s sm_90", "H100 SXM"),
        ("16gb 320GB/s SM75", "T4"),
        ("32GB 1792GB/s sm120", "RTX 5090"),
    ],
)
def test_a_device_in_figures_is_as_fast_as_the_one_it_is(text: str, like: str) -> None:
    machine, sheet = parse(text), parse(like).device
    assert (machine.device.memory, machine.device.capability) == (sheet.memory, sheet.capability)
    assert (machine.device.family, machine.device.link) == (sheet.family, sheet.link)
    assert machine.device.bandwidth == pytest.approx(sheet.bandwidth)
    assert machine.device.tflops == pytest.approx(dict(sheet.tflops), rel=1e-6)
    assert machine.device.usable <= sheet.usable
    assert len(machine.notes) == 1
    assert f"assumed: those of the {like}," in machine.notes[0]


CAPABILITIES = sorted({row.capability for row in catalogue() if row.vendor == "nvidia" and row.capability}, key=float)


@examples(100)
@given(st.sampled_from(CAPABILITIES), st.integers(1, 1024), st.integers(50, 20000), st.integers(1, 8))
def test_a_device_in_figures_is_found_by_its_own_name(capability: str, memory: int, bandwidth: int, count: int) -> None:
    machine = parse(f"{memory}GB {bandwidth}GB/s sm{capability.replace('.', '')}")
    device = machine.device
    assert (device.memory, device.capability) == (memory * GIB, capability)
    assert device.bandwidth == pytest.approx(bandwidth * 1e9)
    assert 0.8 * device.memory < device.usable <= device.memory
    assert parse(device.name) == machine
    (like,) = {row.name for row in catalogue() if f" {row.name}, " in machine.notes[0]}
    sheet = parse(like).device
    assert {dtype: rate / device.bandwidth for dtype, rate in device.tflops.items()} == pytest.approx(
        {dtype: rate / sheet.bandwidth for dtype, rate in sheet.tflops.items()}, rel=1e-2
    )
    if device.kind == "gpu":
        assert parse(f"{count}x {device.name}").devices == (device,) * count


# --- the host beside GPUs ---


def test_the_memory_of_a_host_beside_gpus() -> None:
    for text in (
        "2x RTX 4090 + 64GB RAM",
        "2x RTX 4090, 64 GB",
        "2 RTX 4090s with 64 GB of DDR5 RAM",
        "2x RTX 4090 64GB RAM",
    ):
        machine = parse(text)
        assert (names(machine), machine.host_memory, machine.cpu.memory) == ([("RTX 4090", 2)], 64 * GIB, 64 * GIB), (
            text
        )
        assert machine.notes == ()
    assert parse("RTX 4090 + 192GB RAM").host_memory == 192 * GIB
    assert parse("RTX 4090").host_memory is None
    assert parse("RTX 4090 + 64GB RAM", host_memory=8 * GIB).host_memory == 64 * GIB  # what is described counts


def test_the_processor_beside_gpus() -> None:
    machine = parse("RTX 4090 + 16 cores 128GB")
    assert (machine.device.name, machine.cores, machine.host_memory) == ("RTX 4090", 16, 128 * GIB)
    assert machine.cpu.bandwidth == pytest.approx(102.4e9)
    assert "assumed" in machine.notes[0]
    server = parse("4x L40S + EPYC 9005 512GB")
    assert (server.count, server.cpu.name, server.cpu.memory, server.host_memory) == (
        4,
        "EPYC 9005",
        512 * GIB,
        512 * GIB,
    )


# --- unequal GPUs ---


def test_unequal_gpus_are_all_there() -> None:
    for text in ("RTX 4090 + RTX 3090", "RTX 4090, RTX 3090", "rtx 4090 and rtx 3090"):
        machine = parse(text)
        assert names(machine) == [("RTX 4090", 1), ("RTX 3090", 1)]
        assert machine.usable == sum(device.usable for device in machine.devices)
    assert names(parse("2xL4, 1xT4")) == [("L4", 2), ("T4", 1)]
    assert names(parse("2x RTX 3090 + RTX 4090 + 64GB RAM")) == [("RTX 3090", 2), ("RTX 4090", 1)]


# --- nodes ---


def test_nodes() -> None:
    for text in (
        "2 nodes x 8x H100",
        "2 nodes of 8x H100",
        "2 nodes with 8x H100 each",
        "2 hosts x 8 H100",
        "8x H100 x 2 nodes",
    ):
        machine = parse(text)
        assert (machine.nodes, machine.count, machine.per_node, names(machine)) == (2, 16, 8, [("H100 SXM", 16)]), text
        assert (
            machine.notes[-1]
            == f"{NODE_BANDWIDTH / 1e9:g} GB/s per device are assumed between nodes (400 Gb/s InfiniBand)"
        )
    assert parse("2 nodes x 8x H100 + 2TB RAM").host_memory == 2048 * GIB  # of each
    assert parse("1 node x 8x H100") == parse("8x H100")


def test_more_devices_than_one_host_takes_are_several() -> None:
    machine = parse("16x H100")
    assert (machine.nodes, machine.count) == (2, 16)
    assert "16 devices are read as 2 nodes of 8" in machine.notes[-1]
    assert (parse("8x H100").nodes, parse("12x H100").nodes, parse("72x GB300").nodes) == (1, 2, 1)
    assert parse("1024x T4").nodes == 128


@examples(100)
@given(st.integers(1, 1024), st.sampled_from(("H100", "RTX 3090", "GB300", "MI355X")))
def test_nodes_hold_all_devices(count: int, name: str) -> None:
    machine = parse(f"{count}x {name}")
    most = 72 if name == "GB300" else 8
    assert machine.count == count
    assert (machine.nodes - 1) * most < count <= machine.nodes * most
    assert 1 <= machine.per_node <= most
    assert any("nodes of" in note for note in machine.notes) == (machine.nodes > 1)


# --- machines of clouds ---

INSTANCES = {  # vCPUs, cores, GiB, GB/s
    "c7i.8xlarge": (32, 16, 64, 102.4),
    "m7i.4xlarge": (16, 8, 64, 51.2),
    "c7g.16xlarge": (64, 64, 128, 307.2),
    "r8g.large": (2, 2, 16, 11.2),
    "c7i.48xlarge": (192, 96, 384, 307.2),  # of one socket
    "c3-standard-44": (44, 22, 176, 153.6),
    "e2-standard-4": (4, 2, 16, 9.1),
    "Standard_F32s_v2": (32, 16, 64, 93.9),
    "D16s v5": (16, 8, 64, 51.2),
}


@pytest.mark.parametrize("text", INSTANCES)
def test_a_rented_processor(text: str) -> None:
    machine = parse(text)
    vcpus, cores, memory, bandwidth = INSTANCES[text]
    assert (machine.threads, machine.cores, machine.host_memory) == (vcpus, cores, memory * GIB)
    assert machine.device.bandwidth == pytest.approx(bandwidth * 1e9)
    assert (machine.device.kind, machine.cpu) == ("cpu", machine.device)
    assert re.fullmatch(r"20\d\d(-\d\d)?", machine.device.date)
    assert machine.device.source
    assert "assumed" in machine.notes[0]
    assert parse(machine.device.name) == machine


def test_a_rented_machine_with_gpus() -> None:
    machine = parse("p5.48xlarge")
    assert (names(machine), machine.host_memory) == ([("H100 SXM", 8)], 2048 * GIB)
    assert machine.notes[0] == "p5.48xlarge is read as 8x H100 SXM + 2048GB RAM"
    assert names(parse("Standard_NC24ads_A100_v4")) == [("A100 80GB PCIe", 1)]


FIGURES_REFUSED = {
    "24GB": "'24GB' gives memory alone; write a name such as",
    "1008GB/s sm89": "lacks the memory; write all, as 24GB 1008GB/s sm89",
    "24GB sm89": "lacks the bandwidth",
    "24GB 1008GB/s": "lacks the compute capability",
    "24GB 1008GB/s sm99": "sm99 is not known; write one of sm61, .*sm121",
    "24GB 99999GB/s sm89": "99999 GB/s are not between 1 and 20000; write for example",
    "0 cores 8GB": "0 cores are not between 1 and 1024; write for example 4 cores 8GB",
    "5000 cores 8GB": "5000 cores are not between 1 and 1024",
    "4 cores 99TB": "101376 GB of memory are not between 0.5 and 32768",
    "RTX 4090 + 0GB RAM": "0 GB of memory are not between",
    "RTX 4090 0GB RAM": "0 GB of memory are not between",
    "RTX 4090 + 64GB RAM + 128GB RAM": "the memory of the host is given as 64 and 128; give it once",
    "0 nodes x 8x H100": "0 nodes are not between 1 and 1024; write for example 2 nodes x 8x H100",
    "-2 nodes x 8x H100": "-2 nodes are not between",
    "2 nodes x 0x H100": "0 devices are not between",
    "1000 nodes x 8x H100": "8000 devices are not between 1 and 1024",
    "2 nodes x 8 cores 32GB": "are 2 machines; plan for one of them",
    "2 nodes x M2 16GB": "2x M2 16GB are 2 machines",
    "2x 8 cores 32GB": "are 2 machines",
    "c7i.1000xlarge": "c7i.1000xlarge has 4000 vCPUs, and its family has 1 to 192; write a size",
    "p5.49xlarge": "unknown device 'p5.49xlarge'; did you mean p5.48xlarge",
}


@pytest.mark.parametrize("text", FIGURES_REFUSED)
def test_figures_that_cannot_be_are_one_clear_line(text: str) -> None:
    with pytest.raises(QuantryError, match=FIGURES_REFUSED[text]) as caught:
        parse(text)
    assert len(str(caught.value).splitlines()) == 1


DOCUMENTED = re.findall(r"`([^`]+)`", "".join(
    line.split("|")[1] for line in (Path(__file__).parents[2] / "docs/reference/hardware.md").read_text().splitlines() if line.startswith("| `")
))  # fmt: skip


@pytest.mark.parametrize("text", DOCUMENTED)
def test_the_documented_words_are_read(text: str) -> None:
    assert parse(text).count >= 1

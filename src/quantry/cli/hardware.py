"""`quantry hardware`: what this machine is, or what a description of one means."""

from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._output import facts, print_result, table
from quantry.report.sizes import human

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.devices import Device, Hardware

GROUP = "choose"
EXAMPLES = (
    "quantry hardware",
    'quantry hardware --gpu "4x H100"',
)
DTYPES = ("fp32", "fp16", "bf16", "fp8", "int8", "fp4")


Gpu = Annotated[str | None, typer.Option("--gpu", help='Describe another machine: "2x RTX 3090", "M2 16GB", "cpu".')]


def command(gpu: Gpu = None, json: flags.Json = False) -> None:
    """Show the devices, memory and bandwidth of this machine, or of the one that --gpu describes."""
    from quantry.devices import hardware

    print_result(hardware(gpu), picture, json)


def picture(machine: "Hardware") -> list["RenderableType"]:
    """Draws the machine, a table of its devices, and where the figures are from."""
    from rich.text import Text

    rows = [_row(device, count) for device, count in machine.groups()]
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows)]
    devices = table(headings, headings[1:], drop=("USD/h", "to its peers", "free", "usable"))
    for row in rows:
        devices.add_row(*(Text(row[heading] or "-") for heading in headings))
    known = [(name, Text(value)) for name, value in _facts(machine)]
    above: list[RenderableType] = [facts(known), ""] if known else []
    details = [Text(line, style) for device, _ in machine.groups() for line, style in _details(device)]
    return [*above, devices, "", *details, *(Text(note, "yellow") for note in machine.notes)]


def _facts(machine: "Hardware") -> list[tuple[str, str]]:
    if machine.cores is None:  # described, not detected
        return []
    size = human(machine.host_memory or 0)
    left = "" if machine.host_available is None else f", {human(machine.host_available)} available"
    usable = machine.usable_cores if machine.usable_cores is not None else machine.threads
    return [
        ("processor", machine.cpu.name),
        ("cores", f"{machine.cores} cores, {machine.threads} threads, {usable:g} usable"),
        ("features", ", ".join(machine.features) or "none that matter here"),
        ("memory", size + left),
        (
            "bandwidth",
            f"{machine.cpu.bandwidth / 1e9:,.1f} GB/s ({machine.cpu.source.rpartition('bandwidth is ')[2]})",
        ),
    ]


def _row(device: "Device", count: int) -> dict[str, str]:
    """Returns the cells of a device by column; a column that is empty for all devices is not shown."""
    return {
        "device": f"{count} x {device.name}" if count > 1 else device.name,
        "memory": human(device.memory),
        "usable": human(device.usable),
        "free": "" if device.free is None else human(device.free),
        "bandwidth": f"{device.bandwidth / 1e9:,.0f} GB/s",
        "to its peers": f"{device.link.kind} {device.link.bandwidth / 1e9:,.0f} GB/s" if device.link.bandwidth else "",
        "USD/h": "" if device.price is None else f"{device.price:.2f}",
    }


def _details(device: "Device") -> list[tuple[str, str]]:
    """Returns lines with their style: what the device computes, and where its figures are from."""
    family = f"{device.family} {device.capability}" if device.capability else device.family
    rates = ", ".join(f"{dtype} {device.tflops[dtype]:,g}" for dtype in DTYPES if dtype in device.tflops)
    dated = f"{device.source}, {device.date}" if device.date else device.source
    price = f"; price of {device.price_source}" if device.price_source else ""
    return [(f"{device.name} ({family}), dense TFLOP/s: {rates or 'unknown'}", ""), (dated + price, "dim")]

"""The memory that macOS lets a GPU fill, which its user can raise where nothing fits without."""

from dataclasses import replace

from quantry.devices import Device
from quantry.planning.request import Request
from quantry.report.sizes import human

SYSTEM_SHARE = 0.2  # of the memory that macOS and other programs keep


def raised(request: Request) -> Request | None:
    """Returns the request for a Mac whose limit is raised, with the command that does it; None for other machines."""
    devices = tuple(_raised(device) for device in request.hardware.devices)
    if request.device.platform != "metal" or devices == request.hardware.devices:
        return None
    limit, before = devices[0].usable, request.device.usable
    note = (
        f"macOS lets a GPU fill {human(before)} of {human(request.device.memory)}; this needs more: run "
        f"`sudo sysctl iogpu.wired_limit_mb={limit >> 20}` first, and close other programs"
    )
    return replace(request, hardware=replace(request.hardware, devices=devices), notes=(*request.notes, note))


def _raised(device: Device) -> Device:
    return replace(device, usable=max(device.usable, int(device.memory * (1 - SYSTEM_SHARE))))

"""Where nothing fits: more devices, another device or a smaller model that would."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from quantry.devices import Device
from quantry.devices.catalogue import catalogue
from quantry.models.attention import context_length
from quantry.planning.candidates import find, least_bytes
from quantry.planning.facts import capability
from quantry.planning.models import find_model, from_config, known_models
from quantry.planning.ranking import rough_points
from quantry.planning.request import Request, machine_name
from quantry.quantizing.recipe import presets

FEW = ("bf16", "fp8-dynamic", "w8a8", "w4a16", "gguf-q8_0", "gguf-q4_k_m")  # presets that are tried
COUNTS = (1, 2, 4, 8)
OLDEST = 75  # compute capability that is still suggested


@dataclass(frozen=True, slots=True)
class Near:
    """A change of the request with which something fits. Field names are the JSON names."""

    what: str  # "more of the same", "another device", "a smaller model"
    change: str
    preset: str
    engine: str
    per_device: int


def alternatives(request: Request) -> tuple[Near, ...]:
    """Returns more of the same device, the cheapest other machine and the largest smaller model, where they fit."""
    return tuple(near for near in (_more(request), _other(request), _smaller(request)) if near)


def _more(request: Request) -> Near | None:
    """Returns more devices of the same type; where the host's memory is shared, one of the family with more of it."""
    device = request.device
    if device.kind == "unified":
        rows = sorted(catalogue(), key=lambda row: row.memory)
        machines = [(row, 1) for row in rows if row.family == device.family and row.memory > device.memory]
    else:
        machines = [(device, count) for count in COUNTS if count > request.hardware.count and device.kind == "gpu"]
    return _first(request, "more of the same", machines)


def _other(request: Request) -> Near | None:
    """Returns the cheapest machine of the catalogue that holds the model, of those that all engines run on."""
    machines = [
        (device.price * count, device, count)
        for device in catalogue()
        for count in (COUNTS if device.kind == "gpu" else (1,))
        if device.price and device.name != request.device.name and (capability(device) or OLDEST) >= OLDEST
    ]
    cheapest_first = sorted(machines, key=lambda row: row[0])
    return _first(request, "another device", ((device, count) for _, device, count in cheapest_first))


def _first(request: Request, what: str, machines: Iterable[tuple[Device, int]]) -> Near | None:
    for device, count in machines:
        hardware = replace(request.hardware, devices=(device,) * count, notes=())
        near = _fit(replace(request, hardware=hardware), what, machine_name(device, count))
        if near:
            return near
    return None


def _smaller(request: Request) -> Near | None:
    """Returns the largest smaller model of the same family in the catalogue."""
    known = find_model(request.checkpoint.source)
    name = known.name if known else str(request.checkpoint.config.get("model_type"))
    family = name.partition("-")[0]
    rows = [
        row
        for row in known_models().values()
        if row.name.partition("-")[0] == family and row.published < request.parameters and not row.vision
    ]
    for row in sorted(rows, key=lambda row: (-_alike(row.name, name), -row.published)):
        if (context_length(row.config) or 0) < request.workload.context:
            continue
        tried = replace(request, model=row.repo, checkpoint=from_config(row.config, row.name), stored=None)
        near = _fit(tried, "a smaller model", row.name)
        if near:
            return near
    return None


def _alike(name: str, other: str) -> int:
    """Returns how many letters two names have in common at their beginning."""
    return next((at for at, (left, right) in enumerate(zip(name, other, strict=False)) if left != right), len(name))


def _fit(request: Request, what: str, change: str) -> Near | None:
    """Returns the best of a few presets that fits without the host's memory."""
    names = (request.stored.preset.name,) if request.stored else FEW
    if min(least_bytes(request, presets()[name]) for name in names) > request.hardware.usable:
        return None
    candidates, _ = find(request, names, offload=False)
    if not candidates:
        return None
    best = max(candidates, key=lambda candidate: rough_points(request, candidate))
    return Near(what, change, best.preset.name, best.engine, best.footprint.per_device)

"""Checks that a model and its load fit into the free memory, and names what would fit otherwise."""

from collections.abc import Iterator
from dataclasses import replace

from quantry.devices import Hardware
from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import Serving
from quantry.errors import QuantryError
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.memory.footprint import footprint, room
from quantry.report.sizes import human
from quantry.serving.select import ServedModel
from quantry.types import Footprint, Workload

CONTEXT = 8192  # tokens that are offered unless more are asked for
LEAST = 512


def fitted(serving: Serving, model: ServedModel, hardware: Hardware) -> tuple[Serving, Footprint | None]:
    """Returns the serving with a context that fits, if none was asked for, and its memory.

    Raises QuantryError if it needs more memory than is free. The footprint is None where the memory model knows nothing
    of the engine or the architecture.
    """
    longest = model.context
    if serving.context is not None and longest is not None and serving.context > longest:
        raise QuantryError(
            f"a context of {serving.context} is more than the {longest} tokens that {model.source} was made for",
            fix=f"use --context {longest} or less",
        )
    wanted = replace(serving, context=serving.context or min(longest or CONTEXT, CONTEXT))
    deployment = _deployment(wanted, model, hardware)
    if deployment is None:
        return wanted, None
    shorter = _shorter(wanted) if serving.context is None else ()
    for candidate in (wanted, *shorter):
        needed = _needed(deployment, candidate)
        if needed is None or needed.per_device <= room(deployment):
            return _with_prompt_cache(candidate, needed, deployment), needed
    needed = _needed(deployment, wanted)
    assert needed is not None
    raise QuantryError(_too_much(wanted, model, needed, deployment), fix=_nearest(wanted, model, hardware))


def _with_prompt_cache(serving: Serving, needed: Footprint | None, deployment: Deployment) -> Serving:
    """Limits the cache of finished prompts, which no plan counts, to half of the free memory."""
    usual = engine_facts(serving.engine).server.prompt_cache_mib
    if needed is None or usual is None or deployment.device.kind == "gpu":
        return serving
    left = (room(deployment) - needed.per_device) // 2 >> 20
    return replace(serving, prompt_cache_mib=left) if left < usual else serving


def _deployment(serving: Serving, model: ServedModel, hardware: Hardware) -> Deployment | None:
    """Returns the model in its engine on what is free of the device."""
    if model.checkpoint is None:
        return None
    device = hardware.cpu if serving.platform == "cpu" else hardware.device
    if device.kind != "gpu" and device.free is not None:  # shared with everything else that runs
        device = replace(device, usable=min(device.usable, device.free))
    settings = Settings(tokens=serving.batch_tokens, sequences=serving.parallel, utilization=serving.utilization)
    return Deployment(
        model.checkpoint, None, serving.engine, device, serving.version, serving.kv or "auto", serving.tensor_parallel,
        serving.pipeline_parallel, serving.offload_layers, settings,
    )  # fmt: skip


def _needed(deployment: Deployment, serving: Serving) -> Footprint | None:
    assert serving.context is not None
    try:
        return footprint(deployment, Workload(serving.context, serving.parallel or 1, prompt=serving.context))
    except QuantryError:  # an architecture or engine that the plan cannot count is no reason not to serve it
        return None


def _shorter(serving: Serving) -> Iterator[Serving]:
    context = serving.context or LEAST
    while context // 2 >= LEAST:
        context //= 2
        yield replace(serving, context=context)


def _nearest(wanted: Serving, model: ServedModel, hardware: Hardware) -> str:
    """Says what would fit: fewer sequences, a smaller cache, a shorter context, in this order; else a smaller model."""
    single = replace(wanted, parallel=1 if wanted.parallel else None)
    half = engine_facts(wanted.engine).kv_cache.half
    smaller = [replace(serving, kv=half) for serving in (wanted, single)] if half and wanted.kv is None else []
    for candidate in (single, *smaller, *_shorter(wanted), *_shorter(single)):
        deployment = _deployment(candidate, model, hardware)
        needed = _needed(deployment, candidate) if deployment else None
        if deployment and needed and needed.per_device <= room(deployment):
            return f"this would fit: {_flags(candidate, wanted)}"
    return "quantize it to fewer bits (quantry plan says what fits), or use a larger machine"


def _flags(candidate: Serving, wanted: Serving) -> str:
    names = {"context": "--context", "parallel": "--parallel", "kv": "--kv"}
    changed = {
        flag: value for name, flag in names.items() if (value := getattr(candidate, name)) != getattr(wanted, name)
    }
    return " ".join(f"{flag} {value}" for flag, value in changed.items())


def _too_much(wanted: Serving, model: ServedModel, needed: Footprint, deployment: Deployment) -> str:
    sequences = wanted.parallel or 1
    return (
        f"{model.source} does not fit {deployment.device.name}: {human(needed.weights)} of weights, "
        f"{human(needed.kv_cache)} of KV cache for {sequences} x {wanted.context} tokens, "
        f"{human(needed.activations)} of activations and {human(needed.overhead)} of overhead need "
        f"{human(needed.per_device)} on a device, and {human(room(deployment))} may be filled"
    )

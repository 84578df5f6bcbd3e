"""How fast an engine serves a model on a device, what that costs, and when 4-bit weights no longer pay.

seconds.py has the formulas, engines/NAME.toml the shares and times, by family of devices.
benchmarks/fit_speed.py fits them to measurements (benchmarks/measurements.toml). Where nothing was measured, a row
names the one it is like and says how far off it may be: `Prediction.spread` is that share, and `measured` tells the
two apart. `basis` says what a figure is: "measured" if the model, the scheme and the devices were, "fitted" if others
were on this engine and family, "modelled" if the factors are those of a similar row or something was not covered. A
step has the mean context of an answer.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from quantry.devices import Device
from quantry.errors import QuantryError
from quantry.models.attention import block_count
from quantry.planning.deployment import Deployment
from quantry.planning.memory.terms import cache_type, terms
from quantry.planning.speed.factors import factors_for, unmeasured_spread
from quantry.planning.speed.seconds import (
    DecodeStep,
    Runtime,
    Seconds,
    offloaded_prompt,
    offloaded_step,
    runs,
    step_seconds,
)
from quantry.planning.speed.work import StepWork, work_of
from quantry.quantizing.recipe import Recipe, presets
from quantry.types import Speed, Workload

Basis = Literal["measured", "fitted", "modelled"]
MOST = 4096  # sequences up to which a break-even is looked for
RIVALS = {"gguf": ("gguf-f16", "gguf-q8_0"), "": ("bf16", "fp8-dynamic", "w8a8")}


@dataclass(frozen=True, slots=True)
class Prediction(Speed):
    """A speed and what it is made of; the truth is expected within `spread` of it, as a share."""

    step_s: float
    prompts_tokens_per_s: float  # prefill of as many prompts as there are sequences
    parts: Seconds  # of a step
    spread: float
    measured: bool  # its factors were fitted to measurements of this engine and family
    basis: Basis


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A weight-only scheme at `batch` sequences, and the number of sequences from which others are as fast."""

    preset: str
    batch: int
    overtaken: Mapping[str, int | None]  # preset -> sequences from which it is no slower; None: not up to 4096

    @property
    def better(self) -> dict[str, int]:
        """The presets that are no slower at `batch`, and from how many sequences on."""
        return {name: at for name, at in self.overtaken.items() if at is not None and at <= self.batch}

    @property
    def advice(self) -> str:
        if not self.better:
            ahead = [f"{name} from {at} at once" for name, at in self.overtaken.items() if at is not None]
            return f"{self.preset} pays at {self.batch} at once" + (
                f"; overtaken by {', '.join(ahead)}" if ahead else ""
            )
        named = ", ".join(f"{name} (from {at} at once)" for name, at in self.better.items())
        return f"{self.preset} saves memory but no time at {self.batch} at once: no slower is {named}"


def speed(deployment: Deployment, workload: Workload, host: Device) -> Prediction:
    """Predicts the speed of one copy of a model at `workload.concurrency` sequences; `host` runs offloaded layers.

    Raises QuantryError if nothing is known of the engine's speed on such a device, or if the load is impossible.
    """
    batch, share = workload.concurrency, on_device(deployment)
    _check(deployment.device, batch, share)
    work, runtime, planned = _whole(deployment, workload)
    prompt = min(workload.prompt, workload.context)
    mine, there = _split(work, deployment, share)
    step = offloaded_step(mine, there, runtime, host, planned)
    single, all_prompts = (offloaded_prompt(mine, there, runtime, host, count, prompt) for count in (1, batch))
    extra = unmeasured_spread(
        experts=work.count > 0 and not runtime.factors.routing,
        latent=work.latent > 0,
        several=deployment.devices > 1,
        offload=share < 1,
    )
    known = runtime.factors.measured and not extra
    seen = share >= 1 and planned.cache.bits == 16 and was_measured(work, runtime)
    return Prediction(
        decode_tokens_per_s=batch / step.total,
        prefill_tokens_per_s=prompt / single,
        first_token_s=single,
        bound=step.bound,
        step_s=step.total,
        prompts_tokens_per_s=batch * prompt / all_prompts,
        parts=step,
        spread=round(runtime.factors.spread + extra, 2),
        measured=known,
        basis="measured" if seen else "fitted" if known else "modelled",
    )


def checking_seconds(deployment: Deployment, workload: Workload, tokens: int) -> float:
    """Returns the time of a step that checks `tokens` of every sequence at once; each cache is read once."""
    work, runtime, step = _whole(deployment, workload)
    return step_seconds(work, runtime, replace(step, batch=step.batch * tokens, context=step.context / tokens)).total


def one_layer_seconds(deployment: Deployment, workload: Workload) -> float:
    """Returns the time of a step through one layer and the head, as heads that guess ahead have; without the host's."""
    work, runtime, step = _whole(deployment, workload)
    unhosted = replace(runtime, factors=replace(runtime.factors, step=0.0, sequence=0.0))
    return step_seconds(work.share(1 / work.layers, head=True), unhosted, step).total


def _whole(deployment: Deployment, workload: Workload) -> tuple[StepWork, Runtime, DecodeStep]:
    """Returns a model's work, what it runs on, and the step that the load makes."""
    work = work_of(deployment.checkpoint, deployment.recipe)
    devices = deployment.tensor_parallel, deployment.pipeline_parallel
    runtime = Runtime(deployment.device, factors_for(deployment.engine, deployment.device), *devices)
    dtype = "f16" if work.detail == "f16" else "bf16"
    kept = cache_type(deployment.kv, terms(deployment.engine, None, deployment.device), dtype)
    context = min(workload.prompt + workload.answer / 2, workload.context)
    return work, runtime, DecodeStep(workload.concurrency, context, kept)


def _split(work: StepWork, deployment: Deployment, share: float) -> tuple[StepWork, StepWork | None]:
    """Returns the work of the devices and that of the host, which has whole layers or experts only."""
    if share >= 1:
        return work, None
    if deployment.host_experts:
        return replace(work, experts=work.experts * share), work.experts_alone(1 - share)
    return work.share(share, head=True), work.share(1 - share, head=False)


def on_device(deployment: Deployment) -> float:
    """Returns the share of the layers, or of the experts, that devices hold; the host has the rest."""
    layers, blocks = deployment.offload_layers, block_count(deployment.checkpoint.config)
    if deployment.host_experts:
        return max(0.0, 1 - deployment.host_experts / blocks)
    return 1.0 if layers is None else min(1.0, layers / (blocks + 1))


def was_measured(work: StepWork, runtime: Runtime) -> bool:
    """Returns True if a model of this shape was measured in this scheme on these devices."""
    count, name = runtime.tensor * runtime.pipeline, runtime.device.name
    kinds = runtime.factors.seen.get(name if count == 1 else f"{count}x {name}", {})
    return runtime.factors.measured and round(work.bytes) in kinds.get(f"{work.kind} {work.detail}", ())


def _check(device: Device, batch: int, share: float) -> None:
    if type(batch) is not int or not 1 <= batch <= 1 << 20:
        raise QuantryError(f"a batch of {batch} is not 1 to {1 << 20}", fix="give --concurrency a positive number")
    if share < 1 and device.kind != "gpu":
        raise QuantryError(
            f"{device.name} shares the host's memory and has nothing to leave there", fix="leave offload_layers out"
        )


def break_even(deployment: Deployment, workload: Workload) -> BreakEven:
    """Finds the numbers of sequences from which 16 bit and 8 bit decode as fast as the scheme of a deployment.

    All layers are on the devices. Rivals that the device has no arithmetic for are left out. Raises QuantryError as
    `speed` does.
    """
    recipe, device = deployment.recipe, deployment.device
    assert recipe is not None, "a comparison of schemes needs a recipe"

    _check(device, workload.concurrency, on_device(deployment))

    def steps(chosen: Recipe) -> Callable[[int], float]:
        work, runtime, step = _whole(replace(deployment, recipe=chosen), workload)
        return cache(lambda sequences: step_seconds(work, runtime, replace(step, batch=sequences)).total)

    mine = steps(recipe)

    def first_batch(rival: Recipe) -> int | None:
        theirs = steps(rival)
        return _least(lambda sequences: theirs(sequences) <= mine(sequences))

    chosen = (presets()[name] for name in RIVALS["gguf" if recipe.format == "gguf" else ""])
    rivals = [Recipe(preset, preset.formats[0]) for preset in chosen if preset.name != recipe.preset.name]
    overtaken = {
        rival.preset.name: first_batch(rival) for rival in rivals if runs(work_of(deployment.checkpoint, rival), device)
    }
    return BreakEven(recipe.preset.name, workload.concurrency, overtaken)


def _least(overtakes: Callable[[int], bool]) -> int | None:
    """Returns the least batch from which a rival is no slower, by doubling and halving."""
    low, high = 0, 1
    while not overtakes(high):
        low, high = high, high * 2
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high


def tokens_per_dollar(speed: Speed, price: float, workload: Workload) -> float:
    """Returns the tokens of answers for one dollar, at a price in USD an hour.

    The device reads each prompt before it answers: prompts at the prefill of a full batch, where that is known.
    """
    prefill = speed.prompts_tokens_per_s if isinstance(speed, Prediction) else speed.prefill_tokens_per_s
    seconds = workload.prompt / prefill + workload.answer / speed.decode_tokens_per_s
    return workload.answer / seconds * 3600 / price

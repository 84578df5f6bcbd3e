"""How fast an engine serves a model on a device, what that costs, and when 4-bit weights no longer pay.

A step makes one token for each of b sequences. It reads every weight it needs once, whatever b is, and computes two
operations for each weight and token; so few sequences wait for memory and many for arithmetic:

    step(b)   = step + sequence b + layer L                          launches, scheduling, sampling
              + sum of max(weights in bytes / B, 2 b weights / R)    dense layers, experts, head
              + b max(cache in bytes / B, attention / A)             what each sequence has said before
              + b width passes / B                                   numbers between the matrices
              + unpack packed weights / S                            4-bit codes into 16-bit numbers
              + exchange                                             all-reduce, where devices share each layer
    prompt(n) = |step + launch L, the same sums for n tokens|        a norm: the host launches ahead of the device

B is the device's bandwidth, R its rate for the type that is multiplied, S that of plain 32-bit arithmetic, each times
the share that an engine reaches of it; A is such a share of the 16-bit rate. L counts layers. A weight-only scheme
multiplies in 16 bit: at many sequences it computes as much as bf16 does and unpacks besides, which is why it stops
paying, while 8-bit inputs run at twice the rate. Of a mixture E (1 - (1 - k/E)^b) of E experts are read. Layers left on
the host run at the host's speed one after the other (llama.cpp), or their weights cross the bus in every step. Kernels
that work in tiles of tokens cost some tokens more as soon as there are two (`pad`, on processors).

The shares and times are in engines/NAME.toml, by family of devices. benchmarks/fit_speed.py fits them to what was
measured (benchmarks/measurements.toml). Where nothing was, a row names the one it is like and says how far off it may
be: `Prediction.spread` is that share, and `measured` tells the two apart. A step has the mean context of an answer.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from quantry.devices import Device, Hardware
from quantry.engines.contract.catalogue import engine as engine_facts
from quantry.engines.contract.catalogue import ranked
from quantry.errors import QuantryError
from quantry.planning.memory.terms import CacheType, cache_type, terms
from quantry.planning.speed.work import Kind, Part, Work, work_of
from quantry.quantizing.recipe import Recipe, build
from quantry.types import Checkpoint, Speed, Workload

HALF = 2  # bytes of a 16-bit number
SIXTEEN = {"bf16": ("bf16", "fp16", "fp32"), "f16": ("fp16", "bf16", "fp32")}
BUS = 64e9  # bytes a second from the host to a device whose own link is to its peers (PCIe 5)
MICRO_BATCH = 512  # tokens for which llama.cpp brings weights of the host to the device at once
UNKNOWN_RATE = {"gpu": 75, "unified": 30, "cpu": 10}  # operations a byte of bandwidth, about the catalogue's least
MOST = 4096  # sequences up to which a break-even is looked for
RIVALS = {"gguf": ("gguf-f16", "gguf-q8_0"), "": ("bf16", "fp8-dynamic", "w8a8")}


@dataclass(frozen=True, slots=True)
class Factors:
    """A row of an engine's table `speed`: shares of a device's rates, and seconds; tables go by kind of work."""

    name: str
    engine: str
    families: tuple[str, ...]  # families of devices, or "gpu", "unified", "cpu"
    measured: bool
    spread: float
    bandwidth: float
    attention: float
    compute: Mapping[str, float]
    source: str
    date: str
    attention_step: float | None = None  # of attention to what was said before; None: as in prompts
    base: str | None = None  # the dtype whose rate `compute` is a share of; None: that of the numbers multiplied
    step: float = 0.0
    sequence: float = 0.0
    layer: Mapping[str, float] = field(default_factory=dict)
    launch: Mapping[str, float] = field(default_factory=dict)
    uncompiled: float = 1.0  # launches without torch.compile, times those with it
    graphs: bool = True  # whether a step of decoding is launched as one
    overlap: float = 1.0  # exponent of the norm: 1 adds launches and work up, more overlaps them
    passes: float = 0.0
    unpack: float = 0.0  # 32-bit operations a weight
    pad: float = 0.0  # tokens by which a product of several tokens costs more than they do, for want of full tiles
    split: Literal["tensors", "layers"] = "tensors"  # how several devices share a model
    host: Literal["compute", "stream"] = "stream"  # what becomes of layers left on the host


@dataclass(frozen=True, slots=True)
class Place:
    """Where a model runs: a device, how many of them share each layer, and how the engine does there."""

    device: Device
    factors: Factors
    devices: int = 1
    compiled: bool = True

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.factors.bandwidth

    def shared(self) -> int:
        """Devices that work on a layer at once: one, where layers are handed on or nothing links the devices."""
        linked = self.factors.split == "tensors" and self.device.link.bandwidth > 0
        return self.devices if linked else 1


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time of a step by what takes it."""

    overhead: float = 0.0
    compute: float = 0.0
    bandwidth: float = 0.0
    exchange: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    @property
    def total(self) -> float:
        return self.overhead + self.compute + self.bandwidth + self.exchange

    @property
    def bound(self) -> Literal["bandwidth", "compute", "overhead"]:
        if max(self.compute, self.bandwidth) < self.overhead + self.exchange:
            return "overhead"
        return "compute" if self.compute > self.bandwidth else "bandwidth"


@dataclass(frozen=True, slots=True)
class Prediction(Speed):
    """A speed with what it is made of; the truth is expected within `spread` of it, as a share."""

    batch: int
    step_s: float
    prompts_tokens_per_s: float  # prefill of as many prompts as there are sequences
    parts: Seconds  # of a step
    spread: float
    measured: bool  # whether its factors were fitted to measurements of this engine and family
    source: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Whether a weight-only scheme pays: its step against others, and the sequences from which each is as fast."""

    preset: str
    batch: int
    gain: Mapping[str, float]  # preset -> how many times as fast the asked scheme decodes, at `batch`
    overtaken: Mapping[str, int | None]  # preset -> sequences from which it is no slower; None: not up to 4096
    measured: bool

    @property
    def pays(self) -> bool:
        """Whether it decodes faster than all others at the asked batch."""
        return all(gain > 1 for gain in self.gain.values())

    @property
    def advice(self) -> str:
        better = {name: at for name, at in self.overtaken.items() if at is not None and at <= self.batch}
        if not better:
            ahead = [f"{name} from {at}" for name, at in self.overtaken.items() if at is not None]
            return f"{self.preset} pays at {self.batch} at once" + (
                f"; overtaken by {', '.join(ahead)}" if ahead else ""
            )
        named = ", ".join(f"{name} (from {at} at once)" for name, at in better.items())
        return f"{self.preset} saves memory but no time at {self.batch} at once: no slower is {named}"


def speed(
    checkpoint: Checkpoint,
    recipe: Recipe | None,
    engine: str,
    hardware: Hardware,
    workload: Workload,
    batch: int,
    tensor_parallel: int = 1,
    offload: float = 1.0,
    *,
    kv: str = "auto",
    compiled: bool = True,
) -> Prediction:
    """The speed of a model at `batch` sequences; `offload` is the share of its layers on the device.

    `recipe` None serves it as stored, `kv` is the cache's type, `compiled` whether vLLM may use torch.compile.
    """
    _check(hardware, batch, tensor_parallel, offload)
    work, device = work_of(checkpoint, recipe), hardware.device
    place = Place(device, factors_for(engine, device), tensor_parallel, compiled)
    found = terms(engine, None, device)
    cached = cache_type(kv, found, "f16" if work.detail == "f16" else "bf16")
    context = min(workload.prompt + workload.answer / 2, workload.context)
    prompt = min(workload.prompt, workload.context)
    step = whole_step(work, place, hardware.cpu, offload, batch, context, cached)
    one, many = (whole_prompt(work, place, hardware.cpu, offload, times, prompt) for times in (1, batch))
    extra = _additions(work, tensor_parallel, offload)
    return Prediction(
        decode_tokens_per_s=batch / step.total,
        prefill_tokens_per_s=prompt / one,
        first_token_s=one,
        bound=step.bound,
        batch=batch,
        step_s=step.total,
        prompts_tokens_per_s=batch * prompt / many,
        parts=step,
        spread=round(place.factors.spread + extra, 2),
        measured=place.factors.measured and not extra,
        source=place.factors.source,
    )


def break_even(
    checkpoint: Checkpoint,
    recipe: Recipe,
    engine: str,
    hardware: Hardware,
    workload: Workload,
    batch: int,
    tensor_parallel: int = 1,
    *,
    rivals: Sequence[str] | None = None,
) -> BreakEven:
    """How a scheme decodes against 16 bit and 8 bit at `batch`, and from which batch on each of them is no slower.

    Rivals that the device has no arithmetic for are left out, and so are those that the model cannot be stored in.
    """
    names = RIVALS["gguf" if recipe.format == "gguf" else ""] if rivals is None else rivals
    others = {name: build({"preset": name}) for name in names if name != recipe.preset.name}

    def step(chosen: Recipe, sequences: int) -> float:
        return speed(checkpoint, chosen, engine, hardware, workload, sequences, tensor_parallel).step_s

    others = {name: one for name, one in others.items() if _runs(work_of(checkpoint, one), hardware.device)}
    return BreakEven(
        preset=recipe.preset.name,
        batch=batch,
        gain={name: step(one, batch) / step(recipe, batch) for name, one in others.items()},
        overtaken={
            name: _first_batch(lambda many, one=one: step(one, many) <= step(recipe, many))
            for name, one in others.items()
        },
        measured=factors_for(engine, hardware.device).measured,
    )


def tokens_per_dollar(speed: Speed, hardware: Hardware, workload: Workload, price: float | None = None) -> float | None:
    """Tokens of answers for one unit of the price, which is for an hour of all devices; None where none is known.

    The device reads each prompt before it answers: prompts at the prefill of a full batch, where that is known.
    """
    price = hardware.price if price is None else price
    if price is None:
        return None
    if not price > 0:
        raise QuantryError(f"a price of {price} an hour is not above 0", fix="leave the price out, or give another")
    prefill = speed.prompts_tokens_per_s if isinstance(speed, Prediction) else speed.prefill_tokens_per_s
    seconds = workload.prompt / prefill + workload.answer / speed.decode_tokens_per_s
    return workload.answer / seconds * 3600 / price


# ---- the formulas ----


def whole_step(
    work: Work, place: Place, cpu: Device, offload: float, batch: float, context: float, cached: CacheType
) -> Seconds:
    """A step with the layers that are left on the host."""
    here = step_seconds(work.share(offload, head=True), place, batch, context, cached)
    if offload >= 1:
        return here
    there = work.share(1 - offload, head=False)
    if place.factors.host == "stream":
        brought = there.dense.bytes + there.experts.bytes * there.touched(batch)
        return here + Seconds(bandwidth=brought / _bus(place.device))
    host = Place(cpu, replace(factors_for(place.factors.engine, cpu), step=0.0, sequence=0.0))
    return here + step_seconds(there, host, batch, context, cached)


def step_seconds(work: Work, place: Place, batch: float, context: float, cached: CacheType) -> Seconds:
    """The time of a step in which each of `batch` sequences gets a token."""
    found, shared = place.factors, place.shared()
    kind = effective_kind(work, place.device)
    layer = _of(found.layer, kind, work.detail)
    if not found.graphs:
        layer += _of(found.launch, kind, work.detail)
    seen = max(
        work.cache_bytes(context, cached, shared) / place.bandwidth,
        work.pairs / shared * work.looked_at(context) / _attention_rate(place, found.attention_step),
    )
    own = Seconds(
        overhead=found.step + found.sequence * batch + layer * work.layers,
        compute=_unpack_seconds(work, place, kind, batch),
        bandwidth=batch * (seen + work.width * HALF * found.passes / shared / place.bandwidth),
        exchange=_exchange_seconds(work, place, batch),
    )
    return own + _matrix_seconds(work, place, kind, batch, batch)


def whole_prompt(work: Work, place: Place, cpu: Device, offload: float, batch: float, prompt: float) -> float:
    """Reading prompts with layers left on the host: computed there, or brought over piece by piece, as is faster."""
    here = prompt_seconds(work.share(offload, head=True), place, batch, prompt)
    if offload >= 1:
        return here
    there = work.share(1 - offload, head=False)
    pieces = max(1.0, batch * prompt / MICRO_BATCH)
    bytes_ = (there.dense.bytes + there.experts.bytes) * (pieces if place.factors.host == "compute" else 1)
    brought = bytes_ / _bus(place.device) + prompt_seconds(there, place, batch, prompt)
    if place.factors.host == "stream":
        return here + brought
    host = Place(cpu, factors_for(place.factors.engine, cpu))
    return here + min(brought, prompt_seconds(there, host, batch, prompt))


def prompt_seconds(work: Work, place: Place, batch: float, prompt: float) -> float:
    """The time to read `batch` prompts and give each its first token."""
    found, shared = place.factors, place.shared()
    kind, tokens = effective_kind(work, place.device), batch * prompt
    launch = _of(found.launch, kind, work.detail) * (1.0 if place.compiled else found.uncompiled)
    pairs = work.pairs / shared * tokens * work.looked_at(prompt / 2)
    device = (
        _matrix_seconds(work, place, kind, tokens, batch).total
        + pairs / _attention_rate(place)
        + tokens * work.width * HALF * found.passes / shared / place.bandwidth
        + _unpack_seconds(work, place, kind, tokens)
        + _exchange_seconds(work, place, tokens)
    )
    host = found.step + launch * work.layers
    return float((host**found.overlap + device**found.overlap) ** (1 / found.overlap))


def effective_kind(work: Work, device: Device) -> Kind:
    """How a scheme is computed on a device: without arithmetic for 8-bit inputs, its weights alone are 8 bit."""
    return work.kind if _runs(work, device) else "weight-only"


def _runs(work: Work, device: Device) -> bool:
    return work.kind != "8-bit" or work.detail in device.tflops or device.kind == "cpu"


def _matrix_seconds(work: Work, place: Place, kind: Kind, tokens: float, outputs: float) -> Seconds:
    """Products with all weights: of the layers for `tokens`, of the head for `outputs`."""
    rate = _rate(place, kind, work.detail)
    head = rate if kind == "blocks" else _rate(place, "16-bit", "bf16")
    touched = work.touched(tokens)
    return (
        _larger(work.dense, tokens, rate, place)
        + _larger(work.experts * touched, tokens * work.used / (work.count * touched) if touched else 0, rate, place)
        + _larger(work.head, outputs, head, place)
    )


def _larger(part: Part, tokens: float, rate: float, place: Place) -> Seconds:
    """The larger of reading weights and of computing with them."""
    tokens += place.factors.pad if tokens > 1 else 0
    read = part.bytes / place.shared() / place.bandwidth
    computed = 2 * part.weights * tokens / place.shared() / rate
    return Seconds(compute=computed) if computed > read else Seconds(bandwidth=read)


def _unpack_seconds(work: Work, place: Place, kind: Kind, tokens: float) -> float:
    if kind not in ("weight-only", "blocks"):
        return 0.0
    packed = work.dense.packed + work.experts.packed * work.touched(tokens)
    return place.factors.unpack * packed / place.shared() / _tflops(place.device, ("fp32",))


def _exchange_seconds(work: Work, place: Place, tokens: float) -> float:
    """Two all-reduces a layer over a ring, or a hand-over from device to device."""
    link, number = place.device.link, place.devices
    if number == 1 or not link.bandwidth:
        return 0.0
    wait = float(_data()["links"][link.kind]["latency_us"]) * 1e-6
    message = tokens * work.hidden * HALF / link.bandwidth
    if place.shared() == 1:
        return (number - 1) * (wait + message)
    return 2 * work.layers * (wait + 2 * (number - 1) / number * message)


def _rate(place: Place, kind: Kind, detail: str) -> float:
    """Operations a second that an engine reaches, for a kind of work."""
    base = place.factors.base
    wanted = (base,) if base else (detail,) if kind == "8-bit" else SIXTEEN.get(detail, SIXTEEN["f16"])
    return _of(place.factors.compute, kind, detail) * _tflops(place.device, wanted)


def _attention_rate(place: Place, share: float | None = None) -> float:
    wanted = (place.factors.base,) if place.factors.base else SIXTEEN["bf16"]
    return (place.factors.attention if share is None else share) * _tflops(place.device, wanted)


def _tflops(device: Device, wanted: Sequence[str]) -> float:
    """The first rate that a device has; where it tells none, what devices of its kind have at least."""
    rates = {"int8": 2 * device.tflops.get("fp16", 0.0), **device.tflops}  # so it is where there is int8 at all
    found = next((rates[name] for name in (*wanted, "fp32") if rates.get(name)), 0.0)
    return found * 1e12 or UNKNOWN_RATE[device.kind] * device.bandwidth


def _of(table: Mapping[str, float], kind: Kind, detail: str) -> float:
    """The entry for a kind of work: of its detail, of the kind, of 16 bit, or none."""
    names = (f"{kind} {detail}", kind, "16-bit")
    return next((table[name] for name in names if name in table), 0.0)


def _bus(device: Device) -> float:
    return device.link.bandwidth if device.link.kind.startswith("pcie") else BUS


def _first_batch(overtakes: Any) -> int | None:
    """The least batch from which a rival is no slower, by doubling and halving."""
    low, high = 0, 1
    while not overtakes(high):
        low, high = high, high * 2
        if high > MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if overtakes(middle) else (middle, high)
    return high


def _additions(work: Work, tensor_parallel: int, offload: float) -> float:
    """What the spread grows by for what no measurement covers."""
    rows = _data()["unmeasured"]
    cases = {"experts": work.count > 0, "tensor_parallel": tensor_parallel > 1, "offload": offload < 1}
    return float(sum(rows[name]["spread"] for name, holds in cases.items() if holds))


def _check(hardware: Hardware, batch: int, tensor_parallel: int, offload: float) -> None:
    if type(batch) is not int or not 1 <= batch <= 1 << 20:
        raise QuantryError(f"a batch of {batch} is not 1 to {1 << 20}", fix="give --concurrency a positive number")
    if type(tensor_parallel) is not int or not 1 <= tensor_parallel <= hardware.count:
        raise QuantryError(
            f"a tensor parallel size of {tensor_parallel} does not suit {hardware.count} x {hardware.device.name}",
            fix=f"use 1 to {hardware.count}",
        )
    if not 0 <= offload <= 1:
        raise QuantryError(f"{offload} of the layers on the device is not a share", fix="give 0 to 1")
    if offload < 1 and hardware.device.kind != "gpu":
        raise QuantryError(
            f"{hardware.device.name} shares the host's memory and has nothing to leave there", fix="leave offload at 1"
        )


# ---- the data ----


def factors_for(engine: str, device: Device) -> Factors:
    """The factors of an engine on a device: of its family, else of its kind."""
    known = factors()
    rows = [row for row in known if row.engine == engine] or [
        row for row in known if row.engine == engine_facts(engine).like
    ]
    for wanted in (device.family, device.kind):
        for row in rows:
            if wanted in row.families:
                return row
    raise QuantryError(
        f"nothing is known of the speed of {engine} on {device.name}", fix="choose another engine or device"
    )


@cache
def factors() -> tuple[Factors, ...]:
    """The factors of all engines."""
    return tuple(read_factors(row) for row in factor_rows().values())


def factor_rows() -> dict[str, dict[str, Any]]:
    """The rows of all engines' tables `speed` by name, each with the numbers that it takes from others."""
    stated = {row["name"]: {**row, "engine": one.name} for one in ranked() for row in one.speed}

    def whole(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**whole(stated[row["like"]]), **row} if "like" in row else dict(row)

    return {name: whole(row) for name, row in stated.items()}


def read_factors(row: Mapping[str, Any]) -> Factors:
    """A row as it is written: times in microseconds."""
    given = {name.removesuffix("_us"): _seconds(name, value) for name, value in row.items() if name != "like"}
    return Factors(**{**given, "families": tuple(row["families"]), "date": str(row["date"])})


def _seconds(name: str, value: Any) -> Any:
    if not name.endswith("_us"):
        return value
    return {key: one * 1e-6 for key, one in value.items()} if isinstance(value, Mapping) else value * 1e-6


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(files("quantry.planning.speed").joinpath("factors.toml").read_text(encoding="utf-8"))

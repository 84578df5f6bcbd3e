"""The time of a step and of a prompt, as sums of launches, memory traffic, arithmetic and messages between devices.

A step makes one token for each of b sequences. It reads every weight it needs once, whatever b is, and computes two
operations for each weight and token; so few sequences wait for memory and many for arithmetic:

    step(b)   = step + sequence b + layer L                          launches, scheduling, sampling
              + sum of max(weights in bytes / B, 2 b weights / R)    dense layers, experts, head
              + b max(cache in bytes / B, attention / A)             the earlier tokens of each sequence
              + b width passes / B                                   numbers between the matrices
              + unpack packed weights / S                            4-bit codes into 16-bit numbers
              + exchange                                             all-reduce, where devices share each layer
    prompt(n) = |step + launch L, the same sums for n tokens|        a norm: the host launches ahead of the device

B is the device's bandwidth, R its rate for the type that is multiplied, S that of plain 32-bit arithmetic, each times
the share that an engine reaches of it; A is such a share of the 16-bit rate. L counts layers. A weight-only scheme
multiplies in 16 bit: at many sequences it computes as much as bf16 does and also unpacks, which is why it stops paying,
while 8-bit inputs run at twice the rate. Of a mixture with E experts, E (1 - (1 - k/E)^b) are read. Layers left on the
host run at the host's speed one after the other (llama.cpp), or their weights cross the bus in every step. Kernels that
work in tiles of tokens cost some tokens more as soon as there are two (`pad`, on processors).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from quantry.devices import Device
from quantry.planning.memory.terms import CacheType
from quantry.planning.speed.factors import Factors, factors_for, link_latency
from quantry.planning.speed.work import Kind, StepWork, WeightGroup

HALF = 2  # bytes of a 16-bit number
SIXTEEN = {"bf16": ("bf16", "fp16", "fp32"), "f16": ("fp16", "bf16", "fp32")}
BUS = 64e9  # bytes a second from the host to a device whose own link is to its peers (PCIe 5)
MICRO_BATCH = 512  # tokens for which llama.cpp brings weights of the host to the device at once
UNKNOWN_RATE = {"gpu": 75, "unified": 30, "cpu": 10}  # operations per byte of bandwidth, about the catalogue's least


@dataclass(frozen=True, slots=True)
class Runtime:
    """An engine on a device: its factors there, and how many devices share the model."""

    device: Device
    factors: Factors
    devices: int = 1
    compiled: bool = True  # by torch.compile

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.factors.bandwidth

    @property
    def shared(self) -> int:
        """Devices that work on a layer at once: one, where layers are split by device or no link joins the devices."""
        linked = self.factors.split == "tensors" and self.device.link.bandwidth > 0
        return self.devices if linked else 1


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One step of decoding: a token for each of `batch` sequences, each with `context` earlier tokens in the cache."""

    batch: float
    context: float
    cache: CacheType


@dataclass(frozen=True, slots=True)
class Seconds:
    """The time of a step by its cause."""

    overhead: float = 0.0
    compute: float = 0.0
    bandwidth: float = 0.0
    exchange: float = 0.0

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def total(self) -> float:
        return self.overhead + self.compute + self.bandwidth + self.exchange

    @property
    def bound(self) -> Literal["bandwidth", "compute", "overhead"]:
        if max(self.compute, self.bandwidth) < self.overhead + self.exchange:
            return "overhead"
        return "compute" if self.compute > self.bandwidth else "bandwidth"


def offloaded_step(work: StepWork, runtime: Runtime, host: Device, share: float, step: DecodeStep) -> Seconds:
    """Returns the time of a step with `share` of the layers on the device and the rest on the host."""
    here = step_seconds(work.share(share, head=True), runtime, step)
    if share >= 1:
        return here
    there = work.share(1 - share, head=False)
    if runtime.factors.host == "stream":
        streamed = there.dense.bytes + there.experts.bytes * there.touched(step.batch)
        return here + Seconds(bandwidth=streamed / _bus(runtime.device))
    factors = replace(factors_for(runtime.factors.engine, host), step=0.0, sequence=0.0)
    return here + step_seconds(there, Runtime(host, factors), step)


def step_seconds(work: StepWork, runtime: Runtime, step: DecodeStep) -> Seconds:
    """Returns the time of a step."""
    factors, shared, batch = runtime.factors, runtime.shared, step.batch
    kind = effective_kind(work, runtime.device)
    layer = _entry(factors.layer, kind, work.detail)
    if not factors.graphs:
        layer += _entry(factors.launch, kind, work.detail)
    past = max(
        work.cache_bytes(step.context, step.cache, shared) / runtime.bandwidth,
        work.pairs / shared * work.looked_at(step.context) / _attention_rate(runtime, factors.attention_step),
    )
    own = Seconds(
        overhead=factors.step + factors.sequence * batch + layer * work.layers,
        compute=_unpack_seconds(work, runtime, kind, batch),
        bandwidth=batch * (past + work.width * HALF * factors.passes / shared / runtime.bandwidth),
        exchange=_exchange_seconds(work, runtime, batch),
    )
    return own + matrix_seconds(work, runtime, kind, batch, batch)


def offloaded_prompt(
    work: StepWork, runtime: Runtime, host: Device, share: float, batch: float, prompt: float
) -> float:
    """Returns the time of prompts with layers on the host: computed there or streamed, whichever is faster."""
    here = prompt_seconds(work.share(share, head=True), runtime, batch, prompt)
    if share >= 1:
        return here
    there = work.share(1 - share, head=False)
    pieces = max(1.0, batch * prompt / MICRO_BATCH)
    traffic = (there.dense.bytes + there.experts.bytes) * (pieces if runtime.factors.host == "compute" else 1)
    streamed = traffic / _bus(runtime.device) + prompt_seconds(there, runtime, batch, prompt)
    if runtime.factors.host == "stream":
        return here + streamed
    on_host = Runtime(host, factors_for(runtime.factors.engine, host))
    return here + min(streamed, prompt_seconds(there, on_host, batch, prompt))


def prompt_seconds(work: StepWork, runtime: Runtime, batch: float, prompt: float) -> float:
    """Returns the time to read `batch` prompts and give each its first token."""
    factors, shared = runtime.factors, runtime.shared
    kind, tokens = effective_kind(work, runtime.device), batch * prompt
    launch = _entry(factors.launch, kind, work.detail) * (1.0 if runtime.compiled else factors.uncompiled)
    pairs = work.pairs / shared * tokens * work.looked_at(prompt / 2)
    device = (
        matrix_seconds(work, runtime, kind, tokens, batch).total
        + pairs / _attention_rate(runtime)
        + tokens * work.width * HALF * factors.passes / shared / runtime.bandwidth
        + _unpack_seconds(work, runtime, kind, tokens)
        + _exchange_seconds(work, runtime, tokens)
    )
    host = factors.step + launch * work.layers
    return float((host**factors.overlap + device**factors.overlap) ** (1 / factors.overlap))


def effective_kind(work: StepWork, device: Device) -> Kind:
    """Returns how a device computes a scheme: without arithmetic for 8-bit inputs, only its weights are 8 bit."""
    return work.kind if runs(work, device) else "weight-only"


def runs(work: StepWork, device: Device) -> bool:
    """Returns True if the device has arithmetic for the quantized inputs of a scheme."""
    return work.kind != "8-bit" or work.detail in device.tflops or device.kind == "cpu"


def matrix_seconds(work: StepWork, runtime: Runtime, kind: Kind, tokens: float, outputs: float) -> Seconds:
    """Returns the time of products with all weights: of the layers for `tokens`, of the head for `outputs`."""
    rate = _rate(runtime, kind, work.detail)
    head = rate if kind == "blocks" else _rate(runtime, "16-bit", "bf16")
    touched = work.touched(tokens)
    per_expert = tokens * work.used / (work.count * touched) if touched else 0
    return (
        _larger(work.dense, tokens, rate, runtime)
        + _larger(work.experts * touched, per_expert, rate, runtime)
        + _larger(work.head, outputs, head, runtime)
    )


def _larger(weights: WeightGroup, tokens: float, rate: float, runtime: Runtime) -> Seconds:
    padded = tokens + (runtime.factors.pad if tokens > 1 else 0)
    read = weights.bytes / runtime.shared / runtime.bandwidth
    computed = 2 * weights.weights * padded / runtime.shared / rate
    return Seconds(compute=computed) if computed > read else Seconds(bandwidth=read)


def _unpack_seconds(work: StepWork, runtime: Runtime, kind: Kind, tokens: float) -> float:
    if kind not in ("weight-only", "blocks"):
        return 0.0
    packed = work.dense.packed + work.experts.packed * work.touched(tokens)
    return runtime.factors.unpack * packed / runtime.shared / _operations(runtime.device, ("fp32",))


def _exchange_seconds(work: StepWork, runtime: Runtime, tokens: float) -> float:
    """Returns the time of two all-reduces per layer over a ring, or of handing over from device to device."""
    link, count = runtime.device.link, runtime.devices
    if count == 1 or not link.bandwidth:
        return 0.0
    wait, message = link_latency(link.kind), tokens * work.hidden * HALF / link.bandwidth
    if runtime.shared == 1:
        return (count - 1) * (wait + message)
    return 2 * work.layers * (wait + 2 * (count - 1) / count * message)


def _rate(runtime: Runtime, kind: Kind, detail: str) -> float:
    base = runtime.factors.base
    wanted = (base,) if base else (detail,) if kind == "8-bit" else SIXTEEN.get(detail, SIXTEEN["f16"])
    return _entry(runtime.factors.compute, kind, detail) * _operations(runtime.device, wanted)


def _attention_rate(runtime: Runtime, share: float | None = None) -> float:
    wanted = (runtime.factors.base,) if runtime.factors.base else SIXTEEN["bf16"]
    return (runtime.factors.attention if share is None else share) * _operations(runtime.device, wanted)


def _operations(device: Device, wanted: Sequence[str]) -> float:
    """Returns the first rate that a device lists, in operations per second; if it lists none, its type's least."""
    rates = {"int8": 2 * device.tflops.get("fp16", 0.0), **device.tflops}  # int8 is twice fp16 on such devices
    rate = next((rates[name] for name in (*wanted, "fp32") if rates.get(name)), 0.0)
    return rate * 1e12 or UNKNOWN_RATE[device.kind] * device.bandwidth


def _entry(table: Mapping[str, float], kind: Kind, detail: str) -> float:
    """Returns the entry for a kind of work: of its detail, of the kind, of 16 bit, or 0."""
    names = (f"{kind} {detail}", kind, "16-bit")
    return next((table[name] for name in names if name in table), 0.0)


def _bus(device: Device) -> float:
    return device.link.bandwidth if device.link.kind.startswith("pcie") else BUS

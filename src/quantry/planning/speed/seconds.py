"""The time of a step and of a prompt, as sums of launches, memory traffic, arithmetic and messages between devices.

A step makes one token for each of b sequences. It reads every weight it needs once, whatever b is, and computes two
operations for each weight and token; so few sequences wait for memory and many for arithmetic:

    step(b)   = |host, device|                                       a norm: the host works ahead of the device
      host    = step + sequence b                                    scheduling, sampling
      device  = layer L + routing M + latent K                       launches: all layers, those with experts, with MLA
              + sum of max(weights in bytes / B, 2 b weights / R)    dense layers, experts, head
              + b max(cache in bytes / B, attention / A)             the earlier tokens of each sequence
              + b width passes / B                                   numbers between the matrices
              + unpack packed weights / S                            4-bit codes into 16-bit numbers
              + exchange                                             all-reduce, where devices share each layer
    prompt(n) = |step + launch L + routing_launch M, the same sums for n tokens|

B is the device's bandwidth, R its rate for the type that is multiplied, S that of plain 32-bit arithmetic, each times
the share that an engine reaches of it; A is such a share of the 16-bit rate. L counts layers, M those with experts and
K those with latent attention. A weight-only scheme multiplies in 16 bit: at many sequences it computes as much as bf16
does and also unpacks, which is why it stops paying, while 8-bit inputs run at twice the rate. Of a mixture with E
experts, E (1 - (1 - k/E)^b) are read, and their products reach only a share of R (`grouped`). Of several prompts the
first is often read before the others have come, and the device waits for the host meanwhile (`arrival`).

Devices that share each layer (tensor parallel) each read and compute their share, and exchange after every half layer.
Devices that hold layers in turn (pipeline parallel, llama.cpp) pass each token on: one sequence is as fast as on one
device. vLLM keeps g such groups busy with b/g sequences each, so a step takes as long as one of b/g; and of a prompt in
p pieces, (p + g - 1) / (p g) of the time on one device.

Layers left on the host run at the host's speed one after the other (llama.cpp), or their weights cross the bus in every
step. Kernels that work in tiles of tokens cost some tokens more as soon as there are two (`pad`, on processors).
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
PIECE = 8192  # tokens of prompts that vLLM reads in a step (max_num_batched_tokens); groups of devices read several
MICRO_BATCH = 512  # tokens for which llama.cpp brings weights of the host to the device at once
UNKNOWN_RATE = {"gpu": 75, "unified": 30, "cpu": 10}  # operations per byte of bandwidth, about the catalogue's least


@dataclass(frozen=True, slots=True)
class Runtime:
    """An engine on a device: its factors there, and how many devices share the model."""

    device: Device
    factors: Factors
    tensor: int = 1  # devices that are to share each layer
    pipeline: int = 1  # groups of them that hold layers in turn
    compiled: bool = True  # by torch.compile

    @property
    def bandwidth(self) -> float:
        return self.device.bandwidth * self.factors.bandwidth

    @property
    def shared(self) -> int:
        """Devices that work on a layer at once: one, where layers are split by device or no link joins the devices."""
        linked = self.factors.split == "tensors" and self.device.link.bandwidth > 0
        return self.tensor if linked else 1

    @property
    def turns(self) -> int:
        """Devices, or groups of them, that a token passes in turn."""
        return self.pipeline * (self.tensor if self.factors.split == "layers" else 1)

    @property
    def in_flight(self) -> int:
        """Steps that run at once: engines that split tensors keep every group busy with a part of the sequences."""
        return self.pipeline if self.factors.split == "tensors" else 1


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


def offloaded_step(mine: StepWork, there: StepWork | None, runtime: Runtime, host: Device, step: DecodeStep) -> Seconds:
    """Returns the time of a step with the work `mine` on the device and `there` on the host."""
    here = step_seconds(mine, runtime, step)
    if there is None:
        return here
    if runtime.factors.host == "stream":
        streamed = there.dense.bytes + there.experts.bytes * there.touched(step.batch)
        return here + Seconds(bandwidth=streamed / _bus(runtime.device))
    factors = replace(factors_for(runtime.factors.engine, host), step=0.0, sequence=0.0)
    return here + step_seconds(there, Runtime(host, factors), step)


def step_seconds(work: StepWork, runtime: Runtime, step: DecodeStep) -> Seconds:
    """Returns the time of a step; with several in flight, each has its part of the sequences and passes all groups."""
    factors, shared, batch = runtime.factors, runtime.shared, max(1.0, step.batch / runtime.in_flight)
    kind = effective_kind(work, runtime.device)
    layers = _layer_seconds(factors.layer, factors.routing, work, runtime) + factors.latent * work.latent
    past = max(
        work.cache_bytes(step.context, step.cache, shared) / runtime.bandwidth,
        work.pairs / shared * work.looked_at(step.context) / _attention_rate(runtime, factors.attention_step),
    )
    device = matrix_seconds(work, runtime, kind, batch, batch) + Seconds(
        overhead=layers,
        compute=_unpack_seconds(work, runtime, kind, batch),
        bandwidth=batch * (past + work.width * HALF * factors.passes / shared / runtime.bandwidth),
        exchange=_exchange_seconds(work, runtime, batch),
    )
    host = factors.step + factors.sequence * batch
    if not factors.graphs:
        host += _layer_seconds(factors.launch, factors.routing_launch, work, runtime)
    return device + Seconds(overhead=_overlapped(host, device.total, factors.overlap) - device.total)


def offloaded_prompt(
    mine: StepWork, there: StepWork | None, runtime: Runtime, host: Device, batch: float, prompt: float
) -> float:
    """Returns the time of prompts with work on the host: computed there or streamed, whichever is faster."""
    here = prompt_seconds(mine, runtime, batch, prompt)
    if there is None:
        return here
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
    launch = _layer_seconds(factors.launch, factors.routing_launch, work, runtime)
    launch *= 1.0 if runtime.compiled else factors.uncompiled
    pairs = work.pairs / shared * tokens * work.looked_at(prompt / 2)
    device = (
        matrix_seconds(work, runtime, kind, tokens, batch).total
        + pairs / _attention_rate(runtime)
        + tokens * work.width * HALF * factors.passes / shared / runtime.bandwidth
        + _unpack_seconds(work, runtime, kind, tokens)
        + _exchange_seconds(work, runtime, tokens)
    )
    host = factors.step + launch
    whole = _overlapped(host, device, factors.overlap)
    if batch > 1:
        whole += factors.arrival * max(0.0, host - device / batch)
    pieces = max(1.0, tokens / PIECE)
    return whole * (pieces + runtime.in_flight - 1) / (pieces * runtime.in_flight)


def effective_kind(work: StepWork, device: Device) -> Kind:
    """Returns how a device computes a scheme: without arithmetic for 8-bit inputs, only its weights are 8 bit."""
    return work.kind if runs(work, device) else "weight-only"


def runs(work: StepWork, device: Device) -> bool:
    """Returns True if the device has arithmetic for the quantized inputs of a scheme."""
    return work.kind != "8-bit" or work.detail in device.tflops or device.kind == "cpu"


def matrix_seconds(work: StepWork, runtime: Runtime, kind: Kind, tokens: float, outputs: float) -> Seconds:
    """Returns the time of products with all weights: of the layers for `tokens`, of the head for `outputs`."""
    rate, plain = _rate(runtime, kind, work.detail), _rate(runtime, "16-bit", "bf16")
    head = rate if kind == "blocks" else plain
    dense = rate if work.dense.packed or kind == "16-bit" else plain
    touched = work.touched(tokens)
    per_expert = tokens * work.used / (work.count * touched) if touched else 0
    grouped = _entry(runtime.factors.grouped, kind, work.detail) or 1.0
    return (
        _larger(work.dense, tokens, dense, runtime)
        + _larger(work.experts * touched, per_expert, rate * grouped, runtime)
        + _larger(work.head, outputs, head, runtime)
    )


def _larger(weights: WeightGroup, tokens: float, rate: float, runtime: Runtime) -> Seconds:
    padded = tokens + (runtime.factors.pad if tokens > 1 else 0)
    read = weights.bytes / runtime.shared / runtime.bandwidth
    computed = 2 * weights.weights * padded / runtime.shared / rate
    return Seconds(compute=computed) if computed > read else Seconds(bandwidth=read)


def _overlapped(host: float, device: float, exponent: float) -> float:
    """Returns the time of both together: between their larger and their sum."""
    return float((host**exponent + device**exponent) ** (1 / exponent))


def _layer_seconds(plain: Mapping[str, float], routing: Mapping[str, float], work: StepWork, runtime: Runtime) -> float:
    """Returns what all layers cost besides their work, and those with experts on top of it."""
    kind = effective_kind(work, runtime.device)
    dense = kind if work.dense.packed else "16-bit"
    return _entry(plain, dense, work.detail) * work.layers + _entry(routing, kind, work.detail) * work.routed


def _unpack_seconds(work: StepWork, runtime: Runtime, kind: Kind, tokens: float) -> float:
    if kind not in ("weight-only", "blocks"):
        return 0.0
    dense, experts = (_entry(runtime.factors.unpack, kind, detail) for detail in ("", work.detail))
    operations = dense * work.dense.packed + experts * work.experts.packed * work.touched(tokens)
    return operations / runtime.shared / _operations(runtime.device, ("fp32",))


def _exchange_seconds(work: StepWork, runtime: Runtime, tokens: float) -> float:
    """Returns the time of two all-reduces per layer over a ring, or of handing over from device to device."""
    link, count = runtime.device.link, runtime.shared
    if not link.bandwidth:
        return 0.0
    wait, message = link_latency(link.kind), tokens * work.hidden * HALF / link.bandwidth
    reduced = 2 * work.layers * (wait + 2 * (count - 1) / count * message) if count > 1 else 0.0
    return reduced + (runtime.turns - 1) * (wait + message)


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

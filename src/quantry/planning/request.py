"""What `quantry plan` is asked: options as the user gives them, and the checked request that they become."""

from dataclasses import dataclass
from functools import cached_property

from quantry.devices import Device, Hardware
from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.models.attention import context_length, text_config
from quantry.models.experts import expert_count
from quantry.planning.budget import memory_bytes
from quantry.planning.facts import Facts, capability
from quantry.planning.rules import Use, find_use, tier
from quantry.report.sizes import human
from quantry.types import Checkpoint, Workload


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `quantry plan`; None leaves a choice to the plan."""

    gpu: str | None = None
    use: str | None = None
    context: int | None = None
    concurrency: int | None = None
    engine: str | None = None
    budget: str | int | None = None


@dataclass(frozen=True)
class Request:
    """A model, the devices and the load it is planned for, and the limits on engine and memory."""

    model: str  # as `quantry quantize` opens it
    checkpoint: Checkpoint
    hardware: Hardware
    use: Use
    workload: Workload
    engine: str | None = None
    budget: int | None = None
    exact: bool = False  # the user gave the concurrency; otherwise fewer sequences than the use's will do

    @property
    def device(self) -> Device:
        return self.hardware.device

    @property
    def machine(self) -> str:
        return machine_name(self.device, self.hardware.count)

    @cached_property
    def parameters(self) -> int:
        tied = bool(self.checkpoint.config.get("tie_word_embeddings"))
        heads = ("lm_head.weight",) if tied else ()
        return sum(tensor.numel for tensor in self.checkpoint.tensors if tensor.name not in heads)

    @cached_property
    def facts(self) -> Facts:
        """The facts of a request that rules may speak of."""
        return {
            "use": self.use.name,
            "platform": self.device.platform,
            "family": self.device.family,
            "capability": capability(self.device),
            "tier": tier(self.device),
            "kind": self.device.kind,
            "devices": self.hardware.count,
            "device_gib": self.device.memory / (1 << 30),
            "parameters": self.parameters / 1e9,
            "vision": "vision_config" in self.checkpoint.config,
            "experts": expert_count(text_config(self.checkpoint.config)),
            "context": self.workload.context,
            "concurrency": self.workload.concurrency,
        }


def read_request(model: str, checkpoint: Checkpoint, options: PlanOptions) -> Request:
    """Checks the options and fills in what they leave open.

    Raises QuantryError if a name is unknown, a number is out of range or an option contradicts the model.
    """
    use = find_use(options.use)
    if options.engine is not None:
        engine_facts(options.engine)  # raises for an unknown one
    hardware = parse(options.gpu) if options.gpu is not None else _this_machine()
    if use.name == "vlm" and "vision_config" not in checkpoint.config:
        raise QuantryError(f"--for {options.use} is asked, and {model} has no vision tower", fix="leave --for out")
    return Request(
        model=str(checkpoint.metadata.get("repo", model)),  # of a model known by its shape, the hub id of its weights
        checkpoint=checkpoint,
        hardware=hardware,
        use=use,
        workload=_workload(model, checkpoint, use, options),
        engine=options.engine,
        budget=None if options.budget is None else _budget(options.budget, hardware),
        exact=options.concurrency is not None,
    )


def _this_machine() -> Hardware:
    from quantry.devices.detect import detect  # of this machine only, so that other plans start faster

    return detect(0)


def _workload(model: str, checkpoint: Checkpoint, use: Use, options: PlanOptions) -> Workload:
    """Returns the load of the options or else of the use, within what the model was made for."""
    context, longest = options.context, context_length(checkpoint.config)
    for name, value, most in (("context", context, 1 << 30), ("concurrency", options.concurrency, 1 << 20)):
        if value is not None and not 1 <= value <= most:
            raise QuantryError(f"--{name} {value} is not 1 to {most}", fix=f"give --{name} a positive number")
    if context is not None and longest is not None and context > longest:
        raise QuantryError(
            f"--context {context} is more than the {longest} tokens that {model} was made for",
            fix=f"use --context {longest} or less",
        )
    tokens = context or min(use.context, longest or use.context)
    answer = max(1, min(256, tokens // 4))
    return Workload(tokens, options.concurrency or use.concurrency, max(1, min(use.prompt, tokens - answer)), answer)


def _budget(text: str | int, hardware: Hardware) -> int:
    size = memory_bytes(text)
    if size > hardware.usable:
        machine = machine_name(hardware.device, hardware.count)
        raise QuantryError(
            f"a budget of {human(size)} is more than the {human(hardware.usable)} of {machine}",
            fix="leave --budget out, or plan for a larger machine with --gpu",
        )
    return size


def machine_name(device: Device, count: int) -> str:
    """Names a machine: "2 x RTX 3090"."""
    return f"{count} x {device.name}" if count > 1 else device.name

"""What `quantry plan` is asked: options as the user gives them, and the checked request that they become."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from quantry.devices import Device, Hardware
from quantry.devices.catalogue import parse
from quantry.engines.contract.catalogue import engine_name
from quantry.errors import QuantryError
from quantry.formats.gguf import NAME as GGUF
from quantry.models.attention import text_config
from quantry.models.experts import expert_count
from quantry.planning.budget import memory_bytes
from quantry.planning.existing import existing
from quantry.planning.facts import Facts, capability
from quantry.planning.load import Goals, LoadOptions, read_load
from quantry.planning.ready import ReadyFiles, ready_files
from quantry.planning.rules import Use, find_use, needs_remote_code, tier
from quantry.quantizing.lacks import lacks
from quantry.quantizing.recipe import Recipe
from quantry.report.sizes import human
from quantry.types import Checkpoint, Workload


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of `quantry plan`; None leaves a choice to the plan."""

    gpu: str | None = None
    use: str | None = None
    engine: str | None = None
    budget: str | int | None = None
    load: LoadOptions = field(default_factory=LoadOptions)


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
    stored: Recipe | None = None  # of a checkpoint that is quantized already, and served as it is
    ready: ReadyFiles | None = None  # GGUF files of others, where Quantry writes none
    goals: Goals = field(default_factory=Goals)
    notes: tuple[str, ...] = ()  # what was assumed of the model and the load

    @property
    def device(self) -> Device:
        return self.hardware.device

    @property
    def machine(self) -> str:
        return " + ".join(machine_name(device, count) for device, count in self.hardware.groups())

    @property
    def unequal(self) -> bool:
        """True if the devices differ."""
        return len(self.hardware.groups()) > 1

    @property
    def price(self) -> float | None:
        """USD an hour for the machine, as the user or else the catalogue says."""
        return self.hardware.price if self.goals.price is None else self.goals.price

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
            "remote_code": needs_remote_code(self.checkpoint.config),
            "context": self.workload.context,
            "concurrency": self.workload.concurrency,
        }


def read_request(model: str, checkpoint: Checkpoint, options: PlanOptions) -> Request:
    """Checks the options and fills in what they leave open.

    Raises QuantryError if a name is unknown, a number is out of range or an option contradicts the model.
    """
    use = find_use(options.use)
    engine = None if options.engine is None else engine_name(options.engine)
    hardware = parse(options.gpu) if options.gpu is not None else _this_machine()
    if use.name == "vlm" and "vision_config" not in checkpoint.config:
        raise QuantryError(f"--for {options.use} is asked, and {model} has no vision tower", fix="leave --for out")
    shape, stored = existing(checkpoint) or (checkpoint, None)
    load = read_load(model, shape.config, use, options.load)
    name = str(checkpoint.metadata.get("repo", model))  # of a model known by its shape, the hub id of its weights
    return Request(
        model=name,
        checkpoint=shape,
        hardware=hardware,
        use=use,
        workload=load.workload,
        engine=engine,
        budget=None if options.budget is None else _budget(options.budget, hardware),
        exact=options.load.concurrency is not None,
        stored=stored,
        ready=None if stored and stored.format == GGUF else ready_files(name, shape),
        goals=load.goals,
        notes=(*_borrowed(checkpoint), *_lacks(checkpoint), *load.notes),
    )


def _borrowed(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Says what of the model is taken from the catalogue."""
    sentence = checkpoint.metadata.get("borrowed")
    return (str(sentence),) if sentence else ()


def _lacks(checkpoint: Checkpoint) -> Iterator[str]:
    """Says what a checkpoint lacks to be served; models of the catalogue and GGUF files are known to be."""
    if checkpoint.format != GGUF and checkpoint.metadata.get("shape", "config") == "config":
        yield from lacks(checkpoint)


def _this_machine() -> Hardware:
    from quantry.devices.detect import detect  # of this machine only, so that other plans start faster

    return detect(0)


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

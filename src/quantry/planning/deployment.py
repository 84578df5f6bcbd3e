"""The noun that feasibility, memory and speed are asked about: a model in an engine on devices."""

from dataclasses import dataclass, field

from quantry.devices import Device
from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.planning.memory.terms import EngineTerms, terms
from quantry.quantizing.recipe import Recipe
from quantry.types import Checkpoint


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine is started; None leaves a value to the engine's default for the device."""

    tokens: int | None = None  # of a step: --max-num-batched-tokens, --ubatch-size
    sequences: int | None = None  # at once: --max-num-seqs, --parallel
    utilization: float | None = None
    flash: bool = True  # flash attention in llama.cpp
    outputs: int | None = None  # logits of a step in llama.cpp: its server asks for one a sequence

    def __post_init__(self) -> None:
        for name in ("tokens", "sequences", "outputs"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= 1 << 24):
                raise QuantryError(f"{name} of {value} is not 1 to {1 << 24}", fix="leave it to the engine")
        if self.utilization is not None and not 0 < self.utilization <= 1:
            raise QuantryError(f"a memory utilization of {self.utilization} is not above 0, up to 1", fix="use 0.9")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A checkpoint, the recipe that is applied to it, and the engine and devices that serve it.

    Example: `Deployment(open_model("llama-3.1-8b"), recipe, "vllm", parse("2x H100").device, tensor_parallel=2)`.
    """

    checkpoint: Checkpoint
    recipe: Recipe | None  # None: the checkpoint as stored
    engine: str
    device: Device
    version: str | None = None  # None: the newest that is known
    kv: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    offload_layers: int | None = None  # llama.cpp: layers that a GPU holds, counting the head as one
    settings: Settings = field(default_factory=Settings)
    keep_odd: bool = False
    as_is: bool = False  # the checkpoint is stored so already: Quantry need not write it
    packages: tuple[str, ...] = ()  # installed besides those that the engine's data assume
    features: tuple[str, ...] = ()  # of the processor: amx, ...
    host_experts: int = 0  # llama.cpp: first blocks whose experts stay on the host, with all the rest on the GPUs

    @property
    def terms(self) -> EngineTerms:
        return terms(self.engine, self.version, self.device)

    @property
    def whole_layers(self) -> bool:
        """True if each device gets whole layers, and none is cut."""
        return engine_facts(self.engine).plan.whole_layers

    @property
    def devices(self) -> int:
        """How many devices share one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel

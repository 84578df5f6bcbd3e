"""An option before it is ranked: a deployment that runs and fits, or why it was refused."""

from dataclasses import dataclass

from quantry.planning.deployment import Deployment
from quantry.planning.facts import Facts
from quantry.planning.request import Request
from quantry.quantizing.recipe import Preset, Recipe
from quantry.types import Footprint, Verdict, Workload


@dataclass(frozen=True)
class Candidate:
    """A deployment that runs, for one of `replicas` copies, with its memory."""

    deployment: Deployment
    verdict: Verdict
    workload: Workload  # of one copy
    replicas: int
    footprint: Footprint  # of one copy
    limit: int  # bytes of a device that may be filled

    @property
    def recipe(self) -> Recipe:
        assert self.deployment.recipe is not None
        return self.deployment.recipe

    @property
    def preset(self) -> Preset:
        return self.recipe.preset

    @property
    def engine(self) -> str:
        return self.deployment.engine

    @property
    def sequences(self) -> int:
        """Sequences at once of all copies."""
        return self.workload.concurrency * self.replicas

    @property
    def devices(self) -> int:
        """Devices of all copies."""
        return self.deployment.devices * self.replicas

    @property
    def offloaded(self) -> bool:
        return self.deployment.offload_layers is not None or self.deployment.host_experts > 0

    @property
    def facts(self) -> Facts:
        """The facts of an option that rules may speak of."""
        grid, activation = self.preset.scheme.weight, self.preset.scheme.activation
        return {
            **outline(self.deployment),
            "zero_points": not grid.symmetric,
            "inputs": activation.grid.kind if activation else "none",
            "calibrated": self.preset.transform is not None or self.preset.rounder != "nearest",
            "kernel": self.verdict.outcome,
            "kv": self.deployment.kv,
            "tensor_parallel": self.deployment.tensor_parallel,
            "replicas": self.replicas,
            "offloaded": self.offloaded,
        }


@dataclass(frozen=True, slots=True)
class Refused:
    """A preset that an engine cannot serve here; `short` is the bytes a device lacks, if that is the reason."""

    preset: str
    engine: str
    why: str
    fix: str
    short: int | None = None


def is_ready(request: Request, candidate: Candidate) -> bool:
    """Returns True if the candidate is a GGUF file that others made of the model."""
    return request.ready is not None and candidate.recipe in request.ready.recipes and candidate.deployment.as_is


def is_published(request: Request, candidate: Candidate) -> bool:
    """Returns True if the weights are rounded as the model is stored, by its makers or by the user."""
    ready = is_ready(request, candidate)
    return candidate.deployment.as_is and not (ready and candidate.preset.file_type)


def scheme_name(chosen: Preset) -> str:
    """Returns the name that rules have for the scheme of a preset."""
    grid, activation = chosen.scheme.weight, chosen.scheme.activation
    if grid.is_cast:
        return "16-bit"
    if chosen.file_type:
        return chosen.file_type
    if grid.kind == "int":
        return "llm-int8" if chosen.formats == ("bitsandbytes",) else f"w{grid.bits}a{8 if activation else 16}"
    if grid.kind == "e2m1":
        return "nvfp4" if grid.scale == "e4m3" else "mxfp4"
    return {"e4m3": "fp8", "e5m2": "fp8"}.get(grid.kind, grid.kind)


def outline(deployment: Deployment) -> Facts:
    """Returns the facts of an option that are known before its memory is."""
    recipe = deployment.recipe
    assert recipe is not None
    return {
        "preset": recipe.preset.name,
        "format": recipe.format,
        "scheme": scheme_name(recipe.preset),
        "bits": recipe.preset.scheme.weight.bits,
        "engine": deployment.engine,
        "as_is": deployment.as_is,
    }

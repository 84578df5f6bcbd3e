"""What the quantization job itself needs."""

from dataclasses import dataclass
from math import prod

from quantry.planning.memory.terms import MIB, job_terms
from quantry.planning.memory.weights import Stored, stored
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import STORED, main_dtype
from quantry.types import Checkpoint


@dataclass(frozen=True, slots=True)
class JobCost:
    """Peak memory and disk of the quantization job, in bytes; `vram` is 0 on a CPU."""

    ram: int
    vram: int
    disk: int


def job_cost(checkpoint: Checkpoint, recipe: Recipe, device: str = "cpu", keep_odd: bool = False) -> JobCost:
    """Returns the cost of quantizing: one layer at a time is in memory, and only the result is written."""
    weights, terms = stored(checkpoint, recipe, keep_odd), job_terms()
    operation = _operation(checkpoint, recipe, weights)
    rate = next(row for row in terms["rates"] if operation in row["kinds"])
    worked = (weight for weight in weights if operation == "cast" or weight.quantized)
    largest = max((prod(weight.shape) for weight in worked), default=0)
    return JobCost(
        ram=int(rate["process_mib"] * MIB + largest * rate["ram"]),
        vram=0 if device == "cpu" else int(terms["context_mib"] * MIB + largest * rate["vram"]),
        disk=weights.bytes,
    )


def _operation(checkpoint: Checkpoint, recipe: Recipe, weights: Stored) -> str:
    """Returns what the job does to a layer, by the name of its row in terms.toml."""
    if recipe.format in ("gguf", "bitsandbytes"):
        return recipe.format
    if recipe.preset.scheme.weight.is_cast:
        return "copy" if STORED[weights.dtype] == main_dtype(checkpoint) else "cast"
    return recipe.preset.fit or "mse"

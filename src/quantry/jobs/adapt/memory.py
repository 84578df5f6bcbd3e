"""What training needs in memory, estimated from the headers of the model, and compared with what is free."""

from collections.abc import Sequence

import torch

from quantry.devices.host import memory as host_memory
from quantry.errors import QuantryError
from quantry.jobs.adapt.settings import Settings
from quantry.models.attention import text_config
from quantry.models.linears import Linear
from quantry.report.sizes import human
from quantry.types import Anatomy, Checkpoint

NF4 = 0.5 + 1 / 64 + 4 / (64 * 256)  # bytes a weight: a code, and a nested scale for 64 of them
TRAINED = 4  # float32 copies of the adapter: weights, gradients, two moments of Adam
LOGITS = 3  # float32 copies of the logits: themselves, their logarithms, the gradient
# Bytes kept for the backward pass, in inputs and outputs of linears: 1.03 on the demo in float32. The rest is a margin
# for gradients, and for the float32 copies of inputs that an adapter keeps beside bfloat16, which was not measured.
KEPT = 1.7
AT_ONCE = 2048  # tokens that run together, unless a single row is longer


def computing_type(device: torch.device) -> torch.dtype:
    """Returns the type that training computes in: gradients are too small for a CPU's bfloat16."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def needed(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    layers: Sequence[Linear],
    adapter: int,
    settings: Settings,
    longest: int,
    device: torch.device,
) -> dict[str, int]:
    """Returns the bytes that training needs, by part; `adapter` are its parameters, `longest` tokens of a row."""
    width = computing_type(device).itemsize
    quantized = sum(_size(layer) for layer in layers if not is_expert(layer)) if settings.method == "qlora" else 0
    vocabulary = int(text_config(checkpoint.config).get("vocab_size", 0))
    token = sum(sum(layer.shape) for layer in layers if not is_expert(layer)) * width * KEPT + vocabulary * 4 * LOGITS
    assert settings.batch is not None
    tokens = min(max(AT_ONCE, longest), settings.batch * longest)
    return {
        "weights": int((anatomy.parameters - quantized) * width + quantized * NF4),
        "adapter, gradients and optimizer": TRAINED * 4 * adapter,
        "activations": int(tokens * token),
    }


def is_expert(layer: Linear) -> bool:
    """Says if a linear is part of a stack of experts, which is no layer of its own when loaded."""
    return ".experts." in layer.module


def check_memory(parts: dict[str, int], device: torch.device, method: str) -> None:
    """Raises QuantryError if training does not fit into what is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()[1]
    if not free or sum(parts.values()) <= free:  # 0 where the system does not tell
        return
    words = ", ".join(f"{human(size)} for {name}" for name, size in parts.items())
    smaller = "a shorter --length" if method == "qlora" else "--qlora, a shorter --length"
    raise QuantryError(
        f"training needs {human(sum(parts.values()))} of memory ({words}) and {human(free)} are free",
        fix=f"give {smaller} or a lower --rank, or use a smaller model",
    )


def _size(layer: Linear) -> int:
    return layer.shape[0] * layer.shape[1]

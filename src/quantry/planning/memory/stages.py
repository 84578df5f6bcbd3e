"""Which device holds which layers: pipeline stages, or llama.cpp's layers on GPUs and on the host."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quantry.devices import Device
from quantry.errors import QuantryError, WeightError
from quantry.models.attention import text_config
from quantry.planning.deployment import Deployment


@dataclass(frozen=True, slots=True)
class Stage:
    """Some blocks of a model and the devices that hold them; `tensor` equal devices share each layer."""

    device: Device
    tensor: int
    blocks: range
    embedding: bool
    head: bool
    devices: int  # in all stages
    host: bool = False  # the processor beside a GPU
    alone: bool = True  # no other type of device holds a part of the model

    @property
    def layers(self) -> int:
        return len(self.blocks)


def stages(deployment: Deployment, blocks: int) -> Iterator[Stage]:
    """Yields the stages of a model with `blocks` blocks, first to last.

    Raises QuantryError if heads, blocks or offloaded layers do not suit the devices.
    """
    _check(deployment, blocks)
    if deployment.whole_layers and deployment.device.kind == "gpu":
        yield from _with_host(deployment, blocks)
        return
    whole = deployment.whole_layers
    tensor, count = (1, 1) if whole else (deployment.tensor_parallel, deployment.pipeline_parallel)
    start = 0
    for size in _sizes(blocks, count):
        mine = range(start, start + size)
        yield Stage(deployment.device, tensor, mine, start == 0, mine.stop == blocks, tensor * count)
        start = mine.stop


def _check(deployment: Deployment, blocks: int) -> None:
    count, device = deployment.pipeline_parallel, deployment.device
    if not deployment.whole_layers:
        _check_heads(deployment.checkpoint.config, deployment.tensor_parallel)
    if type(count) is not int or not 1 <= count <= blocks:
        raise QuantryError(f"{count} pipeline stages for {blocks} layers", fix=f"use 1 to {blocks}")
    if deployment.offload_layers is not None and not deployment.whole_layers:
        raise QuantryError(f"{deployment.engine} does not offload single layers", fix="use llama.cpp")
    if deployment.offload_layers and device.kind == "cpu":
        raise QuantryError(f"{device.name} has no GPU to offload layers to", fix="leave --offload-layers out")


def _sizes(blocks: int, stages: int) -> list[int]:
    """Returns the blocks of each stage as vLLM divides them: the remainder goes to the middle, then to the front."""
    counts = [blocks // stages] * stages
    for index in range(2, blocks % stages + 2):
        counts[-index] += 1
    return counts


def _with_host(deployment: Deployment, blocks: int) -> Iterator[Stage]:
    """Yields llama.cpp's stages: the host with the embedding and the first layers, each GPU with some of the others."""
    count, device = deployment.devices, deployment.device
    wanted = blocks + 1 if deployment.offload_layers is None else deployment.offload_layers
    if type(wanted) is not int or not 0 <= wanted <= blocks + 1:
        raise QuantryError(f"{wanted} layers to offload of {blocks} and the head", fix=f"use 0 to {blocks + 1}")
    kept = min(blocks, blocks + 1 - wanted)
    yield Stage(device, 1, range(kept), True, wanted == 0, count, host=True)
    start = kept
    for index in range(count if wanted else 0):
        end = kept + -(-(blocks + 1 - kept) * (index + 1) // count)
        mine = range(start, min(end, blocks))
        yield Stage(device, 1, mine, False, index == count - 1, count, alone=False)
        start = mine.stop


def head_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Returns query heads and KV heads; those of the narrowest layer if layers differ."""
    text = text_config(config)
    heads = _least(text.get("num_attention_heads"), 1)
    return heads, _least(text.get("num_key_value_heads"), heads)


def _least(value: Any, default: int) -> int:
    counts = value if isinstance(value, list | tuple) else [value]
    return min((count for count in counts if type(count) is int and count > 0), default=default)


def _check_heads(config: Mapping[str, Any], devices: int) -> None:
    if type(devices) is not int or not 1 <= devices <= 1024:
        raise QuantryError(f"tensor parallel size {devices} is not 1 to 1024", fix="use 1, 2, 4 or 8")
    heads, kv_heads = head_counts(config)
    if heads % devices:
        raise WeightError(f"{heads} attention heads are not divided by {devices} devices", fix=_fitting(heads))
    if max(kv_heads, devices) % min(kv_heads, devices):
        raise WeightError(
            f"{kv_heads} KV heads can be neither divided nor repeated over {devices} devices", fix=_fitting(kv_heads)
        )


def _fitting(count: int) -> str:
    sizes = [size for size in (1, 2, 4, 8, 16) if count % size == 0]
    return f"use a tensor parallel size of {' or '.join(map(str, sizes))}, or pipeline parallel"

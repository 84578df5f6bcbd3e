"""The linear layers of a model that can be quantized, and which of them an engine fuses.

Linears have the names that engines expect: experts that a checkpoint stores fused in one three-dimensional tensor
(gate_up_proj, down_proj) become one linear each, cut out of their source. Layers that an engine fuses into one matrix
(q/k/v, gate/up) have one `fused` name, since they must share their grid. Layers that it also stacks (the experts of a
layer) have one `shared` name, since they must share any scale that spans a whole tensor.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantry.errors import ConfigError
from quantry.models.attention import text_config
from quantry.models.parts import part_of
from quantry.types import Checkpoint, TensorInfo

QUANTIZED_PARTS = frozenset({"attention", "MLP", "experts"})
FLOATS = frozenset({"BF16", "F16", "F32"})
FUSED = (  # as vLLM 0.32's models pack them
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
EXPERT = re.compile(r"\.experts\.\d+\.")
STACKED = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)(\.weight)?")
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # linears in a stack
TRANSPOSED = frozenset({"gpt2", "openai-gpt", "imagegpt"})  # Conv1D keeps weights as (in, out)
INTERLEAVED = frozenset({"gpt_oss"})  # gate and up rows alternate


@dataclass(frozen=True, slots=True)
class Linear:
    """One linear layer: `source[expert][rows]`, transposed if `flip`, is its (out, in) weight."""

    module: str
    source: str
    shape: tuple[int, int]
    fused: str  # the same for all parts of one matrix of the engine
    shared: str  # the same for all that share a scale for whole tensors: as fused, and all experts of a layer
    expert: int | None = None
    rows: tuple[int, int] | None = None
    flip: bool = False


def linears(checkpoint: Checkpoint, blocks: int) -> tuple[Linear, ...]:
    """Returns all linear layers of the decoder blocks, in the order of the checkpoint.

    Raises ConfigError if the family stores them in an unsupported layout.
    """
    family = str(text_config(checkpoint.config).get("model_type"))
    hidden = text_config(checkpoint.config).get("hidden_size")
    layers = [
        linear
        for tensor in checkpoint.tensors
        if part_of(tensor.name, blocks) in QUANTIZED_PARTS and tensor.dtype in FLOATS
        for linear in _of_tensor(tensor, checkpoint.tensors, family, hidden)
    ]
    if layers and family in TRANSPOSED:
        raise ConfigError(
            f"{family} keeps its linear weights transposed, which is not supported", fix="use a model of another family"
        )
    return tuple(layers)


def check_halves(checkpoint: Checkpoint) -> None:
    """Raises ConfigError if gate and up rows of experts alternate: such a stack cannot be cut into halves."""
    family = str(text_config(checkpoint.config).get("model_type"))
    if family in INTERLEAVED:
        raise ConfigError(
            f"{family} interleaves gate and up rows, which Quantry cannot quantize",
            fix="serve the published checkpoint, which is quantized already (quantry plan)",
        )


def _of_tensor(tensor: TensorInfo, tensors: Sequence[TensorInfo], family: str, hidden: Any) -> list[Linear]:
    stacked = STACKED.fullmatch(tensor.name)
    if tensor.numel == 0:  # an empty tensor may claim any number of experts
        return []
    if stacked and len(tensor.shape) == 3:
        flip = family in INTERLEAVED or _is_flipped(stacked["experts"], tensors, hidden)
        return _of_experts(tensor, stacked["experts"], stacked["projection"], flip)
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
        return []
    module = tensor.name.removesuffix(".weight")
    fused = fused_name(module)
    return [Linear(module, tensor.name, (tensor.shape[0], tensor.shape[1]), fused, shared_name(fused))]


def module_names(tensor: str, expert: int | None) -> tuple[str, ...]:
    """Returns the modules that a tensor of the checkpoint, or one expert in its stack, stands for."""
    stem = tensor.removesuffix(".weight")
    if expert is None:
        return (stem,)
    stacked = STACKED.fullmatch(tensor)
    if stacked is None:
        return (f"{stem}.{expert}",)
    return tuple(f"{stacked['experts']}.{expert}.{leaf}" for leaf in EXPERT_PARTS[stacked["projection"]])


def fused_name(module: str) -> str:
    """Returns the name shared by the modules that engines fuse with this one."""
    parent, _, leaf = module.rpartition(".")
    siblings = next((names for names in FUSED if leaf in names), (leaf,))
    return f"{parent}.{'+'.join(siblings)}"


def shared_name(fused: str) -> str:
    """Returns the name shared by all layers with one scale for whole tensors; engines stack the experts of a layer."""
    return EXPERT.sub(".experts.*.", fused)


def _is_flipped(prefix: str, tensors: Sequence[TensorInfo], hidden: Any) -> bool:
    """Returns True if a stack is (experts, in, out); its down projection, (hidden, inner) unless flipped, shows it."""
    down = next((t for t in tensors if t.name.removesuffix(".weight") == f"{prefix}.down_proj"), None)
    shape = down.shape if down else ()
    if len(shape) != 3 or (shape[1] == hidden) == (shape[2] == hidden):
        raise ConfigError(
            f"{prefix}.down_proj of shape {list(shape)} does not tell rows from columns (hidden size {hidden})",
            fix="save the model with one tensor for each expert",
        )
    return bool(shape[2] == hidden)


def _of_experts(tensor: TensorInfo, prefix: str, projection: str, flip: bool) -> list[Linear]:
    experts, first, second = tensor.shape
    out, into = (second, first) if flip else (first, second)
    names = EXPERT_PARTS[projection]
    part = out // len(names)
    return [
        Linear(
            module=f"{prefix}.{expert}.{name}",
            source=tensor.name,
            shape=(part, into),
            fused=fused_name(f"{prefix}.{expert}.{name}"),
            shared=shared_name(fused_name(f"{prefix}.{expert}.{name}")),
            expert=expert,
            rows=(index * part, (index + 1) * part),
            flip=flip,
        )
        for expert in range(experts)
        for index, name in enumerate(names)
    ]

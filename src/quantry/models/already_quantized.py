"""How a checkpoint is already quantized: the method, and the number of model weights in each stored tensor.

config.json's `quantization_config` and the tensors' names and dtypes decide: int32 words pack 32 / bits weights, a byte
of a 4-bit float format packs two, and scales, zero points and index tensors hold no weights.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from quantry.errors import CheckpointError, ConfigError
from quantry.types import Checkpoint, Quantization, TensorInfo

# tensors that describe the quantization and hold no weights of the model
PARAMETERS = re.compile(
    r"(\.scales|\.qzeros|\.g_idx|\.SCB|\.weight_format|\.absmax|\.quant_map|\.nested_absmax|\.nested_quant_map"
    r"|\.quant_state\.bitsandbytes__\w+|[._](weight|input|output|activation|k|v|q|kv)_(global_)?scale(_inv|_2)?"
    r"|_(weight|input)_zero_point|\.weight_(zero_point|g_idx|shape)|_proj_scale(_inv)?|_(scales|zero_points))$"
)
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def check_sixteen_bit(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if the weights of a checkpoint are no longer 16 bit."""
    if checkpoint.format == "gguf":
        raise CheckpointError(
            f"{checkpoint.source} is a GGUF file",
            fix=f"use the model it was made from, or round a second time: {_again(checkpoint)}",
        )
    quantized = quantization(checkpoint)
    if quantized:
        raise CheckpointError(
            f"{checkpoint.source} is already quantized ({quantized.method}, {quantized.bits:g} bits)",
            fix=f"use the 16-bit original, or round a second time: {_again(checkpoint)}",
        )


def _again(checkpoint: Checkpoint) -> str:
    return f"quantry convert {checkpoint.source} -o OUT --to gguf --requantize Q4_K_M"


def quantization(checkpoint: Checkpoint) -> Quantization | None:
    """Returns how the checkpoint is quantized; None if all its weights are 16 bit or wider."""
    if checkpoint.format == "gguf":
        return _of_gguf(checkpoint)
    settings = _settings(checkpoint.config)
    if settings is None:
        return None
    method = settings.get("quant_method") or settings.get("quant_algo")
    if not isinstance(method, str):
        raise ConfigError(
            f"quantization_config has the keys {sorted(settings)} and no quant_method", fix="restore config.json"
        )
    widths = [(_bits(settings, tensor), weights_of(checkpoint, tensor)) for tensor in checkpoint.tensors]
    quantized = [(bits, count) for bits, count in widths if bits and count]
    total = sum(count for _, count in quantized)
    bits = sum(bits * count for bits, count in quantized) / total if total else 16.0
    return Quantization(method.lower(), round(bits, 3), _group_size(settings))


def weights_of(checkpoint: Checkpoint, tensor: TensorInfo) -> int:
    """Returns the number of model weights that a stored tensor holds."""
    settings = _settings(checkpoint.config) if checkpoint.format == "safetensors" else None
    if settings is None:
        return tensor.numel
    if PARAMETERS.search(tensor.name):
        return 0
    bits = _bits(settings, tensor)
    if tensor.dtype == "I32" and bits:
        return _stored_shape(checkpoint, tensor) if 32 % bits else tensor.numel * (32 // bits)
    return tensor.numel * 2 if tensor.dtype == "U8" and bits == 4 else tensor.numel


def _stored_shape(checkpoint: Checkpoint, tensor: TensorInfo) -> int:
    """Returns the weights in words whose 32 bits are no multiple of their width.

    compressed-tensors has packed 3 bits in two layouts, so its `weight_shape` (two 64-bit numbers) is read; GPTQ has
    always packed 32 weights into as many words as bits.
    """
    name = tensor.name.removesuffix("weight_packed") + "weight_shape"
    shape = next((other for other in checkpoint.tensors if other.name == name and other.nbytes == 16), None)
    if shape is None:
        return tensor.numel * 32 // _bits(_settings(checkpoint.config) or {}, tensor)
    data = checkpoint.read(shape.file, shape.start, 16)
    return int.from_bytes(data[:8], "little") * int.from_bytes(data[8:], "little")


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(f"quantization_config is {str(settings)[:80]!r}, not an object", fix="restore config.json")
    return settings


def _bits(settings: Mapping[str, Any], tensor: TensorInfo) -> int:
    """Returns the width of the quantized weights in `tensor`; 0 for a tensor in 16 bit or wider."""
    if tensor.dtype in FLOATS or PARAMETERS.search(tensor.name):
        return 0
    if tensor.dtype.startswith("F8") or tensor.dtype == "I8":
        return 8
    if tensor.dtype in ("U8", "F4"):
        return 4
    group = _group_for(settings, tensor)
    bits = group.get("num_bits") or settings.get("bits") or settings.get("w_bit") or 4
    if type(bits) is not int or not 1 <= bits <= 16:
        raise ConfigError(f"quantization_config gives {str(bits)[:40]} bits, not 1 to 16", fix="restore config.json")
    return bits


def _weight_groups(settings: Mapping[str, Any]) -> Iterable[tuple[list[str], Mapping[str, Any]]]:
    """Yields compressed-tensors' config groups: their targets, and how they quantize weights."""
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping):
            targets = group.get("targets")
            yield [str(target) for target in targets] if isinstance(targets, list) else [], group["weights"]


def _group_for(settings: Mapping[str, Any], tensor: TensorInfo) -> Mapping[str, Any]:
    """Returns the group that names the tensor's module, or else the first that names a class of modules."""
    module = tensor.name.rpartition(".")[0]
    general: Mapping[str, Any] = {}
    for targets, weights in _weight_groups(settings):
        for target in targets:
            if target == module or (target.startswith("re:") and _matches(target[3:], module)):
                return weights
            if not target.startswith("re:") and "." not in target:
                general = general or weights
    return general


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise ConfigError(
            f"quantization_config has a target re:{pattern[:80]} ({error})", fix="correct the pattern"
        ) from error


def _group_size(settings: Mapping[str, Any]) -> int | None:
    sizes = [weights.get("group_size") for _, weights in _weight_groups(settings)]
    size = sizes[0] if sizes else settings.get("group_size", settings.get("q_group_size"))
    return size if type(size) is int and size > 0 else None


def _of_gguf(checkpoint: Checkpoint) -> Quantization | None:
    from gguf import LlamaFileType

    quantized = [tensor for tensor in checkpoint.tensors if tensor.dtype not in FLOATS]
    weights = sum(tensor.numel for tensor in quantized)
    if not weights:
        return None
    file_type = checkpoint.metadata.get("general.file_type")
    names = {int(member): member.name.removeprefix("MOSTLY_").lower() for member in LlamaFileType}
    name = names.get(file_type, "mixed") if isinstance(file_type, int) else "mixed"
    return Quantization(f"gguf-{name}", round(8 * sum(tensor.nbytes for tensor in quantized) / weights, 3))

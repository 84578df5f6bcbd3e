"""Formats: how a quantized layer lies in a checkpoint. One file is one format, and its file name is the format's name.

A format says without torch what it can hold (`refusal`), which tensors it will write (`layout`) and what config.json
must say (`config`, read back by `schemes`); `encode` and `decode` turn a QTensor into those tensors and back, exactly.
Here is what all of them need: the names of dtypes, the words for a grid, and the errors for a tensor that is not there
or does not fit.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.types import Grid, ScaleType, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Layout = dict[str, tuple[str, tuple[int, ...]]]
ModelType = Literal["bf16", "f16"]

STORED: dict[ScaleType, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16", "e8m0": "U8", "e4m3": "F8_E4M3"}
FLOAT_SCALES: dict[str, ScaleType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


def spell(grid: Grid) -> str:
    """A grid in the words of an error message: "int4 with zero points in groups of 64"."""
    kind = f"int{grid.bits}" if grid.kind == "int" else grid.kind
    zeros = "" if grid.symmetric else " with zero points"
    rows, columns = grid.block
    blocks = {(1, columns): f"in groups of {columns}", (0, 0): "per tensor", (1, 0): "per channel"}
    return f"{kind}{zeros} {blocks.get(grid.block, f'in blocks of {rows} x {columns}')}"


def scale_shape(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of a weight's scales, as in numerics.blocks but without torch."""
    rows, columns = grid.block[0] or shape[0], grid.block[1] or shape[1]
    return -(-shape[0] // rows), -(-shape[1] // columns)


def need_multiple(module: str, side: str, size: int, step: int, name: str) -> None:
    """Refuses a layer one of whose sides is not a multiple of what a word or a group of this format holds."""
    if size % step:
        raise QuantryError(
            f"{module} has {size} {side}, and {name} stores multiples of {step} with this scheme",
            fix="leave the layer in 16 bit, or choose another group size or format",
        )


def refuse(module: str, name: str, reason: str | None) -> None:
    """Turns a refusal into an error for callers that did not ask first."""
    if reason is not None:
        raise QuantryError(f"{module} cannot be stored: {reason}", fix=f"choose a scheme that {name} holds")


def part(tensors: Mapping[str, "Tensor"], module: str, name: str) -> "Tensor":
    """One stored tensor of a layer."""
    key = f"{module}.{name}"
    if key not in tensors:
        raise CheckpointError(f"{key} is missing", fix="download the checkpoint again")
    return tensors[key]


def modules_with(tensors: Iterable[TensorInfo], suffix: str) -> dict[str, TensorInfo]:
    """The layers that have a tensor of this name, with that tensor."""
    ending = f".{suffix}"
    return {info.name.removesuffix(ending): info for info in tensors if info.name.endswith(ending)}


def float_scale(info: TensorInfo) -> ScaleType:
    """The scale type of a stored float tensor."""
    if info.dtype not in FLOAT_SCALES:
        raise CheckpointError(
            f"{info.name} is {info.dtype}, and scales are {', '.join(FLOAT_SCALES)}", fix="quantize the model again"
        )
    return FLOAT_SCALES[info.dtype]


def setting(settings: Mapping[str, Any], names: tuple[str, ...], kind: type, default: Any = None) -> Any:
    """The first of these keys that quantization_config has; its type is checked."""
    for name in names:
        value = settings.get(name)
        if value is None:
            continue
        if type(value) is not kind:
            raise ConfigError(
                f"quantization_config has {name} {str(value)[:40]!r}, not {kind.__name__}", fix="restore config.json"
            )
        return value
    if default is None:
        raise ConfigError(f"quantization_config has no {names[0]}", fix="restore config.json")
    return default


def only_one(name: str, assignment: Mapping[str, Scheme], choices: Iterable[str]) -> str:
    """The single way in which a whole checkpoint is quantized, for formats whose config.json has room for one."""
    found = sorted(set(choices))
    if len(found) != 1:
        raise QuantryError(
            f"{name} holds one scheme for a whole checkpoint, and {len(assignment)} layers have {len(found)}: "
            f"{', '.join(found) or 'none'}",
            fix="use compressed-tensors for mixed schemes",
        )
    return found[0]


def kept_names(name: str, assignment: Mapping[str, Scheme], kept: Iterable[str]) -> list[str]:
    """The layers left in 16 bit, for readers that match them by prefix: none may begin the name of a quantized one."""
    names = list(kept)
    prefixes = tuple(names)
    for module in assignment:
        if module.startswith(prefixes):
            raise QuantryError(
                f"readers of {name} would leave {module} in 16 bit too, because a kept layer's name begins its name",
                fix="keep both layers in 16 bit, or use compressed-tensors",
            )
    return names

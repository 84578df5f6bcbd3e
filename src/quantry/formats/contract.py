"""What a format's file offers, and what formats share: names of dtypes, words for a grid, checks of stored tensors.

A format says without torch what it can hold (`refusal`), which tensors it will write (`layout`) and what config.json
must say (`config`, read back by `schemes`). `encode` turns a QTensor into those tensors, `decode` turns them back,
exactly. Formats that live in a Hugging Face folder offer all of `Format`; GGUF is a container of its own and offers
`NAME` and `refusal` (containers/gguf_file.py does the rest).
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from quantry import registry
from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.types import Activation, Grid, QTensor, ScaleType, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = "quantry.formats"
Layout = dict[str, tuple[str, tuple[int, ...]]]
ModelType = Literal["bf16", "f16"]

STORED: dict[ScaleType, str] = {"f32": "F32", "f16": "F16", "bf16": "BF16", "e8m0": "U8", "e4m3": "F8_E4M3"}
FLOAT_SCALES: dict[str, ScaleType] = {"F32": "f32", "F16": "f16", "BF16": "bf16"}


class CacheFormat(Protocol):
    """How a format stores the scales of an FP8 KV cache."""

    def refusal(self, grid: Grid) -> str | None:
        """Says why a cache of this grid cannot be described; None if it can."""

    def modules(self, linears: Iterable[str]) -> tuple[str, ...]:
        """Returns the attention modules that get scales, from the names of linear layers."""

    def layout(self, module: str, heads: int, grid: Grid) -> Layout:
        """Returns the tensors of an attention module's scales."""

    def encode(self, module: str, keys: "Tensor", values: "Tensor") -> "dict[str, Tensor]":
        """Returns the stored scales of keys and values."""

    def grid(self, settings: Mapping[str, Any]) -> Grid | None:
        """Reads from quantization_config how the cache is quantized; None if it is not."""


class Format(Protocol):
    """A file in `formats` whose layers live in a Hugging Face folder."""

    NAME: str
    QUANT_METHODS: tuple[str, ...]  # config.json's quant_method of the checkpoints it reads
    CACHE_SCALES: CacheFormat | None  # None: it has no place for them

    def refusal(self, scheme: Scheme) -> str | None:
        """Says why the format cannot hold a scheme; None if it can."""

    def stored_grid(self, grid: Grid, dtype: ModelType) -> Grid:
        """Returns the grid with the scale dtype that the format stores."""

    def model_dtype(self, dtype: str) -> str:
        """Returns the 16-bit dtype that the rest of the checkpoint gets."""

    def layout(self, module: str, shape: tuple[int, int], grid: Grid, static: Activation | None = None) -> Layout:
        """Returns the tensors of a layer, with the scale of a static input. Raises QuantryError for an odd shape."""

    def config(self, assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None) -> dict[str, Any]:
        """Returns config.json's quantization_config."""

    def schemes(self, settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
        """Reads the scheme of every quantized module. Raises ConfigError or CheckpointError."""

    def encode(self, module: str, tensor: QTensor) -> "dict[str, Tensor]":
        """Returns the stored tensors of a layer."""

    def decode(
        self, module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None
    ) -> QTensor:
        """Inverts `encode`."""

    def shape(self, module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> tuple[int, int]:
        """Returns the (out, in) of a stored layer without unpacking it."""


def load_format(name: str) -> Format:
    """Imports the format of that name. Raises UnknownNameError."""
    return cast(Format, registry.load(FORMATS, name))


def recognise(quant_method: str) -> Format | None:
    """Finds the format that reads checkpoints with this quant_method."""
    for name in registry.choices(FORMATS):
        with suppress(QuantryError):  # a broken package of others does not keep the rest from being read
            if quant_method in registry.facts(FORMATS, name).get("QUANT_METHODS", ()):
                return load_format(name)
    return None


def spell(grid: Grid) -> str:
    """Describes a grid for an error message: "int4 with zero points in groups of 64"."""
    kind = f"int{grid.bits}" if grid.kind == "int" else grid.kind
    zeros = "" if grid.symmetric else " with zero points"
    rows, columns = grid.block
    blocks = {(1, columns): f"in groups of {columns}", (0, 0): "per tensor", (1, 0): "per channel"}
    return f"{kind}{zeros} {blocks.get(grid.block, f'in blocks of {rows} x {columns}')}"


def scale_shape(grid: Grid, shape: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of a weight's scales, as in numerics.blocks but without torch."""
    rows, columns = grid.block[0] or shape[0], grid.block[1] or shape[1]
    return -(-shape[0] // rows), -(-shape[1] // columns)


def need_multiple(module: str, side: str, size: int, step: int, name: str) -> None:
    """Raises QuantryError for a layer with a side that is not a multiple of the format's word or group."""
    if size % step:
        raise QuantryError(
            f"{module} has {size} {side}, and {name} stores multiples of {step} with this scheme",
            fix="leave the layer in 16 bit, or choose another group size or format",
        )


def refuse(module: str, name: str, reason: str | None) -> None:
    """Raises QuantryError for a refusal."""
    if reason is not None:
        raise QuantryError(f"{module} cannot be stored: {reason}", fix=f"choose a scheme that {name} holds")


def part(tensors: Mapping[str, "Tensor"], module: str, name: str) -> "Tensor":
    """Returns one stored tensor of a layer. Raises CheckpointError if it is missing."""
    key = f"{module}.{name}"
    if key not in tensors:
        raise CheckpointError(f"{key} is missing", fix="download the checkpoint again")
    return tensors[key]


def modules_with(tensors: Iterable[TensorInfo], suffix: str) -> dict[str, TensorInfo]:
    """Returns the layers that have a tensor of this name, with that tensor."""
    ending = f".{suffix}"
    return {info.name.removesuffix(ending): info for info in tensors if info.name.endswith(ending)}


def float_scale(info: TensorInfo) -> ScaleType:
    """Returns the scale type of a stored float tensor. Raises CheckpointError for another dtype."""
    if info.dtype not in FLOAT_SCALES:
        raise CheckpointError(
            f"{info.name} is {info.dtype}, and scales are {', '.join(FLOAT_SCALES)}", fix="quantize the model again"
        )
    return FLOAT_SCALES[info.dtype]


def stored_scales(module: str, grid: Grid, shape: tuple[int, int], scales: Mapping[str, TensorInfo]) -> ScaleType:
    """Returns the scale type of a layer whose scales are stored by group. Raises CheckpointError for missing ones."""
    if module not in scales:
        raise CheckpointError(f"{module}.scales is missing", fix="download the checkpoint again")
    groups = scales[module].shape[0]
    if scale_shape(grid, shape)[1] != groups:
        raise CheckpointError(
            f"{module} has {groups} groups for {shape[1]} inputs, and quantization_config says {spell(grid)}",
            fix="restore config.json",
        )
    return float_scale(scales[module])


def setting(settings: Mapping[str, Any], names: tuple[str, ...], kind: type, default: Any = None) -> Any:
    """Returns the first of these keys that quantization_config has. Raises ConfigError for another type or none."""
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
    """Returns the one scheme of a checkpoint, for formats whose config.json has room for one. Raises QuantryError."""
    different = sorted(set(choices))
    if len(different) != 1:
        raise QuantryError(
            f"{name} holds one scheme for a whole checkpoint, and {len(assignment)} layers have {len(different)}: "
            f"{', '.join(different) or 'none'}",
            fix="use compressed-tensors for mixed schemes",
        )
    return different[0]


def kept_names(name: str, assignment: Mapping[str, Scheme], kept: Iterable[str]) -> list[str]:
    """Lists the layers left in 16 bit, for readers that match by prefix.

    Raises QuantryError if the name of one begins the name of a quantized layer.
    """
    names = list(kept)
    prefixes = tuple(names)
    for module in assignment:
        if module.startswith(prefixes):
            raise QuantryError(
                f"readers of {name} would leave {module} in 16 bit too, because a kept layer's name begins its name",
                fix="keep both layers in 16 bit, or use compressed-tensors",
            )
    return names

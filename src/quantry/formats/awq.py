"""AWQ checkpoints in the "gemm" packing: 4-bit integers with zero points in groups, packed along the output dimension.

For a layer of `out` x `in` weights: `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8] and `scales`
[groups, out]. Each word holds eight outputs in the order 0 2 4 6 1 3 5 7, the lowest nibble first, for both codes and
zero points; both are unsigned. The kernels that read it compute in float16, so scales and the whole checkpoint are
float16. A symmetric weight has the zero point 8 everywhere, and is read back as one with zero points.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quantry.errors import CheckpointError, ConfigError
from quantry.formats import contract
from quantry.types import Activation, Grid, Params, QTensor, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

NAME = "awq"
QUANT_METHODS = ("awq",)
CACHE_SCALES: contract.CacheFormat | None = None


def refusal(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if grid.kind != "int" or grid.bits != 4:
        return f"awq holds 4 bit integers, not {contract.spell(grid).partition(' ')[0]}"
    if grid.block[0] != 1 or not grid.block[1]:
        return f"awq holds groups, not {contract.spell(grid)}"
    if grid.scale not in ("f16", "bf16", "f32"):
        return f"awq holds float scales, not {grid.scale}"
    return None if scheme.activation is None else "awq holds weights only, not quantized activations"


def stored_grid(grid: Grid, dtype: contract.ModelType) -> Grid:
    return replace(grid, scale="f16")


def model_dtype(dtype: str) -> str:
    return "f16"


def layout(module: str, shape: tuple[int, int], grid: Grid, static: Activation | None = None) -> contract.Layout:
    contract.refuse(module, NAME, refusal(Scheme(grid, static)))
    rows, columns = shape
    contract.need_multiple(module, "inputs", columns, grid.block[1], NAME)
    contract.need_multiple(module, "outputs", rows, 8, NAME)
    groups = columns // grid.block[1]
    return {
        f"{module}.qweight": ("I32", (columns, rows // 8)),
        f"{module}.qzeros": ("I32", (groups, rows // 8)),
        f"{module}.scales": (contract.STORED[grid.scale], (groups, rows)),
    }


def encode(module: str, tensor: QTensor) -> "dict[str, Tensor]":
    import torch

    grid, params = tensor.grid, tensor.params
    layout(module, (tensor.shape[0], tensor.shape[1]), grid)  # for its refusals
    zero = torch.zeros_like(params.scale, dtype=torch.int8) if params.zero is None else params.zero
    return {
        f"{module}.qweight": _pack(tensor.codes),
        f"{module}.qzeros": _pack(zero),
        f"{module}.scales": params.scale.T.contiguous(),
    }


def shape(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> tuple[int, int]:
    packed = contract.part(tensors, module, "qweight")
    return packed.shape[1] * 8, packed.shape[0]


def decode(
    module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None = None
) -> QTensor:
    grid = scheme.weight
    codes, zero = _unpack(contract.part(tensors, module, "qweight")), _unpack(contract.part(tensors, module, "qzeros"))
    if grid.symmetric and bool(zero.any()):
        raise CheckpointError(f"{module}.qzeros are not all 8", fix="read the layer with zero points")
    scale = contract.part(tensors, module, "scales").T.contiguous()
    return QTensor(grid, codes, Params(scale, None if grid.symmetric else zero))


def config(assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None = None) -> dict[str, Any]:
    size = contract.only_one(
        NAME, assignment, (f"groups of {scheme.weight.block[1]}" for scheme in assignment.values())
    )
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": int(size.rpartition(" ")[2]),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": contract.kept_names(NAME, assignment, kept),
    }


def schemes(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    bits = contract.setting(settings, ("bits", "w_bit"), int)
    if version != "gemm" or bits != 4 or settings.get("zero_point") is False:
        raise ConfigError(
            f"quantization_config has version {version!r}, {bits} bits and zero_point {settings.get('zero_point')}; "
            "awq is read in version gemm with 4 bits and zero points",
            fix="convert the checkpoint, or quantize the original model",
        )
    size = contract.setting(settings, ("group_size", "q_group_size"), int)
    scales = contract.modules_with(tensors, "scales")
    read = {}
    for module, qweight in contract.modules_with(tensors, "qweight").items():
        shape = 8 * qweight.shape[1], qweight.shape[0]
        grid = Grid("int", 4, (1, shape[1] if size < 0 else size), symmetric=False)
        read[module] = Scheme(replace(grid, scale=contract.stored_scales(module, grid, shape, scales)))
    return read


def _pack(codes: "Tensor") -> "Tensor":
    """Signed codes (outputs, n) -> words (n, outputs / 8)."""
    from quantry.numerics.packing import interleave, pack_rows, unsigned

    return pack_rows(interleave(unsigned(codes, 4).T.contiguous()), 4)


def _unpack(words: "Tensor") -> "Tensor":
    from quantry.numerics.packing import deinterleave, signed, unpack_rows

    return signed(deinterleave(unpack_rows(words, 4, 8 * words.shape[1])).T.contiguous(), 4)

"""GPTQ checkpoints: integers packed along the input dimension, scales and zero points in rows of groups.

For a layer of `out` x `in` weights: `qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32],
`scales` [groups, out] and `g_idx` int32 [in], the group of each input. Codes and zero points are unsigned. In the first
version of the format ("gptq") the stored zero point is one less than the real one, so 0, the zero point of a group of
zeros, cannot be told from 16; "gptq_v2" stores it as it is. Symmetric weights are written in the first version, which
every reader takes; weights with zero points in the second, since the first cannot hold all of them (vLLM 0.26 was seen
to refuse zero points). Nothing here permutes columns: activation order is a matter of the rounder, and leaves `g_idx`
trivial.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from quantry.errors import CheckpointError, ConfigError, QuantryError
from quantry.formats import contract
from quantry.types import Activation, Grid, Params, QTensor, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

NAME = "gptq"
QUANT_METHODS = ("gptq",)
CACHE_SCALES: contract.CacheFormat | None = None
BITS = (2, 3, 4, 8)
Version = Literal["gptq", "gptq_v2"]

# vLLM looks up overrides under the names of its fused layers (0.32, gptq_utils.get_dynamic_override).
FUSED = {
    "q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj",
}  # fmt: skip


def refusal(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if grid.kind != "int" or grid.bits not in BITS:
        return f"gptq holds 2, 3, 4 and 8 bit integers, not {contract.spell(grid).partition(' ')[0]}"
    if grid.block[0] != 1:
        return f"gptq holds groups or channels, not {contract.spell(grid)}"
    if grid.scale not in ("f16", "bf16", "f32"):
        return f"gptq holds float scales, not {grid.scale}"
    return None if scheme.activation is None else "gptq holds weights only, not quantized activations"


def stored_grid(grid: Grid, dtype: contract.ModelType) -> Grid:
    return replace(grid, scale=dtype)


def model_dtype(dtype: str) -> str:
    return dtype


def layout(module: str, shape: tuple[int, int], grid: Grid, static: Activation | None = None) -> contract.Layout:
    contract.refuse(module, NAME, refusal(Scheme(grid, static)))
    rows, columns = shape
    codes = 32 if grid.bits == 3 else 32 // grid.bits  # until the stream of codes is at the border of a word again
    contract.need_multiple(module, "inputs", columns, grid.block[1] or codes, NAME)
    contract.need_multiple(module, "inputs", columns, codes, NAME)
    contract.need_multiple(module, "outputs", rows, codes, NAME)
    groups = contract.scale_shape(grid, shape)[1]
    return {
        f"{module}.qweight": ("I32", (columns * grid.bits // 32, rows)),
        f"{module}.qzeros": ("I32", (groups, rows * grid.bits // 32)),
        f"{module}.scales": (contract.STORED[grid.scale], (groups, rows)),
        f"{module}.g_idx": ("I32", (columns,)),
    }


def encode(module: str, tensor: QTensor, *, checkpoint_format: Version | None = None) -> "dict[str, Tensor]":
    import torch

    from quantry.numerics.packing import pack_rows, unsigned

    grid, params = tensor.grid, tensor.params
    layout(module, (tensor.shape[0], tensor.shape[1]), grid)  # for its refusals
    signed_zero = torch.zeros_like(params.scale, dtype=torch.int8) if params.zero is None else params.zero
    zero = unsigned(signed_zero, grid.bits).T.contiguous()
    if (checkpoint_format or _version(grid)) == "gptq":
        if bool((zero == 0).any()):
            raise QuantryError(
                f"{module} has zero points of 0, which gptq's first version cannot store", fix="write gptq_v2"
            )
        zero = zero - 1
    return {
        f"{module}.qweight": pack_rows(unsigned(tensor.codes, grid.bits), grid.bits).T.contiguous(),
        f"{module}.qzeros": pack_rows(zero, grid.bits),
        f"{module}.scales": params.scale.T.contiguous(),
        f"{module}.g_idx": _group_of_input(tensor.shape[1], grid, tensor.codes.device),
    }


def shape(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> tuple[int, int]:
    packed = contract.part(tensors, module, "qweight")
    return packed.shape[1], packed.shape[0] * 32 // scheme.weight.bits


def decode(
    module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None = None
) -> QTensor:
    """`settings` say the version of the zero points; without them it is the one that `encode` chooses."""
    import torch

    from quantry.numerics.packing import signed, unpack_rows

    grid = scheme.weight
    qweight, scales = contract.part(tensors, module, "qweight"), contract.part(tensors, module, "scales")
    rows, columns = qweight.shape[1], qweight.shape[0] * 32 // grid.bits
    order = tensors.get(f"{module}.g_idx")
    if order is not None and not torch.equal(order.int(), _group_of_input(columns, grid, order.device)):
        raise CheckpointError(
            f"{module}.g_idx permutes the inputs (activation order with groups), which is not read",
            fix="use a checkpoint made with desc_act false or static groups",
        )
    stored = unpack_rows(contract.part(tensors, module, "qzeros"), grid.bits, rows)
    middle = 1 << (grid.bits - 1)
    if grid.symmetric and not (bool((stored == middle - 1).all()) or bool((stored == middle).all())):
        raise CheckpointError(
            f"{module}.qzeros are not all {middle - 1} or {middle}, though the checkpoint says sym true",
            fix="set sym to false in quantization_config",
        )
    plus = 1 if (_stored_version(settings) if settings else _version(grid)) == "gptq" else 0
    zero = None if grid.symmetric else signed((stored + plus) & ((1 << grid.bits) - 1), grid.bits).T.contiguous()
    codes = signed(unpack_rows(qweight.T, grid.bits, columns), grid.bits)
    return QTensor(grid, codes, Params(scales.T.contiguous(), zero))


def config(
    assignment: Mapping[str, Scheme],
    kept: Sequence[str],
    cache: Grid | None = None,
    *,
    checkpoint_format: Version | None = None,
) -> dict[str, Any]:
    """Returns the most frequent scheme for all layers; others and kept ones are `dynamic` rules, as in GPTQModel."""
    versions: set[Version] = {checkpoint_format or _version(scheme.weight) for scheme in assignment.values()}
    if len(versions) != 1:
        raise QuantryError(
            "gptq holds symmetric weights or weights with zero points, not both"
            if versions
            else "no layer is quantized",
            fix="use compressed-tensors for mixed schemes" if versions else "choose layers to quantize",
        )
    version = versions.pop()
    rows = {module: _settings(scheme.weight) for module, scheme in assignment.items()}
    base = dict(Counter(tuple(row.items()) for row in rows.values()).most_common(1)[0][0])
    exceptions = {f"+:^{_pattern(module)}$": row for module, row in rows.items() if row != base}
    left: dict[str, dict[str, Any]] = {f"-:^{re.escape(name)}$": {} for name in kept if name != "lm_head"}
    return {
        "quant_method": "gptq",
        **base,
        "desc_act": False,
        "checkpoint_format": version,
        "format": version,
        "pack_dtype": "int32",
        "lm_head": "lm_head" in assignment,
        "true_sequential": True,
        **({"dynamic": left | exceptions} if left or exceptions else {}),
    }


def schemes(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    _stored_version(settings)  # for its refusal
    scales = contract.modules_with(tensors, "scales")
    read = {}
    for module, qweight in contract.modules_with(tensors, "qweight").items():
        rule = {**settings, **_override(settings, module)}
        bits = contract.setting(rule, ("bits",), int)
        size = contract.setting(rule, ("group_size",), int, -1)
        grid = Grid("int", bits, (1, max(size, 0)), symmetric=contract.setting(rule, ("sym",), bool, True))
        if (reason := refusal(Scheme(grid))) is not None:
            raise ConfigError(f"{module}: {reason}", fix="quantize the original model with a scheme that gptq holds")
        shape = qweight.shape[1], qweight.shape[0] * 32 // bits
        read[module] = Scheme(replace(grid, scale=contract.stored_scales(module, grid, shape, scales)))
    return read


def _version(grid: Grid) -> Version:
    return "gptq" if grid.symmetric else "gptq_v2"


def _stored_version(settings: Mapping[str, Any]) -> str:
    version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    if version not in ("gptq", "gptq_v2"):
        raise ConfigError(
            f"quantization_config has checkpoint_format {str(version)[:40]!r}; gptq and gptq_v2 are read",
            fix="convert the checkpoint, or quantize the original model",
        )
    return str(version)


def _settings(grid: Grid) -> dict[str, Any]:
    return {"bits": grid.bits, "group_size": grid.block[1] or -1, "sym": grid.symmetric}


def _pattern(module: str) -> str:
    """A regular expression for a layer, and for the fused layer that vLLM makes of it and its siblings."""
    parent, _, name = module.rpartition(".")
    if name not in FUSED:
        return re.escape(module)
    return rf"{re.escape(parent)}\.(?:{name}|{FUSED[name]})"


def _override(settings: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The first `dynamic` rule that matches a layer, from the start of its name."""
    rules = settings.get("dynamic")
    for rule, values in rules.items() if isinstance(rules, Mapping) else ():
        try:
            matches = re.match(str(rule).removeprefix("+:").removeprefix("-:"), module)
        except re.error as error:
            raise ConfigError(f"quantization_config has a dynamic rule {rule!r} ({error})", fix="mend it") from error
        if matches:
            return values if isinstance(values, Mapping) else {}
    return {}


def _group_of_input(columns: int, grid: Grid, device: Any) -> "Tensor":
    import torch

    return torch.arange(columns, dtype=torch.int32, device=device) // (grid.block[1] or columns)

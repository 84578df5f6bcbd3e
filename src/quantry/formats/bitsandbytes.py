"""bitsandbytes checkpoints: NF4 and FP4 with or without nested scales, and the 8-bit integers of LLM.int8.

A 4-bit layer is `weight` uint8 [ceil(out * in / 2), 1], the first code of a pair in the high nibble; `weight.absmax`
(float32, or with nested scales uint8 indices beside `weight.nested_absmax` and `weight.nested_quant_map`);
`weight.quant_map`, the code book; and `weight.quant_state.bitsandbytes__nf4`, a JSON text in bytes with the rest. That
text ends in spaces here, so that its length is known before the mean of the scales is.

The 4-bit scales are float32 whatever the model is. The grid's `scale` is instead the dtype that the weight decodes to,
which the JSON text and config.json must name.

An 8-bit layer is `weight` int8, `SCB` float32 [out], 127 times the scale, and `weight_format`, 0 for rows. The reader
computes code * SCB * float32(1 / 127). With bfloat16 scales all of that is exact: SCB needs 15 bits, code * SCB 23, and
127 * float32(1 / 127) is 1 - 2**-28, which rounds back to code * scale.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from quantry.errors import CheckpointError, ConfigError
from quantry.formats import contract
from quantry.types import Activation, Grid, Nested, Params, QTensor, Scheme, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

NAME = "bitsandbytes"
QUANT_METHODS = ("bitsandbytes",)
CACHE_SCALES: contract.CacheFormat | None = None
BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # bitsandbytes 0.50.2, functional.quantize_4bit
NESTED_BLOCK = 256
OFFSET_LENGTH = 24  # the longest text of a float is 24 characters: -1.2345678901234567e-308
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32"}


def refusal(scheme: Scheme) -> str | None:
    grid = scheme.weight
    if scheme.activation is not None:
        return "bitsandbytes holds weights only, not quantized activations"
    if grid.kind == "int":
        fits = grid.bits == 8 and grid.symmetric and grid.block == (1, 0)
        return None if fits else f"bitsandbytes holds symmetric int8 per channel, not {contract.spell(grid)}"
    if grid.kind not in ("nf4", "fp4"):
        return f"bitsandbytes holds nf4, fp4 and int8, not {grid.kind}"
    return None if grid.block[1] in BLOCKS else f"bitsandbytes holds blocks of 32 to 4096, not {grid.block[1]}"


def stored_grid(grid: Grid, dtype: contract.ModelType) -> Grid:
    return replace(grid, scale="bf16" if grid.kind == "int" else dtype)


def model_dtype(dtype: str) -> str:
    return dtype


def layout(module: str, shape: tuple[int, int], grid: Grid, static: Activation | None = None) -> contract.Layout:
    contract.refuse(module, NAME, refusal(Scheme(grid, static)))
    if grid.kind == "int":
        return {
            f"{module}.weight": ("I8", shape),
            f"{module}.SCB": ("F32", (shape[0],)),
            f"{module}.weight_format": ("U8", ()),
        }
    blocks = ceil(prod(shape) / grid.block[1])
    nested: contract.Layout = {
        f"{module}.weight.nested_absmax": ("F32", (ceil(blocks / NESTED_BLOCK),)),
        f"{module}.weight.nested_quant_map": ("F32", (256,)),
    }
    return {
        f"{module}.weight": ("U8", (ceil(prod(shape) / 2), 1)),
        f"{module}.weight.absmax": ("U8" if grid.nested else "F32", (blocks,)),
        f"{module}.weight.quant_map": ("F32", (16,)),
        **(nested if grid.nested else {}),
        _state_name(module, grid.kind): ("U8", (len(_state(shape, grid, 0.0)),)),
    }


def encode(module: str, tensor: QTensor) -> "dict[str, Tensor]":
    import torch

    from quantry.numerics.codebooks import BOOKS, dynamic_table
    from quantry.numerics.packing import pack_nibbles_high_first

    grid, params, device = tensor.grid, tensor.params, tensor.codes.device
    shape = (tensor.shape[0], tensor.shape[1])
    layout(module, shape, grid)  # for its refusals
    if grid.kind == "int":
        return {
            f"{module}.weight": tensor.codes.contiguous(),
            f"{module}.SCB": params.scale.reshape(-1).float() * 127,
            f"{module}.weight_format": torch.zeros((), dtype=torch.uint8, device=device),
        }
    nested = params.nested
    text = _state(shape, grid, 0.0 if nested is None else nested.offset)
    stored = {
        f"{module}.weight": pack_nibbles_high_first(tensor.codes.reshape(1, -1)).view(-1, 1),
        f"{module}.weight.absmax": params.scale if nested is None else nested.codes,
        f"{module}.weight.quant_map": torch.tensor(BOOKS[grid.kind], dtype=torch.float32, device=device),
    }
    if nested is not None:
        stored[f"{module}.weight.nested_absmax"] = nested.absmax
        stored[f"{module}.weight.nested_quant_map"] = dynamic_table().to(device, copy=True)
    return {**stored, _state_name(module, grid.kind): torch.tensor(list(text), dtype=torch.uint8, device=device)}


def shape(module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme) -> tuple[int, int]:
    weight = contract.part(tensors, module, "weight")
    if scheme.weight.kind == "int":
        return weight.shape[0], weight.shape[1]
    state = _read_state(
        module, contract.part(tensors, module, f"weight.quant_state.bitsandbytes__{scheme.weight.kind}")
    )
    rows, columns = state["shape"]
    if type(rows) is not int or type(columns) is not int or (rows * columns + 1) // 2 != weight.numel():
        raise CheckpointError(
            f"{module}.weight has {weight.numel()} bytes for {rows} x {columns} codes of 4 bits",
            fix="download the checkpoint again",
        )
    return rows, columns


def decode(
    module: str, tensors: "Mapping[str, Tensor]", scheme: Scheme, settings: Mapping[str, Any] | None = None
) -> QTensor:
    from quantry.numerics.codebooks import unnest
    from quantry.numerics.packing import unpack_nibbles_high_first

    grid = scheme.weight
    weight = contract.part(tensors, module, "weight")
    if grid.kind == "int":
        return QTensor(grid, weight, _int8_params(module, tensors, grid))
    state = _read_state(module, contract.part(tensors, module, f"weight.quant_state.bitsandbytes__{grid.kind}"))
    _check_tables(module, tensors, grid)
    size = shape(module, tensors, scheme)
    codes = unpack_nibbles_high_first(weight.reshape(1, -1), prod(size)).view(size)
    grid = replace(grid, block=(grid.block[0], state["blocksize"]))
    absmax = contract.part(tensors, module, "weight.absmax")
    if not grid.nested:
        return QTensor(grid, codes, Params(absmax))
    outer = contract.part(tensors, module, "weight.nested_absmax")
    nested = Nested(absmax, outer, float(state["nested_offset"]), state["nested_blocksize"])
    return QTensor(grid, codes, Params(unnest(nested), nested=nested))


def config(assignment: Mapping[str, Scheme], kept: Sequence[str], cache: Grid | None = None) -> dict[str, Any]:
    """What transformers' BitsAndBytesConfig(...).to_dict() gives; block sizes are not in it."""
    grids = [scheme.weight for scheme in assignment.values()]
    contract.only_one(
        NAME, assignment, (f"{grid.kind}{' nested' if grid.nested else ''} for {grid.scale}" for grid in grids)
    )
    grid = grids[0]
    four = grid.kind != "int"
    return {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": four,
        "_load_in_8bit": not four,
        "load_in_4bit": four,
        "load_in_8bit": not four,
        "llm_int8_threshold": 6.0,
        "llm_int8_skip_modules": contract.kept_names(NAME, assignment, kept),
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "bnb_4bit_quant_type": grid.kind if four else "fp4",
        "bnb_4bit_use_double_quant": grid.nested,
        "bnb_4bit_compute_dtype": DTYPES[grid.scale] if four else "float32",
        "bnb_4bit_quant_storage": "uint8",
    }


def schemes(settings: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> dict[str, Scheme]:
    storage = settings.get("bnb_4bit_quant_storage") or "uint8"
    if settings.get("load_in_4bit") and storage != "uint8":
        raise ConfigError(
            f"quantization_config has bnb_4bit_quant_storage {str(storage)[:40]!r}; uint8 is read",
            fix="save the model with bnb_4bit_quant_storage uint8",
        )
    names = {info.name: info for info in tensors}
    read = {module: Scheme(Grid("int", 8, (1, 0), scale="f32")) for module in contract.modules_with(tensors, "SCB")}
    halves = Counter(info.dtype for info in tensors if info.dtype in ("BF16", "F16"))
    for kind in ("nf4", "fp4"):
        for module in contract.modules_with(tensors, f"weight.quant_state.bitsandbytes__{kind}"):
            weight, absmax = names.get(f"{module}.weight"), names.get(f"{module}.weight.absmax")
            if weight is None or absmax is None:
                raise CheckpointError(
                    f"{module}.weight or {module}.weight.absmax is missing", fix="download the checkpoint again"
                )
            read[module] = Scheme(
                Grid(
                    "nf4" if kind == "nf4" else "fp4",
                    4,
                    (1, _block(2 * weight.numel, absmax)),
                    scale="f16" if halves["F16"] > halves["BF16"] else "bf16",
                    nested=absmax.dtype == "U8",
                )
            )
    return read


def _int8_params(module: str, tensors: "Mapping[str, Tensor]", grid: Grid) -> Params:
    from quantry.numerics.grids import SCALE_DTYPES

    order = tensors.get(f"{module}.weight_format")
    if order is not None and int(order) != 0:
        raise CheckpointError(
            f"{module}.weight_format is {int(order)}, a layout of old GPU kernels that is not read",
            fix="save the model again with bitsandbytes 0.45 or newer",
        )
    scale = contract.part(tensors, module, "SCB").float() / 127
    return Params(scale.view(-1, 1).to(SCALE_DTYPES[grid.scale]))


def _state_name(module: str, kind: str) -> str:
    return f"{module}.weight.quant_state.bitsandbytes__{kind}"


def _state(shape: tuple[int, int], grid: Grid, offset: float) -> bytes:
    """The JSON text, filled up with spaces to the length that it has with the longest offset."""
    state: dict[str, Any] = {
        "quant_type": grid.kind,
        "blocksize": grid.block[1],
        "dtype": DTYPES[grid.scale],
        "shape": list(shape),
    }
    if grid.nested:
        state |= {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": offset}
    text = json.dumps(state)
    length = len(text) + (OFFSET_LENGTH - len(json.dumps(offset)) if grid.nested else 0)
    return text.ljust(length).encode()


def _read_state(module: str, text: "Tensor") -> dict[str, Any]:
    try:
        state = json.loads(bytes(text.tolist()))
        fits = isinstance(state["blocksize"], int) and len(state["shape"]) == 2
    except (ValueError, KeyError, TypeError):
        fits = False
    if not fits:
        raise CheckpointError(f"{module}.weight.quant_state is not readable", fix="download the checkpoint again")
    return dict(state)


def _check_tables(module: str, tensors: "Mapping[str, Tensor]", grid: Grid) -> None:
    """Other code books than the published ones cannot be held by a QTensor; the last digit of FP4's varies."""
    import torch

    from quantry.numerics.codebooks import BOOKS, dynamic_table

    tables = {"weight.quant_map": torch.tensor(BOOKS[grid.kind])}
    if grid.nested:
        tables["weight.nested_quant_map"] = dynamic_table()
    for name, table in tables.items():
        stored = contract.part(tensors, module, name).cpu()
        if stored.shape != table.shape or not torch.allclose(stored, table, rtol=0, atol=1e-6):
            raise CheckpointError(f"{module}.{name} is not the published code book", fix="quantize the model again")


def _block(codes: int, absmax: TensorInfo) -> int:
    """The block size from the number of scales; decode takes the exact one from the JSON text."""
    fitting = [block for block in BLOCKS if ceil(codes / block) == absmax.numel]
    if not fitting:
        raise CheckpointError(
            f"{absmax.name} has {absmax.numel} scales for {codes} weights, no block size of bitsandbytes",
            fix="download the checkpoint again",
        )
    return 64 if 64 in fitting else fitting[0]

"""Checks of what is read and written: finite weights, casts that do not overflow, encodings that decode to the same."""

import torch
from torch import Tensor

from quantry.errors import OutputError, WeightError
from quantry.models.weights import NAMES
from quantry.types import QTensor


def check_finite(weight: Tensor, name: str) -> None:
    """Raises WeightError for NaN or infinite weights. `aminmax` propagates NaN, so bad values are counted only then."""
    if weight.numel() and not torch.isfinite(torch.stack(weight.aminmax())).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise WeightError(f"{name} has {bad} weights that are NaN or infinite", fix="repair or retrain the checkpoint")


def cast(weight: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Returns the tensor in another float type. Raises WeightError if it would overflow."""
    if weight.dtype == dtype:
        return weight
    check_finite(weight, name)
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    if largest > torch.finfo(dtype).max:
        raise WeightError(
            f"{name} has a weight of magnitude {largest:g}, more than the {torch.finfo(dtype).max:g} of {NAMES[dtype]}",
            fix="use a preset or format that keeps bf16",
        )
    return weight.to(dtype)


def check_decodes(decoded: QTensor, encoded: QTensor, module: str) -> None:
    """Raises OutputError unless both have the same codes and parameters."""
    pairs = [
        (decoded.codes, encoded.codes),
        (decoded.params.scale, encoded.params.scale),
        (decoded.params.zero, encoded.params.zero),
        (decoded.params.outer, encoded.params.outer),
    ]
    if not all(_same(a, b) for a, b in pairs):
        raise OutputError(f"{module} does not decode to what was encoded", fix="report this as a bug of Quantry")


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and torch.equal(_raw(a), _raw(b))


def _raw(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor

"""The searches of ggml for its k-quants (Q2_K to Q6_K), bit for bit as in its own library, on the CPU or a GPU.

A super-block of 256 weights has 8 or 16 sub-blocks, each with a scale and perhaps a minimum. `search` has three steps:
1. every sub-block by itself: try a row of step sizes, round, solve for the best scale (and minimum), keep the best;
2. the scales of a super-block become whole multiples of one 16-bit number, likewise the minimums;
3. the codes are rounded again, for the scales that the file will hold.
The expensive parts exist twice: in torch (`batched`) and as machine code for the CPU (`compiled`, if llvmlite is
installed).
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.numerics.ggml.exact import TINY
from quantry.numerics.ggml.kquants import batched, compiled
from quantry.numerics.ggml.kquants.rules import RULES, BlockFit, SearchRule, StepSizes
from quantry.numerics.ggml.layout import Fields
from quantry.numerics.simd import AVAILABLE

ALIGN = 64  # super-blocks of a CPU batch are a multiple of this: whole vectors, whose lanes all add in one order


class KQuantBackend(Protocol):
    """The expensive parts of the search; `batched` documents each. Per-sub-block tensors are (sub-blocks, blocks)."""

    def fit_affine(self, rule: SearchRule, steps: StepSizes, weight: Tensor, importance: Tensor | None) -> BlockFit: ...
    def fit_symmetric(self, rule: SearchRule, weight: Tensor, importance: Tensor | None) -> BlockFit: ...
    def fit_improving(self, rule: SearchRule, weight: Tensor) -> tuple[Tensor, Tensor]: ...
    def share_largest(self, values: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def share_signed(self, values: Tensor, top: int, floor: float, code: int) -> tuple[Tensor, Tensor]: ...
    def share_positive(self, values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def share_symmetric(self, values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def round_affine(self, rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor, offset: Tensor) -> Tensor: ...
    def round_symmetric(self, rule: SearchRule, weight: Tensor, fit: BlockFit, step: Tensor) -> Tensor: ...
    def round_over(self, rule: SearchRule, weight: Tensor, codes: Tensor, step: Tensor) -> Tensor: ...


def fast(device: torch.device) -> bool:
    """Returns True if `search` beats ggml's own library there: on any GPU, and on a CPU with llvmlite."""
    return device.type != "cpu" or AVAILABLE


def search(type_name: str, weight: Tensor, importance: Tensor | None, backend: KQuantBackend | None = None) -> Fields:
    """Returns codes and scales of super-blocks (blocks, 256) in float32, given the importance of each weight or None.

    About a million weights a call suit a CPU, many millions a GPU.
    """
    on_cpu = weight.device.type == "cpu"
    backend = backend or (compiled if on_cpu and AVAILABLE else batched)
    weight = weight.float().contiguous()
    if importance is not None:
        importance = importance.float().reshape(weight.shape).contiguous()
    rest = (-weight.shape[0] % ALIGN if len(weight) else ALIGN) if on_cpu else 0
    if not rest:
        return _search(type_name, weight, importance, backend)
    more = (0, 0, 0, rest)
    fields = _search(type_name, pad(weight, more), None if importance is None else pad(importance, more), backend)
    parts = (fields.codes, fields.d, fields.dmin, fields.scales, fields.mins)
    return Fields(*(None if part is None else part[:-rest] for part in parts))  # type: ignore[arg-type]


def _search(type_name: str, weight: Tensor, importance: Tensor | None, backend: KQuantBackend) -> Fields:
    rule = RULES[type_name]
    steps = rule.plain if importance is None else rule.weighted
    if steps:
        return _with_mins(rule, steps, weight, importance, backend)
    if rule.improve and importance is None:
        return _improved(rule, weight, backend)
    return _without_mins(rule, weight, importance, backend)


def _with_mins(
    rule: SearchRule, steps: StepSizes, weight: Tensor, importance: Tensor | None, backend: KQuantBackend
) -> Fields:
    """Searches Q2_K, Q4_K and Q5_K, where a weight is scale * code - minimum."""
    fit = backend.fit_affine(rule, steps, weight, importance)
    if importance is None:
        d, scales = backend.share_largest(fit.scale, rule.scale_top)
        dmin, mins = backend.share_largest(fit.minimum, rule.scale_top)
    else:
        d, scales = backend.share_positive(fit.scale, fit.total, rule.scale_top)
        dmin, mins = backend.share_positive(fit.minimum, fit.total, rule.scale_top)
    d, dmin = d.half(), dmin.half()
    codes = backend.round_affine(rule, weight, fit, d.float() * scales, dmin.float() * mins)
    return Fields(codes, d, dmin, scales.to(torch.uint8).T.contiguous(), mins.to(torch.uint8).T.contiguous())


def _without_mins(rule: SearchRule, weight: Tensor, importance: Tensor | None, backend: KQuantBackend) -> Fields:
    """Searches Q6_K, and Q3_K with importance, where a weight is scale * code and codes have a sign."""
    fit = backend.fit_symmetric(rule, weight, importance)
    if rule.spread is None:
        d, scales = backend.share_signed(fit.scale, rule.scale_top, TINY, 0)
        _forget(fit, d == 0)
    else:
        d, scales = backend.share_symmetric(fit.scale, fit.total, rule.scale_top)
    d = d.half()
    codes = backend.round_symmetric(rule, weight, fit, d.float() * scales)
    return Fields(codes, d, None, scales.to(torch.int8).T.contiguous())


def _improved(rule: SearchRule, weight: Tensor, backend: KQuantBackend) -> Fields:
    """Searches Q3_K without importance: it improves codes one after another instead of trying step sizes."""
    scale, codes = backend.fit_improving(rule, weight)
    d, scales = backend.share_signed(scale, rule.scale_top, 0, -rule.scale_top)
    d = d.half()
    return Fields(
        backend.round_over(rule, weight, codes, d.float() * scales), d, None, scales.to(torch.int8).T.contiguous()
    )


def _forget(fit: BlockFit, blocks: Tensor) -> None:
    """Gives super-blocks the lowest code throughout, as if all weights were zero."""
    gone = blocks.float()
    fit.start.add_(gone / (1 - gone))  # infinity or 0: several times as fast as filling in by a mask
    torch.addcmul(gone, fit.inverse, 1 - gone, out=fit.inverse)

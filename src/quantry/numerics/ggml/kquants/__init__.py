"""The searches of ggml for its k-quants (Q2_K to Q6_K), bit for bit as in its own library, on the CPU or a GPU.

A super-block of 256 weights has 8 or 16 sub-blocks, each with a scale and perhaps a minimum. `search` has three steps:
1. every sub-block by itself: try a row of step sizes, round, solve for the best scale (and minimum), keep the best;
2. the scales of a super-block become whole multiples of one 16-bit number, likewise the minimums;
3. the codes are rounded anew, for the scales that the file will hold.
The heavy parts exist twice: in torch (`batched`) and as machine code for the CPU (`compiled`, if llvmlite is there).
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantry.numerics.ggml.kquants import batched, compiled
from quantry.numerics.ggml.kquants.rules import RULES, TINY, Fit, Rule, Steps
from quantry.numerics.ggml.layout import Fields

ALIGN = 64  # super-blocks in a batch on the CPU are a multiple of this: whole vectors, whose lanes all add in one order


class Engine(Protocol):
    """The heavy parts; `batched` says what each does. Numbers of sub-blocks are (sub-blocks of a block, blocks)."""

    def fit_affine(self, rule: Rule, steps: Steps, weight: Tensor, importance: Tensor | None) -> Fit: ...
    def fit_symmetric(self, rule: Rule, weight: Tensor, importance: Tensor | None) -> Fit: ...
    def fit_improving(self, rule: Rule, weight: Tensor) -> tuple[Tensor, Tensor]: ...
    def share_largest(self, values: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def share_signed(self, values: Tensor, top: int, floor: float, code: int) -> tuple[Tensor, Tensor]: ...
    def share_positive(self, values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def share_symmetric(self, values: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]: ...
    def round_affine(self, rule: Rule, weight: Tensor, fit: Fit, step: Tensor, offset: Tensor) -> Tensor: ...
    def round_symmetric(self, rule: Rule, weight: Tensor, fit: Fit, step: Tensor) -> Tensor: ...
    def round_over(self, rule: Rule, weight: Tensor, codes: Tensor, step: Tensor) -> Tensor: ...


def fast(device: torch.device) -> bool:
    """Whether `search` beats ggml's own library there: on any GPU, and on a CPU with llvmlite."""
    return device.type != "cpu" or compiled.AVAILABLE


def search(kind: str, weight: Tensor, importance: Tensor | None, engine: Engine | None = None) -> Fields:
    """Codes and scales of super-blocks (blocks, 256) in float32, given what an error in each weight counts, or None.

    A call works on all it is given: about a million weights suit a CPU, many millions a GPU.
    """
    on_cpu = weight.device.type == "cpu"
    engine = engine or (compiled if on_cpu and compiled.AVAILABLE else batched)
    weight = weight.float().contiguous()
    if importance is not None:
        importance = importance.float().reshape(weight.shape).contiguous()
    rest = (-weight.shape[0] % ALIGN if len(weight) else ALIGN) if on_cpu else 0
    if not rest:
        return _search(kind, weight, importance, engine)
    more = (0, 0, 0, rest)
    fields = _search(kind, pad(weight, more), None if importance is None else pad(importance, more), engine)
    parts = (fields.codes, fields.d, fields.dmin, fields.scales, fields.mins)
    return Fields(*(None if part is None else part[:-rest] for part in parts))  # type: ignore[arg-type]


def _search(kind: str, weight: Tensor, importance: Tensor | None, engine: Engine) -> Fields:
    rule = RULES[kind]
    steps = rule.plain if importance is None else rule.weighted
    if steps:
        return _with_mins(rule, steps, weight, importance, engine)
    if rule.improve and importance is None:
        return _improved(rule, weight, engine)
    return _without_mins(rule, weight, importance, engine)


def _with_mins(rule: Rule, steps: Steps, weight: Tensor, importance: Tensor | None, engine: Engine) -> Fields:
    """Q2_K, Q4_K and Q5_K, where a weight is scale * code - minimum."""
    fit = engine.fit_affine(rule, steps, weight, importance)
    if importance is None:
        d, scales = engine.share_largest(fit.scale, rule.scale_top)
        dmin, mins = engine.share_largest(fit.minimum, rule.scale_top)
    else:
        d, scales = engine.share_positive(fit.scale, fit.total, rule.scale_top)
        dmin, mins = engine.share_positive(fit.minimum, fit.total, rule.scale_top)
    d, dmin = d.half(), dmin.half()
    codes = engine.round_affine(rule, weight, fit, d.float() * scales, dmin.float() * mins)
    return Fields(codes, d, dmin, scales.to(torch.uint8).T.contiguous(), mins.to(torch.uint8).T.contiguous())


def _without_mins(rule: Rule, weight: Tensor, importance: Tensor | None, engine: Engine) -> Fields:
    """Q6_K, and Q3_K with importance, where a weight is scale * code and codes have a sign."""
    fit = engine.fit_symmetric(rule, weight, importance)
    if rule.spread is None:
        d, scales = engine.share_signed(fit.scale, rule.scale_top, TINY, 0)
        _forget(fit, d == 0)
    else:
        d, scales = engine.share_symmetric(fit.scale, fit.total, rule.scale_top)
    d = d.half()
    codes = engine.round_symmetric(rule, weight, fit, d.float() * scales)
    return Fields(codes, d, None, scales.to(torch.int8).T.contiguous())


def _improved(rule: Rule, weight: Tensor, engine: Engine) -> Fields:
    """Q3_K without importance: codes are improved one after another instead of trying step sizes."""
    scale, codes = engine.fit_improving(rule, weight)
    d, scales = engine.share_signed(scale, rule.scale_top, 0, -rule.scale_top)
    d = d.half()
    return Fields(
        engine.round_over(rule, weight, codes, d.float() * scales), d, None, scales.to(torch.int8).T.contiguous()
    )


def _forget(fit: Fit, blocks: Tensor) -> None:
    """Gives super-blocks the lowest code throughout, as if all were zero."""
    gone = blocks.float()
    fit.start.add_(gone / (1 - gone))  # infinity or 0: several times as fast as filling in by a mask
    torch.addcmul(gone, fit.inverse, 1 - gone, out=fit.inverse)

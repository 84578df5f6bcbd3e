"""Compares every weight of an artefact with the 16-bit one, tensor by tensor: which are wrong, and in what way.

The relative error alone cannot distinguish a 2-bit tensor from a 4-bit one with its neighbour's scales. Three more
numbers can, whatever the grid. The cosine stays above 0.9 down to 2 bits, and is near 0 for another tensor's values or
for rows in another order. The gain of a group, the factor that brings its decoded weights nearest to the original ones,
is 1 up to noise if the scale belongs to the group (its spread is 0.001 at 8 bits and 0.07 at 2), and varies by 0.14 and
more if the scales come from another layer. And a group of ordinary weights never decodes to zeros alone.

Methods that move scales from inputs to weights (AWQ, SmoothQuant) multiply columns, and rows of the layers that feed
them, by factors that the model compensates: these are fitted and removed first. A wrong scale for whole rows of v or up
looks like such a factor and goes unnoticed.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from quantry.models.linears import EXPERT_PARTS, STACKED
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.storage import ARTEFACT_FILE
from quantry.types import Grid, Progress, Scheme

COST = 0.05  # of all comparisons, against a run over the usual text
CHUNK = 1 << 24  # weights compared at a time: 64 MB in float32
GROUP = 128  # columns, for a grid without groups or with groups larger than LARGEST
SMALLEST, LARGEST = 16, 256
SWEEPS = 8  # of fitting columns and rows in turn: the factors converge to 1e-3 after three
PLAIN, VECTOR = "16 bit", "vector"
FED = re.compile(r".*\.(v_proj|up_proj|w3|qkv_proj|gate_up_proj|query_key_value|Wqkv|kv_b_proj)(\.weight)?(\[\d+\])?")

UNLIKE = 0.7  # cosine: 2 bits keep 0.93, another tensor 0 to 0.1
GAIN, SURELY = 0.1, 0.3  # spread of the gain: 2 bits reach 0.07, swapped scales start at 0.14
GAIN_TIMES, TIMES = 2.0, 4.0  # times the median gain and error of the same grid: up to here a tensor is inconspicuous
ERROR = 0.1  # a smaller error is never reported, however little the other tensors lose
CEILING = {2: 0.8, 3: 0.6, 4: 0.4, 5: 0.2, 6: 0.15, 8: 0.15, 16: 0.02}  # by bits, at least twice the worst measured
ORDINARY = 0.25  # of the median group's energy: a group with less may well round to zeros


class Weights(Protocol):
    """An open model, as `sources.open_source` returns it."""

    @property
    def path(self) -> Path: ...
    @property
    def names(self) -> Sequence[str]: ...
    @property
    def schemes(self) -> Mapping[str, Scheme]: ...

    def read(self, name: str) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class TensorError:
    """How one tensor of an artefact differs. Field names are the JSON names."""

    name: str  # an expert of a fused stack has its number at the end: name[3]
    shape: tuple[int, ...]
    grid: str  # tensors of the same grid have similar errors
    bits: int
    error: float  # ||W - Q|| / ||W||; infinite if shapes differ or a value is not finite
    cosine: float = 1.0
    gain: float = 0.0  # root mean square of (gain - 1) over the groups, weighted by their energy
    empty: int = 0  # groups of ordinary weights that are all zero


@dataclass(frozen=True, slots=True)
class Suspect:
    """A tensor with an error that rounding to its grid does not explain."""

    name: str
    error: float
    words: str


def errors(
    reference: Weights, artefact: Weights, progress: Progress | None = None, *, device: str = "cpu"
) -> list[TensorError]:
    """Returns the error of every tensor that both models have, in the order of the reference; computed on the device.

    One pair of tensors is in memory at a time. Norms and biases are compared too, unless a transform changes them. Both
    models may be artefacts.
    """
    transformed = _is_transformed(reference) or _is_transformed(artefact)
    return [
        _compared(
            name,
            weight.to(device),
            decoded.to(device),
            _grid(name, artefact.schemes) or _grid(name, reference.schemes),
            transformed,
        )
        for name, weight, decoded in _pairs(reference, artefact, progress)
        if weight.ndim > 1 or not transformed
    ]


def suspects(errors: Sequence[TensorError]) -> tuple[Suspect, ...]:
    """Returns the tensors with a suspicious error, the worst first; each is compared with those of the same grid."""
    peers: dict[str, list[TensorError]] = {}
    for tensor in errors:
        peers.setdefault(tensor.grid, []).append(tensor)
    suspicious = [
        Suspect(tensor.name, tensor.error, words)
        for tensor in errors
        if (words := _problem(tensor, peers[tensor.grid]))
    ]
    return tuple(sorted(suspicious, key=lambda suspect: -suspect.error))


def _problem(tensor: TensorError, peers: Sequence[TensorError]) -> str:
    """Says what is wrong with a tensor among those of its grid; returns an empty text if nothing is."""
    usual = median(peer.error for peer in peers)
    gain = median(peer.gain for peer in peers)
    if not isfinite(tensor.error):
        return "shapes differ or values are not finite"
    if tensor.cosine < UNLIKE:
        return (
            f"values of another tensor, or rows or columns in another order (cosine {tensor.cosine:.2f}"
            f", error {tensor.error:.2f}, the usual one is {usual:.3f})"
        )
    if tensor.gain > min(SURELY, max(GAIN, GAIN_TIMES * gain)):
        return f"right values at a wrong size: scales of another tensor (off by {tensor.gain:.0%}, usual is {gain:.1%})"
    if tensor.empty:
        return f"{tensor.empty} groups of weights are zero"
    if tensor.error > min(CEILING[tensor.bits], max(ERROR, TIMES * usual)):
        return f"error {tensor.error:.3f}, more than its grid explains: the usual one is {usual:.3f}"
    return ""


def _pairs(reference: Weights, artefact: Weights, progress: Progress | None) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields tensors of the same name; experts one by one, even if only one of the models has them fused."""
    original_names, decoded_names = set(reference.names), set(artefact.names)
    for place, name in enumerate(reference.names):
        if progress:
            progress(place, len(reference.names), name)
        if name in decoded_names:
            yield from _experts(name, reference.read(name), artefact.read(name))
        elif experts := _separate_names(name, decoded_names):
            matched = _separate_experts(artefact, experts, reference.read(name))
            yield from ((part, weight, decoded) for part, decoded, weight in matched)
    for name in artefact.names:
        if name not in original_names and (experts := _separate_names(name, original_names)):
            yield from _separate_experts(reference, experts, artefact.read(name))


def _experts(name: str, weight: Tensor, decoded: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    if weight.ndim < 3 or weight.shape != decoded.shape or not STACKED.fullmatch(name):
        yield name, weight, decoded
        return
    for number in range(len(weight)):
        yield f"{name}[{number}]", weight[number], decoded[number]


def _separate_names(name: str, others: Collection[str]) -> list[list[str]]:
    """Returns, expert by expert, the names of the separate tensors that a fused stack is compared with."""
    stacked = STACKED.fullmatch(name)
    if stacked is None:
        return []
    leaves = EXPERT_PARTS[stacked["projection"]]
    experts: list[list[str]] = []
    while all(f"{stacked['experts']}.{len(experts)}.{leaf}.weight" in others for leaf in leaves):
        experts.append([f"{stacked['experts']}.{len(experts)}.{leaf}.weight" for leaf in leaves])
    return experts


def _separate_experts(
    model: Weights, experts: Sequence[Sequence[str]], stack: Tensor
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields a model's matrices of experts, each with its slice of a stack, which holds gate before up."""
    for expert, names in zip(stack, experts, strict=False):
        matrices = [model.read(name) for name in names]
        upright = expert.shape[-1] == matrices[0].shape[-1]  # some families keep (in, out)
        pieces = (expert if upright else expert.t()).chunk(len(names))
        yield from zip(names, matrices, pieces, strict=True)


def _grid(name: str, schemes: Mapping[str, Scheme]) -> Grid | None:
    module = re.sub(r"(\.weight)?(\[\d+\])?$", "", name)
    scheme = schemes.get(module) or schemes.get(name)
    return scheme.weight if scheme else None


def _compared(name: str, weight: Tensor, decoded: Tensor, grid: Grid | None, transformed: bool) -> TensorError:
    shape, label, bits = tuple(weight.shape), *_label(weight, grid)
    if shape != tuple(decoded.shape):
        return TensorError(name, shape, label, bits, inf, cosine=0.0)
    if prod(shape) == 0:
        return TensorError(name, shape, label, bits, 0.0)
    matrix, decoded_matrix = (
        tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1) for tensor in (weight, decoded)
    )
    if transformed:
        matrix = _rescaled(matrix.float(), decoded_matrix.float(), rows=FED.fullmatch(name) is not None)
    group = grid.block[1] if grid is not None and SMALLEST <= grid.block[1] <= LARGEST else GROUP  # share a scale
    error, cosine, groups = _sums(matrix, decoded_matrix, group)
    gain, empty = (0.0, 0) if label == VECTOR else _gains(groups)
    return TensorError(name, shape, label, bits, error, cosine, gain, empty)


def _label(tensor: Tensor, grid: Grid | None) -> tuple[str, int]:
    if tensor.ndim < 2:
        return VECTOR, 16
    return (PLAIN, 16) if grid is None or grid.is_cast else (f"{grid.kind} {grid.bits} bit", grid.bits)


def _sums(weight: Tensor, decoded: Tensor, group: int) -> tuple[float, float, Tensor]:
    """Returns the error, the cosine, and for every group the sums of W W, W Q and Q Q in float64."""
    total = torch.zeros(4, dtype=torch.float64, device=weight.device)
    groups = []
    rows, columns = weight.shape
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        w, q = weight[start : start + step].float(), decoded[start : start + step].float()
        sums = torch.stack([_grouped(product, group) for product in (w * w, w * q, q * q)])
        groups.append(sums)
        total += torch.cat([sums.sum((1, 2)), (w - q).square_().sum(dtype=torch.float64)[None]])
    ww, wq, qq, difference = total.tolist()
    if not all(map(isfinite, (ww, qq, difference))):
        return inf, 0.0, torch.cat(groups, 1)
    error = (difference / ww) ** 0.5 if ww else (inf if difference else 0.0)
    cosine = wq / (ww * qq) ** 0.5 if ww and qq else float(ww == qq)
    return error, cosine, torch.cat(groups, 1)


def _grouped(products: Tensor, group: int) -> Tensor:
    """Sums groups of columns; the last may be shorter."""
    padded = torch.nn.functional.pad(products, (0, -products.shape[1] % group))
    return padded.view(len(products), -1, group).sum(-1, dtype=torch.float64)


def _gains(groups: Tensor) -> tuple[float, int]:
    """Returns the spread of the groups' gains about 1, and how many groups of ordinary weights are zero."""
    ww, wq, qq = groups.flatten(1)
    gain = torch.where(qq > 0, wq / qq, 1.0)  # an empty group is counted, not averaged
    distance = (gain - 1).abs().clamp(max=1)
    spread = ((ww * distance.square()).sum() / ww.sum()).sqrt().item() if ww.sum() > 0 else 0.0
    empty = (qq == 0) & (ww > ORDINARY * ww.median())
    return spread, int(empty.sum())


def _rescaled(weight: Tensor, decoded: Tensor, rows: bool) -> Tensor:
    """Multiplies the columns of `weight`, and its rows if `rows`, by the factors that bring it nearest to `decoded`.

    The original is rescaled and not the artefact, whose rounding error would grow with the factors.
    """
    scaled = weight
    for _ in range(SWEEPS if rows else 1):
        scaled = scaled * _factors(scaled, decoded, 0)
        if rows:
            scaled = scaled * _factors(scaled, decoded, 1)[:, None]
    return scaled


def _factors(weight: Tensor, decoded: Tensor, dim: int) -> Tensor:
    size = weight.square().sum(dim)
    return torch.where(size > 0, (weight * decoded).sum(dim) / size, 1.0)


def _is_transformed(model: Weights) -> bool:
    """Returns True if quantry.json says that a method moved scales into the weights."""
    folder = model.path if model.path.is_dir() else model.path.parent
    if not (folder / ARTEFACT_FILE).is_file():
        return False
    recipe = read_artefact_file(folder).get("recipe", {})
    presets = [recipe.get("preset"), *(rule.get("preset") for rule in recipe.get("rules", ()))]
    return any(preset and preset.get("transform") for preset in presets)

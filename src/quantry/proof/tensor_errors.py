"""Every weight of an artefact against the 16-bit one, tensor by tensor: which are off, and what is wrong with them.

The relative error alone cannot tell a 2-bit tensor from a 4-bit one with its neighbour's scales. Three more numbers
can, whatever the grid. The cosine stays above 0.9 down to 2 bits, and is near 0 for another tensor's values or rows in
another order. The gain of a group, the factor that would bring its decoded weights nearest to the original ones, is 1
but for noise while its scale is its own (its spread is 0.001 at 8 bits and 0.07 at 2), and varies by 0.14 and more when
the scales are those of another layer. And a group of ordinary weights never decodes to zeros alone.

Methods that move scales from inputs to weights (AWQ, SmoothQuant) change columns, and rows of what feeds them, by
factors that the model compensates: these are fitted out first. A wrong scale for whole rows of v or up then passes for
such a factor.
"""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from quantry.models.linears import STACKED
from quantry.storage import ARTEFACT_FILE
from quantry.types import Grid, Scheme

CHUNK = 1 << 24  # weights compared at a time: 64 MB in float32
GROUP = 128  # columns, where a grid has no groups or groups larger than LARGEST
SMALLEST, LARGEST = 16, 256
SWEEPS = 8  # of fitting columns and rows in turn: the factors are found to 1e-3 after three
PLAIN, VECTOR = "16 bit", "vector"
FED = re.compile(r".*\.(v_proj|up_proj|w3|qkv_proj|gate_up_proj|query_key_value|Wqkv|kv_b_proj)(\.weight)?(\[\d+\])?")

UNLIKE = 0.7  # cosine: 2 bits keep 0.93, another tensor 0 to 0.1
GAIN, SURELY = 0.1, 0.3  # spread of the gain: 2 bits reach 0.07, swapped scales start at 0.14
GAIN_TIMES, TIMES = 2.0, 4.0  # as far off as the middle one of the same grid (gain, error), and still not alarming
ERROR = 0.1  # below it a tensor is not worth a word, however little the others lose
CEILING = {2: 0.8, 3: 0.6, 4: 0.4, 5: 0.2, 6: 0.15, 8: 0.15, 16: 0.02}  # by bits, twice and more of the worst seen
ORDINARY = 0.25  # of the middle group's energy: a group with less may well round to zeros


class Weights(Protocol):
    """An open model, as `sources.open_source` gives it."""

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

    name: str  # an expert of a fused stack has its number behind it: name[3]
    shape: tuple[int, ...]
    grid: str  # tensors of the same grid lose alike
    bits: int
    error: float  # ||W - Q|| / ||W||; infinite where shapes differ or a value is not finite
    cosine: float = 1.0
    gain: float = 0.0  # root mean square of (gain - 1) over the groups, by their energy
    empty: int = 0  # groups of ordinary weights that are all zero


@dataclass(frozen=True, slots=True)
class Suspect:
    """A tensor that no rounding to its grid explains."""

    name: str
    error: float
    words: str


def errors(reference: Weights, artefact: Weights) -> list[TensorError]:
    """The error of every tensor that both have, in the order of the reference; one pair is in memory at a time.

    Norms and biases are compared too, but where a transform changes them. Two artefacts can be compared as well.
    """
    moved = _transformed(reference) or _transformed(artefact)
    found = []
    for name, one, other in _pairs(reference, artefact):
        grid = _grid(name, artefact.schemes) or _grid(name, reference.schemes)
        if one.ndim > 1 or not moved:
            found.append(_compared(name, one, other, grid, moved))
    return found


def suspects(found: Sequence[TensorError]) -> tuple[Suspect, ...]:
    """The tensors that are off, the worst first; each is held against those of the same grid."""
    peers: dict[str, list[TensorError]] = {}
    for tensor in found:
        peers.setdefault(tensor.grid, []).append(tensor)
    named = [Suspect(tensor.name, tensor.error, words) for tensor in found if (words := _wrong(tensor, peers))]
    return tuple(sorted(named, key=lambda suspect: -suspect.error))


def _wrong(tensor: TensorError, peers: Mapping[str, Sequence[TensorError]]) -> str:
    """What is wrong with a tensor, or nothing."""
    alike = peers[tensor.grid]
    usual = median(peer.error for peer in alike)
    gain = median(peer.gain for peer in alike)
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


def _pairs(reference: Weights, artefact: Weights) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Tensors of the same name; experts one by one, whether each side keeps them fused or apart."""
    ours, theirs = set(reference.names), set(artefact.names)
    for name in reference.names:
        if name in theirs:
            yield from _experts(name, reference.read(name), artefact.read(name))
        elif parts := _apart(name, theirs):
            yield from ((part, one, other) for part, other, one in _cut(artefact, parts, reference.read(name)))
    for name in artefact.names:
        if name not in ours and (parts := _apart(name, ours)):
            yield from _cut(reference, parts, artefact.read(name))


def _experts(name: str, one: Tensor, other: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    if one.ndim < 3 or one.shape != other.shape or not STACKED.fullmatch(name):
        yield name, one, other
        return
    for number in range(len(one)):
        yield f"{name}[{number}]", one[number], other[number]


def _apart(name: str, others: Collection[str]) -> list[list[str]]:
    """The names that the experts of a fused stack have where each has its own tensors; expert by expert."""
    stacked = STACKED.fullmatch(name)
    if stacked is None:
        return []
    leaves = ("gate_proj", "up_proj") if stacked["kind"] == "gate_up_proj" else ("down_proj",)
    found: list[list[str]] = []
    while all(f"{stacked['experts']}.{len(found)}.{leaf}.weight" in others for leaf in leaves):
        found.append([f"{stacked['experts']}.{len(found)}.{leaf}.weight" for leaf in leaves])
    return found


def _cut(apart: Weights, parts: Sequence[Sequence[str]], stack: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The matrices of experts that are apart, each with its part of a stack; gate lies before up in one matrix."""
    for expert, names in zip(stack, parts, strict=False):
        matrices = [apart.read(name) for name in names]
        upright = expert.shape[-1] == matrices[0].shape[-1]  # some families keep (in, out)
        pieces = (expert if upright else expert.t()).chunk(len(names))
        yield from zip(names, matrices, pieces, strict=True)


def _grid(name: str, schemes: Mapping[str, Scheme]) -> Grid | None:
    module = re.sub(r"(\.weight)?(\[\d+\])?$", "", name)
    scheme = schemes.get(module) or schemes.get(name)
    return scheme.weight if scheme else None


def _compared(name: str, one: Tensor, other: Tensor, grid: Grid | None, moved: bool) -> TensorError:
    shape, label, bits = tuple(one.shape), *_label(one, grid)
    if shape != tuple(other.shape):
        return TensorError(name, shape, label, bits, inf, cosine=0.0)
    if prod(shape) == 0:
        return TensorError(name, shape, label, bits, 0.0)
    one, other = (tensor.reshape(-1, tensor.shape[-1] if tensor.ndim else 1) for tensor in (one, other))
    if moved:
        one = _moved(one.float(), other.float(), rows=FED.fullmatch(name) is not None)
    error, cosine, groups = _sums(one, other, _group(grid))
    gain, empty = (0.0, 0) if label == VECTOR else _gains(groups)
    return TensorError(name, shape, label, bits, error, cosine, gain, empty)


def _label(tensor: Tensor, grid: Grid | None) -> tuple[str, int]:
    if tensor.ndim < 2:
        return VECTOR, 16
    return (PLAIN, 16) if grid is None or grid.is_cast else (f"{grid.kind} {grid.bits} bit", grid.bits)


def _group(grid: Grid | None) -> int:
    """The columns that share a scale, which are compared together."""
    return grid.block[1] if grid is not None and SMALLEST <= grid.block[1] <= LARGEST else GROUP


def _sums(one: Tensor, other: Tensor, group: int) -> tuple[float, float, Tensor]:
    """Error, cosine, and of every group the sums of W W, W Q and Q Q, in float64."""
    total = torch.zeros(4, dtype=torch.float64)
    groups = []
    rows, columns = one.shape
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        first, second = one[start : start + step].float(), other[start : start + step].float()
        sums = torch.stack([_grouped(a * b, group) for a, b in ((first, first), (first, second), (second, second))])
        groups.append(sums)
        apart = (first - second).square_().sum(dtype=torch.float64)
        total += torch.cat([sums.sum((1, 2)), apart[None]])
    size, product, size_of_other, apart = total.tolist()
    if not all(map(isfinite, (size, size_of_other, apart))):
        return inf, 0.0, torch.cat(groups, 1)
    return _ratio(apart, size), _cosine(product, size, size_of_other), torch.cat(groups, 1)


def _grouped(products: Tensor, group: int) -> Tensor:
    """The sums over groups of columns; the last may be shorter."""
    padded = torch.nn.functional.pad(products, (0, -products.shape[1] % group))
    return padded.view(len(products), -1, group).sum(-1, dtype=torch.float64)


def _ratio(apart: float, size: float) -> float:
    return (apart / size) ** 0.5 if size else (inf if apart else 0.0)


def _cosine(product: float, size: float, other: float) -> float:
    return product / (size * other) ** 0.5 if size and other else float(size == other)


def _gains(groups: Tensor) -> tuple[float, int]:
    """The spread of the groups' gains about 1, and the groups that are empty though they should not be."""
    size, product, other = groups.flatten(1)
    gain = torch.where(other > 0, product / other, 1.0)  # an empty group is counted, not averaged
    away = (gain - 1).abs().clamp(max=1)
    spread = ((size * away.square()).sum() / size.sum()).sqrt().item() if size.sum() > 0 else 0.0
    empty = (other == 0) & (size > ORDINARY * size.median())
    return spread, int(empty.sum())


def _moved(one: Tensor, other: Tensor, rows: bool) -> Tensor:
    """`one` with factors for its columns, and for its rows if asked for, that bring it nearest to `other`.

    The original is moved and not the artefact, whose rounding would grow with the factors it is divided by.
    """
    for _ in range(SWEEPS if rows else 1):
        one = one * _factors(one, other, 0)
        if rows:
            one = one * _factors(one, other, 1)[:, None]
    return one


def _factors(one: Tensor, other: Tensor, dim: int) -> Tensor:
    size = one.square().sum(dim)
    return torch.where(size > 0, (one * other).sum(dim) / size, 1.0)


def _transformed(model: Weights) -> bool:
    """Whether quantry.json says that scales were moved into the weights."""
    folder = model.path if model.path.is_dir() else model.path.parent
    file = folder / ARTEFACT_FILE
    if not file.is_file():
        return False
    recipe: Any = json.loads(file.read_text()).get("recipe", {})
    used = [recipe.get("preset"), *(rule.get("preset") for rule in recipe.get("rules", ()))]
    return any(preset and preset.get("transform") for preset in used)

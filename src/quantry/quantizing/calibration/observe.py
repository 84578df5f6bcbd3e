"""What the linear layers of one decoder block are given, gathered while the block runs.

Layers that are given the very same tensor (q, k and v; gate, up, router and shared expert) share one `Stats`; an expert
has its own, by the tokens that were routed to it. The Gram matrix is summed in float32 from products that are never
rounded to 16 bit, since GPTQ takes its Cholesky factor. The CPU computes only the upper triangle, in panels of rows:
61 % of the work at 1536 channels, 67 % at 576. What goes into the KV cache is seen by a cache that keeps nothing.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from quantry.blockwise.taps import LinearInputs, Place
from quantry.blockwise.walk import Block
from quantry.errors import QuantryError, WeightError
from quantry.models.linears import QUANTIZED_PARTS, STACKED
from quantry.models.parts import part_of
from quantry.types import Stats

BINS = 2048  # of a finished histogram
FINE = 16 * BINS  # while it grows: its range doubles, so at least half of the bins are in use
LEAST = 256  # tokens below which an expert borrows the statistics of all experts
PANELS = {"cpu": 192, "cuda": 2048}  # rows of the Gram matrix at a time: small saves work, large keeps units busy
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OTHER = "use a model that transformers runs with plain linear layers"


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The largest magnitudes that go into the KV cache, float32 by key-value head: keys after rotation, and values."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """What calibration saw of one block.

    Modules are named as in the checkpoint, experts of a fused stack as models/linears.py names them. An expert that no
    token reached has a group without statistics.
    """

    stats: Mapping[str, Stats]  # by group: the modules that share an input, named after the first of them
    groups: Mapping[str, str]  # module -> group
    pools: Mapping[str, str]  # group of an expert -> what the same inputs of all experts of the layer are called
    heads: Heads | None = None

    def tokens(self) -> dict[str, dict[str, int]]:
        """The tokens that each expert saw: by pool, then by group."""
        found: dict[str, dict[str, int]] = {}
        for group, pool in self.pools.items():
            seen = self.stats.get(group)
            found.setdefault(pool, {})[group] = seen.tokens if seen else 0
        return found

    def covered(self, least: int = LEAST) -> tuple[dict[str, Stats], tuple[str, ...]]:
        """Statistics for every group, and the groups of starved experts, which get those of all experts together."""
        stats, starved = dict(self.stats), []
        for counts in self.tokens().values():
            short = [group for group, tokens in counts.items() if tokens < least]
            if short:
                mixed = merge(self.stats[group] for group in counts if group in self.stats)
                stats |= dict.fromkeys(short, mixed)
                starved += short
        return stats, tuple(starved)


def collect(block: Block, *, advance: bool = True, histogram: bool = False) -> Observed:
    """Runs a block on the hidden states that have come to it; `advance` hands them on in the same pass."""
    watch, heads = _Watch(histogram), _HeadWatch()
    inputs = LinearInputs(block.module, block.name, watch.seen)
    with inputs, _after_batch(block.module, watch.next_batch), _cached(block, heads):
        if advance:
            block.advance()
        else:
            for _ in block.outputs():
                pass
    return _observed(watch, modules(block), heads.found())


def attention(block: Block) -> Heads | None:
    """What a block puts into the KV cache; nothing for one that has none. Hidden states stay where they are."""
    heads = _HeadWatch()
    with _cached(block, heads):
        for _ in block.outputs():
            pass
    return heads.found()


def merge(parts: Iterable[Stats]) -> Stats:
    """The statistics of several inputs as if they were one."""
    parts = list(parts)
    tokens = sum(part.tokens for part in parts)
    weights = [part.tokens / tokens for part in parts]
    absmax = torch.stack([part.absmax for part in parts]).amax(0)
    gram = torch.zeros_like(parts[0].gram)
    for part, weight in zip(parts, weights, strict=True):
        gram.add_(part.gram, alpha=weight)
    means = torch.stack([part.mean_abs * weight for part, weight in zip(parts, weights, strict=True)])
    counts = [part.histogram for part in parts]
    top = float(absmax.max())
    histogram = sum(
        _rebin(count, float(part.absmax.max()), top, BINS)
        for part, count in zip(parts, counts, strict=True)
        if count is not None
    )
    whole = histogram if isinstance(histogram, Tensor) and all(count is not None for count in counts) else None
    return Stats(tokens, gram, absmax, means.sum(0), gram.diagonal().clone(), whole)


def modules(block: Block) -> dict[Place, tuple[str, ...]]:
    """The modules of a block, as the checkpoint names them, by the parameter (and the expert in it) they are in."""
    found: dict[Place, tuple[str, ...]] = {}
    shapes = dict(block.module.named_parameters(prefix=block.name))
    for tensor, keys in block.sources.items():
        for key in keys:
            if key not in shapes or shapes[key].ndim not in (2, 3) or not _is_matrix(tensor):
                continue
            place = key.removesuffix(".weight")
            number = EXPERT.search(tensor)
            if shapes[key].ndim == 2 or number:
                where: Place = (place, int(number[1]) if number and shapes[key].ndim == 3 else None)
                found[where] = (*found.get(where, ()), *module_names(tensor, None))
            else:
                for expert in range(shapes[key].shape[0]):
                    found[place, expert] = (*found.get((place, expert), ()), *module_names(tensor, expert))
    return found


def module_names(tensor: str, expert: int | None) -> tuple[str, ...]:
    """The modules that a tensor of the checkpoint, or one expert in its stack, stands for."""
    stem = tensor.removesuffix(".weight")
    if expert is None:
        return (stem,)
    stacked = STACKED.fullmatch(tensor)
    if stacked is None:
        return (f"{stem}.{expert}",)
    leaves = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[stacked["kind"]]
    return tuple(f"{stacked['experts']}.{expert}.{leaf}" for leaf in leaves)


def _is_matrix(tensor: str) -> bool:
    return tensor.endswith(".weight") or STACKED.fullmatch(tensor) is not None


class _Watch:
    """Sorts the inputs of a block's linear layers into groups and adds them up."""

    def __init__(self, histogram: bool) -> None:
        self.group: dict[Place, Place] = {}  # layer -> the first one that was given the same input
        self.sums: dict[Place, _Sums] = {}
        self._histogram = histogram
        self._alive: dict[tuple[int, int, int], tuple[Place, Tensor]] = {}  # held, so that no memory is used again

    def seen(self, name: str, expert: int | None, inputs: Tensor) -> None:
        """Takes note of the input of a linear layer."""
        place = (name, expert)
        identity = (inputs.data_ptr(), inputs.numel(), inputs._version)
        if inputs.numel() == 0:
            return
        first = self._alive.setdefault(identity, (place, inputs))[0]
        group = self.group.setdefault(place, first)
        if group != first:
            raise QuantryError(f"{name} shares its input with other layers only at times", fix=OTHER)
        if group == place:
            rows = inputs.detach().reshape(-1, inputs.shape[-1])
            if place not in self.sums:
                self.sums[place] = _Sums(rows.shape[1], rows.device, self._histogram)
            self.sums[place].add(rows, name if expert is None else f"{name} (expert {expert})")

    def next_batch(self) -> None:
        """Forgets the inputs of a batch that is through."""
        self._alive.clear()


def _observed(watch: _Watch, names: Mapping[Place, tuple[str, ...]], heads: Heads | None) -> Observed:
    """From places in the model to modules of the checkpoint."""
    group_of = {place: watch.group.get(place, place) for place in names}
    called: dict[Place, str] = {}
    for place, group in group_of.items():
        called.setdefault(group, names[place][0])
    _check_seen(watch, names)
    stats = {called[group]: sums.finish() for group, sums in watch.sums.items() if group in called}
    groups = {module: called[group_of[place]] for place, many in names.items() for module in many}
    pools = {called[group_of[place]]: f"{place[0]}.*" for place in names if place[1] is not None}
    return Observed(stats, groups, pools, heads)


def _check_seen(watch: _Watch, names: Mapping[Place, tuple[str, ...]]) -> None:
    """Every layer must have been seen, of experts at least one: not every family calls linear layers so."""
    reached = {place[0] for place in watch.group}
    for (name, _), (module, *_) in names.items():
        if name not in reached and part_of(f"{module}.weight", 1 << 20) in QUANTIZED_PARTS:
            raise QuantryError(f"the input of {module} is not seen: it is no plain linear layer", fix=OTHER)


class _Sums:
    """Running sums over the rows of one input."""

    def __init__(self, channels: int, device: torch.device, histogram: bool) -> None:
        self.tokens = 0
        self._gram = torch.zeros(channels, channels, device=device)
        self._absmax = torch.zeros(channels, device=device)
        self._abs = torch.zeros(channels, device=device, dtype=torch.float64)
        self._histogram = _Histogram(device) if histogram else None

    def add(self, rows: Tensor, name: str) -> None:
        """Adds rows of (tokens, channels)."""
        exact = rows.float()  # for a Gram matrix on the CPU, too
        magnitudes = exact.abs()
        absmax = magnitudes.amax(0)
        _check_finite(absmax, name, rows.dtype)
        self.tokens += rows.shape[0]
        torch.maximum(self._absmax, absmax, out=self._absmax)
        self._abs += magnitudes.sum(0)
        if self._histogram:
            self._histogram.add(magnitudes, float(absmax.max()))
        add_gram(self._gram, rows if rows.is_cuda else exact)

    def finish(self) -> Stats:
        """The means, and the lower triangle of the Gram matrix as a mirror of the upper one."""
        gram = self._gram.triu_().div_(self.tokens)
        gram += gram.triu(1).T
        histogram = self._histogram.finish(float(self._absmax.max())) if self._histogram else None
        mean_abs = (self._abs / self.tokens).float()
        return Stats(self.tokens, gram, self._absmax, mean_abs, gram.diagonal().clone(), histogram)


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Adds the rows' products x x' to the upper triangle of a float32 matrix; what is below it is not defined."""
    step = PANELS.get(rows.device.type, PANELS["cuda"])
    exact = rows if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16) else rows.float()
    for start in range(0, gram.shape[0], step):
        left, right = exact[:, start : start + step].T, exact[:, start:]
        panel = gram[start : start + step, start:]
        if exact.dtype == torch.float32:
            panel.addmm_(left, right)
        else:  # 16-bit factors, float32 sums and results; only CUDA has this product
            panel += torch.mm(left, right, out_dtype=torch.float32)


class _Histogram:
    """Counts of magnitudes over a range that doubles when it is too small; two bins then become one, exactly."""

    def __init__(self, device: torch.device) -> None:
        self._counts = torch.zeros(FINE, dtype=torch.int64, device=device)
        self._range = 0.0

    def add(self, magnitudes: Tensor, top: float) -> None:
        self._range = self._range or top
        while top > self._range:
            self._counts = torch.cat([self._counts.view(-1, 2).sum(1), torch.zeros_like(self._counts[FINE // 2 :])])
            self._range *= 2
        if self._range == 0:
            self._counts[0] += magnitudes.numel()
            return
        places = (magnitudes.flatten() * (FINE / self._range)).int().clamp_(max=FINE - 1)
        self._counts += torch.bincount(places, minlength=FINE)

    def finish(self, top: float) -> Tensor:
        """Counts over equal steps from 0 to the largest magnitude."""
        return _rebin(self._counts, self._range, top, BINS)


def _rebin(counts: Tensor, old: float, new: float, bins: int) -> Tensor:
    """Counts over [0, new] from finer ones over [0, old]; each bin goes where its middle lies."""
    middles = (torch.arange(len(counts), device=counts.device, dtype=torch.float64) + 0.5) * (old / len(counts))
    places = (middles * (bins / new)).long().clamp_(max=bins - 1) if new else torch.zeros_like(counts)
    return torch.zeros(bins, dtype=torch.int64, device=counts.device).index_add_(0, places, counts)


class _HeadWatch(DynamicCache):
    """A KV cache that keeps the largest magnitude of each head and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Notes (windows, heads, tokens, channels) of keys and values, and gives them back."""
        new = [states.detach().abs().amax((0, 2, 3)).float() for states in (key_states, value_states)]
        self._largest = (
            [torch.maximum(*pair) for pair in zip(self._largest, new, strict=True)] if self._largest else new
        )
        return key_states, value_states

    def found(self) -> Heads | None:
        return Heads(*self._largest) if self._largest else None


@contextmanager
def _cached(block: Block, cache: DynamicCache) -> Iterator[None]:
    """A block that writes into a cache; one that knows no such thing is left alone."""
    if "past_key_values" not in signature(type(block.module).forward).parameters:
        yield
        return
    handle = block.module.register_forward_pre_hook(
        lambda _, args, kwargs: (args, {**kwargs, "past_key_values": cache}), with_kwargs=True
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _after_batch(module: nn.Module, then: Any) -> Iterator[None]:
    handle = module.register_forward_hook(lambda *_: then())
    try:
        yield
    finally:
        handle.remove()


def _check_finite(absmax: Tensor, name: str, dtype: torch.dtype) -> None:
    if not bool(absmax.isfinite().all()):
        kind = str(dtype).removeprefix("torch.")
        fix = "compute in bfloat16 or float32" if dtype == torch.float16 else "check the weights before it"
        why = ", likely an overflow" if dtype == torch.float16 else ""
        raise WeightError(f"the input of {name} has values that are not finite in {kind}{why}", fix=fix)

"""Gathers statistics of the inputs of one decoder block's linear layers while the block runs.

Layers that read the very same tensor (q, k and v; gate, up, router and shared expert) share one `Stats`; an expert has
its own, over the tokens routed to it. The Gram matrix is summed in float32 from products that are never rounded to 16
bit, since GPTQ takes its Cholesky factor. The CPU computes only the upper triangle, in panels of rows: 61 % of the work
at 1536 channels, 67 % at 576. A cache that stores nothing sees what goes into the KV cache.
"""

import re
from collections.abc import Iterator, Mapping
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
from quantry.models.linears import QUANTIZED_PARTS, STACKED, module_names
from quantry.models.parts import part_of
from quantry.quantizing.calibration.statistics import BINS, Heads, merge, rebin
from quantry.types import Stats

FINE = 16 * BINS  # of a growing histogram: its range doubles, so at least half of the bins are in use
LEAST = 256  # tokens below which an expert borrows the statistics of all experts
PANELS = {"cpu": 192, "cuda": 2048}  # rows of the Gram matrix at a time: small saves work, large keeps units busy
EXPERT = re.compile(r"\.experts\.(\d+)\.")
OTHER = "use a model that transformers runs with plain linear layers"


@dataclass(frozen=True, slots=True, eq=False)
class ObservedBlock:
    """What calibration saw of one block.

    Modules are named as in the checkpoint, experts of a fused stack as models/linears.py names them. The group of an
    expert that no token reached has no statistics.
    """

    stats: Mapping[str, Stats]  # by group: the modules that share an input, named after the first one
    groups: Mapping[str, str]  # module -> group
    pools: Mapping[str, str]  # group of an expert -> its pool: the same inputs of all experts of the layer
    heads: Heads | None = None

    def tokens(self) -> dict[str, dict[str, int]]:
        """Returns the tokens that each expert saw, by pool and group."""
        counts: dict[str, dict[str, int]] = {}
        for group, pool in self.pools.items():
            stats = self.stats.get(group)
            counts.setdefault(pool, {})[group] = stats.tokens if stats else 0
        return counts

    def expert_tokens(self) -> list[int]:
        """Returns the tokens that were routed to each expert, in their order; none for a block without experts."""
        counts = next(iter(self.tokens().values()), {})
        return [counts[group] for group in sorted(counts, key=lambda group: int(re.findall(r"\d+", group)[-1]))]

    def by_module(self, least: int = LEAST) -> tuple[dict[str, Stats], tuple[str, ...]]:
        """Returns the statistics of every module, and the groups of starved experts.

        An expert with fewer than `least` tokens gets the statistics of all experts of its layer together.
        """
        stats, starved = dict(self.stats), []
        for counts in self.tokens().values():
            short = [group for group, tokens in counts.items() if tokens < least]
            if short:
                mixed = merge(self.stats[group] for group in counts if group in self.stats)
                stats |= dict.fromkeys(short, mixed)
                starved += short
        return {module: stats[group] for module, group in self.groups.items() if group in stats}, tuple(starved)


def collect(block: Block, *, advance: bool = True, histogram: bool = False) -> ObservedBlock:
    """Runs a block on its hidden states and gathers statistics; `advance` hands them on in the same pass."""
    watch, watched = _Watch(histogram), _HeadWatch()
    inputs = LinearInputs(block.module, block.name, watch.seen)
    with inputs, _after_batch(block.module, watch.next_batch), _cached(block, watched):
        if advance:
            block.advance()
        else:
            for _ in block.outputs():
                pass
    return _observed(watch, modules(block), watched.heads())


def attention(block: Block) -> Heads | None:
    """Returns what a block puts into the KV cache, None if it has no cache; does not advance."""
    watched = _HeadWatch()
    with _cached(block, watched):
        for _ in block.outputs():
            pass
    return watched.heads()


def modules(block: Block) -> dict[Place, tuple[str, ...]]:
    """Returns the modules of a block, as the checkpoint names them, by parameter and the expert in it."""
    names: dict[Place, tuple[str, ...]] = {}
    shapes = dict(block.module.named_parameters(prefix=block.name))
    for tensor, keys in block.sources.items():
        for key in keys:
            if key not in shapes or shapes[key].ndim not in (2, 3) or not _is_matrix(tensor):
                continue
            place = key.removesuffix(".weight")
            number = EXPERT.search(tensor)
            if shapes[key].ndim == 2 or number:
                where: Place = (place, int(number[1]) if number and shapes[key].ndim == 3 else None)
                names[where] = (*names.get(where, ()), *module_names(tensor, None))
            else:
                for expert in range(shapes[key].shape[0]):
                    names[place, expert] = (*names.get((place, expert), ()), *module_names(tensor, expert))
    return names


def _is_matrix(tensor: str) -> bool:
    return tensor.endswith(".weight") or STACKED.fullmatch(tensor) is not None


class _Watch:
    """Sorts the inputs of a block's linear layers into groups and sums them up."""

    def __init__(self, histogram: bool) -> None:
        self.group: dict[Place, Place] = {}  # layer -> the first one with the same input
        self.sums: dict[Place, InputSums] = {}
        self._histogram = histogram
        self._alive: dict[tuple[int, int, int], tuple[Place, Tensor]] = {}  # held, so that no address is reused

    def seen(self, name: str, expert: int | None, inputs: Tensor) -> None:
        """Adds the input of a linear layer to its group."""
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
                self.sums[place] = InputSums(rows.shape[1], rows.device, self._histogram)
            self.sums[place].add(rows, name if expert is None else f"{name} (expert {expert})")

    def next_batch(self) -> None:
        """Forgets the inputs of the last batch."""
        self._alive.clear()


def _observed(watch: _Watch, names: Mapping[Place, tuple[str, ...]], heads: Heads | None) -> ObservedBlock:
    group_of = {place: watch.group.get(place, place) for place in names}
    called: dict[Place, str] = {}
    for place, group in group_of.items():
        called.setdefault(group, names[place][0])
    _check_seen(watch, names)
    stats = {called[group]: sums.finish() for group, sums in watch.sums.items() if group in called}
    groups = {module: called[group_of[place]] for place, many in names.items() for module in many}
    pools = {called[group_of[place]]: f"{place[0]}.*" for place in names if place[1] is not None}
    return ObservedBlock(stats, groups, pools, heads)


def _check_seen(watch: _Watch, names: Mapping[Place, tuple[str, ...]]) -> None:
    """Raises QuantryError for a layer, or a stack of experts, whose input was not seen: it calls no linear layer."""
    reached = {place[0] for place in watch.group}
    for (name, _), (module, *_) in names.items():
        if name not in reached and part_of(f"{module}.weight", 1 << 20) in QUANTIZED_PARTS:
            raise QuantryError(f"the input of {module} is not seen: it is no plain linear layer", fix=OTHER)


class InputSums:
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
        """Returns the means; mirrors the upper triangle of the Gram matrix."""
        gram = self._gram.triu_().div_(self.tokens)
        gram += gram.triu(1).T
        histogram = self._histogram.finish(float(self._absmax.max())) if self._histogram else None
        mean_abs = (self._abs / self.tokens).float()
        return Stats(self.tokens, gram, self._absmax, mean_abs, gram.diagonal().clone(), histogram)


def add_gram(gram: Tensor, rows: Tensor) -> None:
    """Adds the rows' products x x' to the upper triangle of a float32 matrix; the lower one is undefined."""
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
    """Counts magnitudes over a range that doubles when it is too small; then two bins become one, exactly."""

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
        """Returns counts over equal steps from 0 to the largest magnitude."""
        return rebin(self._counts, self._range, top, BINS)


class _HeadWatch(DynamicCache):
    """A KV cache that records the largest magnitude of each head and stores nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._largest: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Records (windows, heads, tokens, channels) of keys and values and returns them."""
        new = [states.detach().abs().amax((0, 2, 3)).float() for states in (key_states, value_states)]
        self._largest = (
            [torch.maximum(*pair) for pair in zip(self._largest, new, strict=True)] if self._largest else new
        )
        return key_states, value_states

    def heads(self) -> Heads | None:
        return Heads(*self._largest) if self._largest else None


@contextmanager
def _cached(block: Block, cache: DynamicCache) -> Iterator[None]:
    """Gives a block a cache to write into, if it takes one."""
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

"""Measures what mixtures, and parts of them, lose: the whole model's divergence on windows, rounded as it is written.

One walk over the blocks serves all variants side by side, with one block in memory: the hidden states of the 16-bit
model, and those of every variant from where it first differs. A block is transformed and rounded once for each recipe,
by the makers that write an artefact. A variant of some tensors has these rounded, and the others as the transform left
them, which changes no function. It runs in float32, as `quantry verify` does: in bfloat16 the arithmetic itself would
cost as much as some parts.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import TypedDict

import torch
from torch import Tensor, nn

from quantry.blockwise.walk import Block, Walk
from quantry.errors import QuantryError
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.calibrated_model import CalibratedModel
from quantry.models.weights import DTYPES
from quantry.proof.divergence import full_kl
from quantry.quantizing.calibration.block_inputs import BlockInputs, NoCalibration, StoredBlock
from quantry.quantizing.calibration.per_block import BlockCalibration, BlockSteps
from quantry.quantizing.calibration.store import default_store
from quantry.quantizing.calibration.transform import BlockTransform, even_grids
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.targets import target_of
from quantry.quantizing.tensor_plan import FusedLayers, GgufTensor, Piece
from quantry.storage.reading import read_json
from quantry.types import Progress

ARITHMETIC = torch.float32
KEPT = 2 << 30  # bytes of rounded embeddings and heads that wait in memory for the end of the walk
ENDS = 3  # blocks whose time the head takes, for the progress


@dataclass(frozen=True, slots=True)
class Variant:
    """A model stored as a recipe says in some tensors of the checkpoint, or in all, and in 16 bit elsewhere."""

    recipe: Recipe
    tensors: frozenset[str] | None = None
    windows: int | None = None  # the first so many; None: all

    def has(self, tensor: str) -> bool:
        return self.tensors is None or tensor in self.tensors


class TrialFile(TypedDict):
    """What is stored of a variant."""

    kl: float


class Trial:
    """Windows to measure variants of a model on; `store` is the folder for what was measured."""

    def __init__(self, model: CalibratedModel, windows: Sequence[Sequence[int]], store: Path) -> None:
        self._model, self._windows, self._store = model, windows, store

    def measure(self, variants: Sequence[Variant], progress: Progress | None = None) -> list[float]:
        """Returns the mean divergence of each variant from the 16-bit model in nats a token, over all tokens.

        What was measured before is read from the store.
        """
        paths = [self._path(variant) for variant in variants]
        known = {path: _load(path) for path in paths}
        missing = {path: variant for path, variant in zip(paths, variants, strict=True) if known[path] is None}
        if missing:
            found = _TrialWalk(self._model, self._windows, list(missing.values()), progress).divergences()
            for path, value in zip(missing, found, strict=True):
                known[path] = value
                default_store().put(path, json.dumps(TrialFile(kl=value)).encode())
        elif progress:
            progress(1, 1, "measured before")
        return [value for value in (known[path] for path in paths) if value is not None]

    def _path(self, variant: Variant) -> Path:
        recipe = json.dumps(replace(variant.recipe, budget=None).to_dict(), sort_keys=True, default=str)
        tensors = None if variant.tensors is None else sorted(variant.tensors)
        windows = [tuple(window) for window in self._windows[: variant.windows]]
        facts = repr((self._model.statistics.fingerprint, recipe, tensors, windows, str(ARITHMETIC)))
        return self._store / f"trial-{sha256(facts.encode()).hexdigest()[:32]}.json"


def _load(path: Path) -> float | None:
    try:
        value = float(read_json(path, TrialFile, fix="remove it")["kl"])
    except (QuantryError, KeyError, TypeError, ValueError):
        return None
    return value if isfinite(value) and value >= 0 else None


class _Made:
    """What a recipe makes of a model, block by block."""

    def __init__(self, model: CalibratedModel, recipe: Recipe) -> None:
        target = target_of(model.checkpoint, recipe, keep_odd=True)
        self._reader = model.reader()
        self._maker, plan = target.maker(self._reader), target.plan
        self._pieces: dict[int | None, list[Piece]] = {}
        for piece in plan.pieces:
            self._pieces.setdefault(plan.block_of(piece), []).append(piece)
        schemes = even_grids(plan) if recipe.format == GGUF else plan.assignment
        name = recipe.transform
        transform = BlockTransform(name, model.checkpoint, plan.block_count, schemes) if name else None
        calibrated = BlockCalibration(model.statistics, BlockSteps(transform=transform), self._reader.whole)
        self._calibration = calibrated if recipe.needs_statistics else NoCalibration()

    def rounded(self, block: int | None) -> dict[str, str]:
        """Returns the tensors of the checkpoint that are rounded in a block, or outside, with a name for how."""
        return {name: how for piece in self._pieces.get(block, []) for name, how in _rounded(piece)}

    def block(self, index: int) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Returns the tensors of a block as a transform left them, and the rounded ones, decoded."""
        known = self._calibration.enter(index)
        return known.tensors, self._stored(self._pieces.get(index, []), known)

    def outside(self, name: str) -> Tensor:
        """Returns a rounded tensor outside the blocks, decoded."""
        pieces = [piece for piece in self._pieces[None] if name in dict(_rounded(piece))]
        return self._stored(pieces, BlockInputs())[name]

    def _stored(self, pieces: Iterable[Piece], known: BlockInputs) -> dict[str, Tensor]:
        def original(name: str) -> Tensor:
            return known.tensors[name] if name in known.tensors else self._reader.whole(name)

        stored = StoredBlock(original, ARITHMETIC, None)
        for piece in pieces:
            for _ in self._maker.make(piece, replace(known, stored=stored)):
                pass
            self._maker.release(piece)
        return stored.tensors


def _rounded(piece: Piece) -> Iterator[tuple[str, str]]:
    if isinstance(piece, FusedLayers):
        yield from ((linear.source, str(piece.grid)) for linear in piece.linears)
    elif isinstance(piece, GgufTensor) and piece.kind not in DTYPES:
        yield from ((part.name, piece.kind) for part in piece.target.sources)


@dataclass(slots=True, eq=False)
class _State:
    """A variant on its way: its hidden states by batch, or none as long as they are those of the 16-bit model."""

    variant: Variant
    made: _Made
    batches: int
    hidden: list[Tensor] = field(default_factory=list)

    def rounded(self, block: int | None) -> dict[str, str]:
        return {name: how for name, how in self.made.rounded(block).items() if self.variant.has(name)}


class _TrialWalk:
    """One walk for all variants."""

    def __init__(
        self,
        model: CalibratedModel,
        windows: Sequence[Sequence[int]],
        variants: Sequence[Variant],
        progress: Progress | None,
    ) -> None:
        self._windows, self._progress = windows, progress
        self._walk = Walk(model.statistics.walk.source, device=model.device, dtype=ARITHMETIC, batch=1)
        made: list[tuple[Recipe, _Made]] = []
        for variant in variants:
            if all(recipe != variant.recipe for recipe, _ in made):
                made.append((variant.recipe, _Made(model, variant.recipe)))
        self._states = [
            _State(
                variant, next(one for recipe, one in made if recipe == variant.recipe), len(windows[: variant.windows])
            )
            for variant in variants
        ]
        self._outside: dict[tuple[str, str], Tensor] = {}

    @torch.no_grad()
    def divergences(self) -> list[float]:
        """Runs the walk; returns the mean divergence of each variant."""
        for block in self._walk.blocks(self._windows):
            if block.index == 0:
                self._embed()
            self._report(block.index, block.name)
            self._advance(block)
        self._report(self._walk.count, "the head")
        return self._at_the_head()

    def _embed(self) -> None:
        """Gives variants with a rounded embedding hidden states of their own."""
        skeleton = self._walk.skeleton
        for how, group in self._alike_outside(skeleton.before):
            if how:
                instead = {name: self._rounded_outside(group[0].made, name, kind) for name, kind in how.items()}
                skeleton.load(skeleton.before, instead)
                for state in group:
                    batches = self._walk.batches[: state.batches]
                    state.hidden = [skeleton.head_start(batch.tokens)[0] for batch in batches]
                skeleton.free(skeleton.before)

    def _advance(self, block: Block) -> None:
        """Runs a block for the 16-bit model and for every variant that differs from it."""
        before = [batch.hidden for batch in self._walk.batches]
        block.advance()
        changed = [state for state in self._states if state.rounded(block.index)]
        for state in self._states:
            if state.hidden and state not in changed:
                self._run(block, state, before)
        for made in dict.fromkeys(state.made for state in changed):
            tensors, stored = made.block(block.index)
            own = [state for state in changed if state.made is made]
            skeleton = self._walk.skeleton
            for names, group in _alike(own, lambda state: state.rounded(block.index)):
                skeleton.load(skeleton.inside(block.name), {**tensors, **{name: stored[name] for name in names}})
                for state in group:
                    self._run(block, state, before)

    def _run(self, block: Block, state: _State, before: Sequence[Tensor]) -> None:
        pairs = zip(self._walk.batches, state.hidden or before[: state.batches], strict=False)
        state.hidden = [
            block.apply(batch, hidden.to(self._walk.skeleton.device)).to(batch.hidden.device) for batch, hidden in pairs
        ]

    def _at_the_head(self) -> list[float]:
        skeleton, sums = self._walk.skeleton, dict.fromkeys(self._states, 0.0)
        with skeleton.loaded(skeleton.after):
            head = skeleton.model.get_output_embeddings()
            plain = head.weight
            groups = self._alike_outside(skeleton.after)
            for number, (how, group) in enumerate(groups):
                self._report(self._walk.count + ENDS * number / len(groups), "the head")
                weights = [self._rounded_outside(group[0].made, name, kind) for name, kind in how.items()]
                own = nn.Parameter(weights[0].to(plain.device), False) if weights else plain
                for state, value in self._compared(head, plain, own, group):
                    sums[state] += value
                head.weight = plain
        tokens = [sum(batch.tokens.numel() - 1 for batch in self._walk.batches[: state.batches]) for state in sums]
        return [max(0.0, total / count) for total, count in zip(sums.values(), tokens, strict=True)]

    def _compared(
        self, head: nn.Module, plain: Tensor, own: Tensor, group: Sequence[_State]
    ) -> Iterator[tuple[_State, float]]:
        """Yields the divergence of each window of each variant with this head, summed over its positions."""
        skeleton = self._walk.skeleton
        for number, batch in enumerate(self._walk.batches):
            head.weight = plain
            here = [state for state in group if number < state.batches and (state.hidden or own is not plain)]
            wanted = skeleton.tail(batch.tokens, batch.hidden, nullcontext()) if here else torch.empty(0)
            head.weight = own
            for state in here:
                hidden = state.hidden[number] if state.hidden else batch.hidden
                found = skeleton.tail(batch.tokens, hidden, nullcontext())
                yield state, float(full_kl(wanted[:-1], found[:-1]).sum())

    def _alike_outside(self, keys: frozenset[str]) -> list[tuple[dict[str, str], list[_State]]]:
        """Groups the variants by how they round the tensors that some weights outside the blocks come from."""
        names = set(self._walk.skeleton.sources(keys))
        return _alike(
            self._states, lambda state: {name: how for name, how in state.rounded(None).items() if name in names}
        )

    def _rounded_outside(self, made: _Made, name: str, kind: str) -> Tensor:
        """Returns a rounded embedding or head; some wait in memory, since a tied one is needed at both ends."""
        if (name, kind) in self._outside:
            return self._outside[name, kind]
        tensor = made.outside(name)
        if tensor.nbytes + sum(other.nbytes for other in self._outside.values()) <= KEPT:
            self._outside[name, kind] = tensor
        return tensor

    def _report(self, done: float, label: str) -> None:
        if self._progress:
            self._progress(round(100 * done), 100 * (self._walk.count + ENDS), label)


def _alike(
    states: Sequence[_State], rounded: Callable[[_State], dict[str, str]]
) -> list[tuple[dict[str, str], list[_State]]]:
    """Groups variants that round the same tensors in the same way."""
    groups: list[tuple[dict[str, str], list[_State]]] = []
    for state in states:
        how = rounded(state)
        group = next((own for other, own in groups if other == how), None)
        if group is None:
            groups.append((how, [state]))
        else:
            group.append(state)
    return groups

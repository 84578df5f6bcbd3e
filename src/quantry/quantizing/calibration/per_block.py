"""What calibration knows of the layers' inputs, going with the makers from block to block.

`Inputs` has the statistics of the block in hand, walked or stored, and its tensors as a transform or a distillation
left them. In a sequential job each block is run once more as it is stored, and what it gives then is what the next is
calibrated on. What is found on the way is kept with the job, so that one that was killed and resumed says the same in
the end. Where a GPU has no room, the job goes on in less of it.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from torch import Tensor

from quantry.blockwise.taps import Place
from quantry.blockwise.walk import CPU, Block
from quantry.errors import QuantryError
from quantry.llamacpp import importance
from quantry.llamacpp.tensor_map import Target, TensorSlice
from quantry.models.linears import Linear
from quantry.models.parts import decoder_block
from quantry.models.reader import IMPORTANCE
from quantry.models.workspace import Workspace
from quantry.quantizing.calibration.importance import sums
from quantry.quantizing.calibration.observe import LEAST, Heads, Observed, attention, collect, module_names, modules
from quantry.quantizing.calibration.store import Statistics
from quantry.quantizing.calibration.transform import Transform
from quantry.types import Activation, Scheme, Stats

SEED = 0
FOUND = "calibration"  # what a workspace remembers findings under
LOW = "low memory"  # the finding that there was no room
Layer = tuple[str, int | None, tuple[int, int] | None]  # a matrix in a tensor of the checkpoint: name, expert, rows
T = TypeVar("T")


def tensor_of(layer: Linear | TensorSlice) -> str:
    """The tensor of the checkpoint that a layer is in."""
    return layer.source if isinstance(layer, Linear) else layer.name


@dataclass(slots=True, eq=False)
class _Block:
    """The block in hand."""

    index: int
    stats: dict[str, Stats]  # by module
    tensors: dict[str, Tensor]
    heads: Heads | None
    prepared: dict[int, Any]  # by the identity of the statistics


class _Stored:
    """The tensors of one block as they are stored: layers, decoded, come one by one."""

    def __init__(self, layers: Mapping[int, frozenset[Layer]], dtype: torch.dtype) -> None:
        self._layers, self._dtype = layers, dtype
        self._index = -1
        self._seen: set[Layer] = set()
        self._tensors: dict[str, Tensor] = {}

    def add(self, index: int, layer: Linear | TensorSlice, weight: Tensor, whole: Callable[[str], Tensor]) -> None:
        """Puts a decoded matrix in its place; `whole` gives the tensor of the checkpoint that it is a part of."""
        if index != self._index:
            self.take()
            self._index = index
        name, weight = tensor_of(layer), weight.to(self._dtype)
        if layer.expert is None and layer.rows is None:
            self._tensors[name] = weight.t() if layer.flip else weight
        else:
            if name not in self._tensors:
                self._tensors[name] = whole(name).to(weight.device, self._dtype, copy=True)
            part = self._tensors[name] if layer.expert is None else self._tensors[name][layer.expert]
            part = part.t() if layer.flip else part
            (part[slice(*layer.rows)] if layer.rows else part).copy_(weight)
        self._seen.add((name, layer.expert, layer.rows))

    def lacks(self, index: int) -> bool:
        """Whether layers of a block are missing."""
        wanted = self._layers.get(index, frozenset())
        return bool(wanted) and (index != self._index or not wanted <= self._seen)

    def take(self) -> dict[str, Tensor]:
        """All tensors, which are then forgotten."""
        taken, self._index, self._tensors, self._seen = self._tensors, -1, {}, set()
        return taken

    def lighten(self) -> None:
        """Moves tensors to main memory."""
        self._tensors = {name: tensor.to(CPU) for name, tensor in self._tensors.items()}


class Inputs:
    """What calibration knows of the layers' inputs, block after block.

    With `layers`, the quantized matrices of each block, the job is sequential. It and one that is `distilled` walk
    through the model themselves; others take what they need from `found`. `collects` says if statistics are needed.
    """

    def __init__(
        self,
        found: Statistics,
        transform: Transform | None,
        read: Callable[[str], Tensor],
        *,
        schemes: Mapping[str, Scheme] | None = None,
        collects: bool = True,
        distilled: bool = False,
        layers: Mapping[int, frozenset[Layer]] | None = None,
    ) -> None:
        self._statistics, self._transform, self._read = found, transform, read
        self._schemes, self._collects, self._distilled = schemes or {}, collects, distilled
        self._blocks, self._low_memory = found.count, found.low_memory
        self._stored = None if layers is None else _Stored(layers, found.dtype)
        self._passage = found.passage(self._leave) if distilled or self._stored else None
        self._block: _Block | None = None
        self._findings: dict[str, Any] = {}
        self._work: Workspace | None = None
        self._remake: Callable[[int], None] = lambda _: None

    @property
    def sequential(self) -> bool:
        """Whether a block is calibrated on what the quantized blocks before it give."""
        return self._stored is not None

    def stats(self, name: str, expert: int | None = None) -> Stats | None:
        """The statistics of what a module, a tensor or an expert in it is given; nothing outside of blocks."""
        module = module_names(name, expert)[0]
        index = decoder_block(f"{module}.weight", self._blocks) if self._collects else None
        return None if index is None else self._enter(index).stats.get(module)

    def prepared(self, stats: Stats, prepare: Callable[[Stats], Any]) -> Any:
        """What a rounder makes of statistics, made once for all layers of a block that share them."""
        assert self._block is not None
        block, kept = self._block, self._block.prepared
        if id(stats) not in kept:
            kept[id(stats)] = self._sparing(block.index, lambda: prepare(stats))
            if kept[id(stats)].note:
                group = next(module for module, one in block.stats.items() if one is stats)
                self._find(f"damping {group}", kept[id(stats)].damping)
        return kept[id(stats)]

    def tensor(self, name: str) -> Tensor | None:
        """A tensor of a block as the transform or the distillation has left it."""
        index = decoder_block(name, self._blocks) if self._transform or self._distilled else None
        return None if index is None else self._enter(index).tensors.get(name)

    def heads(self, index: int) -> Heads | None:
        """The largest magnitudes that a block puts into the KV cache."""
        if self._collects or self._passage is None:
            return self._enter(index).heads
        passage = self._passage
        return self._sparing(index, lambda: attention(passage.block(index)))

    def made(self, layer: Linear | TensorSlice, weight: Tensor) -> None:
        """Takes note of a quantized layer of a sequential job: its decoded weight, (out, in), as in the checkpoint."""
        index = decoder_block(tensor_of(layer), self._blocks)
        if self._stored is None or self._passage is None or index is None:
            return
        passage = self._passage
        if passage.here is None or passage.here.index < index:  # a block before which no one has asked for statistics
            self._sparing(index, lambda: passage.block(index))
        if passage.here is not None and passage.here.index == index:
            weight = weight.to(CPU) if self._low_memory else weight
            self._stored.add(index, layer, weight, self._whole)

    def importance(self, targets: Mapping[str, Target]) -> tuple[importance.Importance, bytes]:
        """The importance matrix of a GGUF file with these tensors, and the file that holds it."""
        data, observed = self._statistics.data, self._statistics.observed
        seen = (self._sparing(index, partial(observed, index)) for index in range(self._blocks))
        with TemporaryDirectory() as folder:
            path = Path(folder) / IMPORTANCE
            importance.write(path, sums(seen, targets), [data.name], data.length)
            return importance.read(path), path.read_bytes()

    def resume(self, work: Workspace, remake: Callable[[int], None]) -> None:
        """Takes over what earlier runs of the job have found, and keeps the rest there.

        `remake` makes all layers of a block that an earlier run has written, and so calls `made` for each.
        """
        self._work, self._remake = work, remake
        self._findings = work.remembered(FOUND) | self._findings
        if self._passage and self.sequential:
            self._passage.folder = work.folder
        if LOW in self._findings and not self._low_memory:
            self._lighten()

    def notes(self) -> tuple[str, ...]:
        """What was found on the way, for all blocks together."""
        found = self._findings
        return (*_starved(found), *_damped(found), *_distilled(found), *_short_of_memory(found))

    def _enter(self, index: int) -> _Block:
        if self._block is None or self._block.index != index:
            self._block = self._sparing(index, lambda: self._entered(index))
        return self._block

    def _entered(self, index: int) -> _Block:
        block = self._passage.block(index) if self._passage else None  # it may still need the tensors of the last one
        self._block = None  # before another takes memory
        observed = self._observed(index, block)
        covered, starved = observed.covered(self._statistics.least)
        self._note_starved(index, observed, starved)
        stats = {module: covered[group] for module, group in observed.groups.items() if group in covered}
        tensors: dict[str, Tensor] = {}
        if self._transform:
            made = self._transform.apply(index, stats, self._read)
            tensors, stats = made.block, made.stats
        if self._distilled and block:
            tensors = self._distil(block)
        return _Block(index, stats, tensors, observed.heads, {})

    def _observed(self, index: int, block: Block | None) -> Observed:
        if block is None:
            return self._statistics.observed(index)
        if not self._collects:
            return Observed({}, {}, {})
        return collect(block, advance=False, histogram=self._statistics.histogram)

    def _distil(self, block: Block) -> dict[str, Tensor]:
        """The tensors of a block that was trained to give what it gives in 16 bit."""
        from quantry.quantizing.calibration.distillation import distil

        made = distil(block, self._inside(block, self._schemes), seed=SEED)
        self._find(f"distilled {block.index}", [made.before, made.after])
        return made.tensors

    def _leave(self, block: Block) -> None:
        """Makes a block of a sequential job what is stored of it, so that it gives what the next will be given."""
        if self._stored is None or self._passage is None:
            return
        if self._stored.lacks(block.index):  # an earlier run has written some of it
            self._remake(block.index)
            if self._passage.here is not block:  # begun anew, in less memory
                return
            if self._stored.lacks(block.index):
                raise ValueError(f"layers of block {block.index} were not made again")
        mine = self._block if self._block and self._block.index == block.index else None
        tensors, self._block = (mine.tensors if mine else {}), None
        block.replace({**tensors, **self._stored.take()}, self._activations(block))

    def _activations(self, block: Block) -> dict[Place, Activation]:
        """How inputs of a block are quantized, where scales are found as it runs; stored ones are left out."""
        found: dict[Place, Activation] = {}
        for place, names in modules(block).items():
            kind = self._schemes[names[0]].activation if names[0] in self._schemes else None
            if kind and kind.dynamic:
                found[place] = kind
        return found

    @staticmethod
    def _inside(block: Block, schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
        """The schemes of a block's own modules."""
        return {name: schemes[name] for names in modules(block).values() for name in names if name in schemes}

    def _whole(self, name: str) -> Tensor:
        """A tensor of the block before it was rounded."""
        changed = self.tensor(name)
        return self._read(name) if changed is None else changed

    def _sparing(self, index: int, act: Callable[[], T]) -> T:
        """Does something, and if a GPU has no room for it, once more in the low-memory mode."""
        if not self._low_memory:
            with suppress(torch.OutOfMemoryError):  # what it held on to is gone with it
                return act()
            self._find(LOW, index)
            self._lighten()
        try:
            return act()
        except torch.OutOfMemoryError as error:
            raise QuantryError(
                f"the device has no room for block {index}, in the low-memory mode either",
                fix="use --device cpu, a larger GPU, or a shorter --length",
            ) from error

    def _lighten(self) -> None:
        self._low_memory = True
        if self._block:
            self._block.prepared.clear()
        if self._stored:
            self._stored.lighten()
        if self._passage:
            self._passage.lighten()
        self._statistics.lighten()

    def _note_starved(self, index: int, observed: Observed, starved: tuple[str, ...]) -> None:
        if starved:
            tokens = {group: seen for counts in observed.tokens().values() for group, seen in counts.items()}
            fewest = min(starved, key=lambda group: tokens[group])
            self._find(f"starved {index}", [len(starved), fewest, tokens[fewest]])

    def _find(self, what: str, value: Any) -> None:
        """Keeps a finding, on the disk before what it is about."""
        self._findings[what] = value
        if self._work:
            self._work.remember(FOUND, self._findings)


def _starved(findings: Mapping[str, Any]) -> tuple[str, ...]:
    found = [value for what, value in findings.items() if what.startswith("starved ")]
    if not found:
        return ()
    _, group, tokens = min(found, key=lambda one: (one[2], one[1]))
    return (
        f"{sum(one[0] for one in found)} inputs of experts in {len(found)} blocks have fewer than {LEAST} tokens, the "
        f"fewest {group} ({tokens}): they are taken from all experts of the layer together. More --samples would help.",
    )


def _damped(findings: Mapping[str, Any]) -> tuple[str, ...]:
    found = {what.partition(" ")[2]: value for what, value in findings.items() if what.startswith("damping ")}
    if not found:
        return ()
    worst = max(sorted(found), key=lambda group: found[group])
    return (
        f"GPTQ needed more damping than usual for {len(found)} inputs, the most {found[worst]:g} for that of {worst}.",
    )


def _distilled(findings: Mapping[str, Any]) -> tuple[str, ...]:
    found = [value for what, value in findings.items() if what.startswith("distilled ")]
    if not found:
        return ()
    before, after = (median(errors) for errors in zip(*found, strict=True))
    return (
        f"Distillation lowered the squared error of a block's output on held-out text from {before:.3g} to {after:.3g} "
        f"of its square (medians of {len(found)} blocks).",
    )


def _short_of_memory(findings: Mapping[str, Any]) -> tuple[str, ...]:
    if LOW not in findings:
        return ()
    return (
        f"The GPU had no room for block {findings[LOW]}: from there on one window was run at a time, and hidden states "
        f"were kept in main memory.",
    )

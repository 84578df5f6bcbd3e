"""Calibration as the loop over blocks sees it: enter a block, make its tensors, leave it.

`enter` returns what is known of the block: the statistics of its inputs, from the store or a walk, and its tensors as a
transform or a distillation left them. `leave` matters in sequential jobs: it runs the block again as stored, so that
the next one is calibrated on what the quantized blocks before it give. Where a GPU has no room, the job goes on in less
memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from quantry.blockwise.taps import Place
from quantry.blockwise.walk import Block
from quantry.errors import QuantryError
from quantry.llamacpp import importance
from quantry.llamacpp.tensor_map import Target
from quantry.methods.contract import Prepared, Rounder
from quantry.methods.rounding import LayerInput
from quantry.models.reader import IMPORTANCE
from quantry.models.workspace import Workspace
from quantry.numerics.static import outlying
from quantry.quantizing.calibration.block_inputs import BlockInputs, StoredBlock
from quantry.quantizing.calibration.findings import DISTILLED, EXPERTS, LOW_MEMORY, STARVED, Findings
from quantry.quantizing.calibration.importance import sums
from quantry.quantizing.calibration.low_memory import LowMemory
from quantry.quantizing.calibration.observe import ObservedBlock, attention, modules
from quantry.quantizing.calibration.resumable_walk import ResumableWalk
from quantry.quantizing.calibration.store import Statistics
from quantry.quantizing.calibration.text import SEED
from quantry.quantizing.calibration.transform import BlockTransform
from quantry.storage.temporary import temporary_folder
from quantry.types import Activation, Scheme, Stats

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """What is done in each block beside gathering statistics."""

    transform: BlockTransform | None = None
    sequential: bool = False  # run each block again as stored
    distilled: bool = False  # train each block against its 16-bit output
    collects: bool = True  # gather statistics of inputs
    heads: bool = False  # gather what goes into the KV cache; statistics of inputs include it
    schemes: Mapping[str, Scheme] = field(default_factory=dict)  # of quantized modules


class BlockCalibration:
    """What calibration knows, block after block. `read` returns a tensor of the checkpoint on the computing device.

    Sequential and distilled jobs walk through the model themselves; all others use `statistics`.
    """

    def __init__(self, statistics: Statistics, steps: BlockSteps, read: Callable[[str], Tensor]) -> None:
        self._statistics, self._steps, self._read = statistics, steps, read
        own_walk = steps.sequential or steps.distilled
        self._walk: ResumableWalk | None = replace(statistics.walk) if own_walk else None
        self._low_memory = LowMemory(statistics.walk.low_memory, self._lighten)
        self._findings = Findings()
        self._known = BlockInputs()

    @property
    def sequential(self) -> bool:
        """Says if a block has to be made completely, since it is run again as stored."""
        return self._steps.sequential

    def resume(self, work: Workspace) -> None:
        """Continues what earlier runs of the job began in this workspace."""
        self._findings.resume(work)
        if self._walk and self.sequential:
            self._walk.folder = work.folder
        earlier = list(self._findings.about(LOW_MEMORY))
        if earlier and not self._low_memory.on:
            self._low_memory.switch_on(int(earlier[0]))

    def first_block(self, missing: int | None) -> int | None:
        """Returns where the loop has to begin if `missing` is the first block that is not stored.

        A sequential job begins at the last block whose hidden states were kept, and makes the blocks from there again.
        """
        if missing is None or not self.sequential or self._walk is None:
            return missing
        return self._walk.last_kept(missing)

    def enter(self, index: int | None) -> BlockInputs:
        """Returns what is known of a block; nothing outside of blocks."""
        self._known = BlockInputs()  # before another block takes memory
        if index is not None:
            self._known = self._low_memory.run(index, lambda: self._entered(index))
        return self._known

    def leave(self, index: int | None) -> None:
        """Runs a block of a sequential job as stored; for all others there is nothing to do."""
        if index is not None and self.sequential and index + 1 < self._statistics.count:
            self._low_memory.run(index, lambda: self._run_as_stored(index))

    def importance(self, targets: Mapping[str, Target]) -> tuple[importance.Importance, bytes]:
        """Computes the importance matrix of a GGUF file with these tensors; also returns the file that holds it."""
        text, observed = self._statistics.text, self._counted
        blocks = (self._low_memory.run(index, partial(observed, index)) for index in range(self._statistics.count))
        with temporary_folder() as folder:
            path = folder / IMPORTANCE
            importance.write(path, sums(blocks, targets), [part.name for part in text.parts or (text,)], text.length)
            return importance.read(path), path.read_bytes()

    def outlying(self) -> tuple[str, ...]:
        """Returns the layers whose input has outliers that a stored scale cannot hold."""
        found: list[str] = []
        for index in range(self._statistics.count):
            stats, _ = self._low_memory.run(index, partial(self._statistics.observed, index)).by_module()
            if self._steps.transform:
                stats = self._steps.transform.apply(index, stats, self._read).stats
            for module, seen in stats.items():
                scheme = self._steps.schemes.get(module)
                if scheme and scheme.static and outlying(seen, scheme.static.grid):
                    found.append(module)
        return tuple(found)

    def notes(self) -> tuple[str, ...]:
        """Returns sentences for the model card."""
        return self._findings.notes()

    def expert_tokens(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the tokens that each expert saw, by block."""
        return self._findings.expert_tokens()

    def _entered(self, index: int) -> BlockInputs:
        block = self._block(index) if self._walk else None
        observed = self._counted(index, block)
        stats, starved = observed.by_module()
        self._report_starved(index, observed, starved)
        tensors: Mapping[str, Tensor] = {}
        scales: Mapping[str, Tensor] = {}
        if self._steps.transform:
            transformed = self._steps.transform.apply(index, stats, self._read)
            tensors, stats, scales = transformed.block, transformed.stats, transformed.scales
        if self._steps.distilled and block:
            tensors = self._distil(block)
        inputs = self._layer_inputs(index, stats)
        return BlockInputs(inputs, tensors, observed.heads, self._stored_block(tensors), scales)

    def _counted(self, index: int, block: Block | None = None) -> ObservedBlock:
        """Returns what was seen of a block, and records the tokens of its experts."""
        observed = self._observed(index, block)
        if counts := observed.expert_tokens():
            self._findings.add(EXPERTS, index, counts)
        return observed

    def _observed(self, index: int, block: Block | None) -> ObservedBlock:
        if block is None:
            return self._statistics.observed(index)
        if self._steps.collects:
            return self._statistics.collect(block)
        return ObservedBlock({}, {}, {}, attention(block) if self._steps.heads else None)

    def _block(self, index: int) -> Block:
        """Walks to a block. Raises QuantryError if a sequential job would have to pass a block as it was in 16 bit."""
        assert self._walk is not None
        for block in self._walk.to(index):
            if self.sequential and block.index < index and not block.advanced:
                raise QuantryError(
                    f"the hidden states before block {index} are lost, since the device ran out of memory",
                    fix="run the same command again with --low-memory: what is stored is kept",
                )
        return block

    def _layer_inputs(self, index: int, stats: Mapping[str, Stats]) -> dict[str, LayerInput]:
        """Returns one LayerInput for all modules that share their statistics, named after the first."""
        shared: dict[int, LayerInput] = {}
        for module, seen in stats.items():
            if id(seen) not in shared:
                shared[id(seen)] = LayerInput(seen, partial(self._prepare, index, module))
        return {module: shared[id(seen)] for module, seen in stats.items()}

    def _prepare(self, index: int, module: str, rounder: Rounder, stats: Stats) -> Prepared:
        prepared = self._low_memory.run(index, lambda: rounder.prepare(stats))
        if prepared.report is not None:
            self._findings.add(rounder.__name__, module, prepared.report)
        return prepared

    def _distil(self, block: Block) -> dict[str, Tensor]:
        """Trains a block to give what it gives in 16 bit; returns its new tensors."""
        from quantry.quantizing.calibration.distillation import distil

        names = {name for group in modules(block).values() for name in group}
        schemes = {name: scheme for name, scheme in self._steps.schemes.items() if name in names}
        distilled = distil(block, schemes, seed=SEED, labels=self._statistics.text.labels)
        self._findings.add(DISTILLED, block.index, [distilled.before, distilled.after])
        return distilled.tensors

    def _stored_block(self, tensors: Mapping[str, Tensor]) -> StoredBlock | None:
        if not self.sequential:
            return None

        def original(name: str) -> Tensor:
            return tensors[name] if name in tensors else self._read(name)

        return StoredBlock(original, self._statistics.walk.dtype, CPU if self._low_memory.on else None)

    def _run_as_stored(self, index: int) -> None:
        """Hands the hidden states to the next block through the block as stored."""
        assert self._walk is not None
        assert self._known.stored is not None
        block = self._block(index)
        block.replace({**self._known.tensors, **self._known.stored.tensors}, self._activations(block))
        block.advance()
        self._walk.keep(index + 1)

    def _activations(self, block: Block) -> dict[Place, Activation]:
        """Returns how the inputs of a block are quantized while it runs; stored scales are not simulated."""
        schemes = {place: self._steps.schemes.get(names[0]) for place, names in modules(block).items()}
        return {
            place: scheme.activation
            for place, scheme in schemes.items()
            if scheme and scheme.activation and scheme.activation.dynamic
        }

    def _lighten(self, index: int) -> None:
        self._findings.add(LOW_MEMORY, index, True)
        for layer_input in self._known.inputs.values():
            layer_input.forget()
        if self._known.stored:
            self._known.stored.lighten()
        for walk in {self._walk, self._statistics.walk} - {None}:
            assert walk is not None
            walk.lighten()

    def _report_starved(self, index: int, observed: ObservedBlock, starved: tuple[str, ...]) -> None:
        if starved:
            tokens = {group: seen for counts in observed.tokens().values() for group, seen in counts.items()}
            fewest = min(starved, key=lambda group: tokens[group])
            self._findings.add(STARVED, index, [len(starved), fewest, tokens[fewest]])

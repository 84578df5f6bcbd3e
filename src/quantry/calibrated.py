"""Calibrated jobs: the text they are calibrated on, and what it tells of the layers, block after block.

`begin` refuses everything that can be refused (data, tokenizer, a model that cannot be run) before anything is written.
`Inputs` then goes with the makers from block to block: it has the statistics of the block in hand, walked or stored,
and its tensors as a transform left them. What it finds on the way is kept with the job, so that one that was killed
and resumed says the same in the end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from quantry import registry
from quantry.arch.linears import Linear, linears
from quantry.arch.parts import decoder_block
from quantry.arch.smoothing import smoothing
from quantry.calibrate.cache import Statistics, default_store, identity, statistics
from quantry.calibrate.data import LENGTH, SAMPLES, Data, load
from quantry.calibrate.doctor import diagnose
from quantry.calibrate.importance import sums
from quantry.calibrate.statistics import LEAST, Observed, module_names
from quantry.checkpoint.reader import IMPORTANCE, open_checkpoint, small_folder
from quantry.checkpoint.weights import PlainWeights
from quantry.checkpoint.workspace import Workspace
from quantry.errors import CheckpointError
from quantry.llamacpp import importance
from quantry.llamacpp.targets import Target
from quantry.pieces import Division
from quantry.recipe import Calibration, Recipe
from quantry.tokenizing import load_tokenizer
from quantry.types import Anatomy, Checkpoint, Scheme, Stats, TensorInfo
from quantry.walk import Walk

SEED = 0
FOUND = "calibration"  # what a workspace remembers findings under
SCALED = "scaled with the layers around it"
DTYPES = {"cpu": torch.float32}  # bfloat16 elsewhere: the Gram matrix is summed in float32 all the same
Progress = Callable[[int, int, str], None]


class Calibrated:
    """What a job is calibrated on, checked against the model that will read it, and the transform of its blocks."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, data: Data, transform: "Transform | None") -> None:
        self._checkpoint, self._device, self._data, self._transform = checkpoint, device, data, transform

    @property
    def record(self) -> Calibration:
        """What the recipe says of the text."""
        data = self._data
        return Calibration(data.name, data.fingerprint, len(data.tokens), data.length, SEED, data.count)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should know before the job begins."""
        return (*diagnose(self._data), *(self._transform.notes() if self._transform else ()))

    def marked(self, division: Division) -> Division:
        """The division, with the fates of tensors that are kept but scaled."""
        scaled = self._transform.scaled() if self._transform else set()
        fates = {
            name: f"{fate}{',' if ':' in fate else ':'} {SCALED}" if name in scaled and fate != "quantized" else fate
            for name, fate in division.fates.items()
        }
        return replace(division, fates=fates)

    def inputs(self, folder: Path, read: Callable[[str], Tensor], progress: Progress | None = None) -> "Inputs":
        """What the layers are given on this text, walked or from the store when a block is asked for.

        `read` gives the tensors of the checkpoint on the computing device, `progress` is told of blocks.
        """
        found = statistics(
            PlainWeights(self._checkpoint, folder),
            self._data,
            device=self._device,
            dtype=_dtype(self._device),
            cache=default_store() if self._device.type == "cpu" else None,  # a GPU walks faster than a disk writes
            identity=identity(open_checkpoint(folder)),
            progress=progress,
        )
        return Inputs(found, self._transform, read)


def begin(
    checkpoint: Checkpoint,
    recipe: Recipe,
    anatomy: Anatomy,
    division: Division,
    device: torch.device,
    *,
    data: str | Path | None,
    samples: int | None,
    length: int | None,
) -> Calibrated:
    """Everything that can be refused before a weight is read."""
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.source} has no tokenizer, without which it cannot be calibrated on text",
            fix="copy its files from the original model",
        )
    walk = Walk(PlainWeights(checkpoint, Path()), device=device, dtype=_dtype(device))  # by its headers alone
    with small_folder(checkpoint, "model") as folder:
        tokenizer = load_tokenizer(folder)
    found = load(
        data,
        tokenizer,
        samples=SAMPLES if samples is None else samples,
        length=LENGTH if length is None else length,
        seed=SEED,
        context=anatomy.context_length,
    )
    largest, rows = max(map(max, found.tokens)), walk.skeleton.rows
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer gives a token {largest} where the embedding has {rows} rows",
            fix="use the tokenizer that belongs to the model",
        )
    name = recipe.transform
    transform = Transform(name, checkpoint, anatomy.blocks, division.assignment) if name else None
    return Calibrated(checkpoint, device, found, transform)


def _dtype(device: torch.device) -> torch.dtype:
    return DTYPES.get(device.type, torch.bfloat16)


class Transform:
    """A transform of whole blocks by the name of its plug-in; `schemes` are those of the layers that are rounded."""

    def __init__(self, name: str, checkpoint: Checkpoint, blocks: int, schemes: Mapping[str, Scheme]) -> None:
        self._apply = registry.load("quantry.transforms", name).apply
        self._schemes = schemes
        parts = _by_block(checkpoint, blocks)
        self._tensors = {index: [tensor.name for tensor in part.tensors] for index, (part, _) in parts.items()}
        self._found = {index: smoothing(part, inside, index) for index, (part, inside) in parts.items()}

    def apply(
        self, index: int, stats: Mapping[str, Stats], read: Callable[[str], Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, Stats]]:
        """The tensors of a block and the statistics by module, both as they are after it."""
        block = {name: read(name) for name in self._tensors[index]}
        made = self._apply(block, self._found[index].pairs, stats, self._schemes)
        return made.block, made.stats

    def scaled(self) -> set[str]:
        """The tensors that are changed."""
        pairs = [pair for found in self._found.values() for pair in found.pairs]
        used = [pair for pair in pairs if any(slot.module in self._schemes for slot in pair.consumers)]
        return {slot.source for pair in used for slot in (*pair.producers, *pair.consumers)}

    def notes(self) -> tuple[str, ...]:
        """The layers that are rounded as they are, grouped by the reason."""
        left: dict[str, dict[str, set[int]]] = {}
        for index, found in self._found.items():
            for module, reason in found.left_out.items():
                if module in self._schemes:
                    leaf = _numberless(module.rpartition(f".{index}.")[2])
                    left.setdefault(reason, {}).setdefault(leaf, set()).add(index)
        return tuple(
            f"In {len(set.union(*leaves.values()))} of {len(self._found)} blocks the inputs of "
            f"{', '.join(sorted(leaves))} are not scaled: {reason}."
            for reason, leaves in left.items()
        )


def _by_block(checkpoint: Checkpoint, blocks: int) -> dict[int, tuple[Checkpoint, list[Linear]]]:
    """The tensors and linears of each block: to go through all of them for each takes long with many experts."""
    parts: dict[int, list[TensorInfo]] = {}
    for tensor in checkpoint.tensors:
        index = decoder_block(tensor.name, blocks)
        if index is not None:
            parts.setdefault(index, []).append(tensor)
    found: dict[int, list[Linear]] = {index: [] for index in parts}
    for linear in linears(checkpoint, blocks):
        index = decoder_block(linear.source, blocks)
        if index is not None:
            found[index].append(linear)
    return {index: (replace(checkpoint, tensors=tuple(parts[index])), found[index]) for index in sorted(parts)}


def _numberless(name: str) -> str:
    """A name for all experts of a layer."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


@dataclass(slots=True, eq=False)
class _Block:
    """The block in hand."""

    index: int
    stats: dict[str, Stats]  # by module
    tensors: dict[str, Tensor]
    prepared: dict[int, Any]  # by the identity of the statistics


class Inputs:
    """What calibration knows of the layers' inputs, block after block."""

    def __init__(self, found: Statistics, transform: Transform | None, read: Callable[[str], Tensor]) -> None:
        self._statistics, self._transform, self._read = found, transform, read
        self._blocks = found.count
        self._block: _Block | None = None
        self._findings: dict[str, Any] = {}
        self._work: Workspace | None = None

    def stats(self, name: str, expert: int | None = None) -> Stats | None:
        """The statistics of what a module, a tensor or an expert in it is given; nothing outside of blocks."""
        module = module_names(name, expert)[0]
        index = decoder_block(f"{module}.weight", self._blocks)
        return None if index is None else self._enter(index).stats.get(module)

    def prepared(self, stats: Stats, prepare: Callable[[Stats], Any]) -> Any:
        """What a rounder makes of statistics, made once for all layers of a block that share them."""
        assert self._block is not None
        kept = self._block.prepared
        if id(stats) not in kept:
            kept[id(stats)] = prepare(stats)
            if kept[id(stats)].note:
                group = next(module for module, one in self._block.stats.items() if one is stats)
                self._find(f"damping {group}", kept[id(stats)].damping)
        return kept[id(stats)]

    def tensor(self, name: str) -> Tensor | None:
        """A tensor of a block as the transform has left it."""
        index = decoder_block(name, self._blocks) if self._transform else None
        return None if index is None else self._enter(index).tensors.get(name)

    def importance(self, targets: Mapping[str, Target]) -> tuple[importance.Importance, bytes]:
        """The importance matrix of a GGUF file with these tensors, and the file that holds it."""
        data = self._statistics.data
        seen = (self._statistics.observed(index) for index in range(self._blocks))
        with TemporaryDirectory() as folder:
            path = Path(folder) / IMPORTANCE
            importance.write(path, sums(seen, targets), [data.name], data.length)
            return importance.read(path), path.read_bytes()

    def resume(self, work: Workspace) -> None:
        """Takes over what earlier runs of the job have found, and keeps the rest there."""
        self._work = work
        self._findings = work.remembered(FOUND) | self._findings

    def notes(self) -> tuple[str, ...]:
        """What was found on the way, for all blocks together."""
        return (*_starved(self._findings), *_damped(self._findings))

    def _enter(self, index: int) -> _Block:
        if self._block is None or self._block.index != index:
            self._block = None  # before another takes memory
            observed = self._statistics.observed(index)
            covered, starved = observed.covered(self._statistics.least)
            self._note_starved(index, observed, starved)
            stats = {module: covered[group] for module, group in observed.groups.items() if group in covered}
            tensors: dict[str, Tensor] = {}
            if self._transform:
                tensors, stats = self._transform.apply(index, stats, self._read)
            self._block = _Block(index, stats, tensors, {})
        return self._block

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

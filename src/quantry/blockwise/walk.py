"""A causal language model run block by block, with the weights of one block in memory.

Each block is loaded, run on all windows and freed before the next. `skeleton` loads the weights and runs what comes
before the first block and after the last.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quantry.blockwise.skeleton import BlockCall, Skeleton, WeightSource, check_finite
from quantry.blockwise.taps import Place
from quantry.errors import OutputError, QuantryError
from quantry.types import Activation, Progress

CPU = torch.device("cpu")


def run(
    source: WeightSource,
    windows: Sequence[Sequence[int]],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 4,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yields the logits of each window, (tokens, vocabulary) in float32 on the device, in the order of the windows."""
    walk = Walk(source, device=device, dtype=dtype, batch=batch)
    for block in walk.blocks(windows):
        if progress:
            progress(block.index, walk.count, block.name)
    yield from walk.logits()


def whole(
    source: WeightSource, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """Returns the model with all its weights in memory, for generation; it quantizes inputs as an engine does."""
    skeleton = Skeleton(source, torch.device(device), dtype)
    skeleton.load(skeleton.keys)
    model: transformers.PreTrainedModel = skeleton.model
    if skeleton.activations:
        forward, quantized_inputs = model.forward, skeleton.quantized_inputs(model, "")

        @wraps(forward)
        def simulated(*args: Any, **kwargs: Any) -> Any:
            with quantized_inputs:
                return forward(*args, **kwargs)

        model.forward = simulated
    return model


@dataclass(slots=True)
class Batch:
    """Windows of one length that run together."""

    windows: tuple[int, ...]
    tokens: Tensor
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    spilled: bool = False  # the hidden states lie in a file
    calls: tuple[BlockCall, ...] = ()


class Block:
    """A decoder block with its weights, and the hidden states that have reached it."""

    def __init__(self, walk: "Walk", index: int, name: str, module: nn.Module) -> None:
        self.index, self.name, self.module = index, name, module
        self.advanced = False
        self.skeleton = walk.skeleton
        self._walk, self._activations = walk, walk.skeleton.activations

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The checkpoint's tensors that make up the block, and the model's parameters that each goes into."""
        return {name: made for name, made in self.skeleton.makes.items() if made[0].startswith(f"{self.name}.")}

    def replace(self, tensors: Mapping[str, Tensor], activations: Mapping[Place, Activation] | None = None) -> None:
        """Replaces tensors of the checkpoint, by their names there.

        With `activations` the block quantizes the inputs of its linear layers as an engine does.
        """
        skeleton = self.skeleton
        skeleton.load({key for name in tensors for key in skeleton.makes[name]}, tensors)
        self._activations = skeleton.activations if activations is None else dict(activations)

    def outputs(self) -> Iterator[Tensor]:
        """Yields the block's output for the present hidden states, (windows, tokens, channels) for each batch."""
        quantized_inputs = self.skeleton.quantized_inputs(self.module, self.name, self._activations)
        for batch in self._walk.batches:
            yield self._output(batch, quantized_inputs)

    def advance(self) -> None:
        """Runs the block and passes its outputs on as the hidden states of the next block."""
        self._walk.reached = None
        for batch, output in zip(self._walk.batches, self.outputs(), strict=True):
            self._walk.keep(batch, output)
        self.advanced = True
        self._walk.reached = self.index + 1

    def apply(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Returns the block's output for some hidden states of a batch, on the device; it is differentiable.

        Raises WeightError if a value is not finite.
        """
        call = batch.calls[self.index]
        result = self.module(hidden, *call.args, **call.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        check_finite(output, self.name, self.skeleton.dtype)
        return output

    @torch.no_grad()
    def _output(self, batch: Batch, quantized_inputs: AbstractContextManager[Any]) -> Tensor:
        with quantized_inputs:
            return self.apply(batch, batch.hidden.to(self.skeleton.device))


class Walk:
    """One pass of some windows through a model: first all `blocks`, then `logits`.

    Hidden states stay on a GPU that has four times the room for them, unless the walk is `sparing`. Otherwise they stay
    in memory, or beyond `memory` bytes in a file in the folder `scratch`, which the system caches as memory allows. The
    file has no name and vanishes with the walk. `reached` is the block that all hidden states have reached, or None
    while they are between two blocks.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        batch: int = 4,
        memory: int | None = None,
        scratch: Path | None = None,
        sparing: bool = False,
    ) -> None:
        self.skeleton = Skeleton(source, torch.device(device), dtype)
        self.batches: list[Batch] = []
        self.reached: int | None = None
        self.memory, self.scratch = memory, scratch
        self._size, self._sparing, self._home = batch, sparing, CPU

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.skeleton.layers)

    def blocks(
        self, windows: Sequence[Sequence[int]], start: int = 0, hidden: Sequence[Tensor] | None = None
    ) -> Iterator[Block]:
        """Yields each block with its weights, which are freed when the next block is requested.

        A walk may begin at a later block, with the `hidden` states (tokens, channels) of each window that reach it.
        Raises QuantryError if a window is empty or has a token that the model lacks.
        """
        self.batches = _batches(windows, self._size, self.skeleton.rows)
        self._embed(hidden)
        self.reached = start
        for index in range(start, self.count):
            with self.block(index) as block:
                yield block
                if not block.advanced:
                    block.advance()
                self.skeleton.check_simulated(block.name)

    @contextmanager
    def block(self, index: int) -> Iterator[Block]:
        """Loads a block inside a `with`, whatever the hidden states; `blocks` must have made the batches."""
        name = f"{self.skeleton.stack}.{index}"
        with self.skeleton.loaded(self.skeleton.inside(name)):
            yield Block(self, index, name, self.skeleton.layers[index])

    def logits(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the logits of each window, (tokens, vocabulary) in float32 on the device, in order."""
        rows = {window: (batch, row) for batch in self.batches for row, window in enumerate(batch.windows)}
        with self.skeleton.loaded(self.skeleton.after):
            quantized_inputs = self.skeleton.quantized_inputs(self.skeleton.model, "")
            for window in sorted(rows):
                batch, row = rows[window]
                tokens, hidden = batch.tokens[row : row + 1], batch.hidden[row : row + 1]
                with torch.no_grad():
                    logits = self.skeleton.tail(tokens, hidden, quantized_inputs)
                yield window, logits

    def hidden(self) -> list[Tensor]:
        """Returns the hidden states (tokens, channels) of each window, in the order of the windows."""
        rows = {window: batch.hidden[row] for batch in self.batches for row, window in enumerate(batch.windows)}
        return [rows[window] for window in sorted(rows)]

    def keep(self, batch: Batch, hidden: Tensor) -> None:
        """Stores the hidden states of a batch until they are used."""
        if batch.spilled:
            batch.hidden.copy_(hidden)
        else:
            batch.hidden = hidden.to(self._home)

    def _settle(self, first: Tensor) -> None:
        """Decides where hidden states stay; if they exceed the memory, gives every batch its part of a file."""
        channels, tokens = first.shape[-1], sum(batch.tokens.numel() for batch in self.batches)
        size, device = tokens * channels * first.element_size(), self.skeleton.device
        roomy = device.type == "cuda" and not self._sparing and 4 * size <= torch.cuda.mem_get_info(device)[0]
        self._home = device if roomy else CPU
        if self.memory is None or size <= self.memory or self._home != CPU:
            return
        file = mapped(tokens * channels, first.dtype, self.scratch).view(tokens, channels)
        parts = torch.split(file, [batch.tokens.numel() for batch in self.batches])
        for batch, part in zip(self.batches, parts, strict=True):
            batch.hidden, batch.spilled = part.view(*batch.tokens.shape, channels), True

    def _embed(self, later: Sequence[Tensor] | None) -> None:
        """Gives every batch its hidden states, embedded or `later` ones, and the calls of its blocks."""
        earlier: dict[tuple[int, ...], tuple[BlockCall, ...]] = {}
        with self.skeleton.loaded(self.skeleton.before), torch.no_grad():
            for batch in self.batches:
                hidden, calls = self.skeleton.head_start(batch.tokens)
                if not earlier:
                    self._settle(hidden)
                self.keep(batch, hidden if later is None else torch.stack([later[window] for window in batch.windows]))
                shape = tuple(batch.tokens.shape)
                batch.calls = earlier[shape] if shape in earlier and _equal(earlier[shape], calls) else calls
                earlier.setdefault(shape, batch.calls)


def _batches(windows: Sequence[Sequence[int]], size: int, rows: int) -> list[Batch]:
    """Batches windows of the same length, `size` at a time."""
    lengths: dict[int, list[int]] = {}
    for index, tokens in enumerate(windows):
        if not tokens or not 0 <= min(tokens) <= max(tokens) < rows:
            what = f"a token {max(tokens)} where the model has {rows}" if tokens else "no tokens"
            raise QuantryError(f"window {index} has {what}", fix="use the tokenizer that belongs to the model")
        lengths.setdefault(len(tokens), []).append(index)
    cut = [same[start : start + size] for same in lengths.values() for start in range(0, len(same), size)]
    return [Batch(tuple(indices), torch.tensor([list(windows[index]) for index in indices])) for indices in cut]


def mapped(count: int, dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Returns `count` values in a file without a name.

    All its space is allocated now where the system can do that, so that no later write fails. Raises OutputError if the
    folder has no room for it.
    """
    size = count * dtype.itemsize
    try:
        with NamedTemporaryFile(dir=folder) as file:
            getattr(os, "posix_fallocate", _lengthen)(file.fileno(), 0, size)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    except OSError as error:
        raise OutputError(
            f"no room for {size:,} bytes of hidden states in {folder or gettempdir()}: {error.strerror}",
            fix="free some space, or take fewer or shorter samples",
        ) from error


def _lengthen(file: int, start: int, size: int) -> None:
    """Gives a file its length where the system cannot allocate its space, as on macOS."""
    os.ftruncate(file, start + size)


def _equal(a: Any, b: Any) -> bool:
    """Compares calls of two batches: True if all tensors are equal and a block can write into nothing they share."""
    if isinstance(a, BlockCall):
        return _equal((*a.args, *a.kwargs.items()), (*b.args, *b.kwargs.items()))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    return isinstance(a, str | int | float | None) and a == b

"""A causal language model run block by block, with the weights of one block in memory.

The model is transformers' own, made without weights. Run with decoder blocks that only take note, it tells what the
model does before its first block and what it gives each block besides the hidden states (masks, rotary embeddings); run
with blocks that hand over the last hidden states, what it does after its last one (norm, head, scaling of logits). In
between, blocks are loaded, run on all windows and freed, one after the other. Weights come from a `Source`, whatever
the format, and are put in place by transformers' own loading, which knows how each family renames and fuses them.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from tempfile import NamedTemporaryFile, gettempdir
from threading import Lock
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.initialization import no_tie_weights
from transformers.modeling_utils import LoadStateDictConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quantry.errors import CheckpointError, ConfigError, OutputError, QuantryError, WeightError
from quantry.models.parts import part_of
from quantry.numerics.activations import simulate
from quantry.types import Activation, Progress

Seen = Callable[[str, int | None, Tensor], Tensor | None]
Made = Callable[[str, int | None, Tensor, Tensor], None]
Place = tuple[str, int | None]  # a linear layer as LinearInputs names it: a parameter, and the number in a stack

UNUSED = frozenset({"vision tower", "audio tower", "projector"})  # parts that text does not go through
NUMBER = re.compile(r"\.(\d+)(?=\.)")
CPU = torch.device("cpu")
BUILDING = Lock()  # no_tie_weights changes transformers for all threads, and two at once would leave it changed
OTHER = "use a model that transformers runs as a plain stack of decoder blocks"
AGAIN = "download or write the checkpoint again"


class Source(Protocol):
    """Where weights come from: names as transformers' checkpoints have them, values decoded."""

    @property
    def config(self) -> Mapping[str, Any]:
        """config.json's words, without quantization_config."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""

    @property
    def activations(self) -> Mapping[str, Activation]:
        """The modules whose input an engine quantizes, and how."""

    def read(self, name: str) -> Tensor:
        """A tensor's values in some float type, on the CPU."""


def run(
    source: Source,
    windows: Sequence[Sequence[int]],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 4,
    progress: Progress | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """The logits of each window, (tokens, vocabulary) in float32 on the device, in the order of the windows."""
    walk = Walk(source, device=device, dtype=dtype, batch=batch)
    for block in walk.blocks(windows):
        if progress:
            progress(block.index, walk.count, block.name)
    yield from walk.logits()


def whole(
    source: Source, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> transformers.PreTrainedModel:
    """The model with all its weights in memory, quantizing inputs as an engine would, for generation."""
    skeleton = _Skeleton(source, torch.device(device), dtype)
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


class LinearInputs(TorchFunctionMode):
    """Shows the input of every linear layer of a module: seen(name, expert, inputs) may give another to use instead.

    A name is the parameter's without `.weight`, after `prefix`. Layers are known by where their weight lies: fused
    experts are slices of one parameter, told apart by their number. Active inside a `with`.
    """

    def __init__(self, module: nn.Module, prefix: str, seen: Seen) -> None:
        super().__init__()
        self._names, self._seen = _places(module, prefix), seen

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is nn.functional.linear:
            inputs, weight, *others = [*args, *(kwargs.pop(name) for name in ("input", "weight") if name in kwargs)]
            place = self._names.get(weight.data_ptr())
            other = None if place is None else self._seen(*place, inputs)
            args = (inputs if other is None else other, weight, *others)
        return func(*args, **kwargs)


class LinearOutputs(TorchFunctionMode):
    """Shows the input and the output of every linear layer of a module: made(name, expert, inputs, output).

    Names and numbers are those of LinearInputs. Active inside a `with`.
    """

    def __init__(self, module: nn.Module, prefix: str, made: Made) -> None:
        super().__init__()
        self._names, self._made = _places(module, prefix), made

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func is nn.functional.linear:
            inputs, weight, *_ = [*args, *(kwargs[name] for name in ("input", "weight") if name in kwargs)]
            place = self._names.get(weight.data_ptr())
            if place is not None:
                self._made(*place, inputs, output)
        return output


def _places(module: nn.Module, prefix: str) -> dict[int, Place]:
    """Where each matrix of a module lies: the name of its parameter and, in a stack, its number."""
    found: dict[int, Place] = {}
    for name, weight in module.named_parameters(prefix=prefix):
        name = name.removesuffix(".weight")
        if weight.is_meta or weight.ndim not in (2, 3):
            continue
        if weight.ndim == 2:
            found[weight.data_ptr()] = (name, None)
        else:
            found |= {weight[index].data_ptr(): (name, index) for index in range(len(weight))}
    return found


@dataclass(frozen=True, slots=True)
class _Call:
    """What a model gives a block besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True)
class Batch:
    """Windows of one length that run together."""

    windows: tuple[int, ...]
    tokens: Tensor
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    spilled: bool = False  # the hidden states lie in a file
    calls: tuple[_Call, ...] = ()


class Block:
    """A decoder block with its weights, and the hidden states that have come to it."""

    def __init__(self, walk: "Walk", index: int, name: str, module: nn.Module) -> None:
        self.index, self.name, self.module = index, name, module
        self.advanced = False
        self.skeleton = walk.skeleton
        self._walk, self._activations = walk, walk.skeleton.activations

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """The tensors of the checkpoint that the block is made of, and the model's parameters that each goes into."""
        return {name: made for name, made in self.skeleton.makes.items() if made[0].startswith(f"{self.name}.")}

    def replace(self, tensors: Mapping[str, Tensor], activations: Mapping[Place, Activation] | None = None) -> None:
        """Puts other tensors in place of the checkpoint's, by their names there.

        With `activations` the block sees the inputs of its linear layers as an engine that quantizes them does.
        """
        skeleton = self.skeleton
        skeleton.load({key for name in tensors for key in skeleton.makes[name]}, tensors)
        self._activations = skeleton.activations if activations is None else dict(activations)

    def outputs(self) -> Iterator[Tensor]:
        """What the block makes of the present hidden states, (windows, tokens, channels) for each batch."""
        quantized_inputs = self.skeleton.quantized_inputs(self.module, self.name, self._activations)
        for batch in self._walk.batches:
            yield self._output(batch, quantized_inputs)

    def advance(self) -> None:
        """Hands the hidden states on to the next block."""
        self._walk.reached = None
        for batch, output in zip(self._walk.batches, self.outputs(), strict=True):
            self._walk.keep(batch, output)
        self.advanced = True
        self._walk.reached = self.index + 1

    def apply(self, batch: Batch, hidden: Tensor) -> Tensor:
        """What the block makes of hidden states of a batch, on the device; gradients go through if they are on."""
        call = batch.calls[self.index]
        given = self.module(hidden, *call.args, **call.kwargs)
        output: Tensor = given[0] if isinstance(given, tuple) else given
        _check_finite(output, self.name, self.skeleton.dtype)
        return output

    @torch.no_grad()
    def _output(self, batch: Batch, quantized_inputs: AbstractContextManager[Any]) -> Tensor:
        with quantized_inputs:
            return self.apply(batch, batch.hidden.to(self.skeleton.device))


class Walk:
    """One way through a model with some windows: first all `blocks`, then `logits`.

    Hidden states stay on a GPU that has four times the room for them, unless the walk is to be `sparing`. Elsewhere,
    those of more than `memory` bytes lie in a file in the folder `scratch`, of which the system keeps in memory what
    there is room for; the file has no name and goes away with the walk. `reached` is the block that all hidden states
    have come to, or nothing while they are between two.
    """

    def __init__(
        self,
        source: Source,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        batch: int = 4,
        memory: int | None = None,
        scratch: Path | None = None,
        sparing: bool = False,
    ) -> None:
        self.skeleton = _Skeleton(source, torch.device(device), dtype)
        self.batches: list[Batch] = []
        self.reached: int | None = None
        self._size, self._memory, self._scratch, self._home = batch, memory, scratch, CPU
        self._sparing = sparing

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.skeleton.layers)

    def blocks(
        self, windows: Sequence[Sequence[int]], start: int = 0, hidden: Sequence[Tensor] | None = None
    ) -> Iterator[Block]:
        """Each block with its weights, which are freed when the next is asked for.

        A walk may begin at a later block, with the `hidden` states (tokens, channels) of each window that come to it.
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
        """A block with its weights for a while, whatever hidden states are there; `blocks` has made the batches."""
        name = f"{self.skeleton.stack}.{index}"
        with self.skeleton.loaded(self.skeleton.inside(name)):
            yield Block(self, index, name, self.skeleton.layers[index])

    def logits(self) -> Iterator[tuple[int, Tensor]]:
        """The logits of each window, (tokens, vocabulary) in float32 on the device, in the order of the windows."""
        rows = {window: (batch, row) for batch in self.batches for row, window in enumerate(batch.windows)}
        with self.skeleton.loaded(self.skeleton.after):
            quantized_inputs = self.skeleton.quantized_inputs(self.skeleton.model, "")
            for window in sorted(rows):
                batch, row = rows[window]
                tokens, hidden = batch.tokens[row : row + 1], batch.hidden[row : row + 1]
                with torch.no_grad():
                    found = self.skeleton.tail(tokens, hidden, quantized_inputs)
                yield window, found

    def hidden(self) -> list[Tensor]:
        """The hidden states (tokens, channels) of each window, in the order of the windows."""
        rows = {window: batch.hidden[row] for batch in self.batches for row, window in enumerate(batch.windows)}
        return [rows[window] for window in sorted(rows)]

    def keep(self, batch: Batch, hidden: Tensor) -> None:
        """Puts the hidden states of a batch where they stay until they are used."""
        if batch.spilled:
            batch.hidden.copy_(hidden)
        else:
            batch.hidden = hidden.to(self._home)

    def _settle(self, first: Tensor) -> None:
        """Decides where hidden states stay; if they are too large for memory, gives every batch its place in a file."""
        channels, tokens = first.shape[-1], sum(batch.tokens.numel() for batch in self.batches)
        size, device = tokens * channels * first.element_size(), self.skeleton.device
        roomy = device.type == "cuda" and not self._sparing and 4 * size <= torch.cuda.mem_get_info(device)[0]
        self._home = device if roomy else CPU
        if self._memory is None or size <= self._memory or self._home != CPU:
            return
        room, start = mapped(tokens * channels, first.dtype, self._scratch).view(tokens, channels), 0
        for batch in self.batches:
            part = room[start : start + batch.tokens.numel()]
            batch.hidden, batch.spilled = part.view(*batch.tokens.shape, channels), True
            start += batch.tokens.numel()

    def _embed(self, later: Sequence[Tensor] | None) -> None:
        """The hidden states before the first block or `later` ones, and what each block will be given with them."""
        known: dict[tuple[int, ...], tuple[_Call, ...]] = {}
        with self.skeleton.loaded(self.skeleton.before), torch.no_grad():
            for batch in self.batches:
                hidden, calls = self.skeleton.head_start(batch.tokens)
                if not known:
                    self._settle(hidden)
                self.keep(batch, hidden if later is None else torch.stack([later[window] for window in batch.windows]))
                shape = tuple(batch.tokens.shape)
                batch.calls = known[shape] if shape in known and _same(known[shape], calls) else calls
                known.setdefault(shape, batch.calls)


class _Traced(Exception):  # noqa: N818 - not an error: the last block has been reached
    pass


class _Skeleton:
    """A transformers model whose weights come and go."""

    def __init__(self, source: Source, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.model: Any = _empty_model(source.config, device, dtype)
        self.stack, self.layers = _stack(self.model)
        self.keys = frozenset(self.model.state_dict())
        self.embedding = self._of(self.model.get_input_embeddings())
        self.head = self._of(self.model.get_output_embeddings())
        self.rows = int(self.model.get_input_embeddings().weight.shape[0])
        self._mapping: list[Any] = get_model_conversion_mapping(self.model)
        self.makes = self._targets()
        self._tied = self._ties()
        self._check_names()
        blocks = frozenset(key for key in self.keys if key.startswith(f"{self.stack}."))
        self.outside = frozenset(key for key in self.keys - blocks if part_of(key, len(self.layers)) not in UNUSED)
        self.activations = self._activations()
        self._simulated: set[str] = set()
        self._gives: Callable[[Tensor], Any] = _alone  # what the model expects of a block

    @property
    def before(self) -> frozenset[str]:
        """The weights that are used before the first block."""
        return self.outside - self.head

    @property
    def after(self) -> frozenset[str]:
        """The weights that are used after the last block."""
        return self.outside - self.embedding

    @contextmanager
    def loaded(self, keys: frozenset[str]) -> Iterator[None]:
        """Weights that are in place for a while."""
        self.load(keys)
        try:
            yield
        finally:
            self.free(keys)

    def inside(self, module: str) -> frozenset[str]:
        """The weights of a module."""
        return frozenset(key for key in self.keys if key.startswith(f"{module}."))

    def load(self, keys: Iterable[str], instead: Mapping[str, Tensor] | None = None) -> None:
        """Puts weights of the model in place; tensors that are given `instead` are not read from the source."""
        wanted = {self._tied.get(key, key) for key in keys}
        names = [name for name, made in self.makes.items() if wanted.intersection(made)]
        settings = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self._mapping,
        )
        with _quiet():
            found, _ = convert_and_load_state_dict_in_model(
                self.model, {name: _Lazy(self.source, name, instead or {}) for name in names}, settings
            )
        for key, shape, expected in found.mismatched_keys:
            raise CheckpointError(
                f"{key} has shape {list(shape)} where the config makes it {list(expected)}", fix="restore config.json"
            )
        for key, problem in found.conversion_errors.items():
            raise CheckpointError(f"{key} cannot be made: {str(problem).strip().splitlines()[-1][:200]}", fix=AGAIN)
        for key in keys:
            if key in self._tied:
                self._place(key, self.model.get_parameter_or_buffer(self._tied[key]))

    def free(self, keys: Iterable[str]) -> None:
        """Gives the memory of weights back."""
        for key in {*keys, *(self._tied[key] for key in keys if key in self._tied)}:
            weight = self.model.get_parameter_or_buffer(key)
            empty = torch.empty_like(weight, device="meta")
            self._place(key, nn.Parameter(empty, False) if isinstance(weight, nn.Parameter) else empty)

    def head_start(self, tokens: Tensor) -> tuple[Tensor, tuple[_Call, ...]]:
        """The hidden states of (windows, tokens) before the first block, and what each block is given with them."""
        for self._gives in (_alone, _in_tuple):
            states, calls = self._trace(tokens)
            straight = len(states) == len(self.layers) and all(state is states[0] for state in states)
            if straight and states[0].shape[:-1] == tokens.shape:
                return states[0], tuple(calls)
        raise QuantryError(f"{type(self.model).__name__} does more than run one block after the other", fix=OTHER)

    def _trace(self, tokens: Tensor) -> tuple[list[Tensor], list[_Call]]:
        """The hidden states that come to each block if blocks change nothing, and what comes with them."""
        states: list[Tensor] = []
        calls: list[_Call] = []

        def note(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            states.append(hidden)
            calls.append(_Call(args, kwargs))
            if len(calls) == len(self.layers):
                raise _Traced
            return self._gives(hidden)

        # the other errors are those of a model that expects something else of a block
        with _replaced(self.layers, note), suppress(_Traced, ValueError, TypeError, IndexError, AttributeError):
            self.model(input_ids=tokens.to(self.device), use_cache=False)
        return states, calls

    def tail(self, tokens: Tensor, hidden: Tensor, quantized_inputs: AbstractContextManager[Any]) -> Tensor:
        """The logits of one window from what its last block gave."""
        hidden = hidden.to(self.device)
        with ExitStack() as stack:
            stack.enter_context(_replaced(self.layers, lambda *args, **kwargs: self._gives(hidden)))
            # not in memory now, and what it gives is not used
            stack.enter_context(_replaced([self.model.get_input_embeddings()], lambda ids: hidden))
            stack.enter_context(quantized_inputs)
            logits: Tensor = self.model(input_ids=tokens.to(self.device), use_cache=False).logits[0]
        _check_finite(logits, "the head", self.dtype)
        return logits.float()

    def quantized_inputs(
        self, module: nn.Module, prefix: str, activations: Mapping[Place, Activation] | None = None
    ) -> AbstractContextManager[Any]:
        """In it, a module of the model sees its inputs as an engine that quantizes them does."""
        kinds = self.activations if activations is None else activations

        def simulated(name: str, expert: int | None, inputs: Tensor) -> Tensor | None:
            activation = kinds.get((name, expert))
            if activation is None:
                return None
            self._simulated.add(name)
            return simulate(inputs, activation).to(inputs.dtype)

        return LinearInputs(module, prefix, simulated) if kinds else nullcontext()

    def check_simulated(self, module: str) -> None:
        """An input that should have been quantized must have been seen: not every family calls linear layers so."""
        wanted = {name for name, _ in self.activations if name.startswith(f"{module}.")}
        for name in sorted(wanted - self._simulated):
            raise QuantryError(f"the quantized input of {name} cannot be simulated: it is no linear layer", fix=OTHER)

    def _targets(self) -> dict[str, tuple[str, ...]]:
        """The weights of the model that each tensor of the checkpoint goes into, in the order of loading."""
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        many = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        found = {}
        for name in sorted(self.source.names, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if key not in state and name in state:
                key, pattern = rename_source_key(name, [], [], prefix, state)
            first, *others = many[pattern] if pattern else [key]
            found[name] = (key, *(key.replace(first, other) for other in others))
        return found

    def _ties(self) -> dict[str, str]:
        """Weights that the checkpoint leaves out because they are another's."""
        there = {key for made in self.makes.values() for key in made}
        pairs = [pair for pair in self.model.all_tied_weights_keys.items() if not there.issuperset(pair)]
        return dict((other, one) if one in there else (one, other) for one, other in pairs)

    def _check_names(self) -> None:
        """Every tensor must have a place and every place a tensor, but for those that transformers does without."""
        there = {key for made in self.makes.values() for key in made}
        found = SimpleNamespace(missing_keys=self.keys - there - self._tied.keys(), unexpected_keys=there - self.keys)
        self.model._adjust_missing_and_unexpected_keys(found)
        for what, keys in (("lacks", found.missing_keys), ("has an unexpected", found.unexpected_keys)):
            if keys:
                first, *others = sorted(keys, key=dot_natural_key)
                more = f" and {len(others)} more" if others else ""
                kind = type(self.model).__name__
                raise CheckpointError(f"the checkpoint {what} {first}{more}, unlike a {kind}", fix=AGAIN)

    def _activations(self) -> dict[Place, Activation]:
        """How inputs are quantized, by the names that LinearInputs gives."""
        given = self.source.activations
        if not given:
            return {}
        found: dict[Place, set[Activation | None]] = {}
        state = self.model.state_dict()
        for name, made in self.makes.items():
            for key in made:
                stacked = key in state and state[key].ndim == 3 and NUMBER.findall(name)
                place = (key.removesuffix(".weight"), int(NUMBER.findall(name)[-1]) if stacked else None)
                found.setdefault(place, set()).add(given.get(name.removesuffix(".weight")))
        for (name, _), kinds in found.items():
            if len(kinds) > 1:
                raise CheckpointError(f"parts of {name} quantize the same input in {len(kinds)} ways", fix=AGAIN)
        return {place: kind for place, (kind,) in found.items() if kind is not None}

    def _of(self, module: nn.Module | None) -> frozenset[str]:
        """The weights of a module that is somewhere in the model."""
        names = [name for name, other in self.model.named_modules() if other is module]
        return frozenset().union(*(self.inside(name) for name in names))

    def _place(self, key: str, weight: Tensor) -> None:
        module, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(module), name, weight)


class _Lazy:
    """A tensor that is read when transformers takes it, as it takes slices of safetensors.

    It does so from several threads; a source is asked for one tensor at a time.
    """

    _turn = Lock()

    def __init__(self, source: Source, name: str, instead: Mapping[str, Tensor]) -> None:
        self._source, self._name, self._instead = source, name, instead

    def __getitem__(self, _: Any) -> Tensor:
        with self._turn:
            given = self._instead.get(self._name)
            return self._source.read(self._name) if given is None else given


def _alone(hidden: Tensor) -> Any:
    return hidden


def _in_tuple(hidden: Tensor) -> Any:
    return (hidden,)


def _empty_model(settings: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """The model of a config without weights; what it computes itself, such as rotary frequencies, is there."""
    kind = str(settings.get("model_type"))
    if kind not in CONFIG_MAPPING:
        code = ", and code that comes with a model is not run" if "auto_map" in settings else ""
        raise ConfigError(f"transformers {transformers.__version__} has no model {kind[:40]!r}{code}", fix=OTHER)
    try:
        family = CONFIG_MAPPING[kind]
        plain = family._decode_special_floats({key: value for key, value in settings.items() if key != "auto_map"})
        config = family.from_dict(plain)
        with BUILDING, torch.device("meta"), no_tie_weights():
            # experts one by one, so that the input of each is seen
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    except Exception as error:  # transformers has no class of its own for a config that does not hold
        reason = f"no {kind} can be made of the config: {str(error)[:160]}"
        raise ConfigError(reason, fix="restore config.json") from error
    for name, buffer in list(model.named_non_persistent_buffers()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device=device))
    model.initialize_weights()
    return model.eval()


def _stack(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder blocks of a model, and their name."""
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and part_of(f"{name}.0", count) not in UNUSED:
            return name, module
    raise QuantryError(f"{type(model).__name__} has no stack of {count} decoder blocks", fix=OTHER)


def _batches(windows: Sequence[Sequence[int]], size: int, rows: int) -> list[Batch]:
    """Windows of the same length, some at a time."""
    lengths: dict[int, list[int]] = {}
    for index, tokens in enumerate(windows):
        if not tokens or not 0 <= min(tokens) <= max(tokens) < rows:
            what = f"a token {max(tokens)} where the model has {rows}" if tokens else "no tokens"
            raise QuantryError(f"window {index} has {what}", fix="use the tokenizer that belongs to the model")
        lengths.setdefault(len(tokens), []).append(index)
    cut = [same[start : start + size] for same in lengths.values() for start in range(0, len(same), size)]
    return [Batch(tuple(indices), torch.tensor([list(windows[index]) for index in indices])) for indices in cut]


def mapped(count: int, dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Room for so many values in a file without a name; all of it is taken now, so that writing cannot fail later."""
    size = count * dtype.itemsize
    try:
        with NamedTemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return torch.from_file(file.name, shared=True, size=count, dtype=dtype)
    except OSError as error:
        raise OutputError(
            f"{size:,} bytes of hidden states find no room in {folder or gettempdir()}: {error.strerror}",
            fix="free some space, or take fewer or shorter samples",
        ) from error


def _same(one: Any, other: Any) -> bool:
    """Whether two batches may share what blocks are given: equal tensors, and nothing that a block may write into."""
    if isinstance(one, _Call):
        return _same((*one.args, *one.kwargs.items()), (*other.args, *other.kwargs.items()))
    if isinstance(one, tuple):
        return isinstance(other, tuple) and len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return isinstance(one, str | int | float | None) and one == other


def _check_finite(values: Tensor, name: str, dtype: torch.dtype) -> None:
    if not bool(values.isfinite().all()):
        raise WeightError(
            f"{name} gives values that are not finite in {str(dtype).removeprefix('torch.')}",
            fix="check its weights, or compute in a wider type",
        )


@contextmanager
def _replaced(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Modules that do something else for a while."""
    modules = list(modules)
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar of transformers for each block."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()

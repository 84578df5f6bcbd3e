"""A transformers model made without weights, which are loaded and freed part by part.

Weights come from a `WeightSource`, whatever the format. transformers' own loading puts them in place, because it knows
how each family renames and fuses them. The skeleton also runs what surrounds the decoder blocks: with blocks that only
take notes, the model shows what it does before its first block and what it passes to each block besides the hidden
states (masks, rotary embeddings); with blocks that return the last hidden states, what it does after its last block
(norm, head, scaling of logits).
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from threading import Lock
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn
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

from quantry.blockwise.taps import LinearInputs, Place
from quantry.errors import CheckpointError, ConfigError, QuantryError, WeightError
from quantry.models.parts import part_of
from quantry.numerics.activations import simulate
from quantry.types import Activation

UNUSED = frozenset({"vision tower", "audio tower", "projector"})  # parts that text does not go through
NUMBER = re.compile(r"\.(\d+)(?=\.)")
BUILDING = Lock()  # no_tie_weights patches transformers for all threads; two at once would leave it patched
OTHER = "use a model that transformers runs as a plain stack of decoder blocks"
AGAIN = "download or write the checkpoint again"


class WeightSource(Protocol):
    """Supplies weights: names as in transformers' checkpoints, values decoded."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, without quantization_config."""

    @property
    def names(self) -> Sequence[str]:
        """The names of all tensors."""

    @property
    def activations(self) -> Mapping[str, Activation]:
        """The modules whose input an engine quantizes, and how."""

    def read(self, name: str) -> Tensor:
        """Returns a tensor's values in some float type, on the CPU."""


@dataclass(frozen=True, slots=True)
class BlockCall:
    """The arguments a model passes to a block besides the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Skeleton:
    """A transformers model whose weights come and go.

    `makes` maps each tensor of the checkpoint to the model's parameters it goes into, in the order of loading; `tied`
    maps weights that the checkpoint leaves out to those they are tied to.
    Raises ConfigError if transformers cannot build the model, CheckpointError if tensors do not match its parameters.
    """

    def __init__(self, source: WeightSource, device: torch.device, dtype: torch.dtype) -> None:
        self.source, self.device, self.dtype = source, device, dtype
        self.model: Any = _empty_model(source.config, device, dtype)
        self.stack, self.layers = _stack(self.model)
        self.keys = frozenset(self.model.state_dict())
        self.rows = int(self.model.get_input_embeddings().weight.shape[0])
        self._mapping: list[Any] = get_model_conversion_mapping(self.model)
        self.makes = self._targets()
        self.tied = self._ties()
        self._check_names()
        blocks = self.inside(self.stack)
        outside = frozenset(key for key in self.keys - blocks if part_of(key, len(self.layers)) not in UNUSED)
        self.before = outside - self._of(self.model.get_output_embeddings())  # weights used before the first block
        self.after = outside - self._of(self.model.get_input_embeddings())  # weights used after the last block
        self.activations = self._activations()
        self._simulated: set[str] = set()
        self._block_result: Callable[[Tensor], Any] = _alone  # what the model expects a block to return

    @contextmanager
    def loaded(self, keys: frozenset[str]) -> Iterator[None]:
        """Loads weights and frees them at the end of the `with`."""
        self.load(keys)
        try:
            yield
        finally:
            self.free(keys)

    def inside(self, module: str) -> frozenset[str]:
        """Returns the keys of a module's weights."""
        return frozenset(key for key in self.keys if key.startswith(f"{module}."))

    def sources(self, keys: Iterable[str]) -> list[str]:
        """Returns the tensors of the checkpoint that weights come from, in the order of loading."""
        wanted = {self.tied.get(key, key) for key in keys}
        return [name for name, made in self.makes.items() if wanted.intersection(made)]

    def load(self, keys: Iterable[str], instead: Mapping[str, Tensor] | None = None) -> None:
        """Puts weights in place; tensors in `instead` replace those of the source.

        Raises CheckpointError if a shape differs from the config's, or a conversion of transformers fails.
        """
        names = self.sources(keys)
        settings = LoadStateDictConfig(
            device_map={"": self.device},
            dtype=self.dtype,
            dtype_plan=self.model._get_dtype_plan(self.dtype),
            weight_mapping=self._mapping,
        )
        with _quiet():
            loading, _ = convert_and_load_state_dict_in_model(
                self.model, {name: _LazyTensor(self.source, name, instead or {}) for name in names}, settings
            )
        for key, shape, expected in loading.mismatched_keys:
            raise CheckpointError(
                f"{key} has shape {list(shape)}, but the config makes it {list(expected)}", fix="restore config.json"
            )
        for key, problem in loading.conversion_errors.items():
            reason = str(problem).strip().splitlines()[-1][:200]
            raise CheckpointError(f"transformers cannot convert {key}: {reason}", fix=AGAIN)
        for key in keys:
            if key in self.tied:
                self._set(key, self.model.get_parameter_or_buffer(self.tied[key]))

    def free(self, keys: Iterable[str]) -> None:
        """Frees the memory of weights."""
        for key in {*keys, *(self.tied[key] for key in keys if key in self.tied)}:
            weight = self.model.get_parameter_or_buffer(key)
            empty = torch.empty_like(weight, device="meta")
            self._set(key, nn.Parameter(empty, False) if isinstance(weight, nn.Parameter) else empty)

    def head_start(self, tokens: Tensor) -> tuple[Tensor, tuple[BlockCall, ...]]:
        """Returns the hidden states of (windows, tokens) before the first block, and the call of each block.

        Raises QuantryError if the model does more than run one block after the other.
        """
        for block_result in (_alone, _in_tuple):
            states, calls = self._trace(tokens, block_result)
            straight = len(states) == len(self.layers) and all(state is states[0] for state in states)
            if straight and states[0].shape[:-1] == tokens.shape:
                self._block_result = block_result
                return states[0], tuple(calls)
        raise QuantryError(f"{type(self.model).__name__} does more than run one block after the other", fix=OTHER)

    def _trace(self, tokens: Tensor, block_result: Callable[[Tensor], Any]) -> tuple[list[Tensor], list[BlockCall]]:
        """Returns the hidden states and the call that reach each block when blocks change nothing."""
        states: list[Tensor] = []
        calls: list[BlockCall] = []

        def note(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            states.append(hidden)
            calls.append(BlockCall(args, kwargs))
            if len(calls) == len(self.layers):
                raise _Traced
            return block_result(hidden)

        # a model that expects another result of a block raises one of the other errors
        with _replaced(self.layers, note), suppress(_Traced, ValueError, TypeError, IndexError, AttributeError):
            self.model(input_ids=tokens.to(self.device), use_cache=False)
        return states, calls

    def tail(self, tokens: Tensor, hidden: Tensor, quantized_inputs: AbstractContextManager[Any]) -> Tensor:
        """Returns the logits of one window from the output of its last block."""
        last = hidden.to(self.device)
        with ExitStack() as stack:
            stack.enter_context(_replaced(self.layers, lambda *args, **kwargs: self._block_result(last)))
            # the embedding is not in memory now, and its output is not used
            stack.enter_context(_replaced([self.model.get_input_embeddings()], lambda ids: last))
            stack.enter_context(quantized_inputs)
            logits: Tensor = self.model(input_ids=tokens.to(self.device), use_cache=False).logits[0]
        check_finite(logits, "the head", self.dtype)
        return logits.float()

    def quantized_inputs(
        self, module: nn.Module, prefix: str, activations: Mapping[Place, Activation] | None = None
    ) -> AbstractContextManager[Any]:
        """Quantizes the inputs of a module's linear layers as an engine does, inside a `with`."""
        by_place = self.activations if activations is None else activations

        def simulated(name: str, expert: int | None, inputs: Tensor) -> Tensor | None:
            activation = by_place.get((name, expert))
            if activation is None:
                return None
            self._simulated.add(name)
            return simulate(inputs, activation).to(inputs.dtype)

        return LinearInputs(module, prefix, simulated) if by_place else nullcontext()

    def check_simulated(self, module: str) -> None:
        """Raises QuantryError if a quantized input of a module was never seen: some families do not call `linear`."""
        wanted = {name for name, _ in self.activations if name.startswith(f"{module}.")}
        for name in sorted(wanted - self._simulated):
            raise QuantryError(
                f"the quantized input of {name} cannot be simulated: it is not a linear layer", fix=OTHER
            )

    def _targets(self) -> dict[str, tuple[str, ...]]:
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        many = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
        state, prefix = self.model.state_dict(), self.model.base_model_prefix
        targets = {}
        for name in sorted(self.source.names, key=dot_natural_key):
            key, pattern = rename_source_key(name, renamings, converters, prefix, state)
            if key not in state and name in state:
                key, pattern = rename_source_key(name, [], [], prefix, state)
            first, *others = many[pattern] if pattern else [key]
            targets[name] = (key, *(key.replace(first, other) for other in others))
        return targets

    def _ties(self) -> dict[str, str]:
        """Maps weights that the checkpoint leaves out to the weights they are tied to."""
        stored = {key for made in self.makes.values() for key in made}
        pairs = [pair for pair in self.model.all_tied_weights_keys.items() if not stored.issuperset(pair)]
        return dict((b, a) if a in stored else (a, b) for a, b in pairs)

    def _check_names(self) -> None:
        """Raises CheckpointError if tensors and parameters do not match, except where transformers allows it."""
        stored = {key for made in self.makes.values() for key in made}
        keys = SimpleNamespace(missing_keys=self.keys - stored - self.tied.keys(), unexpected_keys=stored - self.keys)
        self.model._adjust_missing_and_unexpected_keys(keys)
        family = type(self.model).__name__
        if keys.missing_keys:
            raise CheckpointError(f"the checkpoint lacks {_some(keys.missing_keys)}: {family} needs it", fix=AGAIN)
        if keys.unexpected_keys:
            raise CheckpointError(f"the checkpoint has {_some(keys.unexpected_keys)}: {family} has no such", fix=AGAIN)

    def _activations(self) -> dict[Place, Activation]:
        by_module = self.source.activations
        if not by_module:
            return {}
        by_place: dict[Place, set[Activation | None]] = {}
        state = self.model.state_dict()
        for name, made in self.makes.items():
            for key in made:
                stacked = key in state and state[key].ndim == 3 and NUMBER.findall(name)
                place = (key.removesuffix(".weight"), int(NUMBER.findall(name)[-1]) if stacked else None)
                by_place.setdefault(place, set()).add(by_module.get(name.removesuffix(".weight")))
        for (name, _), activations in by_place.items():
            if len(activations) > 1:
                raise CheckpointError(f"parts of {name} quantize the same input in {len(activations)} ways", fix=AGAIN)
        return {place: activation for place, (activation,) in by_place.items() if activation is not None}

    def _of(self, module: nn.Module | None) -> frozenset[str]:
        """Returns the keys of the weights of a module, wherever it is in the model."""
        names = [name for name, other in self.model.named_modules() if other is module]
        return frozenset().union(*(self.inside(name) for name in names))

    def _set(self, key: str, weight: Tensor) -> None:
        module, _, name = key.rpartition(".")
        setattr(self.model.get_submodule(module), name, weight)


class _Traced(Exception):  # noqa: N818 - not an error: the last block has been reached
    pass


class _LazyTensor:
    """A tensor that is read when transformers slices it, as it slices those of safetensors.

    transformers does so from several threads; the lock lets a source read one tensor at a time.
    """

    _turn = Lock()

    def __init__(self, source: WeightSource, name: str, instead: Mapping[str, Tensor]) -> None:
        self._source, self._name, self._instead = source, name, instead

    def __getitem__(self, _: Any) -> Tensor:
        with self._turn:
            given = self._instead.get(self._name)
            return self._source.read(self._name) if given is None else given


def check_finite(values: Tensor, name: str, dtype: torch.dtype) -> None:
    """Raises WeightError if a value is NaN or infinite."""
    if not bool(values.isfinite().all()):
        raise WeightError(
            f"{name} gives values that are not finite in {str(dtype).removeprefix('torch.')}",
            fix="check its weights, or compute in a wider type",
        )


def _alone(hidden: Tensor) -> Any:
    return hidden


def _in_tuple(hidden: Tensor) -> Any:
    return (hidden,)


def _some(keys: Iterable[str]) -> str:
    first, *others = sorted(keys, key=dot_natural_key)
    return f"{first} and {len(others)} more" if others else first


def _empty_model(settings: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Builds the model of a config without weights, but with the buffers it computes, such as rotary frequencies."""
    model_type = str(settings.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        code = ", and code that comes with a model is not run" if "auto_map" in settings else ""
        raise ConfigError(f"transformers {transformers.__version__} has no model {model_type[:40]!r}{code}", fix=OTHER)
    try:
        family = CONFIG_MAPPING[model_type]
        plain = family._decode_special_floats({key: value for key, value in settings.items() if key != "auto_map"})
        config = family.from_dict(plain)
        with BUILDING, torch.device("meta"), no_tie_weights():
            # experts one by one, so that the input of each is seen
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation="eager")
    except Exception as error:  # transformers has no error class for invalid configs
        reason = f"transformers cannot build a {model_type} from the config: {str(error)[:160]}"
        raise ConfigError(reason, fix="restore config.json") from error
    for name, buffer in list(model.named_non_persistent_buffers()):
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, torch.empty_like(buffer, device=device))
    model.initialize_weights()
    return model.eval()


def _stack(model: Any) -> tuple[str, nn.ModuleList]:
    count = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count and part_of(f"{name}.0", count) not in UNUSED:
            return name, module
    raise QuantryError(f"{type(model).__name__} has no stack of {count} decoder blocks", fix=OTHER)


@contextmanager
def _replaced(modules: Iterable[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Gives modules another forward inside a `with`."""
    replaced = [(module, module.__dict__.get("forward")) for module in modules]
    for module, _ in replaced:
        module.forward = forward
    try:
        yield
    finally:
        for module, own in replaced:
            if own is None:
                del module.forward
            else:
                module.forward = own


@contextmanager
def _quiet() -> Iterator[None]:
    """Hides transformers' progress bar, which would appear for each block."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()

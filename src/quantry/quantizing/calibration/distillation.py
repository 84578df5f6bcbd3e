"""ZeroQuant's layer-by-layer distillation: trains a quantized block to give what it gave in 16 bit.

The student is the block itself. At every step its linear weights are cast to the dtype of the checkpoint and rounded to
their grid (full range, nearest code), and the inputs of these layers are rounded as an engine does; gradients pass
through both as if nothing had been rounded. So the student computes with exactly what the pipeline will store. Inputs
and targets are those of the 16-bit model, without labels, and nothing outside of the block is needed.

Only the weights of the quantized linears are trained. Training the norms too, at the same relative rate, changed the
held-out error by less than 1 % (135M model, 4 and 8 bit), and kept tensors should stay the original's. A router is not
trained either: the choice of an expert is no smooth function of it.

The learning rate is in steps of a grid, so that one rate suits 4 and 8 bit: a weight has to cross the border between
two codes, and most are within a fraction of a step of one. Part of the windows is held out, and the state with the
smallest error on them is kept, which may be the first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from quantry.blockwise.walk import Block
from quantry.errors import QuantryError, RecipeError
from quantry.methods.fits import absmax
from quantry.numerics.activations import simulate
from quantry.numerics.grids import decode, effective_scale, encode
from quantry.quantizing.calibration.held_out import held_out
from quantry.quantizing.calibration.observe import OTHER, modules
from quantry.types import Activation, Grid, Scheme

STEPS = (16, 48)  # the fewest and the most; between them, as many as TOKENS allow
TOKENS = 48 * 512  # a step of 512 tokens takes about as long as 4.6 runs of the block: 0.2 s at 135M on two cores
RATE = 0.01  # steps of the grid that a weight moves at first; falls to 0 along a cosine
BETAS = (0.9, 0.99)  # of Adam
HELD = 8  # one batch in so many is held out
CHECKS = 3  # looks at the held-out batches on the way
ROWWISE = ("int", "e4m3", "e2m1")


@dataclass(frozen=True, slots=True, eq=False)
class Distilled:
    """The trained tensors of a block, as the checkpoint stores them; none if training gained nothing.

    `before` and `after` are squared errors of the block on held-out windows relative to the square of its output.
    """

    tensors: dict[str, Tensor]
    before: float
    after: float


def distil(
    block: Block,
    schemes: Mapping[str, Scheme],
    *,
    steps: int | None = None,
    rate: float = RATE,
    seed: int = 0,
    labels: Sequence[int] = (),
) -> Distilled:
    """Trains a block that has not advanced; `schemes` are those of its modules, with the scale types they store.

    A step is one batch of the walk, ideally of one window: the same tokens do more in more steps. `labels` says which
    of several texts each batch is from. Raises RecipeError for schemes that cannot be distilled, QuantryError for too
    few windows.
    """
    taught, steps = draw_lessons(block, steps)
    places = held_out(labels[: len(taught)] or [0] * len(taught), HELD)
    held, lessons = [taught[place] for place in places], [taught[n] for n in range(len(taught)) if n not in places]
    with _deterministic(), torch.enable_grad():
        student = Student(block, schemes)
        before = after = student.error(held)
        best: dict[str, Tensor] = {}
        for step, lesson in enumerate(drawn(len(lessons), steps, seed + block.index)):
            student.learn(lessons[lesson], rate * (1 + cos(pi * step / steps)) / 2)
            if (step + 1) % max(1, steps // CHECKS) == 0:
                error = student.error(held)
                if error < after:
                    best, after = student.state(), error
    return Distilled(checkpoint_tensors(block, best), before, after)


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """A batch of windows: the block's input and its 16-bit output, both on the CPU."""

    hidden: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Tensor


def draw_lessons(block: Block, steps: int | None) -> tuple[list[Lesson], int]:
    """Returns the first batches of a walk, as many as are needed, and the number of steps."""
    if block.advanced:
        raise ValueError(f"{block.name} has handed its hidden states on and cannot be distilled")
    seen: list[tuple[Any, Any]] = []
    targets: list[Tensor] = []
    handle = block.module.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((args, kwargs)), with_kwargs=True
    )
    try:
        for output in block.outputs():
            targets.append(output.cpu())
            if steps is None:
                steps = min(max(TOKENS // output[..., 0].numel(), STEPS[0]), STEPS[1])
            if len(targets) == steps + -(-steps // (HELD - 1)):
                break
    finally:
        handle.remove()
    if steps is None or len(targets) < 2:
        raise QuantryError(
            "distillation needs more than one batch of windows, since one is held out", fix="give more --samples"
        )
    lessons = [
        Lesson(hidden.cpu(), tuple(args), kwargs, target)
        for ((hidden, *args), kwargs), target in zip(seen, targets, strict=True)
    ]
    return lessons, steps


def drawn(count: int, steps: int, seed: int) -> Iterator[int]:
    """Yields the lesson of each step: every one once, then again in another order."""
    generator = torch.Generator().manual_seed(seed)
    rounds = [torch.randperm(count, generator=generator) for _ in range(-(-steps // count))]
    return iter(torch.cat(rounds)[:steps].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class _Weight:
    """A parameter that is rounded: a matrix or a stack of them."""

    value: Tensor  # float32
    scheme: Scheme
    stored: torch.dtype  # of the checkpoint
    dtype: torch.dtype  # of the block's arithmetic

    def rounded(self) -> Tensor:
        """Returns what the block computes with."""
        made = _straight(self.value, lambda value: nearest(value.to(self.stored), self.scheme.weight))
        return made.to(self.dtype)

    def step(self) -> float:
        """Returns the mean step of the grid."""
        grid = self.scheme.weight
        return float(effective_scale(grid, absmax.fit(self.value.detach().flatten(0, -2), grid)).mean())


def nearest(weight: Tensor, grid: Grid) -> Tensor:
    """Rounds a weight to its grid and decodes it, in float32; scales are by row, in a stack too."""
    matrix = weight.flatten(0, -2)
    params = absmax.fit(matrix, grid)
    return decode(encode(matrix, grid, params), grid, params).view(weight.shape)


class _Straight(torch.autograd.Function):
    """Rounding that gradients pass through unchanged."""

    @staticmethod
    def forward(_: Any, value: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(value)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _straight(value: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    made: Tensor = _Straight.apply(value, rounding)  # type: ignore[no-untyped-call]
    return made


class _Inputs(TorchFunctionMode):
    """Rounds the inputs of linear layers, which it knows by the address of their weight."""

    def __init__(self, activations: Mapping[int, Activation | None]) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self._activations = activations
        self._made: dict[tuple[int, Activation], tuple[Tensor, Tensor]] = {}  # shared by layers that share an input

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.linear:
            inputs, weight, *others = [*args, *(kwargs.pop(name) for name in ("input", "weight") if name in kwargs)]
            activation = self._activations.get(weight.data_ptr())
            self.seen.add(weight.data_ptr())
            args = (self._rounded(inputs, activation) if activation else inputs, weight, *others)
        return func(*args, **kwargs)

    def _rounded(self, inputs: Tensor, activation: Activation) -> Tensor:
        key = (id(inputs), activation)  # the tensor is held, so that no other gets its identity
        if key not in self._made:
            made = _straight(inputs, lambda values: simulate(values, activation).to(values.dtype))
            self._made[key] = (inputs, made)
        return self._made[key][1]


class Student:
    """The block with quantized weights and inputs."""

    def __init__(self, block: Block, schemes: Mapping[str, Scheme]) -> None:
        self._module, self._name, self._device = block.module, block.name, block.skeleton.device
        self.weights = _weights(block, schemes)
        trained = [weight for weight in self.weights.values() if weight.value.requires_grad]
        groups = [{"params": [weight.value], "unit": weight.step()} for weight in trained]
        self._optimizer = torch.optim.Adam(groups, betas=BETAS) if groups else None

    def learn(self, lesson: Lesson, rate: float) -> None:
        """Takes one optimizer step on a batch."""
        if self._optimizer is None:
            return
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["unit"]
        self._optimizer.zero_grad()
        wrong, power = self.squared_error(self.rounded(), lesson)
        torch.autograd.backward(wrong / power)
        self._optimizer.step()

    @torch.no_grad()
    def error(self, lessons: Sequence[Lesson]) -> float:
        """Returns the squared error of all lessons relative to the square of their targets."""
        weights = self.rounded()
        pairs = [self.squared_error(weights, lesson) for lesson in lessons]
        return sum(float(wrong) for wrong, _ in pairs) / sum(float(power) for _, power in pairs)

    def state(self) -> dict[str, Tensor]:
        """Returns the trained parameters in the dtype of the checkpoint, by their names in the block."""
        trained = {key: weight for key, weight in self.weights.items() if weight.value.requires_grad}
        return {key: weight.value.detach().to(weight.stored, copy=True) for key, weight in trained.items()}

    def rounded(self) -> dict[str, Tensor]:
        return {key: weight.rounded() for key, weight in self.weights.items()}

    def squared_error(self, weights: Mapping[str, Tensor], lesson: Lesson) -> tuple[Tensor, Tensor]:
        """Returns the squared error and the square of the target."""
        hidden, target = lesson.hidden.to(self._device), lesson.target.to(self._device).float()
        output = self._run(weights, (hidden, *lesson.args), lesson.kwargs)
        return (output.float() - target).square().sum(), target.square().sum()

    def _run(self, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        matrices = {key: list(weight) if weight.ndim == 3 else [weight] for key, weight in weights.items()}
        addresses = {key: [matrix.data_ptr() for matrix in stack] for key, stack in matrices.items()}
        known = {address: self.weights[key].scheme.activation for key, stack in addresses.items() for address in stack}
        with _Inputs(known) as inputs:
            given = torch.func.functional_call(self._module, dict(weights), args, kwargs)
        for key, stack in addresses.items():
            if inputs.seen.isdisjoint(stack):
                raise QuantryError(f"{self._name}.{key} cannot be distilled: it is no plain linear layer", fix=OTHER)
        output: Tensor = given[0] if isinstance(given, tuple) else given
        return output


def _weights(block: Block, schemes: Mapping[str, Scheme]) -> dict[str, _Weight]:
    """Returns the rounded parameters of a block by name; those that cannot go back into the checkpoint stay fixed."""
    given, stored = _schemes(block, schemes), trainable(block)
    weights = {}
    for key, scheme in given.items():
        parameter = block.module.get_parameter(key)
        value = parameter.detach().to(torch.float32, copy=True).requires_grad_(key in stored)
        weights[key] = _Weight(value, scheme, stored.get(key, parameter.dtype), parameter.dtype)
    return weights


def _schemes(block: Block, schemes: Mapping[str, Scheme]) -> dict[str, Scheme]:
    parameters = dict(block.module.named_parameters(prefix=block.name))
    parts: dict[str, set[Scheme | None]] = {}
    for (stem, _), names in modules(block).items():
        key = stem if stem in parameters else f"{stem}.weight"
        parts.setdefault(key.removeprefix(f"{block.name}."), set()).update(map(schemes.get, names))
    for key, different in parts.items():
        if len(different) > 1:
            raise RecipeError(
                f"{block.name}.{key} is distilled as one, and its parts have {len(different)} schemes",
                fix="give all parts of it the same preset",
            )
    rounded = {key: scheme for key, (scheme,) in parts.items() if scheme is not None}
    for key, scheme in rounded.items():
        _check_rows(f"{block.name}.{key}", scheme.weight)
    return rounded


def _check_rows(name: str, grid: Grid) -> None:
    """Raises RecipeError unless each row has its own scales, so that a fused matrix rounds like its parts."""
    if grid.kind not in ROWWISE or grid.block[0] != 1 or grid.spans_tensor:
        raise RecipeError(
            f"{name} cannot be distilled as {grid.kind} in blocks of {list(grid.block)}, which may span its parts",
            fix="use a preset with weights by channel or in groups, such as w8a8-zeroquant",
        )


def trainable(block: Block) -> dict[str, torch.dtype]:
    """Returns the parameters that go back into the checkpoint unchanged, and their dtype there."""
    parameters = dict(block.module.named_parameters())
    back, source = revert(block, parameters), block.skeleton.source
    dtypes: dict[str, set[torch.dtype | None]] = {}
    for name, keys in block.sources.items():
        original = source.read(name)
        for key in (key.removeprefix(f"{block.name}.") for key in keys):
            same = name in back and key in parameters and _same(back[name], original, parameters[key])
            dtypes.setdefault(key, set()).add(original.dtype if same else None)
    return {key: dtype for key, (dtype, *others) in dtypes.items() if dtype is not None and not others}


def _same(back: Tensor, original: Tensor, parameter: Tensor) -> bool:
    return back.shape == original.shape and torch.equal(back, original.to(parameter.device, parameter.dtype))


def checkpoint_tensors(block: Block, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns trained parameters as tensors of the checkpoint."""
    parameters = dict(block.module.named_parameters())
    sources = {name: {key.removeprefix(f"{block.name}.") for key in keys} for name, keys in block.sources.items()}
    back = revert(block, {**parameters, **state}) if state else {}
    return {name: back[name].contiguous() for name, keys in sources.items() if keys & state.keys()}


def revert(block: Block, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of the checkpoint that make up the parameters of a block."""
    named = {f"{block.name}.{key}": value.detach() for key, value in parameters.items()}
    return dict(revert_weight_conversion(block.skeleton.model, named))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Sums in the same order in every run, so that a resumed job makes the same bytes."""
    memory: Any = torch.utils.deterministic
    before, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # a costly safeguard for reads of unwritten memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        memory.fill_uninitialized_memory = fill

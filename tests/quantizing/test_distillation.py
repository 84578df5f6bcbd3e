"""A distilled block is held against its 16-bit output on text that training has not seen, and against plain restatements."""

import copy
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from depth import DEEP, FAMILIES, cases, sampled
from quantry.blockwise.taps import LinearInputs
from quantry.blockwise.walk import Block, Walk
from quantry.errors import QuantryError, RecipeError
from quantry.methods.fits import absmax
from quantry.methods.rounders import nearest
from quantry.models.linears import Linear, linears
from quantry.models.reader import demo_folder, open_checkpoint
from quantry.models.tokenizer import load_tokenizer
from quantry.models.weights import PlainWeights
from quantry.numerics.activations import simulate
from quantry.numerics.grids import dequantize
from quantry.quantizing.calibration import distillation
from quantry.quantizing.calibration.distillation import Distilled, distil
from quantry.quantizing.calibration.text import load
from quantry.quantizing.slices import view as matrix
from quantry.types import Activation, Checkpoint, Grid, Scheme
from tiny_models import ARCHITECTURES, write_model

TOKEN = Activation(Grid("int", 8, (1, 0)))
SCHEMES = {
    "w4a8": Scheme(Grid("int", 4, (1, 64)), TOKEN),
    "w8a8": Scheme(Grid("int", 8, (1, 0)), TOKEN),
}
SMALL = Scheme(Grid("int", 4, (1, 32)), TOKEN)
WINDOWS = [torch.randint(3, 300, (64,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(14)]


FirstBlock = Callable[..., Block]


@pytest.fixture
def first_block() -> Iterator[FirstBlock]:
    """Gives the first block of a walk, which keeps its weights until the end of the test."""
    walks: list[Generator[Block, None, None]] = []

    def begin(source: Any, windows: Sequence[Sequence[int]], batch: int = 1) -> Block:
        walks.append(cast(Generator[Block, None, None], Walk(source, batch=batch).blocks(windows)))
        return next(walks[-1])

    yield begin
    for walk in walks:
        walk.close()


def given(checkpoint: Checkpoint, scheme: Scheme = SMALL) -> dict[str, Scheme]:
    return {linear.module: scheme for linear in linears(checkpoint, 99)}


@pytest.fixture(scope="module", params=cases(ARCHITECTURES, FAMILIES))
def model(request: Any, tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_model(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: Any) -> PlainWeights:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM")
    return PlainWeights(open_checkpoint(folder), folder)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: Any) -> tuple[PlainWeights, Checkpoint]:
    folder: Path = tmp_path_factory.mktemp("mixtral")
    write_model(folder, "MixtralForCausalLM")
    checkpoint = open_checkpoint(folder)
    return PlainWeights(checkpoint, folder), checkpoint


def rounded(weight: Tensor, grid: Grid) -> Tensor:
    """What the pipeline stores of a matrix, decoded."""
    return dequantize(nearest.round_weight(weight, grid, absmax.fit(weight, grid)))


class Stored:
    """A checkpoint as the pipeline makes it of trained tensors, decoded."""

    def __init__(self, plain: PlainWeights, tensors: Mapping[str, Tensor], found: Sequence[Linear], scheme: Scheme):
        self.config, self.names = plain.config, plain.names
        self.activations = {linear.module: scheme.activation for linear in found}
        self._plain, self._tensors, self._scheme = plain, tensors, scheme
        self._linears: dict[str, list[Linear]] = {}
        for linear in found:
            self._linears.setdefault(linear.source, []).append(linear)

    def read(self, name: str) -> Tensor:
        weight = self._tensors.get(name, self._plain.read(name))
        made = weight.float().clone()
        for linear in self._linears.get(name, ()):
            matrix(made, linear)[:] = rounded(matrix(weight, linear), self._scheme.weight)
        return made


# ---- quality ----


def held_out_error(block: Block, weights: Mapping[str, Tensor], scheme: Scheme) -> float:
    """The relative squared error of a Llama block with weights that the pipeline would store."""
    targets = [output.clone() for output in block.outputs()]
    parameters = dict(block.module.named_parameters(prefix=block.name))
    before = {name: parameters[name].detach().clone() for name in weights}
    for name, weight in weights.items():
        parameters[name].data.copy_(rounded(weight, scheme.weight))
    assert scheme.activation is not None
    activation = scheme.activation
    with LinearInputs(block.module, block.name, lambda name, expert, inputs: simulate(inputs, activation)):
        outputs = list(block.outputs())
    for name, weight in before.items():
        parameters[name].data.copy_(weight)
    wrong = sum(
        float((output - target).double().square().sum()) for output, target in zip(outputs, targets, strict=True)
    )
    return wrong / sum(float(target.double().square().sum()) for target in targets)


@sampled
@pytest.mark.parametrize(("name", "gain"), [("w4a8", 0.75), ("w8a8", 0.97)])
def test_a_distilled_block_is_closer_to_its_16_bit_output_on_held_out_text(name: str, gain: float) -> None:
    folder = demo_folder()
    checkpoint, tokenizer = open_checkpoint(folder), load_tokenizer(folder)
    source, scheme = PlainWeights(checkpoint, folder), SCHEMES[name]
    taught = load(folder / "calibration.txt", tokenizer, samples=40, length=96).tokens
    unseen = load(folder / "held-out.txt", tokenizer, samples=8, length=96).tokens
    others = Walk(source, batch=4).blocks(unseen)
    for block, other in zip(Walk(source, batch=1).blocks(taught), others, strict=True):
        inside = [name for name in given(checkpoint) if name.startswith(f"{block.name}.")]
        made = distil(block, dict.fromkeys(inside, scheme))
        plain = {f"{module}.weight": source.read(f"{module}.weight") for module in inside}
        assert made.tensors.keys() == plain.keys()
        before = held_out_error(other, plain, scheme)
        after = held_out_error(other, made.tensors, scheme)
        assert after < gain * before, (block.name, before, after)
        assert made.after < made.before
        if block.index == int(DEEP):  # the first block, and in the deep run the second
            break


# ---- exactness ----


@pytest.mark.parametrize("scheme", [SMALL, SCHEMES["w8a8"]], ids=["groups", "channels"])
def test_what_the_student_computes_with_is_what_the_pipeline_stores(
    first_block: FirstBlock, model: Path, scheme: Scheme
) -> None:
    checkpoint = open_checkpoint(model)
    plain = PlainWeights(checkpoint, model)
    block = first_block(plain, WINDOWS[:3])
    targets = [output.double() for output in block.outputs()]
    lessons, _ = distillation.draw_lessons(block, 3)
    student = distillation.Student(block, given(checkpoint, scheme))
    untrained = student.error(lessons)
    with torch.enable_grad():
        for lesson in lessons:
            student.learn(lesson, 0.3)
    tensors = distillation.checkpoint_tensors(block, student.state())
    found = [linear for linear in linears(checkpoint, 99) if linear.source in block.sources]
    assert tensors.keys() == {linear.source for linear in found}
    for name, tensor in tensors.items():
        original = plain.read(name)
        assert (tensor.shape, tensor.dtype) == (original.shape, original.dtype)
        assert not torch.equal(tensor, original), name
    for trained, error in (({}, untrained), (tensors, student.error(lessons))):
        stored = first_block(Stored(plain, trained, found, scheme), WINDOWS[:3])
        outputs = [output.double() for output in stored.outputs()]
        wrong = sum(float((one - other).square().sum()) for one, other in zip(outputs, targets, strict=True))
        assert error == pytest.approx(wrong / sum(float(target.square().sum()) for target in targets), rel=1e-5)


def test_every_parameter_goes_back_as_it_came(model: Path) -> None:
    plain = PlainWeights(open_checkpoint(model), model)
    for block in Walk(plain, batch=2).blocks(WINDOWS[:2]):
        parameters = dict(block.module.named_parameters())
        assert distillation.trainable(block) == dict.fromkeys(parameters, torch.bfloat16)
        back = distillation.revert(block, parameters)
        assert back.keys() == block.sources.keys()
        for name, tensor in back.items():
            assert torch.equal(tensor, plain.read(name).float()), name


# ---- gradients ----


class Plain(nn.Module):
    """A linear layer in float64 whose weight and input are rounded row by row, straight through."""

    def __init__(self, linear: nn.Linear, scheme: Scheme) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().double())
        self.scheme = scheme

    def forward(self, inputs: Tensor) -> Tensor:
        rows, size = self.weight.shape[0], self.scheme.weight.block[1]
        weight = self.weight.detach().bfloat16().double().view(rows, -1, size)
        levels = 2.0**self.scheme.weight.bits
        scale = (weight.abs().amax(-1, keepdim=True) / ((levels - 1) / 2)).bfloat16().double()
        codes = (weight / scale).round().clamp(-levels / 2, levels / 2 - 1)
        used = self.weight + ((codes * scale).view_as(self.weight) - self.weight).detach()
        step = inputs.detach().abs().amax(-1, keepdim=True) / 127
        seen = inputs + ((inputs / step).round() * step - inputs).detach()
        return seen @ used.T


def plainly(module: nn.Module, scheme: Scheme) -> nn.Module:
    """A copy of a block in float64."""
    made = copy.deepcopy(module).double()
    for name, layer in list(made.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, leaf = name.rpartition(".")
            setattr(made.get_submodule(parent), leaf, Plain(layer, scheme))
    return made


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return tuple(map(doubled, value)) if isinstance(value, tuple) else value


def test_the_gradient_is_that_of_a_plain_restatement(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, [window[:16] for window in WINDOWS[:2]])
    modules = [name.removesuffix(".weight") for name in block.sources if "norm" not in name]
    lesson = distillation.draw_lessons(block, 2)[0][1]
    student = distillation.Student(block, dict.fromkeys(modules, SMALL))
    with torch.enable_grad():
        wrong, power = student.squared_error(student.rounded(), lesson)
        torch.autograd.backward(wrong / power)
        plain = plainly(block.module, SMALL)
        output = plain(
            lesson.hidden.double(), *doubled(lesson.args), **{k: doubled(v) for k, v in lesson.kwargs.items()}
        )
        target = lesson.target.double()
        loss = (output - target).square().sum() / target.square().sum()
        torch.autograd.backward(loss)
    assert float((wrong / power).detach()) == pytest.approx(float(loss.detach()), rel=1e-4)
    assert student.weights.keys() == {f"{name.removeprefix(f'{block.name}.')}.weight" for name in modules}
    for key, weight in student.weights.items():
        expected = plain.get_parameter(key).grad
        assert expected is not None
        assert weight.value.grad is not None
        assert float((weight.value.grad.double() - expected).norm() / expected.norm()) < 1e-4, key


def test_a_step_goes_down_the_gradient_by_the_rate_in_steps_of_the_grid(
    first_block: FirstBlock, llama: PlainWeights
) -> None:
    block = first_block(llama, WINDOWS[:2])
    module = f"{block.name}.mlp.up_proj"
    student = distillation.Student(block, {module: SMALL})
    weight = student.weights["mlp.up_proj.weight"]
    scale = absmax.fit(weight.value.detach(), SMALL.weight).scale.float().mean()
    before = weight.value.detach().clone()
    with torch.enable_grad():
        student.learn(distillation.draw_lessons(block, 2)[0][1], 0.25)
    moved = weight.value.detach() - before
    assert weight.value.grad is not None
    assert torch.equal(moved.sign(), -weight.value.grad.sign())
    assert float(moved.abs().max()) == pytest.approx(0.25 * float(scale), rel=1e-3)  # Adam's first step


def test_a_state_is_not_trained_any_further(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(Wide(llama), WINDOWS[:2])
    student = distillation.Student(block, {f"{block.name}.mlp.up_proj": SMALL})
    kept = student.state()["mlp.up_proj.weight"]
    before = kept.clone()
    with torch.enable_grad():
        student.learn(distillation.draw_lessons(block, 2)[0][1], 0.25)
    assert kept.dtype == torch.float32
    assert torch.equal(kept, before)


class Wide:
    """A checkpoint in float32, as training is."""

    def __init__(self, plain: PlainWeights) -> None:
        self.config, self.names, self.activations = plain.config, plain.names, plain.activations
        self._plain = plain

    def read(self, name: str) -> Tensor:
        return self._plain.read(name).float()


# ---- what holds for every job ----


def bits(made: Distilled) -> tuple[float, float, dict[str, bytes]]:
    raw = {name: tensor.view(torch.int16).numpy().tobytes() for name, tensor in made.tensors.items()}
    return made.before, made.after, raw


def test_the_same_job_gives_the_same_bytes(first_block: FirstBlock, mixture: tuple[PlainWeights, Checkpoint]) -> None:
    source, checkpoint = mixture
    runs = []
    for seed in (0, 0, 1):
        block = first_block(source, WINDOWS)
        runs.append(bits(distil(block, given(checkpoint), steps=9, seed=seed)))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert not torch.are_deterministic_algorithms_enabled()


def test_distillation_leaves_the_block_as_it_was(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS, batch=5)
    before, weights = [output.clone() for output in block.outputs()], copy.deepcopy(block.module.state_dict())
    distil(block, {f"{block.name}.mlp.up_proj": SMALL}, steps=3)
    assert all(torch.equal(weights[name], value) for name, value in block.module.state_dict().items())
    assert all(torch.equal(one, other) for one, other in zip(before, block.outputs(), strict=True))
    assert not block.advanced


def test_the_tensors_are_those_of_the_error_that_is_named(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS)
    schemes = {f"{block.name}.mlp.{leaf}_proj": SMALL for leaf in ("gate", "up", "down")}
    made = distil(block, schemes, steps=12)
    assert made.tensors.keys() == {f"{module}.weight" for module in schemes}
    lessons, _ = distillation.draw_lessons(block, 12)
    for name, tensor in made.tensors.items():
        block.module.get_parameter(name.removeprefix(f"{block.name}.")).data.copy_(tensor)
    student = distillation.Student(block, schemes)
    assert student.error(lessons[:: distillation.HELD]) == made.after < made.before


def test_training_that_gains_nothing_changes_nothing(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS)
    made = distil(block, {f"{block.name}.mlp.down_proj": SMALL}, steps=4, rate=50.0)
    assert made.tensors == {}
    assert made.after == made.before > 0


def test_layers_without_a_scheme_are_neither_rounded_nor_trained(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS)
    exact = distil(block, {}, steps=2)
    assert (exact.tensors, exact.before, exact.after) == ({}, 0.0, 0.0)
    made = distil(block, {f"{block.name}.mlp.up_proj": SMALL}, steps=6)
    assert made.tensors.keys() == {f"{block.name}.mlp.up_proj.weight"}


def test_held_out_windows_are_not_trained_on(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS)
    given_to: dict[bool, list[bytes]] = {True: [], False: []}
    block.module.register_forward_pre_hook(
        lambda _, args: given_to[torch.is_grad_enabled()].append(args[0].numpy().tobytes())
    )
    list(block.outputs())
    windows = given_to[False].copy()
    distil(block, {f"{block.name}.mlp.up_proj": SMALL}, steps=24)
    held = {windows[0], windows[distillation.HELD]}
    assert set(given_to[True]) == set(windows) - held
    assert len(given_to[True]) == 24  # every other one twice
    assert given_to[False][2 * len(windows) :] == [windows[0], windows[distillation.HELD]] * 4


@pytest.mark.parametrize(("length", "batch", "steps"), [(512, 1, 48), (64, 1, 48), (512, 2, 24), (512, 4, 16)])
def test_steps_are_as_many_as_the_tokens_allow(
    first_block: FirstBlock, llama: PlainWeights, length: int, batch: int, steps: int
) -> None:
    block = first_block(llama, [(WINDOWS[0] * 8)[:length]] * 3 * batch, batch=batch)
    lessons, found = distillation.draw_lessons(block, None)
    assert (len(lessons), found) == (3, steps)
    assert len(distillation.draw_lessons(block, 1)[0]) == 2  # no more than are used


# ---- refusals ----


def test_parts_of_a_fused_matrix_must_have_one_scheme(
    first_block: FirstBlock, mixture: tuple[PlainWeights, Checkpoint]
) -> None:
    source, checkpoint = mixture
    block = first_block(source, WINDOWS)
    schemes = {module: scheme for module, scheme in given(checkpoint).items() if not module.endswith("w3")}
    with pytest.raises(RecipeError, match="gate_up_proj is distilled as one, and its parts have 2 schemes"):
        distil(block, schemes)


@pytest.mark.parametrize(
    "grid",
    [
        Grid("e4m3", 8, (128, 128)),
        Grid("e4m3", 8, (0, 0)),
        Grid("e2m1", 4, (1, 16), scale="e4m3"),
        Grid("nf4", 4, (1, 64)),
    ],
)
def test_scales_that_span_rows_are_refused(first_block: FirstBlock, llama: PlainWeights, grid: Grid) -> None:
    block = first_block(llama, WINDOWS)
    with pytest.raises(RecipeError, match="up_proj.weight cannot be distilled as .* in blocks of"):
        distil(block, {f"{block.name}.mlp.up_proj": Scheme(grid)})


def test_one_batch_is_too_few(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS[:4], batch=4)
    with pytest.raises(QuantryError, match="more than one batch of windows.*--samples"):
        distil(block, {})


def test_a_block_that_has_advanced_is_a_bug(first_block: FirstBlock, llama: PlainWeights) -> None:
    block = first_block(llama, WINDOWS[:2])
    block.advance()
    with pytest.raises(ValueError, match="handed its hidden states on"):
        distil(block, {})

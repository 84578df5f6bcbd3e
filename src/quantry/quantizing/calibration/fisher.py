"""Measures how much the outputs of a model's layers matter to its predictions: the diagonal Fisher information.

When the weight W of a linear layer becomes W + D, the next-token probabilities move by a Kullback-Leibler divergence of
about half of D's quadratic form in the Fisher information. With one number f for each row (the mean square of the
gradient of log p(y) with respect to that output, with y drawn from the model's own prediction, not from a text) and the
Gram matrix G of the layer's input, that is `1/2 sum_r f_r D_r G D_r'` nats per token. This neglects correlations
between rows, between tokens, and between the size of a gradient and of an input.

For the head the expectation over y is exact: p (1 - p) for every row. A row of the embedding is used by its own token
only. Where the token comes again in a window, its error is the same, so gradients are summed before they are squared; a
token that others look at (the first of a text above all) has larger ones. So every row that occurs has its own squares.

The weights of one block are in memory at a time: a walk forward that keeps the hidden states before each block, the
head, then the blocks from the last to the first, each run again for the gradients of its outputs. Blocks that read
more of an earlier block than its hidden states (keys shared between layers) pass no gradient back that way.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quantry.blockwise.taps import LinearOutputs, Place
from quantry.blockwise.walk import CPU, Batch, Block, Walk, mapped
from quantry.errors import QuantryError
from quantry.models.linears import QUANTIZED_PARTS
from quantry.models.parts import part_of
from quantry.quantizing.calibration.observe import OTHER, add_gram, modules
from quantry.quantizing.calibration.store import Store, load_checked, pack_checked
from quantry.types import Progress

FILE = "fisher.safetensors"
EDITION = 2  # of the method: another number leaves older figures unused
DRAWN = 256  # positions for which a token is drawn at a time: 0.3 GB of float64 for 150,000 tokens
CHUNK = 1 << 24  # weights whose damage is summed at a time
WINDOWS = 1_000_003  # seeds apart, so that no window draws what another one draws with the next seed


@dataclass(frozen=True, slots=True, eq=False)
class Fisher:
    """Sums over the tokens that reached a layer, divided by all tokens; float32, on the CPU.

    So an expert that few tokens reach counts little, and one that none reaches not at all.
    """

    tokens: int
    outputs: Mapping[str, Tensor]  # module as the checkpoint names it -> (rows,)
    seen: Tensor  # (n,) int64, ascending: the rows of the embedding that occur
    embedding: Tensor  # (n, channels)
    head: Tensor  # (rows,)
    gram: Tensor  # (channels, channels), of the head's input


def fisher(
    walk: Walk,
    windows: Sequence[Sequence[int]],
    *,
    seed: int = 0,
    draws: int = 1,
    progress: Progress | None = None,
) -> Fisher:
    """Computes the Fisher information of a model on some windows, each run `draws` times with other tokens drawn.

    The hidden states before all blocks stay in main memory as far as the walk allows, else in its files.
    """
    runs = [window for _ in range(draws) for window in windows]
    tokens = sum(map(len, runs))
    total = 2 * walk.count + 1

    def tell(done: int, name: str) -> None:
        if progress:
            progress(done, total, name)

    kept = []
    for block in walk.blocks(runs):
        tell(block.index, block.name)
        kept.append(_kept(walk))
    tell(walk.count, "the head")
    head, gram = _head(walk, seed)
    outputs: dict[str, Tensor] = {}
    for index in reversed(range(walk.count)):
        with walk.block(index) as block:
            tell(total - 1 - index, f"gradients of {block.name}")
            outputs |= _block(walk, block, kept.pop())
    seen, embedding = _embedding(walk)
    return Fisher(
        tokens=tokens,
        outputs={name: _mean(sums, tokens) for name, sums in outputs.items()},
        seen=seen,
        embedding=_mean(embedding, tokens),
        head=_mean(head, tokens),
        gram=_mean(gram, tokens),
    )


def _mean(sums: Tensor, tokens: int) -> Tensor:
    return (sums.double() / tokens).float().to(CPU)


def _kept(walk: Walk) -> list[Tensor]:
    states = [batch.hidden for batch in walk.batches]
    if walk.memory is None or walk.count * sum(state.nbytes for state in states) <= walk.memory:
        return [state.to(CPU, copy=True) for state in states]
    room = mapped(sum(state.numel() for state in states), states[0].dtype, walk.scratch)
    parts = torch.split(room, [state.numel() for state in states])
    return [part.view(state.shape).copy_(state) for part, state in zip(parts, states, strict=True)]


# ---- the head ----


def _head(walk: Walk, seed: int) -> tuple[Tensor, Tensor]:
    """Sums over tokens for the head's rows and its input; replaces the last hidden states by their gradients."""
    skeleton = walk.skeleton
    with skeleton.loaded(skeleton.after), torch.enable_grad():
        skeleton.model.requires_grad_(False)
        end = _End(skeleton.model.get_output_embeddings())
        for batch in walk.batches:
            gradients = []
            for row, window in enumerate(batch.windows):
                hidden = batch.hidden[row : row + 1].detach().to(skeleton.device).requires_grad_()
                with end.watched():
                    logits = skeleton.tail(batch.tokens[row : row + 1], hidden, nullcontext())
                gradients.append(end.gradient(logits, hidden, seed * WINDOWS + window))
            walk.keep(batch, torch.cat(gradients))
    return end.sums()


class _End:
    """The head: gradients of the logits, and sums over tokens."""

    def __init__(self, head: nn.Module | None) -> None:
        if head is None:
            raise QuantryError("the model has no head whose rows are tokens", fix=OTHER)
        self._module = head
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._rows = self._gram = torch.zeros(0)

    def watched(self) -> LinearOutputs:
        self._seen.clear()
        return LinearOutputs(self._module, "", lambda name, expert, inputs, output: self._seen.append((inputs, output)))

    def gradient(self, logits: Tensor, hidden: Tensor, seed: int) -> Tensor:
        """Returns the gradient of log p(y) of all positions of a window with respect to its last hidden states."""
        if len(self._seen) != 1:
            raise QuantryError("the head is no plain linear layer", fix=OTHER)
        inputs, output = self._seen.pop()
        (slope,) = torch.autograd.grad(logits, output, torch.ones_like(logits), retain_graph=True)
        with torch.no_grad():
            probabilities = logits.softmax(-1)
            self._add(probabilities, slope.reshape(logits.shape), inputs.reshape(-1, inputs.shape[-1]))
            wanted = -probabilities
            drawn = draw(probabilities, seed)
            wanted[torch.arange(len(drawn), device=drawn.device), drawn] += 1
        (gradient,) = torch.autograd.grad(logits, hidden, wanted)
        return gradient

    def _add(self, probabilities: Tensor, slope: Tensor, inputs: Tensor) -> None:
        """Adds one window. `slope` is the derivative of a logit by the head's output, which a model may cap."""
        if not self._rows.numel():
            self._rows = torch.zeros(probabilities.shape[-1], dtype=torch.float64, device=inputs.device)
            self._gram = torch.zeros(inputs.shape[1], inputs.shape[1], device=inputs.device)
        curvature = probabilities.mul(1 - probabilities).mul_(slope.float().square())
        self._rows += curvature.sum(0, dtype=torch.float64)
        add_gram(self._gram, inputs)

    def sums(self) -> tuple[Tensor, Tensor]:
        return self._rows, self._gram.triu() + self._gram.triu(1).T


def draw(probabilities: Tensor, seed: int) -> Tensor:
    """Draws a token for each row of (positions, vocabulary), the same on every device up to rounding."""
    uniform = torch.rand(len(probabilities), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tokens = []
    chances = torch.split(uniform.to(probabilities.device), DRAWN)
    for part, chance in zip(torch.split(probabilities, DRAWN), chances, strict=True):
        reached = part.double().cumsum(-1)
        tokens.append(torch.searchsorted(reached, chance[:, None] * reached[:, -1:], right=True)[:, 0])
    return torch.cat(tokens).clamp(max=probabilities.shape[-1] - 1)


# ---- blocks and the embedding ----


def _block(walk: Walk, block: Block, states: Sequence[Tensor]) -> dict[str, Tensor]:
    """Sums the squared gradients of a block's linear outputs; turns its output's gradients into its input's."""
    squares = _Squares()
    block.module.requires_grad_(False)
    for batch, state in zip(walk.batches, states, strict=True):
        walk.keep(batch, _back(walk, block, batch, state, squares))
    return squares.named(block)


@torch.enable_grad()
def _back(walk: Walk, block: Block, batch: Batch, state: Tensor, squares: "_Squares") -> Tensor:
    device = walk.skeleton.device
    hidden = state.detach().to(device).requires_grad_()
    with LinearOutputs(block.module, block.name, squares.made):
        output = block.apply(batch, hidden)
    (gradient,) = torch.autograd.grad(output, hidden, batch.hidden.to(device))
    return gradient


class _Squares:
    """Sums of the squared gradients of linear outputs, by the place of the layer."""

    def __init__(self) -> None:
        self._sums: dict[Place, Tensor] = {}
        self._seen: set[str] = set()

    def made(self, name: str, expert: int | None, inputs: Tensor, output: Tensor) -> None:
        """Records a layer's output, and later the gradient with respect to it."""
        self._seen.add(name)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._add((name, expert), gradient))  # type: ignore[no-untyped-call]

    def _add(self, place: Place, gradient: Tensor) -> None:
        exact = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        sums = exact.reshape(-1, exact.shape[-1]).square().sum(0, dtype=torch.float64)
        self._sums[place] = self._sums[place] + sums if place in self._sums else sums

    def named(self, block: Block) -> dict[str, Tensor]:
        """Returns the sums by module; several modules in one parameter (gate and up) have equal shares of the rows."""
        named: dict[str, Tensor] = {}
        shapes = {
            name.removesuffix(".weight"): weight.shape
            for name, weight in block.module.named_parameters(prefix=block.name)
            if weight.ndim in (2, 3)
        }
        for place, names in modules(block).items():
            if place[0] not in self._seen and part_of(f"{names[0]}.weight", 1 << 20) in QUANTIZED_PARTS:
                raise QuantryError(f"the output of {names[0]} is not seen: it is no plain linear layer", fix=OTHER)
            sums = self._sums.get(place, torch.zeros(shapes[place[0]][-2], dtype=torch.float64)).to(CPU)
            named |= dict(zip(names, sums.chunk(len(names)), strict=True))
        return named


def _embedding(walk: Walk) -> tuple[Tensor, Tensor]:
    """Returns the rows of the embedding that occur, and sums over windows of the squares of their gradients."""
    skeleton = walk.skeleton
    everywhere = torch.cat([batch.tokens.flatten() for batch in walk.batches])
    seen = torch.bincount(everywhere).nonzero()[:, 0]
    sums = torch.zeros(0)
    with skeleton.loaded(skeleton.before), torch.enable_grad():
        skeleton.model.requires_grad_(False)
        for batch in walk.batches:
            rows = _Rows(skeleton.model.get_input_embeddings().weight)
            with rows:
                hidden, _ = skeleton.head_start(batch.tokens)
            (gradient,) = torch.autograd.grad(hidden, rows.rows[-1], batch.hidden.to(skeleton.device))
            exact = gradient.to(CPU, torch.promote_types(gradient.dtype, torch.float32))
            if not sums.numel():
                sums = torch.zeros(len(seen), exact.shape[-1], dtype=exact.dtype)
            for tokens, window in zip(batch.tokens, exact, strict=True):
                places = torch.searchsorted(seen, tokens)
                sums += torch.zeros_like(sums).index_add_(0, places, window).square_()
    return seen, sums


class _Rows(TorchFunctionMode):
    """Intercepts the rows looked up in an embedding, to get gradients with respect to them."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._place = weight.data_ptr()
        self.rows: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.embedding and args[1].data_ptr() == self._place:
            output = output.detach().requires_grad_()
            self.rows.append(output)
        return output


# ---- damage ----


def _parts(matrix: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, CHUNK // matrix.shape[1])
    return zip(torch.split(matrix, step), torch.split(rows.to(matrix.device), step), strict=True)


def damage(error: Tensor, rows: Tensor, gram: Tensor) -> float:
    """Predicts the damage of an error (rows, columns) of a linear's weight, in nats per token."""
    total = 0.0
    for part, weight in _parts(error, rows):
        exact = part.float()
        total += float((((exact @ gram) * exact).sum(1).double() * weight.double()).sum())
    return max(0.0, total / 2)


def input_damage(weight: Tensor, rows: Tensor, gram: Tensor, noise: float) -> float:
    """Predicts the damage of rounding the input: channels err independently, by `noise` times their mean square."""
    total = 0.0
    for part, row in _parts(weight, rows):
        total += float(((part.float().square() @ gram.diagonal()).double() * row.double()).sum())
    return max(0.0, noise * total / 2)


def embedding_damage(error: Tensor, seen: Tensor, information: Tensor) -> float:
    """Predicts the damage of an error of an embedding, of whose `seen` rows the Fisher information is given."""
    total = 0.0
    for rows, part in _parts(information, seen):
        some = error[part.to(error.device)].float().square()
        total += float((some * rows.to(error.device)).sum(dtype=torch.float64))
    return max(0.0, total / 2)


# ---- the store ----


def load_or_compute(store: Store | None, key: str, compute: Callable[[], Fisher]) -> Fisher:
    """Reads what the store has under a key, which must name everything it depends on; else computes and stores it."""
    if store is None:
        return compute()
    path = store.folder / key / FILE
    known = _load(path)
    if known is None:
        known = compute()
        store.put(path, _pack(known))
    return known


def _pack(fisher: Fisher) -> bytes:
    parts = {"seen": fisher.seen, "embedding": fisher.embedding, "head": fisher.head, "gram": fisher.gram}
    tensors = {f"output.{number}": rows for number, rows in enumerate(fisher.outputs.values())} | parts
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return pack_checked(contiguous, {"tokens": fisher.tokens, "modules": list(fisher.outputs)})


def _load(path: Path) -> Fisher | None:
    content = load_checked(path)
    if content is None:
        return None
    tensors, facts = content
    try:
        outputs = {module: tensors[f"output.{number}"] for number, module in enumerate(facts["modules"])}
        rest = {name: tensors[name] for name in ("seen", "embedding", "head", "gram")}
        return Fisher(tokens=facts["tokens"], outputs=outputs, **rest)
    except (KeyError, TypeError):
        return None

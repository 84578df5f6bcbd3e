"""The compute buffer of llama.cpp: the tensors of one batch, laid out as ggml's allocator does.

ggml walks the graph of the largest batch once, gives each result a place in one buffer, frees it after its last use
and puts the next one into the smallest hole that holds it. How large the buffer gets depends on sizes and order, so
both are written down here; all results are 32-bit floats. Held against what llama.cpp logs in
tests/planning/test_memory.py
for small models, benchmarks/llamacpp_memory.py for large ones. (Nodes in the order of xllamacpp 2026.10.11549.)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 32
FLOAT, LONG, INT, HALF = 4, 8, 4, 2
ENOUGH = 4  # blocks after which the layout repeats itself


@dataclass(frozen=True, slots=True)
class Batch:
    """A model as llama.cpp computes one batch of it; sizes are numbers a token."""

    hidden: int
    inner: int  # of the MLP, or of an expert
    queries: int
    keys: int
    values: int
    heads: int
    vocabulary: int
    layers: int
    tokens: int  # in the batch
    outputs: int  # tokens whose logits are wanted
    cells: tuple[int, ...]  # of one sequence, for each mask: full layers, sliding layers
    experts: int = 0
    used: int = 0  # experts a token
    shared: int = 0  # inner size of the experts that every token uses
    fused_attention: bool = False  # q, k and v are one matrix
    fused_mlp: bool = False  # gate and up are one matrix
    rotated: int = 0  # size of a head, where a quantized cache has its heads rotated
    flash: bool = True
    embeds: bool = True  # whether tokens become vectors here: the host does it for a GPU


@dataclass(frozen=True, slots=True)
class Node:
    """A result: its bytes, what it is made of, whether it may take the place of a source, whether it is kept."""

    name: str
    bytes: int
    sources: tuple[str, ...] = ()
    in_place: bool = False
    kept: bool = False


def buffer_bytes(batch: Batch) -> int:
    """The size of the buffer for this batch."""
    return lay_out(_inputs(batch), _nodes(batch))


def host_bytes(batch: Batch) -> int:
    """The buffer of the host when a GPU computes: inputs, and the vectors of the tokens."""
    return lay_out(_inputs(batch), _embedding(batch.tokens * batch.hidden * FLOAT))


def lay_out(inputs: Sequence[Node], nodes: Sequence[Node]) -> int:
    """The end of the last byte that was ever taken."""
    waiting = Counter(source for node in nodes for source in node.sources)
    kept = {node.name for node in nodes if node.kept}
    space = Space()
    places = {node.name: space.take(node.bytes) for node in inputs}
    for node in nodes:
        places[node.name] = _place(node, waiting, kept, places, space)
        for source in node.sources:
            waiting[source] -= 1
            if not waiting[source] and source in places and source not in kept:
                space.give(places.pop(source))
    return space.end


def _place(
    node: Node, waiting: Counter[str], kept: set[str], places: dict[str, tuple[int, int]], space: "Space"
) -> tuple[int, int]:
    """The place of a source that nothing else waits for, or a new one."""
    size = _aligned(node.bytes)
    for source in node.sources if node.in_place else ():
        if source in places and source not in kept and waiting[source] == 1 and places[source][1] == size:
            return places.pop(source)
    return space.take(node.bytes)


class Space:
    """Free stretches of a buffer without end; the smallest that fits is taken, the last of equals."""

    def __init__(self) -> None:
        self._free = [(0, 1 << 62)]
        self.end = 0

    def take(self, size: int) -> tuple[int, int]:
        size = _aligned(size)
        holes = [(length, -index) for index, (_, length) in enumerate(self._free[:-1]) if length >= size]
        index = -min(holes)[1] if holes else len(self._free) - 1
        start, length = self._free[index]
        self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
        self.end = max(self.end, start + size)
        return start, size

    def give(self, place: tuple[int, int]) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, place]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _inputs(batch: Batch) -> list[Node]:
    """What the host fills in before each batch; images and mixed batches have inputs even where there are none."""
    tokens, hidden = batch.tokens, batch.tokens * batch.hidden * FLOAT
    embedding = [
        Node("tokens", tokens * INT),
        Node("vectors", hidden),
        Node("mixed tokens", tokens * INT),
        Node("mixed vectors", hidden),
        Node("mixed slots", tokens * LONG),
    ]
    value_cells = tokens * LONG * (1 if batch.flash else batch.values)
    return [
        *(embedding if batch.embeds else [Node("x", hidden)]),
        Node("positions", tokens * INT),
        Node("key cells", tokens * LONG),
        Node("value cells", value_cells),
        *(Node(f"rotation {side}", batch.rotated**2 * FLOAT) for side in ("k", "v") if batch.rotated),
        *(Node(f"mask {i}", tokens * cells * (HALF if batch.flash else FLOAT)) for i, cells in enumerate(batch.cells)),
        Node("wanted", batch.outputs * INT),
    ]


def _embedding(hidden: int) -> list[Node]:
    return [
        Node("x", hidden, ("tokens",)),
        Node("mixed rows", hidden, ("mixed tokens",)),
        Node("mixed", hidden, ("mixed vectors",)),  # nothing is made of it here, so that it is never freed
        Node("mixed set", 0, ("mixed rows", "mixed slots")),
    ]


def _nodes(batch: Batch) -> list[Node]:
    nodes = _embedding(batch.tokens * batch.hidden * FLOAT) if batch.embeds else []
    x = "x"
    count = min(batch.layers, ENOUGH)
    for layer in range(count):
        last = layer == count - 1
        nodes += _attention(batch, f"{layer} ", x)
        attended, residual = f"{layer} o", x
        if last:
            size = batch.outputs * batch.hidden * FLOAT
            nodes += [Node("o rows", size, (attended, "wanted")), Node("x rows", size, (x, "wanted"))]
            attended, residual = "o rows", "x rows"
        nodes += _feed_forward(batch, f"{layer} ", attended, residual, batch.outputs if last else batch.tokens)
        x = f"{layer} out"
    rows = batch.outputs * FLOAT
    return [
        *nodes,
        Node("norm", rows * batch.hidden, (x,), in_place=True),
        Node("result", rows * batch.hidden, ("norm",), in_place=True, kept=True),
        Node("logits", rows * batch.vocabulary, ("result",), kept=True),
    ]


def _attention(batch: Batch, at: str, x: str) -> list[Node]:
    size = batch.tokens * FLOAT
    queries, keys, values = size * batch.queries, size * batch.keys, size * batch.values
    nodes = [Node(at + "n", size * batch.hidden, (x,), in_place=True)]
    if batch.fused_attention:
        nodes.append(Node(at + "qkv", queries + keys + values, (at + "n",)))
        made = {"q": (at + "qkv",), "k": (at + "qkv",), "v": (at + "qkv",)}
    else:
        made = {"q": (at + "q0",), "k": (at + "k0",), "v": (at + "n",)}
    fresh = not batch.fused_attention
    nodes += [Node(at + "q0", queries, (at + "n",))] if fresh else []
    nodes.append(Node(at + "q", queries, (*made["q"], "positions")))
    nodes += _rotated(batch, at + "q", queries, "k")
    if fresh:
        nodes.append(Node(at + "v", values, made["v"]))
        nodes += _rotated(batch, at + "v", values, "v")
        nodes.append(Node(at + "k0", keys, (at + "n",)))
    nodes.append(Node(at + "k", keys, (*made["k"], "positions")))
    nodes += _rotated(batch, at + "k", keys, "k")
    value = at + "v" + ("'" if batch.rotated else "") if fresh else at + "qkv"
    key = at + "k" + ("'" if batch.rotated else "")
    nodes += [Node(at + "stored k", 0, (key, "key cells")), Node(at + "stored v", 0, (value, "value cells"))]
    nodes += _attend(batch, at, at + "q" + ("'" if batch.rotated else ""))
    return [*nodes, Node(at + "o", size * batch.hidden, (at + "a",))]


def _rotated(batch: Batch, name: str, size: int, side: str) -> list[Node]:
    return [Node(name + "'", size, (name, f"rotation {side}"))] if batch.rotated else []


def _attend(batch: Batch, at: str, query: str) -> list[Node]:
    masks = tuple(f"mask {i}" for i in range(len(batch.cells)))
    size = batch.tokens * batch.queries // max(1, batch.keys) * batch.values * FLOAT
    if batch.flash:
        attended = [Node(at + ("a0" if batch.rotated else "a"), size, (query, *masks))]
        return attended + ([Node(at + "a", size, (at + "a0", "rotation v"))] if batch.rotated else [])
    scores = batch.tokens * max(batch.cells) * batch.heads * FLOAT
    return [
        Node(at + "scores", scores, (query,)),
        Node(at + "softmax", scores, (at + "scores", *masks), in_place=True),
        Node(at + "weighted", size, (at + "softmax",)),
        Node(at + "a", size, (at + "weighted",)),
    ]


def _feed_forward(batch: Batch, at: str, attended: str, residual: str, tokens: int) -> list[Node]:
    size = tokens * FLOAT
    before = [
        Node(at + "r", size * batch.hidden, (attended, residual), in_place=True),
        Node(at + "n2", size * batch.hidden, (at + "r",), in_place=True),
    ]
    inside = (
        _experts(batch, at, size) if batch.used else _gated(at, "", size, batch.inner, batch.hidden, batch.fused_mlp)
    )
    summed = (at + "r", at + "down") if batch.fused_attention else (at + "down", at + "r")
    return [*before, *inside, Node(at + "out", size * batch.hidden, summed, in_place=True)]


def _gated(at: str, mark: str, size: int, inner: int, hidden: int, fused: bool) -> list[Node]:
    """Gate, up, their product, and down."""
    gate, up, product, down = (f"{at}{name}{mark}" for name in ("gate", "up", "product", "down"))
    if fused:
        first = [Node(up, 2 * size * inner, (at + "n2",)), Node(product, size * inner, (up,))]
    else:
        first = [
            Node(gate, size * inner, (at + "n2",)),
            Node(up, size * inner, (at + "n2",)),
            Node(product, size * inner, (gate, up)),
        ]
    return [*first, Node(down, size * hidden, (product,))]


def _experts(batch: Batch, at: str, size: int) -> list[Node]:
    """The router, the experts it chose, their sum, and the experts that every token uses."""
    inner, hidden = size * batch.used * batch.inner, size * batch.used * batch.hidden
    chosen = "sum" if batch.shared else "down"
    nodes = [
        Node(at + "router", size * batch.experts, (at + "n2",)),
        Node(at + "chances", size * batch.experts, (at + "router",), in_place=True),
        Node(at + "sorted", size * batch.experts, (at + "chances",)),
        Node(at + "shares", size * batch.used, (at + "chances", at + "sorted")),
        Node(at + "gate", inner, (at + "n2", at + "sorted")),
        Node(at + "up", inner, (at + "n2", at + "sorted")),
        Node(at + "product", inner, (at + "gate", at + "up")),
        Node(at + "each", hidden, (at + "product", at + "sorted")),
        Node(at + "weighted", hidden, (at + "each", at + "shares"), in_place=True),
        Node(at + chosen, size * batch.hidden, (at + "weighted",)),
    ]
    if not batch.shared:
        return nodes
    shared = _gated(at, "'", size, batch.shared, batch.hidden, fused=False)
    return [*nodes, *shared, Node(at + "down", size * batch.hidden, (at + "sum", at + "down'"), in_place=True)]

"""The compute buffer of llama.cpp: the tensors of one batch, laid out as ggml's allocator does.

ggml walks the graph of the largest batch once: it gives each result a place in one buffer, frees it after its last use,
and puts the next result into the smallest hole that holds it. The size of the buffer depends on sizes and on order, so
this file writes down both; all results are 32-bit floats. tests/planning/test_memory.py compares small models with
llama.cpp's log, benchmarks/llamacpp_memory.py large ones. (Nodes in the order of xllamacpp 2026.10.11549.)
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 32
FLOAT, LONG, INT, HALF = 4, 8, 4, 2
ENOUGH = 4  # blocks after which the layout repeats itself


@dataclass(frozen=True, slots=True)
class GraphBatch:
    """The sizes that decide llama.cpp's graph of one batch, in numbers per token."""

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
    used: int = 0  # experts per token
    shared: int = 0  # inner size of the experts that every token uses
    fused_attention: bool = False  # q, k and v are one matrix
    fused_mlp: bool = False  # gate and up are one matrix
    rotated: int = 0  # size of a head, where a quantized cache has its heads rotated
    flash: bool = True
    embeds: bool = True  # this device looks up the embedding; beside a GPU the host does


@dataclass(frozen=True, slots=True)
class Node:
    """A result: its bytes and its sources; `in_place` may reuse the memory of a source, `kept` is never freed."""

    name: str
    bytes: int
    sources: tuple[str, ...] = ()
    in_place: bool = False
    kept: bool = False


def buffer_bytes(batch: GraphBatch) -> int:
    """Returns the size of the buffer for this batch."""
    return lay_out(_inputs(batch), _nodes(batch))


def host_bytes(batch: GraphBatch) -> int:
    """Returns the host's buffer when a GPU computes: inputs, and the vectors of the tokens."""
    return lay_out(_inputs(batch), _embedding(batch.tokens * batch.hidden * FLOAT))


def lay_out(inputs: Sequence[Node], nodes: Sequence[Node]) -> int:
    """Allocates all nodes in order and returns the highest byte ever used."""
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
    """Reuses the place of a source that no other node waits for, or takes a new one."""
    size = _aligned(node.bytes)
    for source in node.sources if node.in_place else ():
        if source in places and source not in kept and waiting[source] == 1 and places[source][1] == size:
            return places.pop(source)
    return space.take(node.bytes)


class Space:
    """The free stretches of an endless buffer; `take` uses the smallest that fits, the last of equals."""

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


def _inputs(batch: GraphBatch) -> list[Node]:
    """Returns what the host fills in before each batch; llama.cpp always has the inputs of images and mixed batches."""
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
        Node("mixed", hidden, ("mixed vectors",)),  # no node uses it, so it is never freed
        Node("mixed set", 0, ("mixed rows", "mixed slots")),
    ]


def _nodes(batch: GraphBatch) -> list[Node]:
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


def _attention(batch: GraphBatch, at: str, x: str) -> list[Node]:
    size, mark = batch.tokens * FLOAT, "'" if batch.rotated else ""
    queries, keys, values = size * batch.queries, size * batch.keys, size * batch.values
    norm, fused = at + "n", at + "qkv"
    if batch.fused_attention:
        made = [
            Node(fused, queries + keys + values, (norm,)),
            Node(at + "q", queries, (fused, "positions")),
            *_rotated(batch, at + "q", queries, "k"),
            Node(at + "k", keys, (fused, "positions")),
        ]
    else:
        made = [
            Node(at + "q0", queries, (norm,)),
            Node(at + "q", queries, (at + "q0", "positions")),
            *_rotated(batch, at + "q", queries, "k"),
            Node(at + "v", values, (norm,)),
            *_rotated(batch, at + "v", values, "v"),
            Node(at + "k0", keys, (norm,)),
            Node(at + "k", keys, (at + "k0", "positions")),
        ]
    value = fused if batch.fused_attention else at + "v" + mark
    return [
        Node(norm, size * batch.hidden, (x,), in_place=True),
        *made,
        *_rotated(batch, at + "k", keys, "k"),
        Node(at + "stored k", 0, (at + "k" + mark, "key cells")),
        Node(at + "stored v", 0, (value, "value cells")),
        *_attend(batch, at, at + "q" + mark),
        Node(at + "o", size * batch.hidden, (at + "a",)),
    ]


def _rotated(batch: GraphBatch, name: str, size: int, side: str) -> list[Node]:
    return [Node(name + "'", size, (name, f"rotation {side}"))] if batch.rotated else []


def _attend(batch: GraphBatch, at: str, query: str) -> list[Node]:
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


def _feed_forward(batch: GraphBatch, at: str, attended: str, residual: str, tokens: int) -> list[Node]:
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
    gate, up, product, down = (f"{at}{name}{mark}" for name in ("gate", "up", "product", "down"))
    bytes_, norm = size * inner, (at + "n2",)
    if fused:
        first = [Node(up, 2 * bytes_, norm), Node(product, bytes_, (up,))]
    else:
        first = [Node(gate, bytes_, norm), Node(up, bytes_, norm), Node(product, bytes_, (gate, up))]
    return [*first, Node(down, size * hidden, (product,))]


def _experts(batch: GraphBatch, at: str, size: int) -> list[Node]:
    """Returns the router, the experts it chose, their sum, and the experts that every token uses."""
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

"""Maps of an artefact, block by block: the stored bits of each matrix, and its sensitivity."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from quantry.errors import CheckpointError
from quantry.models.already_quantized import weights_of
from quantry.models.attention import block_count
from quantry.models.linears import EXPERT
from quantry.models.parts import BLOCK, decoder_block, part_of
from quantry.quantizing.artefact_file import AGAIN
from quantry.report.content import BlockMap
from quantry.storage.reading import read_json
from quantry.types import Checkpoint, TensorInfo

MAPPED = frozenset({"attention", "MLP", "experts", "recurrent", "embedding", "head"})
ENDS = "ends"  # the row of a map with what is before the first block and after the last
Maps = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class SensitivityMaps:
    """The maps that were measured for a mixture, and the names of its layers there."""

    damage: BlockMap
    outliers: BlockMap
    names: tuple[tuple[str, str, str], ...]  # pattern, block, module


def read_sensitivity(file: Path) -> SensitivityMaps:
    """Reads sensitivity.json; returns empty maps if there is none. Raises CheckpointError if it is damaged."""
    if not file.is_file():
        return SensitivityMaps({}, {}, ())
    from quantry.jobs.auto.sensitivity import Sensitivity

    try:
        measured = Sensitivity.from_dict(read_json(file, Sensitivity, fix=AGAIN, error=CheckpointError))
        cells = [(ENDS if layer.block is None else str(layer.block), layer.part, layer) for layer in measured.layers]
        return SensitivityMaps(
            _map((block, part, measured.compared(layer).damage) for block, part, layer in cells),
            _map((block, part, layer.outliers) for block, part, layer in cells if layer.outliers is not None),
            tuple((match, block, part) for block, part, layer in cells for match in layer.match),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is not a sensitivity that Quantry wrote", fix=AGAIN) from error


def bits_map(checkpoint: Checkpoint, names: Iterable[tuple[str, str, str]] = ()) -> Maps:
    """Returns the stored bits per weight of every matrix, scales included: block -> module -> bits.

    `names` are (pattern, block, module): a matrix that matches goes by that name, so that layers that are stored alike
    are one cell of this map as of the others.
    """
    known = list(names)
    blocks = block_count(checkpoint.config)
    stored: Counter[tuple[str, str]] = Counter()
    weights: Counter[tuple[str, str]] = Counter()
    for module, tensors in _matrices(checkpoint, blocks).items():
        named = next(((block, part) for match, block, part in known if fnmatchcase(module, match)), None)
        cell = named or _cell(module, blocks)
        stored[cell] += 8 * sum(tensor.nbytes for tensor in tensors)
        weights[cell] += sum(weights_of(checkpoint, tensor) for tensor in tensors)
    return _map((block, module, stored[block, module] / weights[block, module]) for block, module in stored)


def _matrices(checkpoint: Checkpoint, blocks: int) -> dict[str, list[TensorInfo]]:
    """Returns the stored tensors of each matrix: its codes, scales and so on. GGUF names matrices with `.weight`."""
    is_gguf = checkpoint.format == "gguf"
    matrices: dict[str, list[TensorInfo]] = {}
    others = []
    for tensor in checkpoint.tensors:
        part = part_of(tensor.name, blocks)
        inside = decoder_block(tensor.name, blocks) is not None  # vision towers and draft heads are not
        if part not in MAPPED or not (inside or part in ("embedding", "head")):
            continue
        if len(tensor.shape) > 1 and weights_of(checkpoint, tensor):
            matrices.setdefault(tensor.name if is_gguf else tensor.name.rpartition(".")[0], []).append(tensor)
        elif not tensor.name.endswith(".bias"):
            others.append(tensor)
    for tensor in others:
        owner = next((name for name in _parents(tensor.name) if name in matrices), None)
        if owner is not None:
            matrices[owner].append(tensor)
    return matrices


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _cell(module: str, blocks: int) -> tuple[str, str]:
    """Returns the row and column of a matrix in a map; the experts of a block are one."""
    block = decoder_block(f"{module}.", blocks)
    short = EXPERT.sub(".experts.", BLOCK.split(f"{module}.")[-1]).strip(".").removesuffix(".weight")
    return (ENDS, short.rpartition(".")[2]) if block is None else (str(block), short)


def _map(cells: Iterable[tuple[str, str, float]]) -> Maps:
    """Returns the ends first, then the blocks in their order; modules in the order of the file."""
    rows: Maps = {}
    for block, module, value in cells:
        rows.setdefault(block, {})[module] = value
    return dict(sorted(rows.items(), key=lambda pair: -1 if pair[0] == ENDS else int(pair[0])))

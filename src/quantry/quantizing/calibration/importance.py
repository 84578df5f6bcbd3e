"""An importance matrix for llama.cpp from the statistics: sums of squares of the inputs by GGUF tensor."""

from collections.abc import Iterable, Mapping

import numpy as np

from quantry.llamacpp.importance import Sums
from quantry.llamacpp.tensor_map import Target
from quantry.models.linears import module_names
from quantry.quantizing.calibration.observe import ObservedBlock
from quantry.types import Stats

BLOCK = "blk."


def sums(blocks: Iterable[ObservedBlock], targets: Mapping[str, Target]) -> dict[str, Sums]:
    """Returns what llama-imatrix would record of the matrices inside blocks; an unreached expert has a count of 0."""
    groups: dict[str, Stats | None] = {}
    for block in blocks:
        groups |= {module: _light(block.stats.get(group)) for module, group in block.groups.items()}
    recorded = {}
    for name, target in targets.items():
        modules = [module_names(source.name, source.expert)[0] for source in target.sources]
        if not name.startswith(BLOCK) or not modules or any(module not in groups for module in modules):
            continue
        seen = [groups[module] for module in modules]
        rows = [stats.mean_square.double().cpu().numpy() * stats.tokens if stats else 0.0 for stats in seen]
        values = np.stack([np.broadcast_to(row, target.shape[-1:]) for row in rows])
        recorded[name] = (values, np.array([stats.tokens if stats else 0 for stats in seen]))
    return recorded


def _light(stats: Stats | None) -> Stats | None:
    """Drops the Gram matrix: those of all blocks do not fit in memory."""
    if stats is None:
        return None
    empty = stats.gram.new_empty(0)
    return Stats(stats.tokens, empty, stats.absmax, stats.mean_abs, stats.mean_square)

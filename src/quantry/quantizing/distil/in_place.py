"""Writes tensors of the same size over those of a finished shard."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from quantry.models.reader import open_checkpoint
from quantry.models.weights import as_bytes


def replaced(folder: Path, tensors: Mapping[str, Tensor]) -> set[str]:
    """Writes tensors of the same size over those of these names; returns the files that they are in."""
    places = {tensor.name: tensor for tensor in open_checkpoint(folder).tensors}
    for name, tensor in tensors.items():
        place, data = places[name], as_bytes(tensor)
        if len(data) != place.nbytes:
            raise ValueError(f"{name} has {place.nbytes} bytes in {place.file}, and {len(data)} were given")
        with (folder / place.file).open("r+b") as file:
            file.seek(place.start)
            file.write(data)
    return {places[name].file for name in tensors}

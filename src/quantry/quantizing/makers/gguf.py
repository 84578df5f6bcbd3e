"""Makes the tensors of a GGUF file."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from quantry.formats.gguf import arranged, decode, restored
from quantry.llamacpp.tensor_map import TensorSlice
from quantry.methods.contract import Rounder
from quantry.methods.rounding import LayerInput, round_blocks
from quantry.models.weights import DTYPES
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.makers.checks import cast
from quantry.quantizing.makers.reader import WeightReader
from quantry.quantizing.slices import matrix
from quantry.quantizing.tensor_plan import GgufTensor, Piece


class GgufMaker:
    """Makes ggml tensors; `importance` holds a vector for each matrix that it knows, by GGUF name.

    Matrices whose input is known are rounded by `rounder`, all others as llama.cpp does.
    """

    def __init__(
        self,
        reader: WeightReader,
        rounder: Rounder,
        importance: Mapping[str, Tensor],
        notes: tuple[str, ...] = (),
    ) -> None:
        self._reader, self._rounder, self._importance, self._notes = reader, rounder, importance, notes

    def make(self, piece: Piece, known: BlockInputs) -> Iterator[tuple[str, Tensor]]:
        """Yields a tensor, or its experts one after the other in the order in which they are stacked."""
        assert isinstance(piece, GgufTensor)
        target, kind = piece.target, piece.kind
        if target.values is not None:
            yield target.name, torch.tensor(target.values, dtype=torch.float32)
            return
        vectors = self._importance.get(target.name)
        for index, part in enumerate(target.sources):
            tensor = known.tensors[part.name] if part.name in known.tensors else self._reader.get(part.name)
            weight = self._reader.upload(matrix(tensor, part), part.name)
            if kind in DTYPES:
                yield target.name, cast(arranged(weight, target), DTYPES[kind], part.name)
                continue
            vector = None if vectors is None else vectors[index]
            stored = round_blocks(arranged(weight, target), kind, self._rounder, self._input(part, known), vector)
            if known.stored is not None:
                known.stored.add(part, restored(decode(stored, kind, weight.shape[1]), target))
            yield target.name, stored

    def release(self, piece: Piece) -> None:
        """Lets go of the source tensors of a piece."""
        assert isinstance(piece, GgufTensor)
        self._reader.release({part.name for part in piece.target.sources})

    def notes(self) -> tuple[str, ...]:
        return self._notes

    def _input(self, part: TensorSlice, known: BlockInputs) -> LayerInput | None:
        return known.input_of(part.name, part.expert)

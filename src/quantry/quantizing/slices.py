"""A layer as a slice of a checkpoint's tensor: `tensor[expert]`, transposed if `flip`, then `[rows]`."""

from torch import Tensor

from quantry.llamacpp.tensor_map import TensorSlice
from quantry.models.linears import Linear

Slice = Linear | TensorSlice


def tensor_of(layer: Slice) -> str:
    """Returns the tensor of the checkpoint that holds a layer."""
    return layer.source if isinstance(layer, Linear) else layer.name


def is_whole(layer: Slice) -> bool:
    """Says if a layer is all of its tensor."""
    return layer.expert is None and layer.rows is None


def view(tensor: Tensor, layer: Slice) -> Tensor:
    """Returns the (out, in) matrix, or the vector, of a layer as a view of its tensor."""
    weight = tensor if layer.expert is None else tensor[layer.expert]
    upright = weight.t() if layer.flip else weight
    return upright[slice(*layer.rows)] if layer.rows else upright


def matrix(tensor: Tensor, layer: Slice) -> Tensor:
    """Returns the (out, in) matrix, or the vector, of a layer; rows of a larger matrix are copied."""
    part = view(tensor, layer)
    return part.contiguous() if layer.rows else part

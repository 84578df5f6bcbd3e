"""Taps on the linear layers of a module: their inputs, seen or replaced, and their outputs.

A tap recognises a layer by the address of its weight, so it works however the model calls the layer: fused experts are
slices of one parameter, and their number tells them apart.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Place = tuple[str, int | None]  # a linear layer: its parameter without `.weight`, and its number in a stack of experts


class _LinearTap(TorchFunctionMode):
    """Intercepts every linear layer of a module, inside a `with`.

    A name is the parameter's without `.weight`, after `prefix`.
    """

    def __init__(self, module: nn.Module, prefix: str, callback: Callable[..., Tensor | None]) -> None:
        super().__init__()
        self._places, self._callback = places(module, prefix), callback

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            inputs, weight, bias = _arguments(*args, **(kwargs or {}))
            if weight.data_ptr() in self._places:
                return self._call(self._places[weight.data_ptr()], inputs, weight, bias)
        return func(*args, **(kwargs or {}))

    def _call(self, place: Place, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


class LinearInputs(_LinearTap):
    """Calls callback(name, expert, inputs) before every linear layer; a tensor it returns is used instead."""

    def _call(self, place: Place, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        other = self._callback(*place, inputs)
        return nn.functional.linear(inputs if other is None else other, weight, bias)


class LinearOutputs(_LinearTap):
    """Calls callback(name, expert, inputs, output) after every linear layer."""

    def _call(self, place: Place, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = nn.functional.linear(inputs, weight, bias)
        self._callback(*place, inputs, output)
        return output


def places(module: nn.Module, prefix: str) -> dict[int, Place]:
    """Maps the address of each matrix of a module to its place; a stack of matrices has one address for each."""
    addresses: dict[int, Place] = {}
    for parameter, weight in module.named_parameters(prefix=prefix):
        name = parameter.removesuffix(".weight")
        if weight.is_meta:
            continue
        if weight.ndim == 2:
            addresses[weight.data_ptr()] = (name, None)
        elif weight.ndim == 3:
            addresses |= {weight[index].data_ptr(): (name, index) for index in range(len(weight))}
    return addresses


def _arguments(
    input: Tensor,  # noqa: A002 - as `linear` names it
    weight: Tensor,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns the arguments of `linear` in order, whether the caller named them or not."""
    return input, weight, bias

"""Taps on the linear layers of a module: their inputs, seen or replaced, and their outputs.

A tap recognises a layer by the address of its weight, so it works however the model calls the layer: fused experts are
slices of one parameter, and their number tells them apart.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Place = tuple[str, int | None]  # a linear layer: its parameter without `.weight`, and its number in a stack of experts
OnInput = Callable[[str, int | None, Tensor], Tensor | None]
OnOutput = Callable[[str, int | None, Tensor, Tensor], None]


class LinearInputs(TorchFunctionMode):
    """Calls on_input(name, expert, inputs) before every linear layer of a module; a tensor it returns is used instead.

    A name is the parameter's without `.weight`, after `prefix`. Active inside a `with`.
    """

    def __init__(self, module: nn.Module, prefix: str, on_input: OnInput) -> None:
        super().__init__()
        self._places, self._on_input = places(module, prefix), on_input

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return func(*args, **(kwargs or {}))
        inputs, weight, bias = _arguments(*args, **(kwargs or {}))
        place = self._places.get(weight.data_ptr())
        other = None if place is None else self._on_input(*place, inputs)
        return func(inputs if other is None else other, weight, bias)


class LinearOutputs(TorchFunctionMode):
    """Calls on_output(name, expert, inputs, output) after every linear layer of a module.

    Names and numbers are those of LinearInputs. Active inside a `with`.
    """

    def __init__(self, module: nn.Module, prefix: str, on_output: OnOutput) -> None:
        super().__init__()
        self._places, self._on_output = places(module, prefix), on_output

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            inputs, weight, _ = _arguments(*args, **(kwargs or {}))
            place = self._places.get(weight.data_ptr())
            if place is not None:
                self._on_output(*place, inputs, output)
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

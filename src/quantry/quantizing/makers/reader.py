"""Reads the weights of a checkpoint onto the computing device."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from quantry.models.weights import DTYPES
from quantry.quantizing.makers.checks import check_finite
from quantry.types import Checkpoint, TensorInfo


class Weights(Protocol):
    """Where tensors come from: mapped files, or what is decoded from them."""

    def get(self, tensor: TensorInfo) -> Tensor: ...

    def read(self, tensor: TensorInfo, buffer: Tensor) -> Tensor: ...

    def release(self, tensor: TensorInfo) -> None: ...


class WeightReader:
    """The weights of a checkpoint.

    On the CPU they are mapped. For a GPU each is read into one pinned buffer and copied on a separate stream, while the
    GPU still computes with the weight before.
    """

    def __init__(self, checkpoint: Checkpoint, weights: Weights, device: torch.device) -> None:
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self._weights, self.device = weights, device
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self._held = ""  # the tensor in the buffer

    def get(self, name: str) -> Tensor:
        """Returns a tensor as stored; with a GPU it is valid until the next call."""
        tensor = self._tensors[name]
        if self._copies is None or tensor.nbytes == 0:
            return self._weights.get(tensor)
        if self._pinned.numel() < tensor.nbytes:
            self._held, self._pinned = "", torch.empty(tensor.nbytes, dtype=torch.uint8, pin_memory=True)
        if self._held != name:
            self._weights.read(tensor, self._pinned)
            self._held = name
        return self._pinned[: tensor.nbytes].view(DTYPES[tensor.dtype]).view(tensor.shape)

    def whole(self, name: str) -> Tensor:
        """Returns a tensor on the computing device. Raises WeightError if it is not finite."""
        return self.upload(self.get(name), name)

    def lasting(self, weight: Tensor) -> Tensor:
        """Returns a weight that stays valid when the next is read, on the CPU."""
        return weight if self._copies is None else weight.clone()

    def upload(self, weight: Tensor, name: str) -> Tensor:
        """Copies a weight to the computing device. Raises WeightError if it is not finite."""
        if self._copies is None:
            check_finite(weight, name)
            return weight
        with torch.cuda.stream(self._copies):
            sent = weight.to(self.device, non_blocking=True)
            check_finite(sent, name)
        self._copies.synchronize()  # from here on the buffer is free, and any stream may read the copy
        sent.record_stream(torch.cuda.current_stream())
        return sent

    def release(self, names: Iterable[str]) -> None:
        """Lets the kernel drop the mapped pages of tensors."""
        for name in names:
            self._weights.release(self._tensors[name])

"""The weights of a base with an adapter merged in, computed tensor by tensor when they are asked for.

Sums are taken in float32 and rounded once to the base's type; peft adds in the base's own 16 bits, which rounds twice.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry.models.adapter import HEAD, Adapter, Change, Changes, LowRank
from quantry.models.weights import DTYPES, MappedWeights
from quantry.quantizing.makers.checks import cast, check_finite
from quantry.types import Checkpoint, TensorInfo

TOKENIZER = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip


class MergedWeights:
    """Tensors of a base with the changes of an adapter; the last one stays in memory."""

    def __init__(self, checkpoint: Checkpoint, base: MappedWeights, adapter: Adapter, changes: Changes) -> None:
        self._tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
        self._base, self._adapter, self._changes = base, MappedWeights(adapter.folder), changes
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def get(self, tensor: TensorInfo) -> Tensor:
        """Returns a tensor of the merged model, in the type that `tensor` has."""
        change = self._changes.by_tensor.get(tensor.name)
        if change is None:
            return self._base.get(self._origin(tensor.name))
        if self._last[0] != tensor.name:
            self._last = ("", torch.empty(0))  # before another tensor takes memory
            merged = self._merged(self._origin(tensor.name), change)
            self._last = (tensor.name, cast(merged, DTYPES[tensor.dtype], tensor.name))
        return self._last[1]

    def read(self, tensor: TensorInfo, buffer: Tensor) -> Tensor:
        """Copies a tensor into the first bytes of a buffer."""
        weight = self.get(tensor)
        return buffer[: tensor.nbytes].view(weight.dtype).view(tensor.shape).copy_(weight)

    def copy(self, tensor: TensorInfo) -> Tensor:
        """Returns a tensor in memory of its own."""
        return self.get(tensor).clone()

    def release(self, tensor: TensorInfo) -> None:
        """Lets the kernel reclaim the pages of the base's tensor."""
        self._base.release(self._origin(tensor.name))

    def _origin(self, name: str) -> TensorInfo:
        """Returns the tensor of the base that one begins as: a new head begins as the embedding."""
        return self._tensors[name if name in self._tensors else str(self._changes.head)]

    def _merged(self, tensor: TensorInfo, change: Change) -> Tensor:
        weight = self._trained(change.instead) if change.instead else self._base.get(tensor).float()
        if change.low_rank:
            weight = self._added(weight, change.low_rank)
        if change.add:
            bias, scale = change.add
            weight = weight + self._trained(bias) * scale
        if change.rows:
            ids, values = change.rows
            weight = weight.index_copy(0, torch.tensor(ids), self._trained(values))
        return weight

    def _added(self, weight: Tensor, pair: LowRank) -> Tensor:
        product = self._trained(pair.b) @ self._trained(pair.a)
        summed = weight + (product.T if pair.flip else product) * pair.scale
        if pair.magnitude is None:
            return summed
        lengths: Tensor = torch.linalg.norm(summed, dim=1)
        return (self._trained(pair.magnitude) / lengths).view(-1, 1) * summed

    def _trained(self, tensor: TensorInfo) -> Tensor:
        values = self._adapter.get(tensor).float()
        check_finite(values, tensor.name)
        return values


def merged_checkpoint(checkpoint: Checkpoint, changes: Changes) -> Checkpoint:
    """Returns the merged model by its headers: an untied head, more rows, and the config that goes with them."""
    tensors = [_resized(tensor, changes) for tensor in checkpoint.tensors]
    if changes.head is not None:
        begins = next(tensor for tensor in checkpoint.tensors if tensor.name == changes.head)
        name = next((name for name in changes.by_tensor if name.endswith(HEAD)), HEAD)
        tensors.append(_resized(replace(begins, name=name), changes))
    return replace(checkpoint, tensors=tuple(tensors), config=_config(checkpoint.config, changes))


def _resized(tensor: TensorInfo, changes: Changes) -> TensorInfo:
    change = changes.by_tensor.get(tensor.name)
    shape = change.instead.shape if change and change.instead else tensor.shape
    if shape == tensor.shape:
        return tensor
    count = tensor.numel // tensor.shape[0] * shape[0]
    return replace(tensor, shape=shape, nbytes=tensor.nbytes // tensor.numel * count)


def _config(config: Mapping[str, Any], changes: Changes) -> dict[str, Any]:
    merged = dict(config)
    if changes.head is not None:
        merged["tie_word_embeddings"] = False
    if changes.vocabulary is not None:
        merged["vocab_size"] = changes.vocabulary
    return merged


def tokenizer_files(adapter: Path) -> dict[str, bytes]:
    """Returns the tokenizer that an adapter brings, by file; an adapter with tokens of its own has one."""
    if not (adapter / "tokenizer_config.json").is_file():
        return {}
    return {file.name: file.read_bytes() for pattern in TOKENIZER for file in sorted(adapter.glob(pattern))}

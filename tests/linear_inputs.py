"""Every input of every linear layer of transformers' own model: the oracle of calibration."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantry.models.reader import open_checkpoint
from quantry.models.weights import MappedWeights

WINDOWS = [torch.randint(3, 300, (48,), generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(6)]


class Folder:
    """A 16-bit checkpoint as a source of weights."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint = open_checkpoint(folder)
        self.config = self.checkpoint.config
        self.names = tuple(tensor.name for tensor in self.checkpoint.tensors)
        self.activations: dict[str, Any] = {}
        self._weights, self._tensors = (
            MappedWeights(folder),
            {tensor.name: tensor for tensor in self.checkpoint.tensors},
        )

    def read(self, name: str) -> Tensor:
        return self._weights.get(self._tensors[name])


def inputs_of(model: Any, windows: list[list[int]] = WINDOWS) -> dict[str, Tensor]:
    """Every input of every linear layer of a whole model, by the name transformers gives it; experts by number."""
    found: dict[str, list[Tensor]] = {}
    places = {}
    for name, weight in model.named_parameters():
        stem = name.removesuffix(".weight")
        for index, matrix in enumerate(weight if weight.ndim == 3 else [weight]):
            places[matrix.data_ptr()] = f"{stem}.{index}" if weight.ndim == 3 else stem
    original = nn.functional.linear

    def noted(inputs: Tensor, weight: Tensor, *others: Any, **more: Any) -> Tensor:
        found.setdefault(places[weight.data_ptr()], []).append(inputs.reshape(-1, inputs.shape[-1]).double())
        return original(inputs, weight, *others, **more)

    nn.functional.linear = torch.nn.functional.linear = noted  # type: ignore[assignment]
    try:
        with torch.no_grad():
            for window in windows:
                model(input_ids=torch.tensor([window]), use_cache=False)
    finally:
        nn.functional.linear = torch.nn.functional.linear = original
    return {name: torch.cat(parts) for name, parts in found.items()}


def candidates(module: str) -> list[str]:
    """Where transformers may keep a module of the checkpoint."""
    found = [module, module.replace("language_model.model.layers", "model.language_model.layers")]
    parts = module.split(".")
    if "experts" in parts:  # MODEL.experts.N.LEAF is row N of a stack
        at = parts.index("experts")
        stem, number, leaf = ".".join(parts[:at]).replace("block_sparse_moe", "mlp"), parts[at + 1], parts[at + 2]
        stack = "down_proj" if leaf in ("w2", "down_proj") else "gate_up_proj"
        found.append(f"{stem}.experts.{stack}.{number}")
    found.append(module.replace("block_sparse_moe.gate", "mlp.gate"))
    found.append(module.replace("input_linear", "experts.gate_up_proj").replace("output_linear", "experts.down_proj"))
    found.append(module.replace("router.layer", "router"))
    return found

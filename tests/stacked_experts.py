"""Experts of a tiny mixture as one tensor for all, as transformers 5 keeps them."""

import torch
from torch import Tensor


def stacked(tensors: dict[str, Tensor], flip: bool) -> dict[str, Tensor]:
    """The tensors, with the four experts of each block in one tensor."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for block in range(2):
        prefix = f"model.layers.{block}.mlp.experts."
        gate, up, down = (
            torch.stack([tensors[f"{prefix}{expert}.{name}.weight"] for expert in range(4)])
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        stacks = {"gate_up_proj": torch.cat([gate, up], dim=1), "down_proj": down}
        made.update({f"{prefix}{name}": (s.mT if flip else s).contiguous() for name, s in stacks.items()})
    return made

"""How far the predictions of an artefact are from those of its model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantry.blockwise.walk import run
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration.text import load
from quantry.quantizing.sources import open_source


def windows(source: Path, **how: Any) -> tuple[tuple[int, ...], ...]:
    """What a job reads; random models have nothing in common on other text."""
    return load(None, load_tokenizer(source), context=512, **how).tokens


def logits(folder: Path, tokens: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([one.log_softmax(-1) for _, one in run(open_source(folder), tokens, batch=8)])


def divergence(wanted: Tensor, found: Tensor) -> float:
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())

"""Artefacts of the demo model, quantized once in a run and shared by all of its processes. Tests copy before they write."""

from pathlib import Path
from typing import Any

import pytest

import quantry
from quantry.quantizing.recipe import presets
from shared import shared

DATA_FREE = [preset.name for preset in presets().values() if not preset.calibrated]


def quantized_demo(factory: pytest.TempPathFactory, preset: str, **options: Any) -> Path:
    """The folder of the demo model in a preset, with options of quantize."""
    name = "_".join([preset, *(f"{key}-{value}" for key, value in options.items())])

    def make(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUANTRY_CACHE", str(folder / "cache"))
            quantry.quantize("demo", folder / "artefact", preset=preset, **options)

    return shared(factory, f"demo-{name}", make) / "artefact"


def gguf_in(folder: Path) -> Path:
    """The GGUF file of an artefact."""
    return next(folder.glob("*.gguf"))

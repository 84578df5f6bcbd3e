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


AUTO_TEXT: dict[str, Any] = {"samples": 16, "length": 128}
AUTO_FORMATS = ("gguf", "compressed-tensors")


def measured_demo(factory: pytest.TempPathFactory) -> Path:
    """A cache folder with what preset auto measures of the demo's layers on AUTO_TEXT, for each format."""

    def measure(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUANTRY_CACHE", str(folder))
            for name in AUTO_FORMATS:
                quantry.sensitivity("demo", format=name, transform="awq", **AUTO_TEXT)

    return shared(factory, "measured demo", measure)


def gguf_in(folder: Path) -> Path:
    """The GGUF file of an artefact."""
    return next(folder.glob("*.gguf"))

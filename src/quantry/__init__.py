"""Quantry: from a 16-bit checkpoint to a quantized model that its engine is proven to serve.

Every command of the command line is a function here, with the same name and the same options. They are imported when
they are first used, so that `import quantry` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantry.anatomy import inspect
    from quantry.conversion import convert
    from quantry.devices import Device, Hardware, hardware
    from quantry.errors import QuantryError
    from quantry.harm import sensitivity
    from quantry.job import run
    from quantry.load.bench import bench
    from quantry.load.tune import tune
    from quantry.pipeline import quantize
    from quantry.planning.decision import plan
    from quantry.planning.matrices import matrix
    from quantry.proof.comparison import diff
    from quantry.proof.verification import verify
    from quantry.recipe import presets
    from quantry.serving import serve
    from quantry.sweeping import sweep
    from quantry.types import Anatomy, Artefact, Difference, Proof

__version__ = "0.1.0"
__all__ = [
    "Anatomy", "Artefact", "Device", "Difference", "Hardware", "Proof", "QuantryError", "__version__", "bench",
    "convert", "diff", "hardware", "inspect", "matrix", "plan", "presets", "quantize", "run", "sensitivity", "serve",
    "sweep", "tune", "verify",
]  # fmt: skip

_HOMES = {
    "Anatomy": "types",
    "Artefact": "types",
    "Device": "devices",
    "Difference": "types",
    "Hardware": "devices",
    "Proof": "types",
    "QuantryError": "errors",
    "bench": "load.bench",
    "convert": "conversion",
    "diff": "proof.comparison",
    "hardware": "devices",
    "inspect": "anatomy",
    "matrix": "planning.matrices",
    "plan": "planning.decision",
    "presets": "recipe",
    "quantize": "pipeline",
    "run": "job",
    "sensitivity": "harm",
    "serve": "serving",
    "sweep": "sweeping",
    "tune": "load.tune",
    "verify": "proof.verification",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantry' has no attribute {name!r}")
    return getattr(import_module(f"quantry.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

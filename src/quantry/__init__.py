"""Quantry: from a 16-bit checkpoint to a quantized model that its engine is proven to serve.

Every command of the command line is a function here, with the same name and the same options. They are imported when
they are first used, so that `import quantry` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantry.devices import Device, Hardware, hardware
    from quantry.errors import QuantryError
    from quantry.jobs.adapt.adapt import adapt
    from quantry.jobs.auto.sensitivity import sensitivity
    from quantry.jobs.load.bench import bench
    from quantry.jobs.load.tune import tune
    from quantry.jobs.quantize import quantize
    from quantry.jobs.run.run import run
    from quantry.jobs.sweep.sweep import sweep
    from quantry.jobs.verify import verify
    from quantry.models.anatomy import inspect
    from quantry.planning.matrices import matrix
    from quantry.planning.plan import plan
    from quantry.proof.diff import diff
    from quantry.quantizing.convert import convert
    from quantry.quantizing.recipe import presets
    from quantry.serving.prepare import serve
    from quantry.storage.cache import cache
    from quantry.types import Anatomy, Artefact, Difference, Proof

__version__ = "0.1.0"
__all__ = [
    "Anatomy", "Artefact", "Device", "Difference", "Hardware", "Proof", "QuantryError", "__version__", "adapt",
    "bench", "cache", "convert", "diff", "hardware", "inspect", "matrix", "merge", "plan", "presets", "quantize", "run",
    "sensitivity", "serve", "sweep", "tune", "verify",
]  # fmt: skip

_HOMES = {
    "Anatomy": "types",
    "Artefact": "types",
    "Device": "devices",
    "Difference": "types",
    "Hardware": "devices",
    "Proof": "types",
    "QuantryError": "errors",
    "adapt": "jobs.adapt.adapt",
    "bench": "jobs.load.bench",
    "cache": "storage.cache",
    "convert": "quantizing.convert",
    "diff": "proof.diff",
    "hardware": "devices",
    "inspect": "models.anatomy",
    "matrix": "planning.matrices",
    "merge": "quantizing.merge",
    "plan": "planning.plan",
    "presets": "quantizing.recipe",
    "quantize": "jobs.quantize",
    "run": "jobs.run.run",
    "sensitivity": "jobs.auto.sensitivity",
    "serve": "serving.prepare",
    "sweep": "jobs.sweep.sweep",
    "tune": "jobs.load.tune",
    "verify": "jobs.verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantry' has no attribute {name!r}")
    return getattr(import_module(f"quantry.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

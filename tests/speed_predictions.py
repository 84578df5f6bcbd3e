"""Predictions of speed in one line, and the fit of benchmarks/fit_speed.py as a module."""

import importlib.util
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from quantry.devices import Hardware
from quantry.planning.deployment import Deployment
from quantry.planning.speed.throughput import Prediction, speed
from quantry.quantizing.recipe import Recipe, build
from quantry.types import Checkpoint, Workload

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LOAD = Workload(context=4096)


@cache
def fitting_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_speed", BENCHMARKS / "fit_speed.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["fit_speed"] = module
    spec.loader.exec_module(module)
    return module


def recipe(name: str, form: str | None = None) -> Recipe:
    return build({"preset": name, "format": form})


def predicted(
    model: Checkpoint, preset: str, engine: str, hardware: Hardware, batch: int = 1, devices: int = 1,
    load: Workload = LOAD, **rest: Any,
) -> Prediction:  # fmt: skip
    deployment = Deployment(model, recipe(preset), engine, hardware.device, tensor_parallel=devices, **rest)
    return speed(deployment, replace(load, concurrency=batch), hardware.cpu)

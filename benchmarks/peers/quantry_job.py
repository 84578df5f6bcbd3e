"""One artefact of Quantry as a process of its own, to be timed like those of others: PYTHON quantry_job.py JOB.json.

The job gives model, out and the options of `quantry.quantize`, and `symmetric` where a preset is wanted with or without
zero points against its own definition. The report gets the seconds of calibration (walk, Gram matrices, keeping them)
and of distillation apart from those of the rest, and which windows were read.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import quantry
from quantry.quantizing import recipe
from quantry.quantizing.calibration import distillation
from quantry.quantizing.calibration.per_block import BlockCalibration
from quantry.quantizing.calibration.store import Statistics


def main(job: dict[str, Any]) -> None:
    calibration, training = Clock(), Clock()
    for owner, name in ((BlockCalibration, "leave"), (Statistics, "observed"), (Statistics, "collect")):
        setattr(owner, name, calibration.timed(getattr(owner, name)))
    distillation.distil = training.timed(distillation.distil)
    options = dict(job["options"])
    symmetric = options.pop("symmetric", None)
    if symmetric is not None:
        _redefine(options["preset"], symmetric)
    start = time.perf_counter()
    quantry.quantize(job["model"], job["out"], **options)
    rest = time.perf_counter() - start - calibration.seconds - training.seconds
    seconds = {"calibration": calibration.seconds, "distillation": training.seconds, "rounding": rest}
    told = json.loads((Path(job["out"]) / "quantry.json").read_text())["recipe"].get("calibration")
    report = {
        "parts": {name: round(value, 2) for name, value in seconds.items() if value},
        "versions": {name: version(name) for name in ("quantry", "transformers", "torch")},
        "windows": told and told["fingerprint"],
    }
    Path(job["report"]).write_text(json.dumps(report))


def _redefine(name: str, symmetric: bool) -> None:
    """A preset with or without zero points under the name of the one that has it the other way."""
    known = recipe._presets()
    scheme = known[name].scheme
    grid = dataclasses.replace(scheme.weight, symmetric=symmetric)
    known[name] = dataclasses.replace(known[name], scheme=dataclasses.replace(scheme, weight=grid))


class Clock:
    """The seconds spent inside some functions; one that calls another of them counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside, start = True, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._inside = False

        return outer


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))

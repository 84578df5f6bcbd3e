"""Fits the factors of the speed model (the tables `speed` of engines/*.toml) to the measurements of measurements.toml.

    python benchmarks/fit_speed.py [ROW ...]

For each fit: the numbers to write there, the error of every table, and what fits that have not seen a batch size or a
shape predict for it. The sum of the squares of the logarithms of predicted over measured time is made small; points of
a `target`, whose largest error is promised, count tenfold. There is one start, no random number, and far fewer free
numbers than points.
"""

import json
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from quantry.devices import Device
from quantry.devices.catalogue import catalogue
from quantry.planning.existing import existing
from quantry.planning.memory.terms import CacheType
from quantry.planning.models import from_config, open_model
from quantry.planning.speed.factors import Factors, factor_rows, factors_for, read_factors
from quantry.planning.speed.seconds import DecodeStep, Runtime, prompt_seconds, step_seconds
from quantry.planning.speed.work import StepWork, work_of
from quantry.quantizing.recipe import build
from quantry.types import Checkpoint

HERE = Path(__file__).parent
TARGET = 10.0  # how often points count whose largest error is promised
SIXTEEN = CacheType("16-bit", 16)


@dataclass(frozen=True)
class Point:
    """One measured time."""

    table: str
    shape: str
    target: bool
    weight: float
    scheme: str
    work: StepWork
    device: Device
    devices: int
    compiled: bool
    phase: Literal["decode", "prefill"]
    batch: int
    tokens: int  # before each sequence, or of each prompt
    seconds: float

    def predict(self, factors: Factors) -> float:
        runtime = Runtime(self.device, factors, self.devices, compiled=self.compiled)
        if self.phase == "decode":
            return step_seconds(self.work, runtime, DecodeStep(self.batch, self.tokens, SIXTEEN)).total
        return prompt_seconds(self.work, runtime, self.batch, self.tokens)

    def error(self, factors: Factors) -> float:
        """Of tokens a second in decoding, of the time of prompts: as such figures are told."""
        ratio = self.predict(factors) / self.seconds
        return (1 / ratio if self.phase == "decode" else ratio) - 1


@dataclass(frozen=True)
class Fit:
    """A row of a table `speed`, what it is fitted to, its free numbers with their start; "+" ties two together."""

    row: str
    tables: tuple[str, ...]
    start: Mapping[str, float]


FITS = (
    Fit(
        "vllm hopper",
        ("h200", "h100x8"),
        {
            "step_us": 1000, "sequence_us": 20, "passes": 4, "overlap": 2, "uncompiled": 1.5,
            "bandwidth": 0.9, "attention": 0.7, "unpack.weight-only+unpack.blocks": 4,
            "layer_us.16-bit": 40, "layer_us.8-bit": 40, "layer_us.weight-only": 40,
            "launch_us.16-bit": 400, "launch_us.8-bit": 400, "launch_us.weight-only": 400,
            "compute.8-bit": 0.7, "compute.weight-only": 0.7, "compute.weight-only f16": 0.7,
            "routing_us.16-bit": 10, "routing_us.8-bit": 10, "routing_us.weight-only": 10, "latent_us": 100,
            "routing_launch_us.16-bit": 400,
            "grouped.16-bit": 0.8, "grouped.weight-only": 0.8, "grouped.weight-only mxfp4": 0.8,
        },
    ),
    Fit(
        "llama.cpp cuda",
        ("30", "40"),
        {"bandwidth": 0.8, "layer_us.16-bit+launch_us.16-bit": 20, "compute.16-bit": 0.3, "compute.blocks": 0.3,
         "unpack.blocks": 5, "attention": 0.1},
    ),
    Fit(
        "llama.cpp apple",
        ("m",),
        {"bandwidth": 0.8, "layer_us.16-bit+launch_us.16-bit": 20, "compute.16-bit": 0.6, "compute.blocks": 0.6,
         "unpack.blocks": 5, "attention": 0.2},
    ),
    Fit(
        "llama.cpp x86",
        ("core",),
        {"unpack.blocks": 1, "compute.16-bit": 0.5, "compute.blocks": 0.6, "compute.blocks q8_0": 0.6,
         "compute.blocks q5_0": 0.6, "compute.blocks q4_0": 0.6, "attention": 0.2, "attention_step": 0.1, "pad": 4},
    ),
    Fit("llama.cpp arm", ("pi5",), {"bandwidth": 0.7}),
)  # fmt: skip


def points(prefixes: Iterable[str]) -> list[Point]:
    """The points of the tables whose names begin so."""
    wanted = tuple(prefixes)
    return [point for row in _tables() if row["name"].startswith(wanted) for point in _points(row)]


def _tables() -> list[dict[str, Any]]:
    return list(tomllib.loads((HERE / "measurements.toml").read_text(encoding="utf-8"))["tables"])


def _points(row: Mapping[str, Any]) -> list[Point]:
    """The points of one table."""
    found = []
    changes = json.dumps(row.get("changes", {}))
    for scheme in row["schemes"]:
        form = scheme.get("format")
        given = {
            "table": row["name"],
            "shape": row["model"] + (f" {changes}" if changes != "{}" else ""),
            "target": row.get("target", False),
            "weight": TARGET if row.get("target") else row.get("weight", 1),
            "scheme": scheme["preset"] + (f" {form}" if form else ""),
            "work": _stored(row["model"])
            if "stored" in scheme
            else _work(row["model"], changes, scheme["preset"], form),
            "device": _device(row),
            "devices": row.get("devices", 1),
            "compiled": row.get("setup", "compiled") == "compiled",
        }
        for phase in ("decode", "prefill"):
            for batch, tokens, milliseconds in scheme.get(phase, ()):
                found.append(Point(**given, phase=phase, batch=batch, tokens=tokens, seconds=milliseconds / 1e3))
    return found


@cache
def _work(model: str, changes: str, preset: str, form: str | None) -> StepWork:
    return work_of(_checkpoint(model, changes), build({"preset": preset, "format": form}))


@cache
def _stored(model: str) -> StepWork:
    """The work of a model in the scheme that it is published in."""
    found = existing(open_model(model))
    assert found, f"{model} is published in 16 bit"
    return work_of(*found)


@cache
def _checkpoint(model: str, changes: str) -> Checkpoint:
    found = open_model(model)
    return from_config({**found.config, **json.loads(changes)}, model) if changes != "{}" else found


def _device(row: Mapping[str, Any]) -> Device:
    if "machine" not in row:
        return next(device for device in catalogue() if device.name == row["device"])
    own = row["machine"]
    return Device(own["name"], "x86", own["kind"], own["family"], None, 0, 0, own["bandwidth"] * 1e9, own["tflops"])


def base_row(name: str) -> dict[str, Any]:
    """A row of the tables `speed` of engines/*.toml with what it takes from others."""
    return deepcopy(factor_rows()[name])


def placed(row: Mapping[str, Any], numbers: Mapping[str, float]) -> dict[str, Any]:
    """The row with numbers put in by their names."""
    made = deepcopy(dict(row))
    for names, value in numbers.items():
        for name in names.split("+"):
            table, _, key = name.partition(".")
            if key:
                made[table] = {**made.get(table, {}), key: value}
            else:
                made[table] = value
    return made


def solve(fit: Fit, known: Sequence[Point]) -> dict[str, float]:
    """The free numbers that fit best; logarithms are searched, so that all stay above 0."""
    row = base_row(fit.row)
    names = [name for name in fit.start if is_told(name, known)]
    weights = np.array([point.weight for point in known]) ** 0.5

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = read_factors(placed(row, dict(zip(names, np.exp(logs).tolist(), strict=True))))
        errors = [np.log(point.predict(factors) / point.seconds) for point in known]
        return np.asarray(weights * np.array(errors))

    best = descend(residuals, np.log([fit.start[name] for name in names]))
    return dict(zip(names, np.exp(best).tolist(), strict=True))


def is_told(name: str, known: Iterable[Point]) -> bool:
    """Whether points tell of a number: one of latent attention, of compilation or of a detail needs such points."""
    if name == "latent_us":
        return any(point.work.latent for point in known)
    if name == "uncompiled":
        return len({point.compiled for point in known if point.phase == "prefill"}) == 2
    kind = name.split("+")[0].partition(".")[2]
    return " " not in kind or any(f"{point.work.kind} {point.work.detail}" == kind for point in known)


def descend(
    residuals: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], rounds: int = 200
) -> NDArray[np.float64]:
    """Levenberg and Marquardt's way down the sum of squares."""
    here, damping = start, 1e-2
    found = residuals(here)
    for _ in range(rounds):
        slopes = np.stack([(residuals(here + step) - found) / 1e-5 for step in 1e-5 * np.eye(len(here))], axis=1)
        before = found @ found
        for _ in range(12):
            matrix = slopes.T @ slopes
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix) + 1e-9), -slopes.T @ found)
            there = here + np.clip(step, -1, 1)
            tried = residuals(there)
            if tried @ tried < before:
                here, found, damping = there, tried, max(damping / 5, 1e-9)
                break
            damping *= 4
        if before - found @ found < 1e-7 * before:
            break
    return here


def blind(fit: Fit, known: Sequence[Point]) -> Factors:
    """The factors of a fit to these points.

    A number that none of them tells of is left out, so that of its kind stands in; what compilation saves is kept.
    """
    row = base_row(fit.row)
    for name in fit.start:
        table, _, key = name.partition(".")
        if not is_told(name, known) and name != "uncompiled":
            row[table] = {other: value for other, value in row[table].items() if other != key} if key else 0.0
    return read_factors(placed(row, solve(fit, known)))


def summary(factors: Factors, known: Iterable[Point]) -> dict[str, Any]:
    """Largest and mean error by table and phase."""
    groups: dict[str, list[float]] = {}
    for point in known:
        groups.setdefault(f"{point.table} {point.phase}", []).append(abs(point.error(factors)))
    return {
        name: {"points": len(errors), "largest": round(max(errors), 3), "mean": round(sum(errors) / len(errors), 3)}
        for name, errors in groups.items()
    }


def left_out(fit: Fit, known: Sequence[Point]) -> dict[int, dict[str, float]]:
    """The largest errors at each batch size of the target, by fits that have not seen it."""
    found: dict[int, dict[str, float]] = {}
    targets = [point for point in known if point.target]
    for batch in sorted({point.batch for point in targets}):
        factors = blind(fit, [point for point in known if point.batch != batch])
        unseen = [point for point in targets if point.batch == batch]
        found[batch] = {
            phase: round(max(abs(point.error(factors)) for point in unseen if point.phase == phase), 3)
            for phase in ("decode", "prefill")
        }
    return found


def shapes_left_out(fit: Fit, known: Sequence[Point]) -> dict[str, dict[str, dict[str, float]]]:
    """Median and largest errors for each shape, by fits that have not seen it in any scheme."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in sorted({point.shape for point in known}):
        factors = blind(fit, [point for point in known if point.shape != shape])
        errors: dict[str, list[float]] = {}
        for point in known:
            if point.shape == shape:
                errors.setdefault(point.phase, []).append(abs(point.error(factors)))
        found[shape] = {phase: _spread(sizes) for phase, sizes in errors.items()}
    return found


def _spread(errors: Sequence[float]) -> dict[str, float]:
    return {
        "points": len(errors),
        "median": round(float(np.median(errors)), 3),
        "nine_of_ten": round(float(np.quantile(errors, 0.9)), 3),
        "largest": round(max(errors), 3),
    }


def seen(row: str) -> dict[str, dict[str, list[int]]]:
    """What was measured for a row: by devices and kind of work, the bytes of the weights of each model."""
    found: dict[str, dict[str, set[int]]] = {}
    for table in _tables():
        if "machine" not in table and factors_for(table["engine"], _device(table)).name == row:
            for point in _points(table):
                name = point.device.name if point.devices == 1 else f"{point.devices}x {point.device.name}"
                kinds = found.setdefault(name, {})
                kinds.setdefault(f"{point.work.kind} {point.work.detail}", set()).add(round(point.work.bytes))
    return {name: {kind: sorted(sizes) for kind, sizes in kinds.items()} for name, kinds in found.items()}


def report(fit: Fit) -> dict[str, Any]:
    """A fit with its errors, printed as it goes."""
    known = points(fit.tables)
    numbers = solve(fit, known)
    factors = read_factors(placed(base_row(fit.row), numbers))
    errors = summary(factors, known)
    most = float(np.quantile([abs(point.error(factors)) for point in known], 0.9))
    print(f"{fit.row}: {len(numbers)} free numbers, {len(known)} points, nine of ten errors below {most:.3f}")
    for name, value in numbers.items():
        print(f"    {name} = {value:.3g}")
    for name, row in errors.items():
        print(f"    {name:32} {row['points']:4} points, largest error {row['largest']:.3f}, mean {row['mean']:.3f}")
    unseen = left_out(fit, known)
    for batch, largest in unseen.items():
        print(f"    without batch {batch}: decode {largest['decode']:.3f}, prefill {largest['prefill']:.3f}")
    shapes = shapes_left_out(fit, known) if unseen else {}
    for shape, phases in shapes.items():
        for phase, row in phases.items():
            print(f"    without {shape}: {phase} median {row['median']:.3f}, largest {row['largest']:.3f}")
    for name, kinds in seen(fit.row).items():
        print(
            f"    [speed.seen.{json.dumps(name)}]",
            *(f'"{kind}" = {sizes}' for kind, sizes in kinds.items()),
            sep="\n    ",
        )
    rounded = {name: float(f"{value:.4g}") for name, value in numbers.items()}
    return {
        "numbers": rounded,
        "nine_of_ten": round(most, 3),
        "errors": errors,
        "left_out": unseen,
        "shapes_left_out": shapes,
    }


def main(wanted: Sequence[str]) -> None:
    from measure import keep

    keep("fit_speed", {"fits": {fit.row: report(fit) for fit in FITS if not wanted or fit.row in wanted}})


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main(sys.argv[1:])

"""The loop of a sweep: quantize, verify, next."""

from collections.abc import Callable, Sequence
from pathlib import Path

from quantry.engines.contract.catalogue import scoring_name
from quantry.errors import HubError, OutputError, QuantryError
from quantry.jobs import artefact_report
from quantry.jobs.sweep.plan import Measurement, plan_sweep
from quantry.jobs.sweep.specs import read_specs
from quantry.jobs.sweep.state import JobProgress, SweepState
from quantry.jobs.sweep.table import Sweep, report_content
from quantry.quantizing.calibration.data import Data
from quantry.types import Progress

FATAL = (OutputError, HubError)  # the disk or the network: the next artefact would fail too


def sweep(
    model: str | Path,
    output: str | Path,
    *,
    presets: str | Sequence[str],
    peers: str | Sequence[str | Path] = (),
    text: str | Path | None = None,
    windows: int = 16,
    verify_length: int = 512,
    gate: str = "general",
    data: Data = None,
    samples: int | None = None,
    length: int | None = None,
    rounder: str | None = None,
    group: int | None = None,
    device: str = "cpu",
    engine: str | None = None,
    engine_python: str | Path | None = None,
    announce: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> Sweep:
    """Quantizes `model` in many ways into folders of `output`, verifies each, and writes the table and a report.

    `presets` are names, with options of quantize after a colon, such as `w4a16:group=64,format=compressed-tensors`; one
    text may hold several with commas between. `rounder` and `group` are for presets that do not set them. `peers` are
    files of other tools to measure too. An artefact that cannot be made is a row with the reason.

    Raises QuantryError before the first job if an option is wrong; OutputError or HubError if disk or network fail.
    """
    shared = {key: value for key, value in {"rounder": rounder, "group": group}.items() if value is not None}
    calibration = {"data": data, "samples": samples, "length": length}
    measurement = Measurement(text, windows, verify_length, gate, device, scoring_name(engine), engine_python)
    plan = plan_sweep(model, Path(output).expanduser(), read_specs(presets, shared), peers, calibration, measurement)
    with plan.folder.locked():
        state = SweepState(plan)
        for number, job in enumerate(plan.jobs):
            shown = JobProgress(announce, progress, number, len(plan.jobs), job.name)
            try:
                state.quantize(job, shown)
                state.verify(job, shown)
            except FATAL:
                raise
            except QuantryError as error:
                state.refuse(job, str(error))
            shown.end(state.outcome(job))
        result = state.result()
        state.write(result)
        artefact_report.write(plan.folder.path, report_content(result, state.provenance()))
    return result

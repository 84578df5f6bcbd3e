"""The loop of a sweep: make an artefact, prove it, and go on to the next."""

from collections.abc import Callable, Sequence
from pathlib import Path

from quantry.errors import HubError, OutputError, QuantryError
from quantry.jobs import artefact_report as reporting
from quantry.jobs.sweep.jobs import Jobs
from quantry.jobs.sweep.ordering import Measured, order_of
from quantry.jobs.sweep.place import alone
from quantry.jobs.sweep.specs import read_specs
from quantry.jobs.sweep.table import Sweep, page
from quantry.jobs.sweep.telling import Telling
from quantry.types import Progress

ENDING = (OutputError, HubError)  # the disk or the network: the next artefact would meet the same


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
    data: str | Path | None = None,
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
    """Quantizes `model` in many ways into folders of `output`, proves each of them, and writes the table and a report.

    `presets` are names with options of quantize after a colon, such as `w4a16:group=64,format=compressed-tensors`; in
    one text commas stand between them. `rounder` and `group` are for all presets that do not give their own. `peers`
    are files of other tools, which are measured in the same way. An artefact that is refused is a row with the reason.
    """
    out = Path(output).expanduser()
    shared = {key: value for key, value in {"rounder": rounder, "group": group}.items() if value is not None}
    specs = read_specs(presets, shared)
    calibration = {"data": data, "samples": samples, "length": length}
    measured = Measured(text, windows, verify_length, gate, device, engine, engine_python)
    order = order_of(model, out, specs, peers, calibration, measured)  # all that can be refused is, before a job begins
    with alone(out):
        jobs = Jobs(out, order)
        for number, item in enumerate(order.items):
            tell = Telling(announce, progress, number, len(order.items), item.name)
            try:
                jobs.make(item, tell)
                jobs.prove(item, tell)
            except ENDING:
                raise
            except QuantryError as error:
                jobs.refuse(item, str(error))
            tell.end(jobs.outcome(item))
        done = jobs.result()
        jobs.write(done)
        reporting.write(out, page(done, jobs.provenance()))
    return done

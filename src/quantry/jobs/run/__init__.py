"""`quantry.run`, the main job in one call: plan, quantize, verify, serve, a first answer, and what it cost.

Everything is in one folder: plan.json, the artefact with its card and proof in a folder of its own, the log of the
engine, and run.json with the summary and with notes on what each artefact was asked for. A run that was ended goes on
where it was: an artefact that is finished for the same request is taken over, and so is a proof that was measured in
the same way. What can be refused is refused before anything is written.
"""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quantry.jobs.run.decision import decided
from quantry.jobs.run.files import alone
from quantry.jobs.run.outcome import QUESTION, Asked, DeclinedError, Run, Step
from quantry.jobs.run.steps import Doing, Showing
from quantry.types import Progress

__all__ = ["QUESTION", "Asked", "DeclinedError", "Progress", "Run", "Showing", "Step", "run"]


def run(
    model: str | Path,
    output: str | Path | None = None,
    *,
    serve: bool = True,
    tell: Callable[[Step], None] | None = None,
    confirm: Callable[[str], bool] | None = None,
    showing: Showing | None = None,
    **asked: Any,
) -> Run:
    """Plans, quantizes, verifies and serves `model`, and asks it a first question; `asked` are the fields of `Asked`.

    With `serve` the engine goes on serving: use what comes back in a `with` statement, or `stop` it. Where the gate is
    failed the next option of the plan that should lose less is tried; if none passes, nothing is served. `confirm` is
    asked with a sentence before anything is written; `tell` is given each step that is done, and `showing` gives a
    context with a progress function for a step.
    """
    job = decided(str(model), output, Asked(**asked))
    if confirm and not (job.made and job.proven) and not confirm(job.question()):
        raise DeclinedError
    with alone(job.out):
        done = Doing(job, tell, showing or (lambda _: nullcontext()))
        try:
            done.plan()
            done.make()
            while not done.passed and done.gentler():
                done.make()
            if done.passed and job.installed:
                done.serve()
                done.ask(stay=serve)
            return done.result()
        except BaseException:
            done.stop()
            raise

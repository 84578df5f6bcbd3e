"""The steps of a run in their order."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from quantry.jobs.run.plan import DeclinedError, RunOptions, plan_run
from quantry.jobs.run.result import Run, RunStep
from quantry.jobs.run.steps import RunSteps, Showing


def run(
    model: str | Path,
    output: str | Path | None = None,
    *,
    serve: bool = True,
    verify: bool = True,
    tell: Callable[[RunStep], None] | None = None,
    confirm: Callable[[str], bool] | None = None,
    showing: Showing | None = None,
    **options: Any,
) -> Run:
    """Plans, quantizes and serves `model`, asks it a first question, and proves what was lost.

    `options` are those of RunOptions. The answer comes before the proof, which takes longer; without `verify` nothing
    is proven. If the gate fails, the next candidate of the plan that should lose less is tried; if none passes, nothing
    is served. With `serve` the engine keeps running: use the result in a `with` statement, or `stop` it. `confirm` gets
    a question before anything is written, `tell` each finished step, and `showing` returns a context with a progress
    function for a step.

    Raises QuantryError if an option is wrong or nothing fits, and DeclinedError if `confirm` returns False. Example:

        with run("demo", use="chat") as done:
            print(done.answer)
    """
    plan = plan_run(str(model), output, RunOptions(**options))
    if confirm and not plan.is_verified and not confirm(plan.question()):
        raise DeclinedError
    with plan.folder.locked():
        steps = RunSteps(plan, tell, showing or (lambda *_: nullcontext()))
        try:
            steps.write_plan()
            steps.attempt(keep_serving=serve, proving=verify)
            while verify and not steps.passed and steps.fall_back():
                steps.attempt(keep_serving=serve, proving=verify)
            steps.end(keep_serving=serve)
            return steps.result()
        except BaseException:
            steps.stop()
            raise

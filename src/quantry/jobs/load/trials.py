"""Measures the settings of `quantry tune`: starts a server for each, and puts the same load on all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import OutputError, QuantryError
from quantry.jobs.load import choice
from quantry.jobs.load.bench import bench
from quantry.jobs.load.choice import DEFAULT, ArtefactProof, Recommendation, Trial
from quantry.jobs.load.guidellm_process import GuidellmProcess
from quantry.jobs.load.switches import Change, serve_words
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.serving.prepare import serve
from quantry.types import Progress

AGAIN, TOGETHER = "default again", "together"


@dataclass(frozen=True, slots=True)
class TrialRunner:
    """The server options and the load that all trials share."""

    artefact: str
    options: Mapping[str, Any]  # of the default's server
    load: Mapping[str, Any]  # arguments of bench
    logs: Path | None
    guidellm: GuidellmProcess | None = None  # None starts one for each trial

    def trial(self, name: str, changes: Sequence[Change]) -> Trial:
        """Serves with some changes and measures the load. Raises QuantryError if the server or the load fails."""
        model = next((change.model for change in changes if change.model), self.artefact)
        options = dict(self.options)
        for change in changes:
            options |= change.options
        log = self.logs / f"{name.replace(' ', '-').replace('/', '-')}.log" if self.logs else None
        with serve(model, log=log, port=0, **options) as running:
            result = bench(running.url, started=self.guidellm, **self.load)
            if running.exit_code is not None:
                raise running.death()
            facts = running.facts()
        return Trial(
            name=name, changes=tuple(changes), proof=read_proof(model), level=result.levels[0],
            findings=result.findings, kv_cache_bytes=facts.kv_cache_bytes, command=tuple(serve_words(model, options)),
        )  # fmt: skip

    def attempt(self, name: str, changes: Sequence[Change]) -> Trial:
        """Does the same, but returns an error as a trial: one setting that fails does not stop the others."""
        try:
            return self.trial(name, changes)
        except OutputError:
            raise
        except QuantryError as error:
            return Trial(name, tuple(changes), ArtefactProof(), problem=str(error))


def run_trials(
    runner: TrialRunner, changes: Sequence[Change], progress: Progress | None
) -> tuple[list[Trial], Recommendation]:
    """Measures the default, each change, the default again, and the best changes together.

    Returns both runs of the default, and the recommendation of all trials, the default among them.
    """
    done = 0

    def report(name: str) -> None:
        nonlocal done
        if progress:
            progress(done, max(len(changes) + 2, done + 1), name)
        done += 1

    report(DEFAULT)
    first = runner.trial(DEFAULT, ())
    trials = [first]
    for change in changes:
        report(change.name)
        trials.append(runner.attempt(change.name, (change,)))
    report(AGAIN)
    runs = [first, runner.trial(AGAIN, ())]
    bar = max(choice.LEAST, choice.noise(runs))
    best = choice.faster_changes(choice.judge_trials(trials, runs), bar)
    if len(best) > 1:
        report(TOGETHER)
        trials.append(runner.attempt(TOGETHER, best))
    return runs, _confirmed(runner, choice.judge_trials(trials, runs), runs, report)


def _confirmed(
    runner: TrialRunner, judged: Sequence[Trial], runs: Sequence[Trial], report: Callable[[str], None]
) -> Recommendation:
    """Measures the recommended setting again, until a second run confirms one: each run confirms or excludes one."""
    trials = list(judged)
    while True:
        recommendation = choice.choose(trials, runs)
        chosen = next((trial for trial in trials if trial.name == recommendation.chosen), None)
        if chosen is None or not chosen.changes or chosen.second is not None:
            return recommendation
        name = f"{chosen.name} again"
        report(name)
        trials[trials.index(chosen)] = choice.confirm(chosen, runner.attempt(name, chosen.changes), runs)


def read_proof(artefact: str | Path) -> ArtefactProof:
    """Reads the proof of an artefact from its quantry.json; returns an empty one if there is no such file."""
    path = Path(artefact).expanduser()
    try:
        content = read_artefact_file(path if path.is_dir() else path.parent)
    except QuantryError:
        return ArtefactProof()
    proof, recipe = content.get("proof", {}), content.get("recipe", {})
    return ArtefactProof(proof.get("verdict"), proof.get("gate"), recipe.get("kv"))

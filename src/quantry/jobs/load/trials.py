"""The settings of `quantry tune`, measured: a server for each, the same load for all."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantry.errors import OutputError, QuantryError
from quantry.jobs.load import choice
from quantry.jobs.load.bench import bench
from quantry.jobs.load.choice import DEFAULT, Choice, Proof, Trial
from quantry.jobs.load.guide import Guide
from quantry.jobs.load.switches import Change, serve_words
from quantry.serving import serve
from quantry.storage import ARTEFACT_FILE
from quantry.types import Progress

AGAIN, TOGETHER = "default again", "together"


@dataclass(frozen=True, slots=True)
class Job:
    """All that the trials share."""

    artefact: str
    options: Mapping[str, Any]  # of the default's server
    load: Mapping[str, Any]  # of bench
    logs: Path | None
    guide: Guide | None = None  # that all trials share; None starts one for each

    def trial(self, name: str, made: Sequence[Change]) -> Trial:
        """Serves with some changes, loads the server, and gives the figures; what cannot be served is an error."""
        model = next((change.model for change in made if change.model), self.artefact)
        options = dict(self.options)
        for change in made:
            options |= change.options
        log = self.logs / f"{name.replace(' ', '-').replace('/', '-')}.log" if self.logs else None
        with serve(model, log=log, port=0, **options) as running:
            found = bench(running.url, started=self.guide, **self.load)
            if running.exit_code is not None:
                raise running.death()
            told = running.facts()
        return Trial(
            name=name, changes=tuple(made), proof=proof(model), level=found.levels[0], findings=found.findings,
            kv_cache_bytes=told.kv_cache_bytes, command=tuple(serve_words(model, options)),
        )  # fmt: skip

    def tried(self, name: str, made: Sequence[Change]) -> Trial:
        """The same, with an error as a row of its own: one setting that fails leaves the others."""
        try:
            return self.trial(name, made)
        except OutputError:
            raise
        except QuantryError as error:
            return Trial(name, tuple(made), Proof(), problem=str(error))


def measured(job: Job, asked: Sequence[Change], progress: Progress | None) -> tuple[list[Trial], Choice]:
    """Both runs of the default, and what is chosen of all trials, the default among them."""
    done = 0

    def say(name: str) -> None:
        nonlocal done
        if progress:
            progress(done, max(len(asked) + 2, done + 1), name)
        done += 1

    say(DEFAULT)
    first = job.trial(DEFAULT, ())
    trials = [first]
    for change in asked:
        say(change.name)
        trials.append(job.tried(change.name, (change,)))
    say(AGAIN)
    runs = [first, job.trial(AGAIN, ())]
    bar = max(choice.LEAST, choice.noise(runs))
    best = choice.winners(choice.judged(trials, runs), bar)
    if len(best) > 1:
        say(TOGETHER)
        trials.append(job.tried(TOGETHER, best))
    return runs, _settled(job, choice.judged(trials, runs), runs, say)


def _settled(job: Job, trials: Sequence[Trial], runs: Sequence[Trial], say: Callable[[str], None]) -> Choice:
    """What is chosen once a second run bears it out; each round one trial is borne out or objected to."""
    while True:
        found = choice.choose(trials, runs)
        chosen = next((trial for trial in trials if trial.name == found.chosen), None)
        if chosen is None or not chosen.changes or chosen.second is not None:
            return found
        name = f"{chosen.name} again"
        say(name)
        second = choice.confirmed(chosen, job.tried(name, chosen.changes), runs)
        trials = [second if trial is chosen else trial for trial in trials]


def proof(artefact: str | Path) -> Proof:
    """What quantry.json beside an artefact says of its quality; nothing where there is none."""
    path = Path(artefact).expanduser()
    note = (path if path.is_dir() else path.parent) / ARTEFACT_FILE
    try:
        told = json.loads(note.read_text(encoding="utf-8"))
        verdict, recipe = told.get("proof") or {}, told.get("recipe") or {}
        return Proof(verdict.get("verdict"), verdict.get("gate"), recipe.get("kv"))
    except (OSError, ValueError, AttributeError):
        return Proof()

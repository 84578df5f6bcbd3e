"""`quantry tune`: which switches of an engine make this load faster, measured one at a time and then together.

Every setting is a server of its own (`quantry.serving.serve`) under the same load (`jobs.load.bench`, with the same
prompts), so that no cache knows them. The default is measured first and last: how far its two runs are apart is what a
gain has to exceed. What is tried is in switches.py, measured in trials.py, chosen in choice.py.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.errors import OutputError, QuantryError, UnknownNameError
from quantry.jobs.load import choice, guide, prompts
from quantry.jobs.load.bench import LIMITS, Lengths
from quantry.jobs.load.choice import Proof, Trial
from quantry.jobs.load.switches import GUESSING, SLOTS, changes
from quantry.jobs.load.trials import Job, measured, proof
from quantry.models.writer import write_atomically
from quantry.registry import suggest
from quantry.serving import Options, Prepared, prepare
from quantry.types import Progress

CONCURRENCY = 4
EACH = 8  # requests of every stream, where nothing is said
NOTE = "tune.json"
OWN = ("port", "host", "api_key")  # of Options: tune's servers are for itself


@dataclass(frozen=True, slots=True)
class Tuned:
    """What `quantry tune` found. Field names are the JSON names."""

    artefact: str
    engine: str
    version: str
    context: int | None
    date: str
    load: Mapping[str, Any]
    slo: Mapping[str, float]
    proof: Proof
    noise: float  # how far two runs of the default were apart
    trials: tuple[Trial, ...]  # the default first
    again: Trial  # the default once more, at the end
    chosen: str | None  # the name of a trial; None where none keeps the limits
    why: str
    command: tuple[str, ...]  # to serve with
    notes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    @property
    def recommended(self) -> Trial | None:
        return next((trial for trial in self.trials if trial.name == self.chosen), None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "path": str(self.path) if self.path else None}


def tune(
    artefact: str | Path,
    *,
    prompt_tokens: int | str | Lengths = 256,
    answer_tokens: int | str | Lengths = 128,
    concurrency: int = CONCURRENCY,
    requests: int | None = None,
    shared_prefix: int = 0,
    dataset: str | Path | None = None,
    tokenizer: str | Path | None = None,
    chat: bool = False,
    slo: Mapping[str, float] | None = None,
    switches: Sequence[str] | None = None,
    draft: str | Path | None = None,
    others: Sequence[str | Path] = (),
    output: Path | None = None,
    guidellm_python: Path | None = None,
    progress: Progress | None = None,
    **serving: Any,
) -> Tuned:
    """Measures the switches that matter on this engine and load, and recommends the fastest that keeps the limits.

    `switches` are names of switches.NAMES, with values where only some are to be tried (`parallel=8`); None tries all
    that the engine has and the load can show. `others` are artefacts of the same model that may take the place of this
    one. `serving` are fields of `serving.Options` for all servers. tune.json and the engines' logs go into `output`.
    """
    serving = {name: value for name, value in serving.items() if value is not None}
    _check(concurrency, requests, slo or {}, serving, output)
    python = guide.find_python(guidellm_python)
    prepared = prepare(artefact, Options(**serving, port=0))
    engine, context = prepared.serving.engine, prepared.serving.context
    lengths = Lengths.of(prompt_tokens, "--prompt-tokens"), Lengths.of(answer_tokens, "--answer-tokens")
    asked = changes(
        switches,
        engine,
        concurrency=concurrency,
        parallel=serving.get("parallel"),
        shared=bool(shared_prefix or dataset),
        draft=draft,
        others=others,
    )
    if dataset is None:
        _check_room(*lengths, shared_prefix, prepared, concurrency)
    load = {
        "prompt_tokens": lengths[0], "answer_tokens": lengths[1], "concurrency": (concurrency,),
        "requests": requests or EACH * concurrency, "shared_prefix": shared_prefix, "dataset": dataset,
        "tokenizer": tokenizer, "chat": chat, "slo": dict(slo or {}),
    }  # fmt: skip
    logs = _folder(output)
    with guide.started(Path(python), offline=_is_here(dataset) and _is_here(tokenizer)) as guidellm:
        job = Job(str(artefact), {**serving, "context": context}, load, logs, guidellm)
        runs, found = measured(job, asked, progress)
    result = _tuned(job, prepared, runs, found, _about_prompts(dataset, shared_prefix, lengths[0], runs[0]))
    return _written(result, output) if output else result


# ---- what was asked ----


def _check(
    concurrency: int, requests: int | None, slo: Mapping[str, float], serving: Mapping[str, Any], output: Path | None
) -> None:
    for name, value in (("concurrency", concurrency), ("requests", requests)):
        if value is not None and value < 1:
            raise QuantryError(f"{name} is {value}", fix="give a number above 0")
    for name in slo:
        if name not in LIMITS:
            raise UnknownNameError(f"unknown limit {name!r}", fix=suggest(name, LIMITS))
    if taken := [name for name in OWN if name in serving]:
        raise QuantryError(f"tune starts servers for itself, and {taken[0]} is asked for", fix=f"leave {taken[0]} out")
    if output is not None and output.exists() and not output.is_dir():
        raise OutputError(f"{output} is a file", fix="give a folder")


def _is_here(named: str | Path | None) -> bool:
    """Whether nothing needs to be downloaded for it."""
    return named is None or Path(named).expanduser().exists()


def _check_room(prompt: Lengths, answer: Lengths, shared_prefix: int, prepared: Prepared, concurrency: int) -> None:
    """Requests that no server could answer; slots that are not asked for share one context (llama.cpp)."""
    served = prepared.serving
    needed = shared_prefix + (prompt.max or prompt.mean) + (answer.max or answer.mean)
    if served.context is None:
        return
    if needed > served.context:
        raise QuantryError(
            f"prompt and answer have {needed} tokens, and a sequence may have {served.context}",
            fix="ask for a larger --context, or measure shorter ones",
        )
    together = min(concurrency, SLOTS.get(served.engine, 0)) if served.concurrency is None else 0
    if together * needed > served.context:
        raise QuantryError(
            f"{together} sequences of {needed} tokens share a context of {served.context}",
            fix=f"give each its own with --parallel {concurrency}, or a larger --context",
        )


# ---- what was found ----


def _about_prompts(dataset: str | Path | None, shared_prefix: int, prompt: Lengths, usual: Trial) -> list[str]:
    """What the prompts do to the prefix cache."""
    hits = usual.engine("prefix_hit_rate")
    if dataset is None:
        words = prompts.unused(shared_prefix, prompt.mean, hits)
    else:
        file = Path(dataset)
        texts = prompts.read(file) if file.is_file() else None
        words = prompts.advice(prompts.shared(texts) if texts else None, hits)
    return [words] if words else []


def _tuned(job: Job, prepared: Prepared, runs: Sequence[Trial], found: choice.Choice, about: Sequence[str]) -> Tuned:
    chosen = next((trial for trial in found.trials if trial.name == found.chosen), None)
    guessed = any(change.switch in GUESSING for trial in found.trials for change in trial.changes)
    made_up = ["the prompts are made up: acceptance on yours may differ, --dataset measures it"]
    ours = proof(job.artefact)
    quality = [] if ours.passed else [f"{Path(job.artefact).name} {choice.verdict(ours)}"]
    return Tuned(
        artefact=job.artefact,
        engine=prepared.serving.engine,
        version=prepared.serving.version,
        context=prepared.serving.context,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load={
            name: str(value) if isinstance(value, Lengths | Path) else value
            for name, value in job.load.items()
            if name != "slo"
        },
        slo=job.load["slo"],
        proof=ours,
        noise=choice.noise(runs),
        trials=found.trials,
        again=runs[1],
        chosen=found.chosen,
        why=found.why,
        command=chosen.command if chosen else (),
        notes=(*about, *found.notes, *(made_up if guessed and job.load["dataset"] is None else ()), *quality),
        versions={"quantry": __version__},
    )


# ---- writing ----


def _folder(output: Path | None) -> Path | None:
    """Where logs go; made before minutes are spent."""
    if output is None:
        return None
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}", fix="give another folder with -o") from error
    return output


def _written(found: Tuned, output: Path) -> Tuned:
    whole = replace(found, path=output)
    try:
        write_atomically(output / NOTE, (json.dumps(whole.to_dict(), indent=2) + "\n").encode())
    except OSError as error:
        raise OutputError(f"cannot write to {output}: {error.strerror}", fix="give another folder with -o") from error
    return whole

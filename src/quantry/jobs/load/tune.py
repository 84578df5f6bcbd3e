"""`quantry tune`: finds the switches of an engine that make a load faster, one at a time and then together.

Every setting gets a new server (`quantry.serving.serve`) and the same load (`jobs.load.bench`, with the same prompts),
so no cache has seen the prompts. The default is measured first and last: a gain has to exceed the difference of its two
runs. switches.py lists what is tried, trials.py measures it, choice.py recommends.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import Options
from quantry.errors import QuantryError
from quantry.jobs.load import choice, guidellm_process, prompts
from quantry.jobs.load.bench import check_output
from quantry.jobs.load.choice import ArtefactProof, Recommendation, Trial
from quantry.jobs.load.scenario import Lengths, new_seed
from quantry.jobs.load.server_facts import this_machine
from quantry.jobs.load.slo import check_limits
from quantry.jobs.load.switches import SPECULATION, Switches
from quantry.jobs.load.trials import TrialRunner, read_proof, run_trials
from quantry.jobs.output_folder import write_json, writing
from quantry.serving.prepare import ServerPlan, prepare
from quantry.storage import write_atomically
from quantry.types import Progress

CONCURRENCY = 4
EACH = 8  # requests per stream, by default
NOTE, PAGE = "tune.json", "tune.html"
OWN = ("port", "host", "api_key")  # of Options: tune sets them itself


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of `quantry tune`. Field names are the JSON names."""

    artefact: str
    engine: str
    version: str
    context: int | None
    date: str
    load: Mapping[str, Any]
    slo: Mapping[str, float]
    proof: ArtefactProof
    noise: float  # relative difference between the two runs of the default
    trials: tuple[Trial, ...]  # the default first
    again: Trial  # the second run of the default, at the end
    chosen: str | None  # the name of a trial; None if none keeps the limits
    why: str
    command: tuple[str, ...]  # to serve with
    notes: tuple[str, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""  # the machine that it was measured on
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

    `switches` are names of switches.NAMES, with a value to try only that (`parallel=8`); None tries all that the engine
    has and the load can show. `others` are artefacts of the same model to try instead of this one. `serving` are fields
    of `serving.Options` for all servers. tune.json, tune.html and the engines' logs go into the folder `output`.

    Raises QuantryError if an option is wrong, guidellm is missing, or the default cannot be served.
    """
    options = {name: value for name, value in serving.items() if value is not None}
    _check_numbers(concurrency=concurrency, requests=requests, shared_prefix=shared_prefix)
    _check(slo or {}, options, output)
    python = guidellm_process.find_python(guidellm_python)
    prepared = prepare(artefact, Options(**options, port=0))
    lengths = Lengths.of(prompt_tokens, "--prompt-tokens"), Lengths.of(answer_tokens, "--answer-tokens")
    parallel, shares_prefix = options.get("parallel"), bool(shared_prefix or dataset)
    tried = Switches(prepared.serving.engine, concurrency, shares_prefix, parallel, draft).changes(switches, others)
    if dataset is None:
        _check_context(*lengths, shared_prefix, prepared, concurrency)
    load = {
        "prompt_tokens": lengths[0], "answer_tokens": lengths[1], "concurrency": (concurrency,),
        "requests": requests or EACH * concurrency, "shared_prefix": shared_prefix, "dataset": dataset,
        "tokenizer": tokenizer, "chat": chat, "slo": dict(slo or {}), "seed": new_seed(),
    }  # fmt: skip
    if output:
        with writing(output):  # before minutes are spent
            output.mkdir(parents=True, exist_ok=True)
    with guidellm_process.started(Path(python), offline=_is_local(dataset) and _is_local(tokenizer)) as guidellm:
        runner = TrialRunner(str(artefact), {**options, "context": prepared.serving.context}, load, output, guidellm)
        runs, recommendation = run_trials(runner, tried, progress)
    result = _tuned(runner, prepared, runs, recommendation)
    return _written(result, output) if output else result


def _check_numbers(**numbers: int | None) -> None:
    for name, value in numbers.items():
        least = 0 if name == "shared_prefix" else 1
        if value is not None and value < least:
            raise QuantryError(f"--{name.replace('_', '-')} is {value}", fix=f"give {least} or more")


def _check(slo: Mapping[str, float], options: Mapping[str, Any], output: Path | None) -> None:
    check_limits(slo)
    if excluded := [name for name in OWN if name in options]:
        raise QuantryError(f"tune chooses {excluded[0]} for its servers", fix=f"leave {excluded[0]} out")
    check_output(output)


def _is_local(name: str | Path | None) -> bool:
    return name is None or Path(name).expanduser().exists()


def _check_context(
    prompt: Lengths, answer: Lengths, shared_prefix: int, prepared: ServerPlan, concurrency: int
) -> None:
    """Raises QuantryError if a request does not fit the context; llama.cpp's default slots share one context."""
    served = prepared.serving
    needed = shared_prefix + (prompt.max or prompt.mean) + (answer.max or answer.mean)
    if served.context is None:
        return
    if needed > served.context:
        raise QuantryError(
            f"prompt and answer have {needed} tokens, and a sequence may have {served.context}",
            fix="ask for a larger --context, or measure shorter ones",
        )
    together = min(concurrency, engine_facts(served.engine).server.slots or 0) if served.parallel is None else 0
    if together * needed > served.context:
        raise QuantryError(
            f"{together} sequences of {needed} tokens share a context of {served.context}",
            fix=f"give each its own with --parallel {concurrency}, or a larger --context",
        )


def _prompt_notes(load: Mapping[str, Any], default: Trial) -> list[str]:
    hit_rate = default.engine("prefix_hit_rate")
    if load["dataset"] is None:
        advice = prompts.unused(load["shared_prefix"], load["prompt_tokens"].mean, hit_rate)
    else:
        file = Path(load["dataset"])
        texts = prompts.read(file) if file.is_file() else None
        advice = prompts.advice(prompts.shared(texts) if texts else None, hit_rate)
    return [advice] if advice else []


def _notes(runner: TrialRunner, proof: ArtefactProof, recommendation: Recommendation, default: Trial) -> list[str]:
    speculated = any(change.switch in SPECULATION for trial in recommendation.trials for change in trial.changes)
    notes = [*_prompt_notes(runner.load, default), *recommendation.notes]
    if speculated and runner.load["dataset"] is None:
        notes.append("the prompts are made up: acceptance on yours may differ, --dataset measures it")
    if not proof.passed:
        notes.append(f"{Path(runner.artefact).name} {choice.verdict(proof)}")
    return notes


def _tuned(runner: TrialRunner, prepared: ServerPlan, runs: Sequence[Trial], recommendation: Recommendation) -> Tuned:
    chosen = next((trial for trial in recommendation.trials if trial.name == recommendation.chosen), None)
    proof = read_proof(runner.artefact)
    return Tuned(
        artefact=runner.artefact,
        engine=prepared.serving.engine,
        version=prepared.serving.version,
        context=prepared.serving.context,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load={
            name: str(value) if isinstance(value, Lengths | Path) else value
            for name, value in runner.load.items()
            if name != "slo"
        },
        slo=runner.load["slo"],
        proof=proof,
        noise=choice.noise(runs),
        trials=recommendation.trials,
        again=runs[1],
        chosen=recommendation.chosen,
        why=recommendation.why,
        command=chosen.command if chosen else (),
        notes=tuple(_notes(runner, proof, recommendation, runs[0])),
        versions={"quantry": __version__},
        hardware=this_machine(),
    )


def _written(result: Tuned, output: Path) -> Tuned:
    from quantry.jobs.load.tune_page import tune_page  # matplotlib

    whole = replace(result, path=output)
    with writing(output):
        write_json(output / NOTE, whole.to_dict())
        write_atomically(output / PAGE, tune_page(whole).encode())
    return whole

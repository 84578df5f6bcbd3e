"""`quantry.verify`: measures what an artefact lost, and records the verdict."""

from dataclasses import replace
from pathlib import Path

from quantry.engines.contract.catalogue import scoring_name
from quantry.errors import OutputError, QuantryError
from quantry.jobs import verdict, verify_cache
from quantry.models.reader import local_folder
from quantry.proof.gate import own_limits
from quantry.proof.prove import VerifyOptions, prove
from quantry.proof.tasks.judge import JudgeEndpoint
from quantry.proof.text import Texts, check_time
from quantry.quantizing.origin import origin_of
from quantry.report.stages import named, stages
from quantry.types import Progress, Proof

PASSES = 4  # of the proof over its tokens, about: the reference, its arithmetic, the artefact decoded and served


def verify(
    artefact: str | Path,
    *,
    reference: str | Path | None = None,
    text: Texts = None,
    prompts: str | Path | None = None,
    tasks: str | None = None,
    limit: int | None = None,
    judge: str | None = None,
    judge_model: str | None = None,
    judge_key: str = "OPENAI_API_KEY",
    engine: str | None = None,
    engine_python: str | Path | None = None,
    gate: str = "general",
    max_kl: float | None = None,
    min_top1: float | None = None,
    max_perplexity_ratio: float | None = None,
    windows: int = 16,
    length: int = 512,
    proof_time: float | None = None,
    kv: str | None = None,
    context: int | None = None,
    max_tokens: int = 64,
    device: str = "cpu",
    output: str | Path | None = None,
    record: bool = True,
    report: bool = False,
    progress: Progress | None = None,
) -> Proof:
    """Measures what `artefact` lost compared with `reference`, and records the verdict in its card and quantry.json.

    Without a `reference` it is the 16-bit model that the artefact's quantry.json names. `text` (None: a text of the
    package) is cut into `windows` of `length` tokens; 0 are all there are. Several texts (a list, or with commas
    between) give as many windows each, and `domains` has the figures of each. With a `proof_time` in seconds, fewer are
    measured where they do not fit into it, or where 8 or more leave no doubt about the verdict. `prompts` is a file of
    JSON lines, `tasks` names tasks of lm-evaluation-harness with commas between, the first `limit` questions of each;
    `judge` is the address of a third model. `max_kl`, `min_top1` and `max_perplexity_ratio` replace the limits of the
    `gate`. `engine` measures the artefact as served: GGUF files always in llama.cpp.

    `kv` names types of KV cache, with commas between: `kv_cache` of the proof then has what each loses in the engine
    compared with its 16-bit cache, by position in windows of `context` tokens (None: 8192, or the model's context), and
    how many tokens fit this machine. The verdict does not depend on it.

    The verdict goes into a folder `output`, with a `report` if that is asked for. Without one, that on an artefact in
    the hub's cache goes into Quantry's own cache, and that on another tool's is not recorded. `recorded` of the proof
    is the folder; it is None, and the last note says why, if the verdict could not be written.

    Raises QuantryError if an option is wrong, the artefact is unfinished or the engine fails. Example:

        verify("demo-w4a16").passed
    """
    options = VerifyOptions(
        text, _path(prompts), tasks, limit, _judge(judge, judge_model, judge_key), scoring_name(engine),
        _path(engine_python), gate, windows, length, max_tokens, device,
        own_limits(max_kl=max_kl, min_top1=min_top1, max_perplexity_ratio=max_perplexity_ratio), check_time(proof_time),
    )  # fmt: skip
    if limit is not None and limit < 1:
        raise QuantryError(f"--limit is {limit}", fix="give 1 or more, or leave it out for all")
    folder = _path(output)
    if folder is not None and not record:
        raise QuantryError("--no-record leaves nothing to write with -o", fix="leave one of them out")
    if folder is not None:
        verdict.check_output(folder, Path(artefact).expanduser())
    proof = _measured(str(artefact), str(reference or origin_of(artefact)), options, kv, context, progress)
    return _recorded(artefact, proof, folder, report=report) if record else proof


def _measured(
    artefact: str,
    reference: str,
    options: VerifyOptions,
    kv: str | None,
    context: int | None,
    progress: Progress | None,
) -> Proof:
    """Returns the proof, with what caches lose if that is asked for."""
    job = verify_cache.prepare(artefact, reference, options, kv, context)
    if job is None:
        return prove(artefact, reference, options, progress)
    tokens = sum(len(window.tokens) for window in job.windows) * (1 + len(job.choice.caches))
    shown = stages(progress, {"proof": PASSES * options.windows * options.length or tokens, "caches": tokens})
    proof = prove(artefact, reference, options, shown["proof"])
    return replace(proof, kv_cache=verify_cache.measure(job, named(shown["caches"], job.words)))


def recorded(proof: Proof) -> Proof:
    """Returns a proof. Raises OutputError if it could not be recorded."""
    if proof.recorded is None:
        raise OutputError(proof.notes[-1], fix="make the folder writable and run the same command again")
    return proof


def _recorded(artefact: str | Path, proof: Proof, output: Path | None, *, report: bool) -> Proof:
    path = local_folder(artefact)
    place = verdict.place_of(path, output)
    try:
        if place is None:
            raise OutputError("another tool made the artefact", fix="give -o DIR to keep it")
        verdict.record(path, place, proof, report=report)
    except QuantryError as error:  # also of a damaged file that the report needs: figures cost time
        return replace(proof, notes=(*proof.notes, f"the verdict is not recorded: {error}"))
    return replace(proof, recorded=str(place))


def _judge(url: str | None, model: str | None, key: str) -> JudgeEndpoint | None:
    if url is None:
        return None
    if not model:
        raise QuantryError("a judge needs the name of its model", fix="give --judge-model")
    return JudgeEndpoint(url, model, key)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value).expanduser()

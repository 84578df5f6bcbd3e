"""`quantry verify`: measures what a quantized model lost, and judges it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.cli import _flags as flags
from quantry.cli._domains import domain_table
from quantry.cli._first import (
    check_at_least,
    check_cache,
    check_gate,
    check_given,
    check_origin,
    check_present,
    check_scoring_engine,
    check_texts,
    check_windows,
)
from quantry.cli._next import tell_next
from quantry.cli._output import check_files, print_result, progress_bar, table, write_file
from quantry.report.caches import cache_sentence, room_sentence
from quantry.report.ci import answered, differing
from quantry.report.sizes import counted, percent, position_range

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from quantry.types import Proof

GROUP = "prove"
EXAMPLES = (
    "quantry verify out",
    "quantry verify out --reference owner/name --gate accuracy-critical --engine vllm",
    "quantry verify out --text chats.jsonl,code.txt",
    "quantry verify out --max-kl 0.05 --min-top1 0.9 --junit verify.xml",
    "quantry verify out --kv q8_0,q4_0 --context 8k",
)
Quantized = Annotated[str, typer.Argument(help="A quantized folder or .gguf file.")]
Reference = Annotated[
    str | None,
    typer.Option(help="The 16-bit model: a folder, a hub id (owner/name) or demo; else the one it was made from."),
]
Prompts = Annotated[Path | None, typer.Option(help="JSONL of your own prompts, with answers if there are any.")]
Tasks = Annotated[
    str | None, typer.Option(help="Tasks of lm-evaluation-harness: names or YAML files, with commas between.")
]
Limit = Annotated[int | None, typer.Option(help="Items of each task, 1 or more; all if left out.")]
Judge = Annotated[
    str | None, typer.Option(help="An OpenAI endpoint (http://host/v1) that compares answers to the prompts.")
]
JudgeModel = Annotated[str | None, typer.Option(help="The model to ask there.")]
JudgeKey = Annotated[str, typer.Option(help="The environment variable that holds the endpoint's key.")]
Engine = Annotated[str | None, typer.Option(help="Measure as served too: {verifying}; GGUF always is, in llama.cpp.")]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", help="A folder for the verdict; else an artefact of Quantry gets it itself."),
]
Record = Annotated[bool, typer.Option("--record/--no-record", help="Write the verdict, or only print it.")]
MaxKl = Annotated[float | None, typer.Option(help="Your own limit of the mean KL, 0 or more, such as 0.05.")]
MinTop1 = Annotated[float | None, typer.Option(help="Your own limit of the same first tokens, 0 to 1, such as 0.95.")]
MaxPerplexityRatio = Annotated[
    float | None, typer.Option(help="Your own limit of the perplexity against the 16-bit model's, 0 or more: 1.05.")
]
Junit = Annotated[Path | None, typer.Option(help="Write the findings as JUnit XML, for CI.")]
Markdown = Annotated[Path | None, typer.Option(help="Write the verdict as Markdown, for a job's summary.")]
ProofTime = Annotated[
    float | None,
    typer.Option(help="Measure as many of the windows as fit into it, above 0: 90s or 3m; else all.", **flags.TIME),
]
Kv = Annotated[
    str | None,
    typer.Option(help="What these types of KV cache lose as served, by position: q8_0,q4_0, or fp8 in vLLM."),
]
CacheContext = Annotated[
    int | None,
    typer.Option(help="Tokens of a window for --kv, 2 or more: 8k; else 8k or the model's context.", **flags.TOKENS),
]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer to a prompt, 1 or more.")]


def command(
    artefact: Quantized,
    reference: Reference = None,
    text: flags.Texts = None,
    prompts: Prompts = None,
    tasks: Tasks = None,
    limit: Limit = None,
    judge: Judge = None,
    judge_model: JudgeModel = None,
    judge_key: JudgeKey = "OPENAI_API_KEY",
    engine: Engine = None,
    engine_python: flags.EnginePython = None,
    gate: flags.Gate = "general",
    max_kl: MaxKl = None,
    min_top1: MinTop1 = None,
    max_perplexity_ratio: MaxPerplexityRatio = None,
    windows: flags.Windows = 16,
    length: flags.WindowLength = 512,
    proof_time: ProofTime = None,
    kv: Kv = None,
    context: CacheContext = None,
    max_tokens: MaxTokens = 64,
    device: flags.Device = "cpu",
    output: Output = None,
    record: Record = True,
    report: flags.Report = True,
    junit: Junit = None,
    markdown: Markdown = None,
    json: flags.Json = False,
) -> None:
    """Measure what was lost, on the written bytes and in the engine; exit code 1 if the gate fails."""
    check_gate(gate)
    check_scoring_engine(engine)
    check_windows(windows, length=length)
    check_at_least(1, limit=limit, max_tokens=max_tokens)
    check_texts(text)
    check_given(prompts)
    check_present(artefact, reference)
    check_origin(artefact, reference, "with --reference")
    check_cache(artefact, engine, kv, context)
    check_files(file for file in (junit, markdown) if file)
    from quantry.jobs.verdict import obstacle
    from quantry.jobs.verify import verify
    from quantry.report import ci

    written = {file: make for file, make in ((junit, ci.junit), (markdown, ci.markdown)) if file}
    if record and Path(artefact).expanduser().exists() and (why := obstacle(Path(artefact).expanduser(), output)):
        typer.echo(f"warning: the verdict will not be recorded: {why}", err=True)
    with progress_bar(quiet=json) as progress:
        proof = verify(
            artefact, reference=reference, text=text, prompts=prompts, tasks=tasks, limit=limit, judge=judge,
            judge_model=judge_model, judge_key=judge_key, engine=engine, engine_python=engine_python, gate=gate,
            max_kl=max_kl, min_top1=min_top1, max_perplexity_ratio=max_perplexity_ratio,
            windows=windows, length=length, proof_time=proof_time, kv=kv, context=context, max_tokens=max_tokens,
            device=device, output=output, record=record, report=report, progress=progress,
        )  # fmt: skip
    print_result(proof, picture, json)
    for file, make in written.items():
        write_file(file, make(proof))
    if record and proof.recorded is None:
        typer.echo(f"warning: {proof.notes[-1]}", err=True)
    if proof.recorded and not json:
        _tell_files(Path(proof.recorded))
    if not proof.passed:
        raise typer.Exit(1)
    if not json:
        tell_next(artefact)
    if output and proof.recorded is None:
        raise typer.Exit(2)


def _tell_files(folder: Path) -> None:
    """Says where the verdict is, if not in the artefact's own card, and the report."""
    from quantry.jobs.artefact_report import PAGE
    from quantry.jobs.verdict import BESIDE

    for name, file in (("verdict", folder / BESIDE), ("report", folder / PAGE)):
        if file.is_file():
            typer.echo(f"{name}: {file}")


def picture(proof: "Proof") -> list["RenderableType"]:
    """Draws a proof: figures, failed checks, verdict."""
    from rich.text import Text

    right = ["decoded", "95 % interval", *([f"in {proof.served['engine']}"] if proof.served else [])]
    figures = table(("", *right), right, drop=("95 % interval",))
    for name, words in ROWS.items():
        figures.add_row(words, *_cells(proof, name))
    measured = (
        f"{proof.text['name']}: {counted(proof.text['windows'], 'window')} of {proof.text['length']} tokens; "
        f"perplexity {proof.reference_perplexity:.3f} in 16 bit; noise floor of KL {proof.noise_floor:.2g}"
    )
    passed = sum(finding["ok"] for finding in proof.findings)
    end = ("PASS", "bold green") if proof.passed else ("FAIL", "bold red")
    return [
        Text(f"{proof.artefact} against {proof.reference}", "bold"),
        Text(measured, "dim"),
        figures,
        *domain_table(proof),
        *_answers(proof),
        *_caches(proof.kv_cache or {}),
        "",
        *(_failed(finding) for finding in proof.findings if not finding["ok"]),
        *(Text(note, "dim") for note in proof.notes),
        Text.assemble(end, f": gate {proof.gate}, {passed} of {len(proof.findings)} checks passed"),
    ]


ROWS = {
    "kl": "mean KL",
    "kl_median": "median KL",
    "kl_p99": "99th percentile",
    "top1": "same first token",
    "perplexity": "perplexity",
}


def _cells(proof: "Proof", name: str) -> list[str]:
    low, high = proof.intervals[name]
    cells = [_number(name, getattr(proof, name)), f"{_number(name, low)} to {_number(name, high)}"]
    return [*cells, _number(name, proof.served[name])] if proof.served else cells


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "top1" else f"{value:.3f}" if name == "perplexity" else f"{value:.4f}"


def _answers(proof: "Proof") -> list[str]:
    lines = []
    if proof.prompts:
        lines.append(f" {answered(proof.prompts)}")
        lines += [f"   {line}" for line in differing(proof.prompts)]
        lines += [f" {warning}" for warning in proof.prompts["warnings"]]
        if proof.prompts["correct"]:
            right = proof.prompts["correct"]
            ours, theirs = percent(right["quantized"]), percent(right["base"])
            lines.append(f" right answers: {ours}, {theirs} in 16 bit (p = {right['p']:.2g})")
        if proof.prompts.get("judge"):
            judge = proof.prompts["judge"]
            lines.append(
                f" {judge['model']} prefers it {judge['wins']} times, the 16-bit model {judge['losses']} times"
            )
    for task, metrics in (proof.tasks or {}).items():
        for metric, row in metrics.items():
            chance = f" (p = {row['paired']['p']:.2g})" if row["paired"] else ""
            lines.append(f" {task} {metric}: {row['quantized']:.4f}, {row['base']:.4f} in 16 bit{chance}")
    return lines


def _caches(found: "Mapping[str, Any]") -> list["RenderableType"]:
    """Draws what each type of KV cache loses in each bin of positions, and how much of it fits."""
    if not found:
        return []
    from rich.text import Text

    heads = [position_range(part) for part in next(iter(found["caches"].values()))["bins"]]
    right = ["mean KL", "95 % interval", *heads, "same first token", "perplexity"]
    lines = table(("KV cache", *right), right, drop=("95 % interval", "perplexity", "same first token", *heads[1:-1]))
    for name, row in found["caches"].items():
        binned = [f"{part['kl']:.4f}" for part in row["bins"]]
        low, high = row["intervals"]["kl"]
        figures = (f"{row['kl']:.4f}", f"{low:.4f} to {high:.4f}", *binned)
        lines.add_row(name, *figures, f"{row['top1']:.1%}", f"{row['perplexity']:.3f}")
    lines.add_row(found["base"], *[""] * (len(heads) + 3), f"{found['perplexity']:.3f}")
    rooms = _rooms(found.get("room") or {}, found["text"]["length"])
    return ["", Text(cache_sentence(found), "dim"), lines, *rooms]


def _rooms(room: "Mapping[str, Any]", context: int) -> list["RenderableType"]:
    if not room:
        return []
    from rich.text import Text

    right = ("bytes a token", "tokens that fit", f"sequences of {context:,}")
    lines = table(("KV cache", *right), right)
    for name, row in room["caches"].items():
        lines.add_row(name, f"{row['bytes_per_token']:,}", f"{row['tokens']:,}", f"{row['sequences']:,}")
    return [Text(f"capacity {room_sentence(room)}", "dim"), lines]


def _failed(finding: "Mapping[str, Any]") -> "RenderableType":
    from rich.text import Text

    mark, style = ("!", "yellow") if finding["warning"] else ("✗", "red")
    return Text.assemble((f"{mark} {finding['name']}: ", style), f"{finding['words']}; {finding['fix']}")

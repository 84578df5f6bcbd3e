"""`quantry verify`: what a quantized model lost, measured, and whether that is acceptable."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantry.storage import ARTEFACT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from quantry.types import Proof


def command(
    artefact: Annotated[str, typer.Argument(help="A quantized folder or .gguf file.")],
    reference: Annotated[str, typer.Option(help="The 16-bit model: a folder, a hub id (owner/name) or demo.")],
    text: Annotated[Path | None, typer.Option(help="A text file to measure on; else the stories of the demo.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL of your own prompts, with answers if there are any.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Tasks of lm-evaluation-harness: names or YAML files, with commas between.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Items of each task; all without it.")] = None,
    judge: Annotated[
        str | None, typer.Option(help="An OpenAI endpoint (http://host/v1) that compares answers to the prompts.")
    ] = None,
    judge_model: Annotated[str | None, typer.Option(help="The model to ask there.")] = None,
    judge_key: Annotated[
        str, typer.Option(help="The environment variable that holds the endpoint's key.")
    ] = "OPENAI_API_KEY",
    engine: Annotated[
        str | None, typer.Option(help="Measure as served too: llama.cpp (default for GGUF), vllm or transformers.")
    ] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="The python of the environment that the engine is installed in.")
    ] = None,
    gate: Annotated[str, typer.Option(help="What the model is for: general, accuracy-critical or draft.")] = "general",
    windows: Annotated[int, typer.Option(help="Pieces of the text to measure on; 0 for all.")] = 16,
    length: Annotated[int, typer.Option(help="Tokens of a piece.")] = 512,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer to a prompt.")] = 64,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html and report.png beside the model.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Measure what was lost, on the written bytes and in the engine; exit code 1 if the gate is failed."""
    from quantry.cli._job import steps, write_report
    from quantry.proof.verify import verify

    with steps(quiet=json) as progress:
        proof = verify(
            artefact,
            reference=reference,
            text=text,
            prompts=prompts,
            tasks=tasks,
            limit=limit,
            judge=judge,
            judge_model=judge_model,
            judge_key=judge_key,
            engine=engine,
            engine_python=engine_python,
            gate=gate,
            windows=windows,
            length=length,
            max_tokens=max_tokens,
            device=device,
            progress=progress,
        )
    folder = Path(artefact).expanduser()
    folder = folder if folder.is_dir() else folder.parent
    page = write_report(folder) if report and (folder / ARTEFACT_FILE).is_file() else None
    if json:
        from json import dumps

        typer.echo(dumps(proof.to_dict(), indent=2))
    else:
        from rich.console import Console

        console = Console(highlight=False)
        for item in picture(proof):
            console.print(item)
        if page:
            console.print(f"report: {page}", soft_wrap=True)
    if not proof.passed:
        raise typer.Exit(1)


def picture(proof: "Proof") -> list["RenderableType"]:
    """The proof as a person would rather see it: figures, what is wrong, verdict."""
    from rich.table import Table
    from rich.text import Text

    figures = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in _columns(proof):
        figures.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, words in ROWS.items():
        figures.add_row(words, *_cells(proof, name))
    measured = (
        f"{proof.text['name']}: {proof.text['windows']} windows of {proof.text['length']} tokens; perplexity "
        f"{proof.reference_perplexity:.3f} in 16 bit; noise floor of KL {proof.noise_floor:.2g}"
    )
    passed = sum(finding["ok"] for finding in proof.findings)
    end = ("PASS", "bold green") if proof.passed else ("FAIL", "bold red")
    return [
        Text(f"{proof.artefact} against {proof.reference}", "bold"),
        Text(measured, "dim"),
        figures,
        *_answers(proof),
        "",
        *(_wrong(finding) for finding in proof.findings if not finding["ok"]),
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


def _columns(proof: "Proof") -> list[str]:
    served = [f"in {proof.served['engine']}"] if proof.served else []
    return ["", "decoded", "95 % interval", *served]


def _cells(proof: "Proof", name: str) -> list[str]:
    low, high = proof.intervals[name]
    cells = [_number(name, getattr(proof, name)), f"{_number(name, low)} to {_number(name, high)}"]
    return [*cells, _number(name, proof.served[name])] if proof.served else cells


def _number(name: str, value: float) -> str:
    return f"{value:.1%}" if name == "top1" else f"{value:.3f}" if name == "perplexity" else f"{value:.4f}"


def _answers(proof: "Proof") -> list[str]:
    """What came of prompts and tasks, a line each."""
    lines = []
    if proof.prompts:
        lines.append(f" {proof.prompts['agreement']['value']:.0%} of {proof.prompts['prompts']} prompts answered alike")
        if proof.prompts["correct"]:
            right = proof.prompts["correct"]
            lines.append(
                f" right answers: {right['quantized']:.0%}, {right['base']:.0%} in 16 bit (p = {right['p']:.2g})"
            )
        if proof.prompts.get("judge"):
            told = proof.prompts["judge"]
            lines.append(f" {told['model']} prefers it {told['wins']} times, the 16-bit model {told['losses']} times")
    for task, metrics in (proof.tasks or {}).items():
        for metric, row in metrics.items():
            chance = f" (p = {row['paired']['p']:.2g})" if row["paired"] else ""
            lines.append(f" {task} {metric}: {row['quantized']:.4f}, {row['base']:.4f} in 16 bit{chance}")
    return lines


def _wrong(finding: "Mapping[str, Any]") -> "RenderableType":
    from rich.text import Text

    mark, style = ("!", "yellow") if finding["warning"] else ("✗", "red")
    return Text.assemble((f"{mark} {finding['name']}: ", style), f"{finding['words']}; {finding['fix']}")

"""`quantry quantize`: a quantized checkpoint from a 16-bit one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from quantry.types import Artefact


def command(
    model: Annotated[str, typer.Argument(help="A folder, a hub id (owner/name) or the word demo.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The folder to write; new or empty.")],
    preset: Annotated[str | None, typer.Option(help="A name of `quantry presets`, or auto with --budget.")] = None,
    budget: Annotated[
        str | None, typer.Option(help='With --preset auto: 4.5bpw, 6GiB, 105453920B or "fits RTX 3060 at 8k".')
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help="With --preset auto: the device that will serve it: only what loads there is used."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="A TOML file with a preset and rules by layer.")] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan written by `quantry plan -o`; its best option is taken.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="One of the formats that can hold the preset.")] = None,  # noqa: A002
    group: Annotated[int | None, typer.Option(help="Weights that share a scale, for presets with groups.")] = None,
    rounder: Annotated[str | None, typer.Option(help="nearest or gptq, instead of the preset's own.")] = None,
    transform: Annotated[
        str | None, typer.Option(help="awq or smoothquant before rounding, instead of the preset's own.")
    ] = None,
    imatrix: Annotated[
        str | None,
        typer.Option(help="For gguf presets: a file of importance vectors, auto to compute them, or none."),
    ] = None,
    input_scales: Annotated[
        str | None, typer.Option(help="For static presets: minmax, percentile or mse, instead of the preset's own.")
    ] = None,
    kv: Annotated[
        str | None, typer.Option(help="What the KV cache is served in: fp8, fp8-head (a scale a head) or int8.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Text, JSON lines, parquet or a datasets folder to calibrate on; else a built-in text."),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows to calibrate on; 128 if not given.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens of a window; 2048 if not given.")] = None,
    sequential: Annotated[
        bool | None,
        typer.Option(
            "--sequential/--no-sequential", help="Calibrate each block on what the quantized blocks before it give."
        ),
    ] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Keep less of a calibration on the GPU, which takes longer.")
    ] = False,
    keep_odd: Annotated[
        bool, typer.Option("--keep-odd", help="Leave layers in 16 bit whose shape does not fit.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")] = False,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    report: Annotated[
        bool, typer.Option("--report/--no-report", help="Write report.html and report.png beside the model.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Write a quantized checkpoint that engines load unmodified."""
    from dataclasses import replace

    from quantry.cli._job import announce, bar, finish, write_report
    from quantry.jobs.quantize import quantize

    told: list[str] = []

    def tell(planned: "Artefact") -> None:
        announce(planned)
        told.extend(planned.notes)
        typer.echo("".join(f"{note}\n" for note in told), nl=False)

    with bar(quiet=json) as progress:
        artefact = quantize(
            model,
            output,
            preset=preset,
            recipe=recipe,
            plan=plan,
            format=format,
            group=group,
            budget=budget,
            gpu=gpu,
            rounder=rounder,
            transform=transform,
            imatrix=imatrix,
            input_scales=input_scales,
            kv=kv,
            data=data,
            samples=samples,
            length=length,
            sequential=sequential,
            low_memory=low_memory,
            keep_odd=keep_odd,
            dry_run=dry_run,
            device=device,
            announce=None if json else tell,
            progress=progress,
        )
    page = write_report(output) if report and not dry_run else None
    new = tuple(note for note in artefact.notes if note not in told)
    finish(replace(artefact, notes=new), dry_run, json, page)

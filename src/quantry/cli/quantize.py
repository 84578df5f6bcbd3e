"""`quantry quantize`: a quantized checkpoint from a 16-bit one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_calibration, check_data, check_given, check_models, check_recipe
from quantry.cli._output import announce, finish, progress_bar, write_report

if TYPE_CHECKING:
    from quantry.types import Artefact

GROUP = "make"
EXAMPLES = (
    "quantry quantize demo -o out --preset Q4_K_M",
    "quantry quantize ./my-model -o out --preset awq --data chats.jsonl",
    "quantry quantize ./my-model -o out --preset gptq --data chats.jsonl:3,code.txt:1",
    "quantry quantize ./my-model -o out --preset auto --budget 6GiB",
)
Preset = Annotated[str | None, typer.Option(help="A name of `quantry presets`, or auto with --budget.")]
Budget = Annotated[
    str | None, typer.Option(help='With --preset auto: 4.5bpw, 6GiB, 105453920B or "fits RTX 3060 at 8k".')
]
Gpu = Annotated[
    str | None, typer.Option(help="With --preset auto: the device that will serve it; only what loads there is used.")
]
RecipeFile = Annotated[Path | None, typer.Option(help="A TOML file with a preset and rules by layer.")]
PlanFile = Annotated[Path | None, typer.Option(help="A plan written by `quantry plan -o`; its best option is taken.")]
Format = Annotated[str | None, typer.Option(help="The format, one that can hold the preset: {formats}.")]
Group = Annotated[
    int | None, typer.Option(help="Weights that share a scale, for presets with groups: a multiple of 8, 8 to 1024.")
]
Rounder = Annotated[str | None, typer.Option(help="{rounders}, instead of the preset's own.")]
Transform = Annotated[str | None, typer.Option(help="{transforms} before rounding, instead of the preset's own.")]
Imatrix = Annotated[
    str | None, typer.Option(help="For gguf presets: a file of importance vectors, auto to compute them, or none.")
]
InputScales = Annotated[
    str | None, typer.Option(help="For static presets: minmax, percentile or mse, instead of the preset's own.")
]
KvCache = Annotated[
    str | None, typer.Option(help="The type that the KV cache is served in: {kv_caches} (fp8-head: a scale a head).")
]
Sequential = Annotated[
    bool | None,
    typer.Option("--sequential/--no-sequential", help="Calibrate each block on the outputs of the quantized ones."),
]
LearnRounding = Annotated[
    bool, typer.Option("--learn-rounding", help="Then train the codes of each block against the 16-bit block.")
]
RoundingSteps = Annotated[int | None, typer.Option(help="Steps of that in each block: 1 or more, 200 if left out.")]
Distil = Annotated[
    bool, typer.Option("--distil", help="Then train the scales against the 16-bit model; it holds both in memory.")
]
DistilSteps = Annotated[int | None, typer.Option(help="Steps of that training: 1 or more, 200 if left out.")]
LowMemory = Annotated[
    bool, typer.Option("--low-memory", help="Keep less of a calibration on the GPU, which takes longer.")
]
KeepOdd = Annotated[bool, typer.Option("--keep-odd", help="Leave layers in 16 bit whose shape does not fit.")]


def command(
    model: flags.Checkpoint,
    output: flags.NewFolder,
    preset: Preset = None,
    budget: Budget = None,
    gpu: Gpu = None,
    recipe: RecipeFile = None,
    plan: PlanFile = None,
    format: Format = None,  # noqa: A002
    group: Group = None,
    rounder: Rounder = None,
    transform: Transform = None,
    imatrix: Imatrix = None,
    input_scales: InputScales = None,
    kv: KvCache = None,
    data: flags.Data = None,
    samples: flags.Samples = None,
    length: flags.SampleLength = None,
    sequential: Sequential = None,
    learn_rounding: LearnRounding = False,
    rounding_steps: RoundingSteps = None,
    distil: Distil = False,
    distil_steps: DistilSteps = None,
    low_memory: LowMemory = False,
    keep_odd: KeepOdd = False,
    overwrite: flags.Overwrite = False,
    dry_run: flags.DryRun = False,
    device: flags.Device = "cpu",
    report: flags.Report = True,
    json: flags.Json = False,
) -> None:
    """Write a quantized checkpoint that engines load unmodified."""
    from dataclasses import replace

    check_recipe(
        preset=preset, format=format, group=group, rounder=rounder, transform=transform, input_scales=input_scales,
        kv=kv,
    )  # fmt: skip
    check_calibration(samples, length)
    check_given(recipe, plan)
    check_data(data)
    check_models(model)
    from quantry.jobs.quantize import quantize
    from quantry.quantizing.card import FINISHED

    announced: list[str] = []  # notes that were printed before the work began

    def tell(planned: "Artefact") -> None:
        announce(planned)
        announced.extend(planned.notes)
        typer.echo("".join(f"{note}\n" for note in planned.notes), nl=False)

    with progress_bar(quiet=json) as progress:
        artefact = quantize(
            model, output, preset=preset, recipe=recipe, plan=plan, format=format, group=group, budget=budget, gpu=gpu,
            rounder=rounder, transform=transform, imatrix=imatrix, input_scales=input_scales, kv=kv, data=data,
            samples=samples, length=length, sequential=sequential, learn_rounding=learn_rounding,
            rounding_steps=rounding_steps, distil=distil, distil_steps=distil_steps,
            low_memory=low_memory, keep_odd=keep_odd, overwrite=overwrite, dry_run=dry_run, device=device,
            announce=None if json else tell, progress=progress,
        )  # fmt: skip
    page = write_report(output, missing=FINISHED in artefact.notes) if report and not dry_run else None
    new = tuple(note for note in artefact.notes if note not in announced)
    finish(replace(artefact, notes=new), dry_run, json, page)

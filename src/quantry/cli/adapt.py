"""`quantry adapt`: a LoRA or QLoRA adapter of a 16-bit model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._first import check_given, check_models
from quantry.cli._output import print_json, progress_bar
from quantry.report.sizes import counted, human

if TYPE_CHECKING:
    from quantry.jobs.adapt.result import Adapter

GROUP = "make"
EXAMPLES = (
    "quantry adapt ./my-model --data chats.jsonl -o my-adapter",
    "quantry adapt ./my-model --data chats.jsonl -o my-adapter --qlora --device cuda",
    "quantry adapt demo --data demo -o out --steps 20",
)
Data = Annotated[
    Path, typer.Option(help="Chats or prompts with completions as JSON lines, or a text; demo is a built-in text.")
]
Rank = Annotated[int, typer.Option(help="Rank of the adapter's matrices, 1 to 1024.")]
Alpha = Annotated[
    int | None, typer.Option(help="Weight of the adapter, 1 to 65536; twice the rank if left out, so that it counts 2.")
]
Rslora = Annotated[bool, typer.Option("--rslora", help="Scale by alpha / sqrt(rank), which suits high ranks.")]
Target = Annotated[str, typer.Option(help="Layers to adapt, such as q_proj,v_proj, or all-linear.")]
Epochs = Annotated[int | None, typer.Option(help="Rounds through the data, 1 to 10000; 3 if left out.")]
Steps = Annotated[int | None, typer.Option(help="Steps of the optimizer instead of --epochs, 1 to 10000000.")]
Batch = Annotated[int | None, typer.Option(help="Rows of a step, 1 to 65536; by the size of the model if left out.")]
Rate = Annotated[
    float | None, typer.Option(help="Learning rate, above 0 and up to 1; by the size of the model if left out.")
]
Length = Annotated[
    int | None, typer.Option(help="Tokens of a row, 2 to 1048576; 2048 or the model's context if left out.")
]
Seed = Annotated[int, typer.Option(help="Seed of the order of rows and of the first weights, 0 or more.")]
HeldBack = Annotated[
    float, typer.Option(help="Share of rows to measure on and not to train on, above 0 and up to 0.5; at least a row.")
]
Qlora = Annotated[bool, typer.Option("--qlora", help="Hold the model as bitsandbytes' NF4, which takes less memory.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Train anew, in place of an adapter that is there.")]


def command(
    model: flags.Checkpoint,
    data: Data,
    output: flags.NewFolder,
    rank: Rank = 16,
    alpha: Alpha = None,
    rslora: Rslora = False,
    target: Target = "all-linear",
    epochs: Epochs = None,
    steps: Steps = None,
    batch: Batch = None,
    rate: Rate = None,
    length: Length = None,
    seed: Seed = 0,
    held_back: HeldBack = 0.1,
    qlora: Qlora = False,
    device: flags.Device = "cpu",
    overwrite: Overwrite = False,
    dry_run: flags.DryRun = False,
    json: flags.Json = False,
) -> None:
    """Train a LoRA or QLoRA adapter of a 16-bit model on chats or text."""
    from quantry.jobs.adapt.settings import Settings, check_installed

    settings = Settings(
        "qlora" if qlora else "lora", rank, alpha, rslora, target, epochs, steps, batch, rate, length, seed, held_back
    )
    settings.check()
    check_installed(settings.method)
    check_given(data)
    check_models(model)
    from quantry.jobs.adapt.adapt import adapt

    with progress_bar(quiet=json) as progress:
        adapter = adapt(
            model, output, data=data, rank=rank, alpha=alpha, rslora=rslora, target=target, epochs=epochs, steps=steps,
            batch=batch, rate=rate, length=length, seed=seed, held_back=held_back, qlora=qlora, device=device,
            overwrite=overwrite, dry_run=dry_run, announce=None if json else _announce, progress=progress,
        )  # fmt: skip
    if json:
        print_json(adapter.to_dict())
    elif not dry_run:
        _tell(adapter)


def _announce(adapter: "Adapter") -> None:
    data, settings = adapter.data, adapter.settings
    typer.echo(
        f"{adapter.source} -> {adapter.method} of rank {settings['rank']}: {counted(adapter.parameters, 'parameter')}\n"
        f"{counted(data['rows'], 'row')} of {data['name']}, {data['held_back']:,} held back; "
        f"{counted(adapter.steps, 'step')} of {counted(settings['batch'], 'row')} at a rate of {settings['rate']:g}; "
        f"about {human(sum(adapter.memory.values()))} of memory"
    )
    for note in adapter.notes:
        typer.echo(note)


def _tell(adapter: "Adapter") -> None:
    from quantry.quantizing.card import FINISHED

    assert adapter.loss is not None
    held = adapter.loss["held_back"]
    typer.echo(f"loss of held-back rows: {held['before']:.4f} -> {held['after']:.4f} nats per token")
    typer.echo(FINISHED if FINISHED in adapter.notes else f"wrote {adapter.path}")

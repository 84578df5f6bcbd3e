"""The command line: one thin file a command.

A command's file is found by its name (see registry.py). Its function `command` calls the Python function of the same
name and prints the result. It imports what it needs when it runs, so `quantry --help` is instant.
"""

from typing import Annotated, NoReturn

import typer

from quantry import __version__, registry
from quantry.cli._ending import ended_by_signals, ending, forgiving_output
from quantry.cli._flags import ListingCommand

app = typer.Typer(
    name="quantry",
    help="From a 16-bit LLM checkpoint to a quantized model that its engine is proven to serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"quantry {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


for _name in registry.choices("quantry.cli"):
    app.command(_name, cls=ListingCommand)(registry.load("quantry.cli", _name).command)


def main() -> NoReturn:
    """Runs the command line and exits with the code of its ending (see _ending.py)."""
    forgiving_output()
    with ended_by_signals(), ending():
        app()
    raise SystemExit(0)

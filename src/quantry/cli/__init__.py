"""The command line: one file a command, a thin skin over the function of the same name.

A command's file is found by its name (see registry.py) and holds one function `command`. Nothing heavy is imported
before a command runs, so `quantry --help` is instant.
"""

import sys
from typing import Annotated, NoReturn

import typer

from quantry import __version__, registry
from quantry.errors import QuantryError

app = typer.Typer(
    name="quantry",
    help="From a 16-bit LLM checkpoint to a quantized model that its engine is proven to serve.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    app.command(_name)(registry.load("quantry.cli", _name).command)


def main() -> NoReturn:
    """Runs the command line. An error of the user's is one line and its exit code, never a traceback."""
    try:
        app()
    except QuantryError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted; a job that writes goes on where it was when it is started again", file=sys.stderr)
        sys.exit(130)
    sys.exit(0)

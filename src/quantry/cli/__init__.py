"""The command line: one thin file a command.

A command's file is found by its name (see registry.py). Its function `command` calls the Python function of the same
name and prints the result; `GROUP` and `EXAMPLES` are for its help. It imports what it needs when it runs, so
`quantry --help` is instant.
"""

from typing import Annotated, NoReturn

import typer

from quantry import __version__, registry
from quantry.cli._ending import ended_by_signals, ending, forgiving_output
from quantry.cli._flags import Commands, ListingCommand
from quantry.cli._help import honour_no_color
from quantry.cli._welcome import TITLES, welcome

app = typer.Typer(
    name="quantry",
    cls=Commands,
    help="From a 16-bit LLM checkpoint to a quantized model that its engine is proven to serve.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.")]
Verbose = Annotated[bool, typer.Option("-v", help="With --version: those of packages, engines and devices too.")]


@app.callback()
def _options(context: typer.Context, version: Version = False, verbose: Verbose = False) -> None:
    if version and verbose:
        from quantry.cli._versions import versions

        typer.echo(versions())
    elif version:
        typer.echo(f"quantry {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(welcome(groups(), examples()))
    if version or context.invoked_subcommand is None:
        raise typer.Exit


def groups() -> dict[str, str]:
    """Returns the group of every command: choose, make, prove or serve."""
    return {name: registry.facts(__name__, name)["GROUP"] for name in registry.choices(__name__)}


def examples() -> dict[str, tuple[str, ...]]:
    """Returns command lines that show the use of every command."""
    return {name: registry.facts(__name__, name)["EXAMPLES"] for name in registry.choices(__name__)}


_ORDER = list(TITLES)
for _name, _group in sorted(groups().items(), key=lambda item: (_ORDER.index(item[1]), item[0])):
    app.command(_name, cls=ListingCommand, rich_help_panel=TITLES[_group])(registry.load("quantry.cli", _name).command)


def main() -> NoReturn:
    """Runs the command line and exits with the code of its ending (see _ending.py)."""
    forgiving_output()
    honour_no_color()
    with ended_by_signals(), ending():
        code = app(standalone_mode=False)
    raise SystemExit(code or 0)

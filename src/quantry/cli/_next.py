"""What to do next with an artefact: command lines that work for it on this machine."""

from pathlib import Path
from shlex import quote

import typer


def tell_next(artefact: str | Path, *, verify: bool = False) -> None:
    """Prints the commands to go on with, if there are any."""
    if line := next_line(artefact, verify=verify):
        typer.echo(line)


def next_line(artefact: str | Path, *, verify: bool = False) -> str:
    """Returns `next: quantry verify OUT; quantry serve OUT`, with what works here alone; empty if nothing does."""
    name = quote(str(artefact))
    steps = [f"quantry verify {name}"] if verify and _has_reference(artefact) else []
    if _is_served(artefact):
        steps.append(f"quantry serve {name}")
    return f"next: {'; '.join(steps)}" if steps else ""


def _has_reference(artefact: str | Path) -> bool:
    """Tells if the 16-bit model that an artefact was made from is known and here."""
    from quantry.errors import QuantryError
    from quantry.quantizing.origin import origin_of

    try:
        return bool(origin_of(artefact))
    except QuantryError:
        return False


def _is_served(artefact: str | Path) -> bool:
    """Tells if an engine of this machine loads the artefact."""
    from quantry.engines.contract.options import Options
    from quantry.errors import QuantryError
    from quantry.serving.prepare import prepare

    try:
        prepare(artefact, Options(port=0)).check_installed()
    except (QuantryError, OSError):
        return False
    return True

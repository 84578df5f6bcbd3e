"""The figures of each text of a proof, as a table of the terminal."""

from typing import TYPE_CHECKING

from quantry.cli._output import table
from quantry.report.domains import COLUMNS, cells

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.types import Proof


def domain_table(proof: "Proof") -> list["RenderableType"]:
    """Draws what was lost on each text; nothing for a proof on one."""
    if not proof.domains:
        return []
    rows = table(COLUMNS, COLUMNS[1:-1], drop=("in 16 bit", "perplexity", "same first token"))
    for domain in proof.domains:
        rows.add_row(*cells(domain))
    return ["", rows]

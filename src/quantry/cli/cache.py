"""`quantry cache`: what Quantry keeps on this disk, and how to be rid of it."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from quantry.cli import _flags as flags
from quantry.cli._output import print_result, table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from quantry.storage.cache import Cache, Entry

GROUP = "choose"
EXAMPLES = (
    "quantry cache",
    "quantry cache --clear --older-than 30d",
    "quantry cache statistics --clear --yes",
)
Kind = Annotated[str | None, typer.Argument(help="One part of it: {cache_kinds}; all if left out.")]
Clear = Annotated[
    bool, typer.Option("--clear", help="Remove it; verdicts and places of models only if their part is named.")
]
OlderThan = Annotated[str | None, typer.Option(help="Only what was not used for so long: 12h, 30d, 4w.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before it is removed.")]


def command(
    kind: Kind = None,
    clear: Clear = False,
    older_than: OlderThan = None,
    yes: Yes = False,
    json: flags.Json = False,
) -> None:
    """List what is in Quantry's cache, with sizes and ages, or clear it; what a running job uses stays."""
    from quantry.errors import QuantryError
    from quantry.storage.cache import cache

    if clear and not yes and (json or not sys.stdin.isatty()):
        raise QuantryError("--clear asks at a terminal, and there is none", fix="add --yes")
    done = cache(kind, clear=clear, older_than=older_than, confirm=None if yes else _confirm)
    print_result(done, _cleared if clear else picture, json)


def _confirm(entries: "tuple[Entry, ...]") -> bool:
    from quantry.report.sizes import counted, human

    size = human(sum(entry.bytes for entry in entries))
    return typer.confirm(f"remove {counted(len(entries), 'entry', 'entries')}, {size}?", err=True)


def picture(cache: "Cache") -> list["RenderableType"]:
    """Draws the cache by kind, with the total."""
    from quantry.report.sizes import human
    from quantry.storage.cache import KINDS

    right = ("entries", "size")
    headings = ("", *right, "last used", "oldest", "what it is")
    rows = table(headings, right, drop=("oldest", "last used"), prose=("what it is",))
    for kind, facts in KINDS.items():
        entries = [entry for entry in cache.entries if entry.kind == kind]
        if entries:
            ages = sorted((entry.used for entry in entries), reverse=True)
            size = human(sum(entry.bytes for entry in entries))
            rows.add_row(kind, f"{len(entries):,}", size, _ago(ages[0]), _ago(ages[-1]), facts.about)
    if not cache.entries:
        return [f"{cache.path}: nothing of this kind is there"]
    held = sum(entry.held for entry in cache.entries)
    in_use = f", {held:,} in use by running jobs" if held else ""
    others = f"; {human(cache.other_bytes)} of other files are left alone" if cache.other_bytes else ""
    return [rows, f"{cache.path}: {human(cache.bytes)} in all{in_use}{others}", "clear it: quantry cache --clear"]


def _cleared(cache: "Cache") -> list["RenderableType"]:
    from quantry.report.sizes import counted, human

    size = human(sum(entry.bytes for entry in cache.removed))
    lines: list[RenderableType] = [f"removed {counted(len(cache.removed), 'entry', 'entries')}, {size}"]
    if held := sum(entry.held for entry in cache.entries):
        lines.append(f"{held:,} in use by running jobs {'was' if held == 1 else 'were'} left")
    return lines


def _ago(when: float) -> str:
    from time import time

    from quantry.report.sizes import counted

    hours = max(0.0, time() - when) / 3600
    if hours < 1:
        return "just now"
    return f"{counted(int(hours), 'hour')} ago" if hours < 48 else f"{counted(int(hours / 24), 'day')} ago"

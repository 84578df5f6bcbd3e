"""Help for windows too narrow for typer's panels, which would cut names of options."""

from collections.abc import Iterator
from os import environ
from shutil import get_terminal_size
from typing import Any

TYPES, PADDING = 8, 16  # letters beside names and sentences in a panel
LEAST = 24  # letters of a sentence
INDENT = "      "


def honour_no_color() -> None:
    """Keeps typer from writing bold and dim where colours are not wanted."""
    if environ.get("NO_COLOR"):
        from typer import rich_utils

        rich_utils.COLOR_SYSTEM = None


def is_narrow(command: Any, ctx: Any) -> bool:
    """Says if the window cannot hold the longest option beside the longest word of a sentence."""
    parameters = command.get_params(ctx)
    names = max(len(name) for parameter in parameters for name in parameter.opts)
    others = max((len(name) for parameter in parameters for name in parameter.secondary_opts), default=0)
    words = max(len(word) for parameter in parameters for word in (parameter.help or "").split())
    return get_terminal_size().columns < names + others + TYPES + max(words, LEAST) + PADDING


def narrow_help(command: Any, ctx: Any) -> str:
    """Returns the help of a command as a list: each option on a line of its own, what it does below."""
    usage = " ".join([ctx.command_path, *command.collect_usage_pieces(ctx)])
    return "\n".join([f"Usage: {usage}", "", _filled(command.help or "", ""), "", *_options(command, ctx)])


def _options(command: Any, ctx: Any) -> Iterator[str]:
    for parameter in command.get_params(ctx):
        if record := parameter.get_help_record(ctx):
            names, words = record
            yield f"  {names}"
            yield _filled(words, INDENT)


def _filled(words: str, indent: str) -> str:
    """Wraps between words alone: a name or a path stays whole."""
    from textwrap import fill

    return fill(
        " ".join(words.split()),
        get_terminal_size().columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )

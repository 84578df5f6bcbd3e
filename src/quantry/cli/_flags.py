"""Flags that several commands share, and the names that help texts list.

A help text writes `{rounders}` where it lists the names that may be given. The names are looked up when a command's
help is shown: `quantry --help` stays instant, and a plug-in of another package is listed like a built-in one.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from quantry import registry
from quantry.cli._ending import ending
from quantry.cli._help import is_narrow, narrow_help


def token_count(text: str) -> int:
    """Reads a number of tokens, also as people write it: 8k is 8,192."""
    found = re.fullmatch(r"(-?\d{1,12})\s*([km]?)", str(text).strip().lower())
    if found is None:
        raise typer.BadParameter(f"{str(text)[:40]!r} is no number of tokens, such as 8192 or 8k")
    return int(found[1]) << {"": 0, "k": 10, "m": 20}[found[2]]


def seconds(text: str) -> float:
    """Reads a time as people write it: 90, 90s, 3m, 1.5h."""
    found = re.fullmatch(r"(-?\d{1,9}(?:\.\d{1,3})?)\s*(s|m|min|h)?", str(text).strip().lower())
    if found is None:
        raise typer.BadParameter(f"{str(text)[:40]!r} is no time, such as 90s, 3m or 1h")
    return float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"]


TOKENS: dict[str, Any] = {"parser": token_count, "metavar": "TOKENS"}
TIME: dict[str, Any] = {"parser": seconds, "metavar": "TIME"}

PromptTokens = Annotated[
    str, typer.Option(help="Tokens of a prompt, 1 or more: 256, or a distribution as 256,stdev=64,min=16,max=512.")
]
AnswerTokens = Annotated[str, typer.Option(help="Tokens of an answer, 1 or more, in the same way.")]
Dataset = Annotated[str | None, typer.Option(help="Prompts from a file (JSON lines, CSV, parquet, text) or a hub id.")]
Tokenizer = Annotated[
    str | None, typer.Option(help="A folder, .gguf file or hub id to count tokens with; else the server's own.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Ask for chats rather than completions.")]
GuidellmPython = Annotated[
    Path | None, typer.Option(help="The python of the environment that guidellm is installed in.")
]
Context = Annotated[int | None, typer.Option(help="Tokens a sequence may reach, 1 or more: 8192 or 8k.", **TOKENS)]
EnginePython = Annotated[
    Path | None, typer.Option(help="The python of the environment that the engine is installed in.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

Checkpoint = Annotated[str, typer.Argument(help="A folder, a hub id (owner/name) or the word demo.")]
NewFolder = Annotated[Path, typer.Option("-o", "--output", help="The folder to write; new, empty, or of the same job.")]
Use = Annotated[str | None, typer.Option("--for", help="What the model is for: {uses}.")]
Text = Annotated[Path | None, typer.Option(help="A text file to measure on; else the stories of the demo.")]
Texts = Annotated[
    str | None,
    typer.Option(
        help="A text file or JSON lines to measure on, or several with commas between; else the stories of the demo."
    ),
]
Windows = Annotated[int, typer.Option(help="Windows of a text to measure on, 1 or more; 0 for all.")]
WindowLength = Annotated[int, typer.Option(help="Tokens of a window, 2 or more.")]
Gate = Annotated[str, typer.Option(help="What the model is for, which sets the limits: {gates}.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text, JSON lines, parquet or a datasets folder to calibrate on, or several with weights: "
        "chat.jsonl:3,code.txt:1; else a built-in text.",
    ),
]
Samples = Annotated[int | None, typer.Option(help="Windows to calibrate on, 1 or more; 128 if left out.")]
SampleLength = Annotated[
    int | None, typer.Option(help="Tokens of a window to calibrate on, 2 or more; 2048 if left out.")
]
Device = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Make it anew, in place of an artefact that is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and stop.")]
Report = Annotated[
    bool, typer.Option("--report/--no-report", help="Write report.html and report.png beside the model.")
]


class ListingCommand(TyperCommand):
    """A command whose help lists names and examples, and which ends in one line."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters, that of help among them."""
        found = super().get_params(ctx)
        _hide_types_of_switches(found)
        return found

    def invoke(self, ctx: Any) -> Any:
        with ending():  # before typer, which takes any EOFError for the end of the input
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for parameter in self.params:
            parameter.help = filled(parameter.help)  # type: ignore[attr-defined]
        if is_narrow(self, ctx):
            typer.echo(narrow_help(self, ctx) + "\n")
        else:
            super().format_help(ctx, formatter)
        examples = registry.facts("quantry.cli", str(self.name)).get("EXAMPLES", ())
        typer.echo("".join(f"{line}\n" for line in ("Examples:", *(f"  {example}" for example in examples))))


class Commands(TyperGroup):
    """All commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the options, that of help among them."""
        found = super().get_params(ctx)
        _hide_types_of_switches(found)
        return found


def _hide_types_of_switches(parameters: Iterable[Any]) -> None:
    """Keeps typer from writing <bool> beside a switch, which takes no value."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.display_type_rich = lambda ctx: None


def filled(text: str | None) -> str:
    """Puts the names that may be given in place of `{rounders}`, `{gates}`, ... in a help text."""
    return re.sub(r"\{(\w+)\}", lambda word: spelled(_names(word[1])), text or "")


def spelled(names: Iterable[str]) -> str:
    """Spells a list as English does: `a, b or c`."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


PLUGINS = {
    "formats": "quantry.formats",
    "rounders": "quantry.methods.rounders",
    "transforms": "quantry.methods.transforms",
}
MEMBERS = {  # a collection of names, or a function that returns one
    "engines": "quantry.engines.contract.catalogue.engines",
    "verifying": "quantry.engines.contract.catalogue.verifying",
    "kv_caches": "quantry.quantizing.recipe.KV",
    "gates": "quantry.proof.gate.uses",
    "uses": "quantry.planning.rules.uses",
    "matrices": "quantry.planning.matrices.MAKERS",
    "cache_kinds": "quantry.storage.cache.KINDS",
}


def _names(word: str) -> Iterable[str]:
    if word in PLUGINS:
        return registry.choices(PLUGINS[word])
    module, _, member = MEMBERS[word].rpartition(".")
    names = getattr(import_module(module), member)
    return names() if callable(names) else names  # type: ignore[no-any-return]

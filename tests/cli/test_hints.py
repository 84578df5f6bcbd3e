"""Every `quantry ...` command that the code or the documentation suggests is taken by the real command line.

Hints are collected from strings and f-strings of the source (errors, notes, cards, reports, docstrings), from lists of
words that begin with "quantry", from data (TOML), from stored plans and from pages. A hint that names the model or file it works
on must parse as it stands. One that does not is a mention (`quantry verify --prompts FILE`): its options must exist, and
what it leaves out is filled in.
"""

import ast
import json
import re
import shlex
import tomllib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer._click.exceptions import ClickException

from quantry import registry
from quantry.cli import app, examples
from quantry.engines.contract.catalogue import engines
from quantry.proof.gate import uses as gates
from quantry.quantizing.recipe import presets
from quantry.storage import read_data

ROOT = Path(__file__).parents[2]
GAP = "\x00"  # a placeholder of an f-string
SAMPLE = "1"  # a number, a text and a path
COMMANDS = registry.choices("quantry.cli")
START = re.compile(r"(?<![\w./-])quantry (?!import\b)(?=[a-z])")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"--?[a-z][a-z-]*")
ARGUMENT = re.compile(rf"{GAP}|[A-Z_]{{2,}}[\w./]*|https?://\S+|[\w.-]+/[\w./-]+|demo")  # in prose, where words follow
KNOWN: dict[
    str, Callable[[], Collection[str]]
] = {  # values that are names of something; the rest is left to the parser
    "preset": lambda: {*presets(), "auto", *read_data("quantry", "preset_names.toml")},
    "format": lambda: registry.choices("quantry.formats"),
    "rounder": lambda: registry.choices("quantry.methods.rounders"),
    "to": lambda: {*registry.choices("quantry.formats"), "bf16", "fp16"},
    "engine": engines,
    "gate": gates,
}


@dataclass(frozen=True)
class Hint:
    """The words of a command, and where it is suggested; `whole` if nothing but the command stands there."""

    where: str
    words: tuple[str, ...]
    whole: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {' '.join(self.words)}".replace(GAP, "{}")


def problem(hint: Hint) -> str | None:
    """Says what is wrong with a hint."""
    name, *arguments = hint.words[1:]
    if name not in COMMANDS:
        return f"there is no command {name}"
    command = group().commands[name]
    filled = [word.replace(GAP, SAMPLE) for word in arguments]
    try:
        if any(parameter.param_type_name == "argument" for parameter in _given(command, arguments)) or hint.whole:
            context = command.make_context(name, filled)
        else:
            context = command.make_context(name, [*filled, *_required(command, arguments)])
    except ClickException as error:
        return error.format_message()
    except typer.Exit:  # help was asked for, and shown
        return None
    for option, known in KNOWN.items():
        value = context.params.get(option)
        if value is not None and value in arguments and value != value.upper() and value not in known():
            return f"there is no {option} {value}"
    return None


@cache
def group() -> Any:
    return typer.main.get_command(app)


def _options(command: Any) -> dict[str, Any]:
    return {spelling: option for option in command.params for spelling in (*option.opts, *option.secondary_opts)}


def _given(command: Any, arguments: list[str]) -> list[Any]:
    """The parameters that a hint gives."""
    options, given, expected = _options(command), [], False
    positional = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    for word in arguments:
        if expected:
            expected = False
        elif word in options:
            given.append(options[word])
            expected = not options[word].is_flag
        elif positional and not word.startswith("-"):
            given.append(positional.pop(0))
    return given


def _required(command: Any, arguments: list[str]) -> Iterator[str]:
    """What a mention leaves out: the value of its last option, then required options and arguments."""
    given, options = _given(command, arguments), _options(command)
    if arguments and arguments[-1] in options and not options[arguments[-1]].is_flag:
        yield SAMPLE
    for parameter in command.params:
        if parameter.required and parameter not in given:
            yield from () if parameter.param_type_name == "argument" else (parameter.opts[0],)
            yield SAMPLE


def in_text(text: str, where: str) -> Iterator[Hint]:
    """Finds the hints of a text: `in backticks`, or followed by prose."""
    for start in START.finditer(text):
        rest = text[start.start() :]
        if text[: start.start()].endswith("`"):
            quoted = rest.partition("`")[0]
            if quoted.count("\n") < 2:
                yield Hint(where, tuple(shlex.split(quoted.replace("[", "").replace("]", ""))))
        else:
            yield Hint(where, tuple(_before_prose(rest)))


def _before_prose(text: str) -> Iterator[str]:
    """The words of a command up to the prose that follows it."""
    options: dict[str, Any] = {}
    expected = False
    for index, word in enumerate(text.partition("\n\n")[0].split()):
        bare = word.rstrip(".,:;)`'\"")
        option = options.get(bare)
        if not (index < 2 or expected or OPTION.fullmatch(bare) or ARGUMENT.fullmatch(bare)):
            return
        yield bare
        if index == 1 and bare in COMMANDS:
            options = _options(group().commands[bare])
        expected = option is not None and not option.is_flag
        if bare != word:
            return


def in_page(path: Path) -> Iterator[Hint]:
    """Finds the hints of a Markdown page: lines of its code blocks except ```text, which is output, and its text."""
    text, where = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
    for block in FENCE.findall(text):
        if block.startswith("```text"):
            continue
        for line in block.splitlines():
            if start := START.search(line):
                yield Hint(where, tuple(shlex.split(line[start.start() :], comments=True)), whole=True)
    yield from in_text(FENCE.sub("", text), where)


def in_source(path: Path) -> Iterator[Hint]:
    """Finds the hints of a Python file: its strings, and its lists of words."""
    tree, name = ast.parse(path.read_text(encoding="utf-8")), str(path.relative_to(ROOT))
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.JoinedStr):
            yield from in_text("".join(map(_spelled, node.values)), where)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield from in_text(node.value, where)
        elif isinstance(node, ast.List) and len(node.elts) > 1 and _spelled(node.elts[0]) == "quantry":
            yield Hint(where, tuple(_spelled(word) for word in node.elts if not isinstance(word, ast.Starred)))
        elif isinstance(node, ast.FunctionDef):
            yield from _built(node, where)


def _spelled(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else GAP


def _built(function: ast.FunctionDef, where: str) -> Iterator[Hint]:
    """Finds the options that a function adds to the one command that it builds as a list."""
    lists = [node for node in ast.walk(function) if isinstance(node, ast.List) and len(node.elts) > 1]
    commands = {_spelled(node.elts[1]) for node in lists if _spelled(node.elts[0]) == "quantry"}
    if len(commands) == 1:
        constants = [node.value for node in ast.walk(function) if isinstance(node, ast.Constant)]
        for option in {
            value for value in constants if isinstance(value, str) and value.startswith("--") and value != "--"
        }:
            yield Hint(where, ("quantry", *commands, option))


def in_data(value: Any, where: str) -> Iterator[Hint]:
    """Finds the hints of TOML or JSON: texts, and lists of words."""
    match value:
        case str():
            yield from in_text(value, where)
        case ["quantry", *_]:
            yield Hint(where, tuple(value), whole=True)
        case dict() | list():
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in entries:
                if key != "source":  # of a row: names files of the package
                    yield from in_data(inner, where)


@cache
def hints() -> tuple[Hint, ...]:
    """All hints of the project."""
    source = ROOT / "src/quantry"
    tables = [(path, tomllib.loads(path.read_text(encoding="utf-8"))) for path in sorted(source.rglob("*.toml"))]
    plans = [
        (path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted(ROOT.glob("tests/planning/*.json"))
    ]
    pages = [
        page
        for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*.md")
        for page in sorted(ROOT.glob(pattern))
    ]
    collected = [hint for path in sorted(source.rglob("*.py")) for hint in in_source(path)]
    collected += [hint for path, data in (*tables, *plans) for hint in in_data(data, str(path.relative_to(ROOT)))]
    collected += [hint for page in (*pages, *source.rglob("*.md")) for hint in in_page(page)]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return (*collected, *in_text(makefile.replace("$(BIN)/", ""), "Makefile"))


def test_every_hint_is_taken_by_the_command_line() -> None:
    wrong = [f"{hint}\n    {fault}" for hint in dict.fromkeys(hints()) if (fault := problem(hint))]
    assert not wrong, "\n".join(wrong)


def test_hints_are_found_everywhere() -> None:
    """A collector that finds nothing would pass; every kind of place has some."""
    places = {re.sub(r":\d+$", "", hint.where) for hint in hints()}
    for place in (
        "README.md",
        "Makefile",
        "docs/reference/serve.md",
        "src/quantry/planning/rules.toml",
        "src/quantry/planning/commands.py",
    ):
        assert place in places
    assert {hint.words[1] for hint in hints()} == set(COMMANDS)
    assert len(hints()) > 200


WRONG = {
    'fix="quantry convrt the artefact"': "no command convrt",
    'f"or quantry convert {model} --format {form} -o OUT"': "No such option",
    'f"quantry convert {model} -o OUT"': "Missing option '--to'",
    '"see `quantry inspect A B`"': "unexpected extra argument",
    '"run quantry serve MODEL --parallel many"': "valid integer",
    '"quantry quantize --preset w4a15, or w4a16"': "no preset w4a15",
    'f(["quantry", "verify", folder, "--windows", "8", "--gates", gate])': "No such option",
    "def f():\n    words = ['quantry', 'serve', model]\n    words += ['--paralel', str(2)]": "No such option",
}
RIGHT = (
    'fix="quantry convert the artefact"',
    'f"or quantry convert {model} --to {form} -o OUT"',
    '"run quantry verify --prompts FILE; then, or later, serve"',
    '"write it with quantry plan -o"',
    '"no proof: quantry verify gives it one"',
    'f"quantry serve {model} --parallel {count} -- --any"',
)


@pytest.mark.parametrize("code", WRONG)
def test_a_wrong_hint_is_refused(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert any(WRONG[code] in (fault or "") for fault in faults(code, monkeypatch, tmp_path))


@pytest.mark.parametrize("code", RIGHT)
def test_a_right_hint_is_taken(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert faults(code, monkeypatch, tmp_path) == [None]


def faults(code: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str | None]:
    monkeypatch.setitem(globals(), "ROOT", folder)
    path = folder / "planted.py"
    path.write_text(code.replace('fix="', 'x = "'), encoding="utf-8")
    return [problem(hint) for hint in in_source(path)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_help_is_taken(name: str) -> None:
    for line in examples()[name]:
        assert problem(Hint(name, tuple(shlex.split(line)), whole=True)) is None, line

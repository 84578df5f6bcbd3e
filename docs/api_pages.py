"""The pages of Python names and JSON names, from signatures, docstrings and the comments of fields."""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import quantry
from quantry.jobs.auto.sensitivity import Sensitivity
from quantry.jobs.load.bench import Bench
from quantry.jobs.load.tune import Tuned
from quantry.jobs.run.result import Run
from quantry.jobs.sweep.table import Sweep
from quantry.planning.matrices import Matrix
from quantry.planning.plan import Plan
from quantry.quantizing.recipe import Preset

FIELD = re.compile(r"^    (\w+): ([^=#]+?)(?: = [^#]+?)?(?:  # (.+))?$", re.MULTILINE)
CLASS = re.compile(r"\b[A-Z]\w+")
JSON_TYPES = {
    r'"': "",
    r"(?:Mapping|dict)\[(?:[^\[\]]|\[[^\]]*\])*\]": "object",
    r"tuple\[(?:float, float|int, int)\]": "list of two numbers",
    r"tuple\[(\w+), \.\.\.\]": r"list of \1",
    r"Literal\[.+\]|LayerKind|Path": "string",
    r"\bstr\b": "string",
    r"\b(?:int|float)\b": "number",
    r"\bbool\b": "boolean",
    r" \| None": " or null",
}
RESULTS: dict[str, tuple[type, str]] = {  # what a command prints with --json, and the page that explains it
    "run": (Run, "run.md"),
    "inspect": (quantry.Anatomy, "inspect.md"),
    "plan": (Plan, "plan.md"),
    "quantize": (quantry.Artefact, "quantize.md"),
    "convert": (quantry.Artefact, "quantize.md"),
    "sensitivity": (Sensitivity, "budget.md"),
    "sweep": (Sweep, "sweep.md"),
    "verify": (quantry.Proof, "verify.md"),
    "diff": (quantry.Difference, "verify.md"),
    "bench": (Bench, "bench.md"),
    "tune": (Tuned, "tune.md"),
    "matrix": (Matrix, "matrices.md"),
    "presets": (Preset, "presets.md"),
}
PYTHON = """# Python

Every command is a function of the same name, with the same options. `import quantry` is instant: a function is imported when it
is first used. An error that a user can mend is a `QuantryError`; its text is the line that the command would print.

```python
import quantry

artefact = quantry.quantize("demo", "build/demo-q4_k_m", preset="gguf-q4_k_m")
proof = quantry.verify(artefact.path, "demo", windows=2)
print(proof.verdict, proof.kl)
```
"""
JSON = """# JSON

`--json` prints one object on standard output and nothing else; progress and warnings go to standard error. Names are stable: a
test freezes them, and a change is in the changelog. Sizes are bytes, times are seconds unless a name says otherwise, rates are
shares from 0 to 1. `null` stands for what was not measured or does not apply.

`quantry matrix` and `quantry presets` print a list of such objects. [`quantry hardware`](hardware.md#json) and
[`quantry serve`](serve.md) are explained on their own pages.
"""


def python_page() -> str:
    """Returns every public name with its signature and docstring."""
    names = [name for name in quantry.__all__ if name != "__version__"]
    functions = [name for name in names if name[0].islower()]
    classes = [name for name in names if name[0].isupper()]
    parts = [PYTHON, "## Functions\n", *map(_function, functions), "## Types\n", *map(_class, classes)]
    return "\n".join(parts)


def _function(name: str) -> str:
    function = getattr(quantry, name)
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef)
    return f"### quantry.{name}\n\n```python\n{_signature(node)}\n```\n\n{_prose(function)}\n"


def _signature(node: ast.FunctionDef) -> str:
    """Returns the signature of a function, an argument a line."""
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    lines = [f"    {argument},\n" for argument in _arguments(node.args)]
    return f"{node.name}(\n{''.join(lines)}){returned}"


def _arguments(arguments: ast.arguments) -> Iterator[str]:
    plain = [None] * (len(arguments.args) - len(arguments.defaults)) + list(arguments.defaults)
    yield from map(_argument, arguments.args, plain)
    if arguments.kwonlyargs:
        yield "*"
    yield from map(_argument, arguments.kwonlyargs, arguments.kw_defaults)
    if arguments.kwarg:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return argument.arg + kind + (f" = {ast.unparse(default)}" if default else "")


def _class(name: str) -> str:
    kind = getattr(quantry, name)
    return f"### quantry.{name}\n\n{_prose(kind)}\n\n{_fields(kind) if is_dataclass(kind) else ''}"


def _prose(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").strip()


def json_page() -> str:
    """Returns the names of what each command prints for programs."""
    sections = [JSON]
    for command, (kind, page) in RESULTS.items():
        explained = _explained(page)
        sections += [f"## quantry {command}\n", f"See also [{command}]({page}).\n", _names(kind, explained)]
        sections += [f"`{inner.__name__}`:\n\n{_names(inner, explained)}" for inner in _inner(kind, {kind})]
    return "\n".join(sections)


def _names(kind: type, explained: Mapping[str, str]) -> str:
    """Returns a table of the JSON names of a dataclass, explained by the comment of a field or by its page."""
    rows = [
        f"| `{name}` | {_json_type(name, hint)} | {meaning or explained.get(name, '')} |"
        for name, hint, meaning in FIELD.findall(_body(kind))
    ]
    return "\n".join(["| name | type | meaning |", "|---|---|---|", *rows, ""])


def _explained(page: str) -> dict[str, str]:
    """Returns what the tables under "JSON" of a page say of a name."""
    path = Path(__file__).parent / "reference" / page
    text = path.read_text(encoding="utf-8").partition("\n## JSON\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    return dict(reversed(rows))  # of a name that comes twice, the first


def _json_type(name: str, hint: str) -> str:
    if name == "running":
        return "boolean"
    for pattern, word in JSON_TYPES.items():
        hint = re.sub(pattern, word, hint)
    return hint


def _fields(kind: type) -> str:
    """Returns a table of the fields of a dataclass; the comment beside a field is its meaning."""
    rows = [
        f"| `{name}` | `{_escaped(hint)}` | {_escaped(meaning)} |"
        for name, hint, meaning in FIELD.findall(_body(kind))
    ]
    return "\n".join(["| name | type | meaning |", "|---|---|---|", *rows, ""])


def _body(kind: type) -> str:
    """Returns the source of a class up to its first method."""
    return re.split(r"\n    (?:def |@)", inspect.getsource(kind))[0]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _inner(kind: type, seen: set[type]) -> Iterator[type]:
    """Yields the dataclasses that the fields of one name, and theirs."""
    names = vars(sys.modules[kind.__module__])
    for _, hint, _ in FIELD.findall(_body(kind)):
        for word in CLASS.findall(hint):
            found = names.get(word)
            if isinstance(found, type) and is_dataclass(found) and found not in seen:
                seen.add(found)
                yield found
                yield from _inner(found, seen)

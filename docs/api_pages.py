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
from quantry.jobs.adapt.result import Adapter
from quantry.jobs.auto.sensitivity import Sensitivity
from quantry.jobs.load.bench import Bench
from quantry.jobs.load.tune import Tuned
from quantry.jobs.run.result import Run
from quantry.jobs.sweep.table import Sweep
from quantry.planning.plan import Plan
from quantry.quantizing.recipe import Preset

FIELD = re.compile(r"^    (\w+): ([^=#]+?)(?: = [^#]+?)?(?:  # (.+))?$", re.MULTILINE)
CLASS = re.compile(r"\b[A-Z]\w+")
JSON_TYPES = {
    r'"': "",
    r"(?:Mapping|dict)\[(?:[^\[\]]|\[[^\]]*\])*\]": "object",
    r"tuple\[(?:float, float|int, int)\]": "list of two numbers",
    r"tuple\[(\w+), \.\.\.\]": r"list of \1",
    r"Literal\[.+\]|LayerKind|GridKind|ScaleType|Path": "string",
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
    "adapt": (Adapter, "adapt.md"),
    "sensitivity": (Sensitivity, "budget.md"),
    "sweep": (Sweep, "sweep.md"),
    "verify": (quantry.Proof, "verify.md"),
    "diff": (quantry.Difference, "verify.md"),
    "bench": (Bench, "bench.md"),
    "tune": (Tuned, "tune.md"),
    "presets": (Preset, "presets.md"),
}
MEANINGS = {  # of names that several results share
    "a": "the first artefact",
    "answer": "what the model answered",
    "answer_tokens": "tokens of an answer, on average",
    "artefact": "the folder of the artefact",
    "b": "the second artefact",
    "bits": "bits of a quantized weight",
    "bits_per_weight": "bits for each weight, everything stored together",
    "blocks": "decoder blocks",
    "budget": "bytes that may be filled, or null",
    "bytes": "of all stored tensors",
    "change": "what to change",
    "chat_template": "whether there is one",
    "completed": "requests that were answered in full",
    "context": "tokens a sequence may reach",
    "context_length": "tokens the model was made for",
    "date": "when it was measured",
    "domains": "the same figures of each text, if there are several",
    "engine": "the engine",
    "error": "of the weights, relative to theirs",
    "errors": "requests that failed",
    "expert_tokens": "tokens that calibration routed to each expert, by block",
    "file": "what the step wrote",
    "findings": "everything that was compared with a limit",
    "format": "how weights are stored",
    "formats": "formats it can be written in, the default first",
    "gate": "the limits that were applied",
    "group": "weights that share a scale, or null",
    "group_size": "weights that share a scale",
    "intervals": "95 %, by bootstrap over windows",
    "kept_tensors": "tensors that stay in 16 bit",
    "kernel": "the kernel that runs it",
    "kind": "its kind",
    "kl": "mean KL divergence in nats",
    "kl_interval": "95 % interval",
    "kl_median": "median of it",
    "kl_p99": "99th percentile of it",
    "kv_cache_bytes": "memory of the KV cache",
    "latency": "milliseconds to the last token",
    "layers": "of this kind",
    "levels": "one for each load",
    "limit": "the limit",
    "load": "what was asked of the server",
    "mean": "the mean",
    "method": "how it is quantized",
    "model": "the model, as it was given",
    "name": "its name",
    "noise_floor": "KL of the 16-bit model from itself",
    "notes": "sentences that a person should read",
    "objection": "why it is not recommended, however fast",
    "ok": "whether the limit is kept",
    "output_tokens_per_second": "tokens of answers in a second",
    "p50": "the median",
    "p95": "95th percentile",
    "p99": "99th percentile",
    "parameters": "weights, tied ones once",
    "path": "the folder that was written",
    "peer": "whether another tool made it",
    "per_device": "bytes on the fullest device",
    "perplexity": "of the artefact",
    "perplexity_interval": "95 % interval",
    "preset": "the preset",
    "problem": "why it could not be made or measured, or null",
    "prompts": "how your prompts were answered",
    "proof": "what verify found",
    "quantized_layers": "layers that were quantized",
    "question": "what the model was asked",
    "reasons": "why it is recommended",
    "reference": "the 16-bit model",
    "reference_perplexity": "of the 16-bit model",
    "requests_per_second": "requests answered in a second",
    "rounder": "how weights are rounded",
    "rows": "one for each preset and peer, in the order asked for",
    "running": "whether the engine still serves",
    "seconds": "how long it took",
    "served": "the same figures as served by the engine, with `engine`, `version` and `gap`",
    "served_kl": "mean KL as served",
    "served_kl_interval": "95 % interval",
    "slo": "limits, as given",
    "source": "the model, as it was given",
    "source_bytes": "of the 16-bit model",
    "steps": "what was done, in order",
    "switch": "what was changed",
    "tasks": "results of tasks",
    "tensors": "stored tensors",
    "text": "the text that was measured on",
    "tokenizer": "the tokenizer's file",
    "top1": "share of positions with the same first token",
    "top1_interval": "95 % interval",
    "tpot": "milliseconds for each further token",
    "transform": "what is done to a block before",
    "ttft": "milliseconds to the first token",
    "url": "where the server answers",
    "use": "what the model is for",
    "value": "the figure",
    "verdict": "`pass` or `fail`",
    "version": "of the engine",
    "versions": "of the programs involved",
    "warnings": "what to look out for",
    "why": "the reason",
    "words": "what was found, as a sentence",
    "worst_tensors": "tensors with the largest error, first",
}
PYTHON = """# Python

Every command is a function of the same name, with the same options. `import quantry` is instant: a function is
imported when it is first used. An error that a user can mend is a `QuantryError`; its text is the line that the command
would print.

```python
import quantry

artefact = quantry.quantize("demo", "build/demo-q4_k_m", preset="gguf-q4_k_m")
proof = quantry.verify(artefact.path, reference="demo", windows=2)
print(proof.verdict, proof.kl)
```
"""
JSON = """# JSON

`--json` prints one object on standard output and nothing else; progress and warnings go to standard error. Names are
stable: a test freezes them, and a change is in the changelog. Sizes are bytes, times are seconds unless a name says
otherwise, rates are shares from 0 to 1. `null` stands for what was not measured or does not apply.

`quantry presets` prints a list of such objects, `quantry matrix` one of tables with `title`, `columns` and `rows`.
[`quantry hardware`](hardware.md#json) and [`quantry serve`](serve.md) are explained on their own pages.
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
    kind: type = getattr(quantry, name)
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
        f"| `{name}` | {_json_type(name, hint)} | {meaning or explained.get(name) or MEANINGS.get(name, '')} |"
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
        f"| `{name}` | `{_escaped(hint)}` | {_escaped(meaning)} |" for name, hint, meaning in FIELD.findall(_body(kind))
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

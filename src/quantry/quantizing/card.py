"""Describes a finished job: quantry.json for programs, the model card for people.

Neither names a clock or a host, so the same job gives the same bytes.
"""

import json
import platform
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantry import __version__
from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import engine_facts, usual
from quantry.engines.contract.options import Serving
from quantry.errors import OutputError
from quantry.models.workspace import Finished
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.quantizing.card_head import card_head
from quantry.quantizing.recipe import AUTO, Preset, Recipe
from quantry.quantizing.tensor_plan import TensorPlan
from quantry.report import domains
from quantry.report.caches import cache_lines
from quantry.report.ci import answered, listed
from quantry.storage import ARTEFACT_FILE
from quantry.types import Anatomy, Artefact

SECTION = ("<!-- proof -->", "<!-- end of proof -->")  # of the model card
MEASURED = "## What was measured\n"
FINISHED = "It was finished by an earlier run of the same job; --overwrite makes it anew."
FIGURES = {  # of a proof -> their names and number formats in the card
    "kl": ("mean KL divergence", ".4f"),
    "kl_median": ("median KL divergence", ".4f"),
    "kl_p99": ("99th percentile of KL divergence", ".3f"),
    "top1": ("same first token", ".1%"),
    "perplexity": ("perplexity", ".3f"),
}


def plan(source: str, out: Path, recipe: Recipe, anatomy: Anatomy, tensors: TensorPlan) -> Artefact:
    """Returns what a job will write, before it starts."""
    return Artefact(
        source=source,
        path=str(out),
        preset=recipe.name,
        format=recipe.format,
        parameters=anatomy.parameters,
        source_bytes=anatomy.bytes,
        bytes=tensors.bytes,
        bits_per_weight=round(8 * tensors.bytes / anatomy.parameters, 4),
        quantized_layers=len(tensors.assignment),
        kept_tensors=sum(fate.startswith(("kept", "cast")) for fate in tensors.fates.values()),
    )


def finish(planned: Artefact, files: Mapping[str, Finished], notes: tuple[str, ...]) -> Artefact:
    """Adds the written files and what was found on the way."""
    return replace(planned, files={name: asdict(done) for name, done in files.items()}, notes=notes)


def as_json(
    artefact: Artefact, recipe: Recipe, tensors: TensorPlan, source: str, facts: Mapping[str, Any] | None = None
) -> str:
    """Returns quantry.json: recipe, versions, hashes, sizes, and the fate of every source tensor.

    `source` is the identity of the checkpoint (models/identity.py), `facts` are further fields.
    """
    unsaid = ("path", "source", *(() if artefact.expert_tokens else ("expert_tokens",)))
    content = {
        "quantry": __version__,
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        **{key: value for key, value in artefact.to_dict().items() if key not in unsaid},
        "source": Path(artefact.source).name,
        "source_identity": source,
        **(facts or {}),
        "recipe": recipe.to_dict(),
        "fates": _fates(tensors),
    }
    return json.dumps(content, indent=2) + "\n"


def finished(planned: Artefact, recipe: Recipe, tensors: TensorPlan, source: str) -> Artefact:
    """Returns the artefact that an earlier run of the same job has finished.

    Raises OutputError, which says what differs, if the folder holds the artefact of another job or a damaged one.
    """
    out = Path(planned.path)
    anew = "choose another output, or make it anew with --overwrite"
    content = read_artefact_file(out, fix=anew, error=OutputError)
    wanted = json.loads(as_json(planned, recipe, tensors, source))
    is_computed = recipe.imatrix == AUTO  # the vectors, and what is chosen by them, are known after the calibration
    for key in ("quantry", "source_identity", "preset", "format", "recipe", *(() if is_computed else ("fates",))):
        before, now = content.get(key), wanted[key]
        if key == "recipe":
            found = {"dynamic": None, **({"imatrix": None} if is_computed else {})}  # by the calibration
            before, now = ({**(facts or {}), **found} for facts in (before, now))
        if before != now:
            raise OutputError(f"{out} exists and was made with another {key.replace('_', ' ')}", fix=anew)
    files = content.get("files") or {}
    sizes = {path.name: path.stat().st_size for path in out.iterdir() if path.is_file()}
    if not files or any(sizes.get(name) != file["bytes"] for name, file in files.items()):
        raise OutputError(f"{out} exists and is damaged", fix=anew)
    experts = {block: tuple(counts) for block, counts in content.get("expert_tokens", {}).items()}
    return replace(planned, files=files, notes=(*content.get("notes", ()), FINISHED), expert_tokens=experts)


def _fates(tensors: TensorPlan) -> dict[str, list[str]]:
    fates: dict[str, list[str]] = {}
    for name, fate in tensors.fates.items():
        fates.setdefault(fate, []).append(name)
    return fates


def as_markdown(
    artefact: Artefact, recipe: Recipe, tensors: TensorPlan, folder: Path, steps: Sequence[str] = ()
) -> str:
    """Returns the model card; `folder` is that of the source, `steps` say where that comes from."""
    counts = Counter(fate.partition(":")[0] for fate in tensors.fates.values())
    rules = "".join(f"| {match} | {what} |\n" for match, what in _rules(recipe))
    name = Path(artefact.source).name
    head, missing = card_head(artefact, recipe, folder)
    made_from = "".join(f"- {step}\n" for step in steps)
    lineage = f"Steps before this one:\n\n{made_from}\n" if steps else ""
    return f"""---
{head}
---
# {name}, {artefact.preset}

{recipe.about}. Made with Quantry {__version__} from {name}; stored as {artefact.format}.

| | |
|---|---|
| parameters | {artefact.parameters:,} |
| size | {artefact.bytes:,} bytes, {artefact.bytes / artefact.source_bytes:.1%} of the original |
| bits a weight | {artefact.bits_per_weight:.3f}, scales and unquantized parts included |
| linear layers quantized | {artefact.quantized_layers} |
| source tensors | {", ".join(f"{count} {fate}" for fate, count in counts.items())} |
{rules}
{"".join(f"{note}{chr(10)}" for note in (*artefact.notes, *missing))}
{lineage}{_serving(artefact, recipe)}
{SECTION[0]}
{MEASURED}
Nothing yet: `quantry verify .` in this folder compares it with the 16-bit model, and writes the figures here.
{SECTION[1]}

`quantry.json` has the recipe, the versions, the SHA-256 of each shard and the fate of every tensor.
"""


def _serving(artefact: Artefact, recipe: Recipe) -> str:
    """Returns the commands that serve the artefact, run in its folder: Quantry's, and that of the usual engine.

    Nothing is said of a format that no engine loads.
    """
    engine = next(iter(usual(artefact.format)), None)
    if engine is None:
        return ""
    facts, files = engine_facts(engine), [name for name in artefact.files if name.endswith(".gguf")]
    serving = Serving(
        model=min(files) if files else ".",
        format=artefact.format,
        engine=engine,
        version=facts.latest,
        platform="cpu" if files else "cuda",
        kv=facts.kv_cache.recipes.get(str(recipe.kv)),
    )
    own = shlex.join(adapter(engine).command(serving).shown())
    return f"## How to serve it\n\nIn this folder:\n\n```sh\nquantry serve .\n{own}\n```\n"


def _rules(recipe: Recipe) -> list[tuple[str, str]]:
    """Returns the rules of a recipe; those of a budget, one for every layer, are counted."""
    rules = [(rule.match, rule.type or (_grouped(rule.preset) if rule.preset else "16 bit")) for rule in recipe.rules]
    if recipe.budget:
        return [(what, f"{count} rules") for what, count in Counter(what for _, what in rules).most_common()]
    return [(f"`{match}`", what) for match, what in rules]


def _grouped(preset: Preset) -> str:
    rows, columns = preset.scheme.weight.block
    return f"{preset.name}, groups of {columns}" if rows == 1 and columns else preset.name


def proven_files(folder: Path, proof: Mapping[str, Any]) -> dict[Path, bytes]:
    """Returns quantry.json and the model card with a proof (types.Proof as a dict) in place of an older one.

    Returns nothing for an artefact without quantry.json, which another tool made. Raises OutputError if a file cannot
    be read.
    """
    note, card = folder / ARTEFACT_FILE, folder / "README.md"
    if not note.is_file():
        return {}
    try:
        content = {**read_artefact_file(folder, error=OutputError), "proof": proof}
        text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    except OSError as error:
        raise OutputError(
            f"cannot read {error.filename or note}: {error.strerror}", fix="check its permissions"
        ) from error
    whole = _with_section(text, proof_section(proof))
    return {note: (json.dumps(content, indent=2) + "\n").encode(), card: whole.encode()}


def proof_section(proof: Mapping[str, Any]) -> str:
    """Returns the proof for people, as Markdown."""
    served: Mapping[str, Any] = proof.get("served") or {}
    verdict = "Passes" if proof.get("verdict") == "pass" else "**Fails**"
    text = proof.get("text") or {}
    columns = ["decoded", f"served by {served.get('engine')} {served.get('version', '')}".strip()][: 1 + bool(served)]
    rows = [
        f"| {words} | {' | '.join(_figure(side, name, style) for side in (proof, served)[: len(columns)])} |"
        for name, (words, style) in FIGURES.items()
    ]
    where = f" on {text['name']} ({text.get('positions', 0):,} positions)" if "name" in text else ""
    parts = [
        f"{MEASURED}\n{verdict} the gate *{proof.get('gate')}*, compared with {proof.get('reference')}{where}.",
        "\n".join([f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|", *rows]),
        f"The reference has a perplexity of {_number(proof, 'reference_perplexity', '.3f')};"
        f" in 16-bit arithmetic it differs from itself by a KL of {_number(proof, 'noise_floor', '.2g')}.",
        "\n".join(domains.markdown(proof.get("domains") or ())),
        _memory(proof.get("memory") or {}),
        _prompts(proof.get("prompts") or {}),
        "\n".join(cache_lines(proof["kv_cache"])) if proof.get("kv_cache") else "",
        "\n".join(f"- {finding['words']}" for finding in proof.get("findings", ()) if not finding.get("ok", True)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _prompts(prompts: Mapping[str, Any]) -> str:
    return "\n".join(listed(answered(prompts), prompts.get("differing", ()))) if prompts else ""


def _with_section(text: str, section: str) -> str:
    begin, end = SECTION
    whole = f"{begin}\n{section}{end}\n"
    older = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}\n?", re.DOTALL)
    if older.search(text):
        return older.sub(lambda _: whole, text, count=1)
    return f"{text.rstrip()}\n\n{whole}" if text.strip() else whole


def _figure(side: Mapping[str, Any], name: str, style: str) -> str:
    """Writes a number with its confidence interval, if it has one."""
    bounds = (side.get("intervals") or {}).get(name)
    reach = f" ({bounds[0]:{style}} to {bounds[1]:{style}})" if bounds else ""
    return _number(side, name, style) + reach


def _number(side: Mapping[str, Any], name: str, style: str) -> str:
    value = side.get(name)
    return "-" if value is None else f"{value:{style}}"


def _memory(memory: Mapping[str, Any]) -> str:
    predicted, measured = memory.get("predicted") or {}, memory.get("measured") or {}
    names = list(dict.fromkeys([*predicted, *measured]))
    if not names:
        return ""
    rows = [f"| {name.replace('_', ' ')} | {_bytes(predicted, name)} | {_bytes(measured, name)} |" for name in names]
    return "\n".join(["| memory, bytes | predicted | measured |", "|---|---|---|", *rows])


def _bytes(side: Mapping[str, Any], name: str) -> str:
    value = side.get(name)
    return f"{value:,}" if isinstance(value, int) else "-"

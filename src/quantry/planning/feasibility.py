"""Can an engine serve a quantized model on a device? Kernel, fallback or refusal, with reason and fix.

What engines can do is data: engines/*.toml, and every.toml beside this file for what holds in every engine. facts.py
gathers the facts of each distinct layer, conditions.py evaluates rows of conditions on them. Refusals come first, row
by row; then every layer takes the first kernel that is for it and whose needs it meets, or is refused with what the
nearest kernels lack; then cautions turn the verdict into a fallback.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal

from quantry.devices import Device
from quantry.engines.contract.catalogue import Capability, Engine, engine_facts, known_version
from quantry.errors import QuantryError
from quantry.models.linears import check_halves
from quantry.planning.conditions import agrees, fill, holds, spell_need
from quantry.planning.deployment import Deployment
from quantry.planning.facts import Facts, device_facts, layer_facts
from quantry.storage import read_data
from quantry.types import Verdict

SHOWN = 3  # kernels named when none fits


def feasible(deployment: Deployment) -> Verdict:
    """Returns the one verdict on a model, its recipe, and the engine and device that are to serve it.

    Raises UnknownNameError if the engine or its version is not known, QuantryError if the tensor parallel size is not
    1 to 1024.
    """
    engine, version = engine_facts(deployment.engine), known_version(deployment.engine, deployment.version)
    recipe, tensor_parallel = deployment.recipe, deployment.tensor_parallel
    assert recipe is not None, "a verdict needs a recipe"
    if type(tensor_parallel) is not int or not 1 <= tensor_parallel <= 1024:
        raise QuantryError(f"tensor parallel size {tensor_parallel} is not 1 to 1024", fix="use 1, 2, 4 or 8")
    packages = {*deployment.packages, *(package.name for package in engine.packages if package.assumed)}
    common = device_facts(deployment.device, tensor_parallel, packages, deployment.features)
    common["as_is"] = deployment.as_is
    try:
        if not deployment.as_is:
            check_halves(deployment.checkpoint)
        layers = [{**common, **facts} for facts in layer_facts(deployment.checkpoint, recipe, tensor_parallel)]
        if deployment.as_is:  # whether Quantry could write it does not matter
            layers = [{**facts, "gguf_problem": ""} for facts in layers]
    except QuantryError as error:
        return Verdict("refusal", None, error.problem, error.fix, "quantry")
    return _judge(engine, version, deployment.device, layers)


def _judge(engine: Engine, version: str, device: Device, layers: Sequence[Facts]) -> Verdict:
    """Applies refusals, kernels, cautions and notes, in this order."""
    refusal = next(_matches(engine, "refusals", version, layers), None)
    if refusal:
        return _verdict("refusal", None, *refusal)
    chosen: dict[str, tuple[Capability, Facts]] = {}
    served: list[Facts] = []
    for facts in layers:
        kernel, missed = _choose(engine, version, facts)
        if kernel is None:
            return _no_kernel(engine, f"{engine.name} {version} on {device.name}", facts, missed)
        chosen.setdefault(str(kernel.name), (kernel, facts))
        served.append({**facts, "kernel": kernel.name})
    doubts = [(row, facts) for row, facts in chosen.values() if row.outcome == "fallback"]
    doubts += list(_matches(engine, "cautions", version, served))[:1]
    names = ", ".join(chosen)
    verdict = _verdict("fallback", names, *doubts[0]) if doubts else _plainly(names, *next(iter(chosen.values())))
    notes = [fill(row.reason, facts) for row, facts in _matches(engine, "notes", version, layers[:1])]
    return replace(verdict, reason="; ".join([verdict.reason, *notes]))


def _matches(engine: Engine, table: str, version: str, layers: Sequence[Facts]) -> Iterator[tuple[Capability, Facts]]:
    """Yields every row of a table that agrees with a layer, with the first such layer."""
    for row in _rows(engine, table, version):
        facts = next((facts for facts in layers if agrees(row.when, facts, engine.cases)), None)
        if facts is not None:
            yield row, facts


def _plainly(names: str, row: Capability, facts: Facts) -> Verdict:
    return _verdict("kernel", names, replace(row, reason=row.reason or f"{{name}} takes {_scheme_words(facts)}"), facts)


def _choose(engine: Engine, version: str, facts: Facts) -> tuple[Capability | None, list[tuple[Capability, list[str]]]]:
    """Returns the first kernel that takes a layer, and the kernels for such layers with the needs it does not meet."""
    missed: list[tuple[Capability, list[str]]] = []
    for row in _rows(engine, "kernels", version):
        if agrees(row.when, facts, engine.cases):
            lacking = [name for name, wanted in row.needs.items() if not holds(name, wanted, facts, engine.cases)]
            if not lacking:
                return row, missed
            missed.append((row, lacking))
    return None, missed


def _rows(engine: Engine, table: str, version: str) -> Iterator[Capability]:
    """Returns the rows of a table that hold in a version; those for every engine come first."""
    everywhere = every_refusal() if table == "refusals" else ()
    return (row for row in (*everywhere, *getattr(engine, table)) if row.holds_in(version))


def _verdict(
    outcome: Literal["kernel", "fallback", "refusal"], kernel: str | None, row: Capability, facts: Facts
) -> Verdict:
    named = facts | {"name": row.name or ""}
    fix = fill(row.fix, named) if row.fix else None
    return Verdict(outcome, kernel, fill(row.reason, named), fix, f"{row.source} ({row.date})")


def _no_kernel(engine: Engine, place: str, facts: Facts, missed: list[tuple[Capability, list[str]]]) -> Verdict:
    """Says what the kernels for such a layer lack, those first that lack least."""
    if not missed:
        release = engine.releases[-1]
        reason = f"{place} has no loader for {_scheme_words(facts)} in {facts['format']}: {facts['layer']}"
        fix = fill(engine.fixes["default"], facts)
        return Verdict("refusal", None, reason, fix, f"{release.source} ({release.date})")
    nearest = sorted(missed, key=lambda pair: len(pair[1]))
    lacks = (f"{row.name} needs {spell_need(row.needs, lacking[0], facts)}" for row, lacking in nearest[:SHOWN])
    row, (first, *_) = nearest[0]
    fix = fill(engine.fixes.get(first, engine.fixes["default"]), facts)
    if first == "packages":
        fix = f"install {row.needs['packages']['has']}, or {fix}"
    reason = f"{place} has no kernel for {facts['layer']} in {_scheme_words(facts)}: {'; '.join(dict.fromkeys(lacks))}"
    return Verdict("refusal", None, reason, fix, f"{row.source} ({row.date})")


def _scheme_words(facts: Facts) -> str:
    inputs = "" if facts["inputs"] == "none" else f" with {facts['inputs']} inputs"
    return f"{facts['words']}{inputs}"


@cache
def every_refusal() -> tuple[Capability, ...]:
    """Returns the refusals that hold in every engine."""
    rows = read_data("quantry.planning", "every.toml")["refusals"]
    return tuple(Capability(**{**row, "date": str(row["date"])}) for row in rows)

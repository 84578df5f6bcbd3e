"""The engine that scores an artefact, by its name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quantry.engines.contract.catalogue import engine_facts, engine_name, verifying
from quantry.errors import QuantryError
from quantry.proof.served.contract import ScoringEngine
from quantry.proof.served.llama_cpp import EmbeddedLlama
from quantry.proof.served.process import PATIENCE, EngineProcess


def scoring_engine(
    name: str, python: Path | None = None, *, options: Mapping[str, Any] | None = None, patience: float = PATIENCE
) -> ScoringEngine:
    """Returns an engine that `verify` can score in; `python` has it installed, `options` are those of its loader.

    Raises UnknownNameError if there is no such engine, and QuantryError for a python of the embedded one.
    """
    name = engine_name(name, verifying())
    facts = verifying()[name]
    if not facts.embedded:
        return EngineProcess(facts, engine_facts(name).folder / facts.scorer, python, options or {}, patience)
    if python is not None:
        raise QuantryError(f"{name} is embedded, so {python} cannot run it", fix="leave --engine-python out")
    return EmbeddedLlama()

"""The commands of an option: quantize, verify, serve, as lists of words that a shell needs no quoting for."""

from dataclasses import dataclass, replace
from pathlib import Path

from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import engine_facts
from quantry.engines.contract.options import Serving
from quantry.quantizing.recipe import CAST, Preset, presets


@dataclass(frozen=True, slots=True)
class PlannedArtefact:
    """A quantized model before it is made, and where its files will be."""

    model: str  # what `quantry quantize` opens: a folder, a hub id or demo
    preset: Preset
    format: str
    shards: int = 1  # files of a GGUF
    as_is: bool = False  # the model is served as it is published

    @property
    def folder(self) -> str:
        """The folder that the quantized model goes to."""
        suffix = "" if self.format == self.preset.formats[0] else f"-{self.format}"
        return f"{plain_name(self.model)}-{self.preset.name}{suffix}"

    @property
    def served(self) -> str:
        """What the engine is given: the folder, or the first file of a GGUF."""
        if self.as_is:
            return self.model
        if self.format != "gguf":
            return self.folder
        assert self.preset.file_type is not None
        stem = f"{self.folder}/{plain_name(self.model)}-{self.preset.file_type.upper()}"
        return f"{stem}.gguf" if self.shards == 1 else f"{stem}-00001-of-{self.shards:05d}.gguf"


def plain_name(model: str) -> str:
    """Returns the last part of a model's path or hub id, as `quantry quantize` uses it for a file."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


def commands(artefact: PlannedArtefact, serving: Serving, gate: str = "general") -> dict[str, list[str]]:
    """Returns the commands in the order in which they are run; of a model that is served as it is, the last only.

    Raises UnknownNameError if the engine's version lacks a flag or a value that the serving needs.
    """
    serve = serve_words(serving)
    if artefact.as_is:
        return {"serve": serve}
    verify = ["quantry", "verify", artefact.folder, "--reference", artefact.model, "--gate", gate]
    return {
        "quantize": _quantize(artefact),
        "verify": [*verify, "--engine", serving.engine] if engine_facts(serving.engine).verify else verify,
        "serve": serve,
    }


def serve_words(serving: Serving) -> list[str]:
    """Returns the engine's own command, with what a plan sets for it."""
    return adapter(serving.engine).command(_planned_options(serving)).shown()


def _quantize(artefact: PlannedArtefact) -> list[str]:
    """Returns `quantry quantize` with format and group only where they are not the preset's own."""
    preset = artefact.preset
    words = ["quantry", "quantize", artefact.model, "-o", artefact.folder, "--preset", preset.name]
    if artefact.format not in (CAST, preset.formats[0]):
        words += ["--format", artefact.format]
    if preset.scheme.weight.block != presets()[preset.name].scheme.weight.block:
        words += ["--group", str(preset.scheme.weight.block[1])]
    return words


def _planned_options(serving: Serving) -> Serving:
    """Drops the options that a plan does not set for this engine."""
    facts = engine_facts(serving.engine).plan
    options = facts.options
    return replace(
        serving,
        tensor_parallel=1 if facts.spreads_unasked else serving.tensor_parallel,
        pipeline_parallel=1 if facts.spreads_unasked else serving.pipeline_parallel,
        replicas=serving.replicas if facts.copies else 1,
        utilization=serving.utilization if "utilization" in options else None,
        cache_gib=serving.cache_gib if "cache_gib" in options and serving.platform == "cpu" else None,
        prefix_cache=serving.prefix_cache if "prefix_cache" in options else None,
        dtype=serving.dtype if "dtype" in options else None,
    )

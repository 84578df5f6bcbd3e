"""The table of the README against other tools, from benchmarks/results/*.json and nothing else."""

from typing import Any

from benchmark_tables import result

HEAD = (
    "| job | size, MiB | KL, theirs | KL, same method | KL, best of Quantry | seconds | peak memory, MiB |\n"
    "|---|---|---|---|---|---|---|"
)
NOTE = """KL divergence from the 16-bit model in nats per token (lower is better): SmolLM2-135M, 8 windows of 512 tokens
of WikiText-2. "Best of Quantry" is `--preset auto` with the other tool's size as its budget; it measures
every layer first, and takes longer and more memory than the row says. Seconds and memory read *theirs →
Quantry*, with the same method, on 2 CPU cores; rows marked * time a 1B shape, the others SmolLM2-135M with
calibration from nothing. Files: [calibrated_quality](benchmarks/results/calibrated_quality.json),
[bit_budget](benchmarks/results/bit_budget.json), [gguf_peers](benchmarks/results/gguf_peers.json),
[quantize_peers](benchmarks/results/quantize_peers.json); [how they were
measured](docs/explanation/measurements.md)."""
OLLAMA = "| Ollama: not measured, it could not be installed there | | | | | | |"

REFERENCE = "SmolLM2-135M"  # the model of all figures here


def peer_table() -> str:
    """Returns the table with its note."""
    rows = [_plain_gguf(), _importance(), _fp8(), *map(_gptq, ("llmcompressor", "gptqmodel")), OLLAMA]
    return "\n".join([HEAD, *rows, "", NOTE, ""])


def _quality(name: str) -> dict[str, Any]:
    """Returns a row of calibrated_quality.json."""
    rows = result("calibrated_quality")["models"]["SmolLM2-135M"]["rows"]
    row: dict[str, Any] = next(row for row in rows if row["name"] == name)
    return row


def _auto(part: str, kind: str) -> float:
    """Returns the KL of preset auto within the bytes of a kind."""
    value: float = result("bit_budget")["models"][REFERENCE]["parts"][part]["rows"][f"{kind}-auto"]["kl"]
    return value


def _plain_gguf() -> str:
    theirs, ours, times = _quality("llamacpp/Q4_K_M-nearest"), _quality("Q4_K_M-nearest"), result("gguf_peers")
    steps = times["convert"], times["llama-quantize"]
    seconds = sum(step["seconds"] for step in steps), times["quantry"]["seconds"]
    memory = max(step["peak_anonymous_bytes"] for step in steps), times["quantry"]["peak_anonymous_bytes"]
    return _row("llama.cpp: Q4_K_M *", theirs, ours, None, seconds, memory)


def _importance() -> str:
    theirs, ours = _quality("llamacpp/Q4_K_M-imatrix"), _quality("Q4_K_M-imatrix")
    return _calibrated("llama.cpp: Q4_K_M, importance matrix", theirs, ours, _auto("gguf", "Q4_K_M"))


def _fp8() -> str:
    theirs, ours = _quality("llmcompressor/fp8-dynamic-nearest"), _quality("fp8-dynamic-nearest")
    times = result("quantize_peers")["fp8"]
    sides = times["llm-compressor"], times["quantry"]
    seconds, memory = (tuple(side[key] for side in sides) for key in ("seconds", "peak_anonymous_bytes"))
    return _row("llm-compressor: FP8 *", theirs, ours, None, seconds, memory)


def _gptq(peer: str) -> str:
    name = {"llmcompressor": "llm-compressor", "gptqmodel": "GPTQModel"}[peer]
    theirs, ours = _quality(f"{peer}/w4-g64-gptq"), _quality("w4-g64-gptq")
    return _calibrated(f"{name}: 4-bit GPTQ, groups of 64", theirs, ours, _auto("folder", "w4-g64"))


def _calibrated(job: str, theirs: dict[str, Any], ours: dict[str, Any], best: float) -> str:
    assert not any(row.get("busy") for row in (theirs, ours)), f"{job}: seconds of a busy machine"
    seconds, memory = ((theirs[key], ours[key]) for key in ("seconds", "peak_resident_bytes"))
    return _row(job, theirs, ours, best, seconds, memory)


def _row(
    job: str,
    theirs: dict[str, Any],
    ours: dict[str, Any],
    best: float | None,
    seconds: tuple[float, ...],
    memory: tuple[float, ...],
) -> str:
    sizes = dict.fromkeys(f"{row['bytes'] / 2**20:.1f}" for row in (theirs, ours))
    cells = (
        job,
        " → ".join(sizes),
        f"{theirs['kl']:.3f}",
        f"{ours['kl']:.3f}",
        f"**{best:.3f}**" if best else "",
        " → ".join(f"{value:.0f}" if value >= 20 else f"{value:.1f}" for value in seconds),
        " → ".join(f"{value / 2**20:,.0f}" for value in memory),
    )
    return f"| {' | '.join(cells)} |"

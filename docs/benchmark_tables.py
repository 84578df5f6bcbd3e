"""Tables of the explanations, from benchmarks/results/*.json and nothing else."""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
READINGS = ("gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q3_k_m", "w3a16", "w2a16")


def result(name: str) -> dict[str, Any]:
    """Returns a result of a benchmark."""
    content: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return content


def speed_table() -> str:
    """Returns what presets gain over bf16 at 1, 16 and 64 requests at once."""
    rows = result("gpu_serving")["speed"]["rows"]
    batches = list(rows["bf16"]["batches"])
    head = "".join(f" {batch} at once |" for batch in batches)
    lines = [f"| preset | weights, GiB |{head} first token, {batches[-1]} at once |", "|---" * (len(batches) + 3) + "|"]
    for name, row in rows.items():
        speeds = (row["batches"][batch] for batch in batches)
        cells = [f"{one['tokens_per_s']:,.0f} tok/s ({one['against_bf16']:.2f} x)" for one in speeds]
        first = f"{row['batches'][batches[-1]]['first_ms']:,.0f} ms"
        weights = f"{row['weights_bytes'] / 2**30:.1f}"
        lines.append(f"| {' | '.join([f'`{name}`', weights, *cells, first])} |")
    return "\n".join([*lines, ""])


def presets_table() -> str:
    """Returns what every preset lost, as the bytes say and as served."""
    head = "| preset | by | bytes | KL decoded | KL served | engine | same first token | perplexity |"
    rows = [_preset(row) for row in result("verify_presets")["rows"]]
    return "\n".join([head, "|---" * 8 + "|", *rows, ""])


def readings_table() -> str:
    """Returns what a KL goes with, for a few presets of one model."""
    rows = {row["preset"]: row for row in result("verify_presets")["rows"] if row["by"] == "quantry"}
    chosen = [rows[name] for name in READINGS]
    head = f"| preset | mean KL | same first token | perplexity ({chosen[0]['reference_perplexity']:.1f} in 16 bit) |"
    cells = [
        f"| `{row['preset']}` | {_kl(row['kl'])} | {row['top1']:.1%} | {row['perplexity']:,.1f} |" for row in chosen
    ]
    return "\n".join([head, "|---" * 4 + "|", *cells, ""])


def caches_table() -> str:
    """Returns what KV caches lost at length, by position, beside llama.cpp's own figure of the second half."""
    rows = [row for row in result("kv_length")["rows"] if "caches" in row]
    heads = ("model", "context", "KV cache", "mean KL", "by tokens in the cache", "same first token")
    lines = [f"| {' | '.join(heads)} | llama-perplexity, last bin |", "|---" * 7 + "|"]
    for row in rows:
        for name, found in row["caches"].items():
            bins = ", ".join(f"to {part['end']:,}: {_kl(part['kl'])}" for part in found["bins"])
            peer = (row["llama_perplexity"] or {"caches": {}})["caches"].get(name, {})
            cells = [row["model"], f"{row['context']:,}", f"`{name}`", _kl(found["kl"]), bins, f"{found['top1']:.1%}"]
            lines.append(f"| {' | '.join([*cells, _kl(peer.get('kl'))])} |")
    return "\n".join([*lines, ""])


def _preset(row: dict[str, Any]) -> str:
    if "kl" not in row:
        return f"| `{row['preset']}` | {row['by']} | | refused | | | | |"
    served = row.get("served") or {}
    cells = [f"`{row['preset']}`", row["by"], f"{row['bytes']:,}", _kl(row["kl"]), _kl(served.get("kl")), row["engine"]]
    return f"| {' | '.join(cells)} | {row['top1']:.3f} | {row['perplexity']:.2f} |"


def _kl(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if abs(value) < 1e-8 else f"{value:.4f}" if value >= 1e-4 else f"{value:.1e}"

"""What calibrated_quality.py makes of its rows: ratios to peers, the best of each kind, tables, one file of models."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

OURS = "quantry"
Figures = dict[str, Any]


def part(file: Path, name: str) -> Figures | None:
    """What a file says of a model, if it does."""
    models = json.loads(file.read_text())["models"] if file.exists() else {}
    found: Figures | None = models.get(name)
    return found


def merged(file: Path, name: str, record: Figures) -> Figures:
    """A file with what is known now of one model, and the KL of each row with a column for every model."""
    models = json.loads(file.read_text())["models"] if file.exists() else {}
    models[name] = record
    return {"benchmark": "calibrated_quality", "kl": columns(models), "models": models}


def columns(models: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """By row and model."""
    found: dict[str, dict[str, float]] = {}
    for name, record in models.items():
        for row in record["rows"]:
            if "failed" not in row:
                found.setdefault(row["name"], {})[name] = row["kl"]
    return found


def against(rows: Sequence[Figures]) -> dict[str, Figures]:
    """Ours through a peer's, the same method at the same bits: below 1 is better than the peer."""
    good = {row["name"]: row for row in rows if "failed" not in row}
    found: dict[str, Figures] = {}
    for row in good.values():
        ours = good.get(f"{row['kind']}-{row['method']}")
        if row["by"] == OURS or ours is None:
            continue
        keys = ("kl", "seconds", "peak_resident_bytes", "bytes")
        busy = ours.get("busy") or row.get("busy")
        fair = not busy and (ours.get("cold") or not ours["calibrated"])
        found[row["name"]] = {key: round(ours[key] / row[key], 4) for key in keys if fair or key != "seconds"}
        if row["served"] and ours["served"]:
            found[row["name"]]["served_kl"] = round(ours["served"]["kl"] / row["served"]["kl"], 4)
    return found


def best(rows: Sequence[Figures]) -> dict[str, Figures]:
    """For each kind, the least KL of ours and of the peers, and how they compare."""
    found: dict[str, Figures] = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        mine = _least(rows, kind, lambda row: row["by"] == OURS)
        other = _least(rows, kind, lambda row: row["by"] != OURS)
        if mine and other:
            found[kind] = {
                "ours": mine["name"],
                "peer": other["name"],
                "kl": round(mine["kl"] / other["kl"], 4),
                "bytes": round(mine["bytes"] / other["bytes"], 4),
            }
    return found


def _least(rows: Sequence[Figures], kind: str, which: Callable[[Figures], bool]) -> Figures | None:
    good = [row for row in rows if row["kind"] == kind and "failed" not in row and which(row)]
    return min(good, key=lambda row: row["kl"], default=None)


def line(row: Figures) -> str:
    if "failed" in row:
        return f"{row['name']:32} failed: {row['failed']}"
    return f"{row['name']:32} KL {row['kl']:.4f} top1 {row['top1']:.3f} ppl {row['perplexity']:.2f} {row['seconds']} s"


def markdown(record: Figures) -> str:
    """The rows as a table, then the best of each kind."""
    lines = [
        "| row | MB | bits a weight | seconds | calibration | x floor | GiB resident | KL (95 %) | served KL "
        "| same top 1 | perplexity | ours / it: KL, time |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_cells(row, record["against"].get(row["name"])) for row in record["rows"]]
    lines += ["", "| kind | best of ours | best peer | KL | bytes |", "|---|---|---|---|---|"]
    lines += [
        f"| {kind} | {one['ours']} | {one['peer']} | {one['kl']:.2f} | {one['bytes']:.3f} |"
        for kind, one in record["best"].items()
    ]
    return "\n".join(lines)


def _cells(row: Figures, ratio: Figures | None) -> str:
    if "failed" in row:
        return f"| {row['name']} | failed: {row['failed'].replace('|', '/')} |" + " |" * 10
    low, high = row["interval"]
    calibration = row["parts"].get("calibration")
    cells = [
        row["name"],
        f"{row['bytes'] / 1e6:.1f}",
        f"{row['bits_per_weight']:.2f}",
        f"{row['seconds']:.1f}",
        "" if calibration is None else f"{calibration:.1f}",
        f"{row['floor']['times']:.1f}" if row["floor"] else "",
        f"{row['peak_resident_bytes'] / 2**30:.2f}",
        f"{row['kl']:.4f} ({low:.4f} to {high:.4f})",
        f"{row['served']['kl']:.4f}" if row["served"] else "",
        f"{row['top1']:.3f}",
        f"{row['perplexity']:.2f}",
        ", ".join(f"{ratio[key]:.2f}" for key in ("kl", "seconds") if key in ratio) if ratio else "",
    ]
    return f"| {' | '.join(cells)} |"

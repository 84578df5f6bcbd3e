"""Writes plan_cases.json and plan_shown.json: what the plan answers now. Run it when the answers are meant to change."""

import json
from pathlib import Path
from typing import Any

from quantry.planning.matrices import cases
from quantry.planning.plan import Plan, plan

FOLDER = Path(__file__).parent
GIB = 1 << 30
SHOWN: dict[str, dict[str, Any]] = {  # what the issue asks to be shown
    "70B on two RTX 3090": {"model": "llama-3.1-70b", "gpu": "2x RTX 3090", "context": 4096},
    "70B on an H100, throughput": {"model": "llama-3.1-70b", "gpu": "H100", "use": "high-throughput"},
    "70B on two H100, throughput": {"model": "llama-3.1-70b", "gpu": "2x H100", "use": "high-throughput"},
    "70B on a T4": {"model": "llama-3.1-70b", "gpu": "T4"},
    "70B on an M2": {"model": "llama-3.1-70b", "gpu": "M2 16GB"},
    "8B on an M2": {"model": "llama-3.1-8b", "gpu": "M2 16GB"},
    "vision": {"model": "qwen2.5-vl-7b", "gpu": "RTX 3090"},
    "experts": {"model": "mixtral-8x7b", "gpu": "A100 80GB"},
    "edge": {"model": "llama-3.1-8b", "gpu": "Jetson Orin 8GB"},
    "medical": {"model": "llama-3.1-8b", "gpu": "A10G", "use": "medical"},
    "405B on a T4": {"model": "llama-3.1-405b", "gpu": "T4"},
}


def first(found: Plan) -> dict[str, Any]:
    """The essential fields of the first option, or what is nearest; speeds are left out, they are fitted anew."""
    if not found.options:
        return {"nearest": [f"{near.what}: {near.change}, {near.preset} in {near.engine}" for near in found.nearest]}
    one = found.options[0]
    return {
        "preset": one.preset,
        "format": one.format,
        "engine": one.engine,
        "quality": one.quality,
        "kv_cache_type": one.kv_cache_type,
        "layout": one.layout,
        "commands": one.commands,
        "gib": round(one.memory["total"] / GIB),
        "warnings": len(one.warnings),
    }


def choice(found: Plan) -> str:
    """What becomes of the weights, where, and how it is spread; presets of one scheme may change places."""
    one = found.options[0]
    cut = (
        f", {one.layout['replicas']} x {one.layout['devices'] // one.layout['replicas']}"
        if one.layout["devices"] > 1
        else ""
    )
    return f"{one.scheme} in {one.engine}, cache {one.kv_cache_type}{cut}"


def main() -> None:
    shown = {name: {"ask": ask, **first(plan(**ask))} for name, ask in SHOWN.items()}
    (FOLDER / "plan_shown.json").write_text(json.dumps(shown, indent=2) + "\n", encoding="utf-8")
    chosen = {case["id"]: choice(plan(**case["ask"])) for case in cases()}
    (FOLDER / "plan_cases.json").write_text(json.dumps(chosen, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""Damages thousands of files by seeds and counts how commands end on them (tests/hostile_inputs.py)."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

from campaign.workers import Workers
from hostile_inputs import KINDS, MEMORY_USED, Ending, run

CLASSES = ("signal", "bug", "hang", "memory", "other")


def hostile(cases: int, first: int, intact: Path, workers: Workers) -> dict[str, Any]:
    """Runs cases of all kinds, quick ones more often, and returns the counts; kind and seed of a fault repeat it."""
    codes: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    faults = Counter(dict.fromkeys(CLASSES, 0))
    seen = []

    def damage(number: int, place: Path) -> tuple[int, Ending]:
        return number, run(KINDS[_kind(number)], number, intact, place)

    for number, ending in workers.each(range(first, first + cases), damage):
        name = _kind(number)
        codes[str(ending.code)] += 1
        kinds[name] += 1
        fault = ending.fault or ("" if ending.memory < MEMORY_USED else f"{ending.memory:,} bytes of memory")
        if fault:
            faults[_class(ending.code, ending.fault)] += 1
            seen.append({"kind": name, "seed": number, "command": ending.words[0], "fault": fault[-300:]})
            print(json.dumps(seen[-1]), flush=True)
    done = sum(kinds.values())
    return {"cases": done, "kinds": dict(kinds), "codes": dict(codes), "faults": dict(faults), "seen": seen}


def _kind(number: int) -> str:
    return random.Random(f"kind {number}").choices(list(KINDS), [kind.weight for kind in KINDS.values()])[0]


def _class(code: int | None, fault: str) -> str:
    if code is None:
        return "hang"
    return "memory" if not fault else "signal" if code < 0 else "bug" if code == 70 else "other"

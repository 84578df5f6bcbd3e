"""Damages thousands of files by seeds and counts how commands end on them (tests/hostile_inputs.py says which files).

    PYTHONPATH=tests python benchmarks/campaign/hostile.py --cases 20000 -o benchmarks/results/campaign.json

Zero of every count in `faults` is what is asked for; `seen` names kind and seed of each, which repeat it.
"""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from hostile_inputs import KINDS, MEMORY_USED, make_intact, run


def campaign(cases: int, first: int, names: list[str], folder: Path) -> dict[str, Any]:
    """Runs the cases of every kind in turn, and returns the counts."""
    (folder / "intact").mkdir()
    make_intact(folder / "intact")
    codes: Counter[str] = Counter()
    faults: Counter[str] = Counter({"signal": 0, "bug": 0, "hang": 0, "memory": 0, "other": 0})
    seen = []
    for number in range(first, first + cases):
        name = names[number % len(names)]
        ending = run(KINDS[name], number, folder / "intact", folder / "case")
        codes[str(ending.code)] += 1
        fault = ending.fault or ("" if ending.memory < MEMORY_USED else f"{ending.memory:,} bytes of memory")
        if fault:
            faults[_sort(ending.code, ending.fault)] += 1
            seen.append({"kind": name, "seed": number, "command": ending.words[0], "fault": fault[:300]})
            print(json.dumps(seen[-1]), flush=True)
    return {"cases": cases, "codes": dict(codes), "faults": dict(faults), "seen": seen}


def _sort(code: int | None, fault: str) -> str:
    if code is None:
        return "hang"
    return "memory" if not fault else "signal" if code < 0 else "bug" if code == 70 else "other"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        counts = campaign(asked.cases, asked.first, asked.kinds.split(","), Path(folder))
    if asked.output:
        known = json.loads(asked.output.read_text()) if asked.output.is_file() else {}
        asked.output.write_text(json.dumps({**known, "hostile inputs": counts}, indent=1) + "\n")
    print(json.dumps(counts))
    sys.exit(bool(counts["seen"]))


if __name__ == "__main__":
    main()

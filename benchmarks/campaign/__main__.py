"""The worst day, by the thousand: kills, hostile inputs, full disks, little memory, shared outputs, a loaded server.

    PYTHONPATH=tests:benchmarks python -m campaign [PARTS] [--kills 200] [--cases 20000] [--workers 2] [--first 0]

Each part can be run alone, with smaller numbers, and again: counts of one commit, machine and set of versions are added
up in benchmarks/results/campaign.json. Zero of every count in `faults` is the goal; `seen` names the seed of each.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import quantry
from campaign.crowd import crowd
from campaign.hostile import hostile
from campaign.jobs import DEMO, JOBS
from campaign.kills import kills
from campaign.limits import disks, memories
from campaign.sharing import engines, sharing
from campaign.workers import Workers
from hostile_inputs import make_intact

RESULTS = Path(__file__).parents[1] / "results" / "campaign.json"
PACKAGES = ("quantry", "torch", "transformers", "tokenizers", "xllamacpp", "guidellm")


def main() -> None:
    asked = _arguments()
    faults = 0
    os.environ["HF_HUB_OFFLINE"] = "1"
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "intact").mkdir()
        make_intact(folder / "intact")
        quantry.quantize("demo", folder / "intact" / DEMO, preset="gguf-q8_0")
        workers = Workers(folder / "cases", asked.workers, asked.seconds)
        for part, run in _parts(asked, folder / "intact", workers).items():
            if part in asked.parts or not asked.parts:
                counts = run()
                faults += sum(counts["faults"].values())
                _add(asked.output, part, counts, asked.commit)
                print(json.dumps({part: counts}), flush=True)
    sys.exit(bool(faults))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="campaign", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "parts", nargs="*", help="kills, hostile, disks, memories, sharing, engines, crowd; all if none"
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cases", type=int, default=20_000, help="hostile inputs")
    parser.add_argument("--rounds", type=int, default=10, help="of sharing and of killed engines")
    parser.add_argument("--jobs", default=",".join(JOBS), help="of disks and memories")
    parser.add_argument("--minutes", type=float, default=10, help="of load on a server")
    parser.add_argument("--workers", type=int, default=1, help="cases at once")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case begins")
    parser.add_argument("--commit", default=_commit(), help="of Quantry, where it is no checkout")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    return parser.parse_args()


def _parts(asked: argparse.Namespace, intact: Path, workers: Workers) -> dict[str, Callable[[], dict[str, Any]]]:
    first = asked.first
    return {
        "kills": lambda: kills(asked.kills, first, intact, workers),
        "hostile": lambda: hostile(asked.cases, first, intact, workers),
        "disks": lambda: disks(asked.jobs.split(","), intact, workers),
        "memories": lambda: memories(asked.jobs.split(","), intact, workers),
        "sharing": lambda: sharing(asked.rounds, first, intact, workers),
        "engines": lambda: engines(asked.rounds, first, intact, workers),
        "crowd": lambda: crowd(asked.minutes, first, intact, workers.folder),
    }


def _commit() -> str:
    words = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _add(file: Path, part: str, counts: dict[str, Any], commit: str) -> None:
    """Adds counts to those of the same part, if they are of the same versions; replaces them otherwise."""
    known = json.loads(file.read_text()) if file.is_file() else {}
    versions = {name: version(name) for name in PACKAGES} | {"python": platform.python_version(), "commit": commit}
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    before = known.get(part, {})
    same = before.get("versions") == versions and before.get("machine") == machine
    total = _sum({key: before[key] for key in counts if key in before} if same else {}, counts)
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    known[part] = {"date": date, "machine": machine, "versions": versions, **total}
    file.write_text(json.dumps(known, indent=1) + "\n")


def _sum(old: Any, new: Any) -> Any:
    """Adds numbers of two counts, name by name, and joins lists; the largest is kept of what is a peak."""
    if isinstance(new, dict):
        known = old if isinstance(old, dict) else {}
        return {
            key: max(known.get(key, 0), new[key])
            if "peak" in key and key in new
            else _sum(known.get(key), new.get(key))
            for key in [*known, *(key for key in new if key not in known)]
        }
    if isinstance(new, list):
        return [*(old or []), *new]
    if isinstance(new, int | float) and not isinstance(new, bool):
        return new + (old or 0)
    return old if new is None else new


if __name__ == "__main__":
    main()

"""Two load tests side by side: the levels that both have, and what is different about the loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from quantry.storage.reading import read_json

if TYPE_CHECKING:
    from quantry.jobs.load.bench import Bench
    from quantry.jobs.load.results import Level

NOTE = "bench.json"
SAME = ("prompt", "answer", "shared_prefix", "chat", "dataset")  # what makes two loads comparable


class LevelNote(TypedDict, total=False):
    """What is read back of a level."""

    name: str
    output_tokens_per_second: float
    ttft: dict[str, float] | None
    tpot: dict[str, float] | None


class BenchNote(TypedDict):
    """What is read back of bench.json."""

    model: str
    date: str
    load: dict[str, Any]
    levels: list[LevelNote]


@dataclass(frozen=True, slots=True)
class Change:
    """A level now against then; above 1 is more tokens, or more time. Field names are the JSON names."""

    level: str
    tokens_per_second: float | None
    ttft_p50: float | None
    tpot_p50: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A load test against an earlier one. Field names are the JSON names."""

    file: str
    model: str
    date: str
    changes: tuple[Change, ...]
    differences: tuple[str, ...]  # of the loads, in words


def read_earlier(path: Path) -> tuple[Path, Mapping[str, Any]]:
    """Reads bench.json, or that of a folder. Raises OutputError if it is damaged."""
    file = path.expanduser()
    file = file / NOTE if file.is_dir() else file
    return file, read_json(file, BenchNote, fix="give a folder or a bench.json that quantry bench -o wrote")


def compare(result: "Bench", earlier: tuple[Path, Mapping[str, Any]]) -> Comparison:
    """Compares the levels of two load tests that have the same name."""
    file, then = earlier
    before = {level["name"]: level for level in then["levels"] if "name" in level}
    changes = tuple(_change(level, before[level.name]) for level in result.levels if level.name in before)
    load = then["load"]
    differences = tuple(
        f"{name.replace('_', ' ')} is {result.load.get(name)} now, and was {load.get(name)}"
        for name in SAME
        if result.load.get(name) != load.get(name)
    )
    return Comparison(file.name, str(then["model"]), str(then["date"]), changes, differences)


def _change(level: "Level", before: Mapping[str, Any]) -> Change:
    times = (_ratio(getattr(level, name), before.get(name)) for name in ("ttft", "tpot"))
    return Change(level.name, _share(level.output_tokens_per_second, before.get("output_tokens_per_second")), *times)


def _ratio(now: Any, then: Mapping[str, float] | None) -> float | None:
    return _share(now.p50, then.get("p50")) if now and then else None


def _share(now: float, then: float | None) -> float | None:
    return now / then if then else None

"""The content of a report as plain data: field names are the JSON names.

Everything is checked here, once, whether it comes from a program or from a file, so that drawing need not: an error
names the place of a value that is not a finite number, or of a share above 1.
"""

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, Literal

from quantry.errors import QuantryError

Interval = tuple[float, float]
BlockMap = Mapping[str, Mapping[str, float]]  # block -> module -> value, for the modules that a block has

LARGEST = 1 << 60  # bytes; more is a mistake, and no axis shows it
FILES = 500  # of one report: nobody reads a plot of more
PARTS = 24  # of memory
CELLS = 50_000  # of one map: engines fuse experts, and the largest models have some 2,000


@dataclass(frozen=True, slots=True)
class FileRow:
    """One file: its size, and its losses."""

    name: str
    bytes: int
    bits_per_weight: float | None = None
    kl: float | None = None  # of the weights decoded from its bytes
    kl_interval: Interval | None = None
    served_kl: float | None = None  # measured in its engine
    served_kl_interval: Interval | None = None
    top1: float | None = None
    top1_interval: Interval | None = None
    perplexity: float | None = None
    perplexity_interval: Interval | None = None
    peer: bool = False  # made by another tool
    chosen: bool = False  # the file that the report is about
    verdict: Literal["pass", "fail"] | None = None  # of the gate; None if it was not judged

    def __post_init__(self) -> None:
        _text(self.name, "the name of a row")
        where = f"{self.name[:60]!r}"
        _count(self.bytes, f"bytes of {where}")
        for name in ("bits_per_weight", "kl", "served_kl", "top1", "perplexity"):
            if (value := getattr(self, name)) is not None:
                _number(value, f"{name} of {where}")
        for name in ("kl", "served_kl", "top1", "perplexity"):
            _interval(getattr(self, f"{name}_interval"), getattr(self, name), f"{name}_interval of {where}")
        if self.verdict not in (None, "pass", "fail"):
            raise _wrong(f"the verdict of {where} is {str(self.verdict)[:40]!r}", "give pass, fail or nothing")
        if self.top1 is not None and not 0 <= self.top1 <= 1:
            raise _wrong(f"top1 of {where} is {self.top1}, not between 0 and 1", "give it as a share, 0.93 for 93 %")
        if self.perplexity is not None and self.perplexity < 1:
            raise _wrong(f"perplexity of {where} is {self.perplexity}, below 1", "give exp(mean loss), not the loss")

    @property
    def role(self) -> str:
        """The role of its colour: ours, or another tool's."""
        return "peer" if self.peer else "ours"

    @property
    def judged(self) -> float | None:
        """The KL that counts: as served if it was measured in an engine."""
        return self.kl if self.served_kl is None else self.served_kl

    @property
    def judged_interval(self) -> Interval | None:
        return self.kl_interval if self.served_kl is None else self.served_kl_interval


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by part (weights, kv_cache, activations, overhead, ...), and the capacity of the device."""

    predicted: Mapping[str, int] = field(default_factory=dict)
    measured: Mapping[str, int] = field(default_factory=dict)
    capacity: int | None = None
    device: str = ""

    @property
    def sides(self) -> list[tuple[str, Mapping[str, int]]]:
        """The sides that have parts: predicted, measured."""
        return [(side, parts) for side in ("predicted", "measured") if (parts := getattr(self, side))]

    def __post_init__(self) -> None:
        for side, parts in (("predicted", self.predicted), ("measured", self.measured)):
            pairs = _pairs(parts, f"memory.{side}")
            if len(pairs) > PARTS:
                raise _wrong(f"memory.{side} has {len(pairs)} parts, more than {PARTS}", "sum some of them up")
            for name, value in pairs:
                _count(value, f"{name[:60]!r} of memory.{side}")
        if self.capacity is not None:
            _count(self.capacity, "memory.capacity")
        _text(self.device, "memory.device")


@dataclass(frozen=True, slots=True)
class Content:
    """Everything that a page can show. It has a date only if one is given, so the same job gives the same bytes."""

    title: str
    model: str = ""
    date: str = ""
    rows: tuple[FileRow, ...] = ()
    noise_floor: float | None = None  # the KL of the 16-bit model against itself in 16-bit arithmetic
    reference_perplexity: float | None = None
    gate: str = ""
    verdict: Literal["", "pass", "fail"] = ""
    findings: tuple[Mapping[str, Any], ...] = ()  # as a proof has them: words, ok, warning, fix
    answered: str = ""  # how many prompts were answered alike, in words
    differing: tuple[str, ...] = ()  # a line for each of the first prompts that were not
    sensitivity: BlockMap = field(default_factory=dict)  # predicted damage
    outliers: BlockMap = field(default_factory=dict)  # the largest channel over the median one
    bits: BlockMap = field(default_factory=dict)  # bits a weight that were chosen
    memory: Memory | None = None
    serve: str = ""  # the command of Quantry
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)  # recipe, hashes, calibration text
    engine_command: str = ""  # the same in the engine's own words
    domains: tuple[Mapping[str, Any], ...] = ()  # as a proof has them: the figures of each text
    caches: BlockMap = field(default_factory=dict)  # bin of positions -> type of KV cache -> mean KL
    cache_figures: BlockMap = field(default_factory=dict)  # type -> kl, kl_low, kl_high, top1, ... -> value
    cache_words: str = ""  # what was compared, and what the capacity is for

    def __post_init__(self) -> None:
        for name in ("title", "model", "date", "gate", "answered", "cache_words", "serve", "engine_command"):
            _text(getattr(self, name), name)
        for name in ("noise_floor", "reference_perplexity"):
            if (value := getattr(self, name)) is not None:
                _number(value, name)
        if len(self.rows) > FILES:
            raise _wrong(f"a report of {len(self.rows)} rows, more than {FILES}", "leave some out")
        if self.verdict not in ("", "pass", "fail"):
            raise _wrong(f"the verdict is {self.verdict!r}", "give pass, fail or nothing")
        for name in ("sensitivity", "outliers", "bits", "caches", "cache_figures"):
            _check_map(getattr(self, name), name)
        for name in ("versions", "provenance"):
            _pairs(getattr(self, name), name)
        for finding in self.findings:
            _pairs(finding, "a finding")
        for domain in self.domains:
            _pairs(domain, "a domain")
        for name in ("differing", "notes"):
            for line in getattr(self, name):
                _text(line, f"a line of {name}")

    @property
    def chosen(self) -> FileRow | None:
        """The row that the report is about: the one marked, or the only one that Quantry made."""
        ours = [row for row in self.rows if not row.peer]
        marked = [row for row in self.rows if row.chosen]
        return marked[0] if marked else ours[0] if len(ours) == 1 else None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Content":
        """Reads the JSON that `to_json` or another program wrote. Raises QuantryError if it is invalid."""
        try:
            loaded = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _wrong(
                f"the content of a report is not JSON ({str(error)[:80]})", "give the file as written"
            ) from error
        given = _fields(loaded, cls, "a report")
        if "title" not in given:
            raise _wrong("a report has no title", 'add "title"')
        rows = tuple(_row(row) for row in _items(given.get("rows", ()), "rows"))
        memory = given.get("memory")
        listed = ("findings", "domains", "differing", "notes")
        sequences = {name: tuple(_items(given.get(name, ()), name)) for name in listed}
        kept = None if memory is None else Memory(**_fields(memory, Memory, "memory"))
        return cls(**{**given, **sequences, "rows": rows, "memory": kept})


def plain(text: str) -> str:
    """Replaces control characters and lone surrogates, which pages and pictures cannot hold."""
    return "".join(
        "\ufffd" if unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t" else char for char in text
    )


def frontier(rows: Sequence[FileRow]) -> list[FileRow]:
    """Returns the files that no other file beats in both size and KL, smallest first."""
    best: list[FileRow] = []
    for row in sorted((row for row in rows if row.judged is not None), key=lambda row: (row.bytes, row.judged or 0.0)):
        if not best or (row.judged or 0.0) < (best[-1].judged or 0.0):
            best.append(row)
    return best


def modules_of(values: BlockMap) -> tuple[str, ...]:
    """Returns the modules of all blocks, in the order of their first occurrence."""
    return tuple(dict.fromkeys(module for block in values.values() for module in block))


def _row(loaded: Any) -> FileRow:
    given = _fields(loaded, FileRow, "a row")
    for name in ("name", "bytes"):
        if name not in given:
            raise _wrong(f"a row of the report has no {name}", f'add "{name}"')
    spans = {
        name: tuple(value) for name, value in given.items() if name.endswith("_interval") and isinstance(value, list)
    }
    return FileRow(**{**given, **spans})


def _fields(loaded: Any, data_class: type[Any], where: str) -> dict[str, Any]:
    names = {field.name for field in fields(data_class)}
    pairs = dict(_pairs(loaded, where))
    unknown = next((name for name in pairs if name not in names), None)
    if unknown is not None:
        raise _wrong(f"{where} has no {unknown[:60]!r}", f"known are {', '.join(sorted(names))}")
    return pairs


def _pairs(value: Any, where: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise _wrong(f"{where} is {type(value).__name__}, not an object", "give an object whose names are text")
    return list(value.items())


def _items(value: Any, where: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise _wrong(f"{where} is {type(value).__name__}, not a list", "give a list")
    return value


def _check_map(values: BlockMap, name: str) -> None:
    cells = 0
    for block, modules in _pairs(values, name):
        for module, value in _pairs(modules, f"{name} of block {block[:60]!r}"):
            _number(value, f"{name} of {block[:60]!r}, {module[:60]!r}")
            if value < 0:
                raise _wrong(f"{name} of {block[:60]!r}, {module[:60]!r} is {value}, below 0", "give 0 or more")
            cells += 1
    if cells > CELLS:
        raise _wrong(f"{name} has {cells:,} cells, more than {CELLS:,}", "join the experts of a block into one module")


def _number(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not isfinite(value):
        raise _wrong(f"{where} is {str(value)[:40]!r}, not a finite number", "leave out figures that were not measured")


def _count(value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise _wrong(f"{where} is {str(value)[:40]!r}, not bytes from 0 to 2^60", "give a whole number of bytes")


def _interval(span: Any, value: Any, where: str) -> None:
    if span is None:
        return
    if not isinstance(span, tuple) or len(span) != 2:
        raise _wrong(f"{where} is {str(span)[:40]!r}, not two numbers", "give the lower and the upper bound")
    for bound in span:
        _number(bound, where)
    if value is None:
        raise _wrong(f"{where} is without its value", "give both or neither")
    if not span[0] <= span[1]:
        raise _wrong(f"{where} is from {span[0]} to {span[1]}", "give the lower bound first")


def _text(value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise _wrong(f"{where} is {type(value).__name__}, not text", "give text")


def _wrong(problem: str, fix: str) -> QuantryError:
    return QuantryError(problem, fix=fix)

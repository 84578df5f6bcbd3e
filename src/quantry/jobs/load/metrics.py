"""What an engine counts itself, read from its Prometheus page before, during and after a load.

Which names hold a figure is in the engine's facts (`metrics` in engines/*.toml); which engine it is shows in the
names of the page. Rates are what counters grew by; the filling of the KV cache is a gauge that is empty again when the
load is over, so that it is looked at all the while and its peak is kept.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event, Thread
from types import TracebackType
from typing import Self

import httpx

from quantry.engines.contract.catalogue import Measure, Metrics, engines

EVERY = 0.5  # seconds between two looks at the page
ANSWER = 5.0  # seconds for the page to come
FIGURES = ("prefix_hit_rate", "acceptance_rate", "kv_usage")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*$")

Page = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one load; None where the engine does not tell, or where nothing of the kind happened."""

    engine: str
    prefix_hit_rate: float | None = None  # tokens of prompts that were in the cache already
    acceptance_rate: float | None = None  # guesses of speculative decoding that were right
    kv_usage: float | None = None  # the most of the KV cache that was filled at a time


def parse(text: str) -> dict[str, float]:
    """Samples of a Prometheus page by name; those that differ in labels alone are added up, as the contract says."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (sample := SAMPLE.match(line)):
            continue
        try:
            value = float(sample[2])
        except ValueError:
            continue
        if math.isfinite(value):
            found[sample[1]] = found.get(sample[1], 0.0) + value
    return found


def which(page: Page) -> str | None:
    """The engine whose figures a page has."""
    for name in engines():
        told = engines()[name].metrics
        if told and any(part in page for measure in _measures(told) for part in (*measure.over, *measure.under)):
            return name
    return None


class Watch:
    """Reads the page of an engine around a load: `with Watch(...) as watch`, then `watch.figures()`."""

    def __init__(self, url: str, key: str | None = None, every: float = EVERY) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=ANSWER)
        self._every, self._over = every, Event()
        self._peak: dict[str, float] = {}
        self._before: Page = {}
        self._after: Page = {}
        self._engine: str | None = None
        self._path = "/metrics"

    def __enter__(self) -> Self:
        for path in dict.fromkeys(told.path for name in engines() if (told := engines()[name].metrics)):
            if engine := which(page := self._read(path)):
                self._engine, self._path, self._before = engine, path, page
                break
        self._thread = Thread(target=self._look, daemon=True)
        if self._engine:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self._engine:
            self._thread.join()
            self._after = self._read(self._path)
        self._client.close()

    def figures(self) -> Figures | None:
        """What happened between the two pages; None where the server has no page that is known."""
        told = engines()[self._engine].metrics if self._engine else None
        if not self._engine or not told:
            return None
        return Figures(self._engine, *(self._figure(getattr(told, name)) for name in FIGURES))

    def _figure(self, measure: Measure | None) -> float | None:
        if measure is None:
            return None
        return measure.between(self._before, self._after if measure.under else self._peak)

    def _look(self) -> None:
        while not self._over.wait(self._every):
            page = self._read(self._path)
            self._peak = {name: max(value, self._peak.get(name, value)) for name, value in page.items()} or self._peak

    def _read(self, path: str) -> dict[str, float]:
        """The page; nothing where there is none, since a load can be measured without."""
        try:
            answer = self._client.get(path)
        except httpx.HTTPError:
            return {}
        return parse(answer.text) if answer.status_code == httpx.codes.OK else {}


def _measures(told: Metrics) -> list[Measure]:
    return [measure for name in FIGURES if (measure := getattr(told, name)) is not None]

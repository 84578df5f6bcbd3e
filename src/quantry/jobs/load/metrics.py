"""What an engine counts itself, read from its Prometheus page before, during and after a load.

The engine's facts name its figures (`metrics` in engines/*.toml); the names on a page tell the engine. Rates are the
growth of counters. KV cache usage is a gauge that is zero again after the load, so it is read all the while, and its
peak is kept.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event, Thread
from typing import Self

import httpx

from quantry.engines.contract.catalogue import Measure, engines

EVERY = 0.5  # seconds between two readings of the page
TIMEOUT = 5.0  # seconds for the page
FIGURES = ("prefix_hit_rate", "acceptance_rate", "kv_usage")
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)(?:\s+-?\d+)?\s*$")

Page = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Figures:
    """The engine's figures of one load; None if it does not report one, or if nothing of the kind happened."""

    engine: str
    prefix_hit_rate: float | None = None  # share of prompt tokens that were in the cache
    acceptance_rate: float | None = None  # share of speculative tokens that were accepted
    kv_usage: float | None = None  # peak share of the KV cache in use


def parse(text: str) -> dict[str, float]:
    """Returns the samples of a Prometheus page by name; those that differ only in labels are summed."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not (sample := SAMPLE.match(line)):
            continue
        try:
            value = float(sample[2])
        except ValueError:
            continue
        if math.isfinite(value):
            samples[sample[1]] = samples.get(sample[1], 0.0) + value
    return samples


def which(page: Page) -> str | None:
    """Returns the engine that a page is of; None if no engine is known to have its names."""
    for name, engine in engines().items():
        measures = [getattr(engine.metrics, figure) for figure in FIGURES] if engine.metrics else []
        if any(part in page for measure in measures if measure for part in (*measure.over, *measure.under)):
            return name
    return None


class Watch:
    """Reads an engine's page around a load: `with Watch(...) as watch: ...`, then `watch.figures()`."""

    def __init__(self, url: str, key: str | None = None, every: float = EVERY) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT)
        self._every, self._over = every, Event()
        self._peak: dict[str, float] = {}
        self._before: Page = {}
        self._after: Page = {}
        self._engine: str | None = None
        self._path = "/metrics"

    def __enter__(self) -> Self:
        for path in dict.fromkeys(engine.metrics.path for engine in engines().values() if engine.metrics):
            if name := which(page := self._read(path)):
                self._engine, self._path, self._before = name, path, page
                break
        self._thread = Thread(target=self._watch, daemon=True)
        if self._engine:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._engine:
            self._thread.join()
            self._after = self._read(self._path)
        self._client.close()

    def figures(self) -> Figures | None:
        """Returns what happened between the two readings; None if the server has no page that is known."""
        metrics = engines()[self._engine].metrics if self._engine else None
        if not self._engine or not metrics:
            return None
        return Figures(self._engine, *(self._figure(getattr(metrics, name)) for name in FIGURES))

    def _figure(self, measure: Measure | None) -> float | None:
        end = self._after if measure and measure.under else self._peak
        return measure.between(self._before, end) if measure else None

    def _watch(self) -> None:
        while not self._over.wait(self._every):
            page = self._read(self._path)
            self._peak = {name: max(value, self._peak.get(name, value)) for name, value in page.items()} or self._peak

    def _read(self, path: str) -> dict[str, float]:
        """Reads the page; returns nothing if there is none, since a load can be measured without."""
        try:
            answer = self._client.get(path)
        except httpx.HTTPError:
            return {}
        return parse(answer.text) if answer.status_code == httpx.codes.OK else {}

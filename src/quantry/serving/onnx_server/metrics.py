"""The page for Prometheus."""

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock


@dataclass(slots=True)
class Counts:
    """What has happened since the start, for Prometheus."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)  # by path and status
    prompt_tokens: int = 0
    generated_tokens: int = 0
    abandoned: int = 0
    _lock: Lock = field(default_factory=Lock)

    def request(self, path: str, status: int) -> None:
        with self._lock:
            self.requests[path, status] += 1

    def add(self, *, prompt: int = 0, generated: int = 0, abandoned: int = 0) -> None:
        with self._lock:
            self.prompt_tokens += prompt
            self.generated_tokens += generated
            self.abandoned += abandoned

    def page(self, queued: int) -> str:
        with self._lock:
            answered = {f'{{path="{path}",status="{code}"}}': n for (path, code), n in sorted(self.requests.items())}
            rows: list[tuple[str, str, str, dict[str, int]]] = [
                ("requests_total", "counter", "Requests that were answered", answered),
                ("requests_abandoned_total", "counter", "Requests whose client left", {"": self.abandoned}),
                ("prompt_tokens_total", "counter", "Tokens of prompts that were read", {"": self.prompt_tokens}),
                ("generated_tokens_total", "counter", "Tokens that were generated", {"": self.generated_tokens}),
                ("requests_running", "gauge", "Requests that compute", {"": min(1, queued)}),
                ("requests_waiting", "gauge", "Requests that wait for their turn", {"": max(0, queued - 1)}),
            ]
        return "".join(
            _metric(f"onnxruntime_{name}", metric_type, about, values) for name, metric_type, about, values in rows
        )


def _metric(name: str, metric_type: str, about: str, values: dict[str, int]) -> str:
    samples = "".join(f"{name}{labels} {value}\n" for labels, value in values.items())
    return f"# HELP {name} {about}.\n# TYPE {name} {metric_type}\n{samples}"

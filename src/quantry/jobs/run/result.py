"""What a run returns: its steps, its figures, and the engine that still serves."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from quantry.serving.process import Running


@dataclass(frozen=True, slots=True)
class RunStep:
    """A finished step, and the file that it wrote. Field names are the JSON names."""

    name: str  # plan, quantize, serve, answer, verify, instead
    words: str
    file: str | None = None
    taken_over: bool = False  # from an earlier run
    seconds: float = 0.0
    said: str = ""  # the first question and its answer


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run. Field names are the JSON names; `running` is the engine if it still serves."""

    model: str
    path: str
    use: str
    preset: str
    format: str
    engine: str
    artefact: str
    source_bytes: int
    bytes: int
    bits_per_weight: float
    proof: Mapping[str, Any] | None  # verdict, gate, kl, served_kl, kl_interval, windows, top1, ...
    memory: Mapping[str, Mapping[str, int]]  # predicted and measured, by part
    speed: Mapping[str, float | None]  # tokens_per_s, predicted_tokens_per_s, first_token_s
    question: str | None
    answer: str | None
    url: str | None
    commands: Mapping[str, str]  # to continue with
    steps: tuple[RunStep, ...]
    notes: tuple[str, ...] = ()
    running: "Running | None" = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        """Says if the gate is passed, or nothing was proven."""
        return self.proof is None or bool(self.proof["verdict"] == "pass")

    def stop(self) -> None:
        """Stops the engine, if it still serves."""
        if self.running:
            self.running.stop()

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of `quantry run --json`."""
        return asdict(replace(self, running=None)) | {"running": self.running is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def figures_of(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a proof that a summary needs; top-1 and perplexity are the engine's if it was measured."""
    served = proof.get("served") or {}
    judged = served or proof
    failed = [finding for finding in proof["findings"] if not finding["ok"]]
    return {
        "verdict": proof["verdict"],
        "gate": proof["gate"],
        "engine": served.get("engine"),
        "kl": proof["kl"],
        "served_kl": served.get("kl"),
        "kl_interval": judged["intervals"]["kl"],
        "windows": proof["text"]["windows"],
        "top1": judged["top1"],
        "perplexity": judged["perplexity"],
        "reference_perplexity": proof["reference_perplexity"],
        "wrong": [f"{finding['words']}; {finding.get('fix') or ''}".strip("; ") for finding in failed],
    }

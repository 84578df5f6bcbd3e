"""What a run is asked for, and what comes of it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from quantry.serving.process import Running

QUESTION = "What color is the sky?"


@dataclass(frozen=True, slots=True)
class Step:
    """Something that was done, and the file that came of it."""

    name: str  # plan, quantize, verify, serve, answer
    words: str
    file: str | None = None
    taken_over: bool = False  # by an earlier run
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """What came of it all, and what it cost. Names are the JSON names; `running` is the engine if it still serves."""

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
    proof: Mapping[str, Any]  # verdict, gate, kl, served_kl, top1, perplexity, reference_perplexity
    memory: Mapping[str, Mapping[str, int]]  # predicted and measured, by part
    speed: Mapping[str, float | None]  # tokens_per_s, predicted_tokens_per_s, first_token_s
    question: str | None
    answer: str | None
    url: str | None
    commands: Mapping[str, str]  # to go on with
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    running: "Running | None" = field(default=None, repr=False, compare=False)

    @property
    def passed(self) -> bool:
        return bool(self.proof["verdict"] == "pass")

    def stop(self) -> None:
        """Stops the engine, if it still serves."""
        if self.running:
            self.running.stop()

    def to_dict(self) -> dict[str, Any]:
        """The JSON of `quantry run --json`."""
        return asdict(replace(self, running=None)) | {"running": self.running is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass(frozen=True, slots=True)
class Asked:
    """All that can be asked of a run beside its model and folder; None leaves a thing to Quantry."""

    use: str | None = None
    budget: str | None = None  # a size for preset auto
    gpu: str | None = None  # another machine to plan for
    engine: str | None = None
    engine_python: str | Path | None = None
    context: int | None = None
    port: int | None = None  # 0 takes one that is free
    text: str | Path | None = None  # to measure on
    windows: int = 16
    question: str = QUESTION
    device: str | None = None  # to compute on; a GPU if there is one


class DeclinedError(Exception):
    """The question whether to go on was answered with no; nothing was written."""


def figures_of(proof: Mapping[str, Any]) -> dict[str, Any]:
    """Of a proof what a summary needs; same first token and perplexity are the engine's, where one was asked."""
    served = proof.get("served") or {}
    judged = served or proof
    return {
        "verdict": proof["verdict"],
        "gate": proof["gate"],
        "engine": served.get("engine"),
        "kl": proof["kl"],
        "served_kl": served.get("kl"),
        "top1": judged["top1"],
        "perplexity": judged["perplexity"],
        "reference_perplexity": proof["reference_perplexity"],
        "wrong": [f"{one['words']}; {one.get('fix') or ''}".strip("; ") for one in proof["findings"] if not one["ok"]],
    }

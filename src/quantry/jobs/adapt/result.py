"""What the job returns."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter, planned or written. Field names are the JSON names."""

    source: str
    path: str
    method: str  # lora or qlora
    data: Mapping[str, Any]  # name, sha256, rows, held_back and truncated
    settings: Mapping[str, Any]  # the options, with defaults filled in
    steps: int  # steps of the optimizer
    parameters: int  # weights of the adapter
    memory: Mapping[str, int]  # bytes that training needs, by part, estimated
    loss: Mapping[str, Any] | None = None  # training (a step each) and held_back (before, after); null until trained
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> bytes, sha256; empty until written
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

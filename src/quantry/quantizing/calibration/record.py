"""What quantry.json records of the text that a job was calibrated on."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class CalibratedText:
    """One of several texts that a job was calibrated on."""

    name: str
    weight: float
    fingerprint: str  # SHA-256 of its windows of tokens
    samples: int
    tokens: int
    template: bool  # it has the form of the chat template


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that a job was calibrated on."""

    data: str
    fingerprint: str  # SHA-256 of the windows of tokens
    samples: int
    length: int
    seed: int
    tokens: int
    arithmetic: str  # what the model was run in
    texts: tuple[CalibratedText, ...] = ()  # of a mixture

    def to_dict(self) -> dict[str, Any]:
        """Returns the JSON of quantry.json; the texts are those of a mixture."""
        return {key: value for key, value in asdict(self).items() if key != "texts" or value}

"""What a user may say about calibration."""

from dataclasses import dataclass

from quantry.quantizing.calibration.data import Data, texts_of


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """What to calibrate on; None is the default. `low_memory` needs less of a GPU's memory and takes longer."""

    data: Data = None
    samples: int | None = None
    length: int | None = None
    low_memory: bool = False

    def __post_init__(self) -> None:
        texts_of(self.data)  # raises for a wrong weight

    def flags(self) -> list[str]:
        """Returns the flags of the options that are set."""
        chosen = {"data": self.data, "samples": self.samples, "length": self.length}
        names = [f"--{name}" for name, value in chosen.items() if value is not None]
        return [*names, "--low-memory"] if self.low_memory else names

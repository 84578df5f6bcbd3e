"""Options of training: their ranges, and their defaults by model size."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import isfinite, sqrt

from quantry.errors import QuantryError, RecipeError
from quantry.types import Anatomy

ALL_LINEAR = "all-linear"  # peft's word for every linear layer but the output head
RANK, EPOCHS, LENGTH, SEED, HELD_BACK = 16, 3, 2048, 0, 0.1
SCALE = 2.0  # of the adapter's output; alpha / rank, with rsLoRA alpha / sqrt(rank)
# Parameters of the model, up to -> rate, rows of a step. The first row was tried on the demo; the others are usual
# values that were not measured.
BY_SIZE = ((1e8, 2e-3, 8), (1e9, 5e-4, 8), (2e10, 2e-4, 16), (float("inf"), 1e-4, 16))
RANGES: dict[str, tuple[float, float]] = {  # both ends are allowed
    "rank": (1, 1024), "alpha": (1, 65536), "epochs": (1, 10_000), "steps": (1, 10_000_000), "batch": (1, 65536),
    "length": (2, 1 << 20), "seed": (0, (1 << 63) - 1),
}  # fmt: skip
SHARES = {"rate": 1.0, "held_back": 0.5}  # above 0 and up to this
INSTALL = 'pip install "quantry[adapt]"'


@dataclass(frozen=True, slots=True)
class Settings:
    """How an adapter is trained; None is what was left out."""

    method: str = "lora"
    rank: int = RANK
    alpha: int | None = None
    rslora: bool = False
    target: str = ALL_LINEAR
    epochs: int | None = None
    steps: int | None = None
    batch: int | None = None
    rate: float | None = None
    length: int | None = None
    seed: int = SEED
    held_back: float = HELD_BACK

    def check(self) -> None:
        """Raises QuantryError for a number outside its range, or for options that exclude each other."""
        for name, (least, most) in RANGES.items():
            _check(name, getattr(self, name), least, most)
        for name, most in SHARES.items():
            value = getattr(self, name)
            if value is not None and not (isfinite(value) and 0 < value <= most):
                raise RecipeError(f"{_flag(name)} is {value:g}", fix=f"give a number above 0 and up to {most:g}")
        if self.epochs is not None and self.steps is not None:
            raise RecipeError(f"--epochs {self.epochs} and --steps {self.steps} exclude each other", fix="give one")
        if not self.targets:
            raise RecipeError("--target names no layer", fix="give names such as q_proj,v_proj, or leave it out")

    @property
    def targets(self) -> tuple[str, ...]:
        """The names of layers to adapt, sorted."""
        return tuple(sorted({name.strip() for name in self.target.split(",")} - {""}))

    @property
    def alpha_of_scale(self) -> int:
        """The alpha that gives the usual scale."""
        return max(1, round(SCALE * (sqrt(self.rank) if self.rslora else self.rank)))

    def filled(self, anatomy: Anatomy) -> "Settings":
        """Returns the settings with defaults for a model; a length beyond its context becomes that."""
        rate, batch = next((rate, batch) for most, rate, batch in BY_SIZE if anatomy.parameters <= most)
        length = self.length or LENGTH
        return replace(
            self,
            alpha=self.alpha or self.alpha_of_scale,
            epochs=self.epochs or (None if self.steps else EPOCHS),
            batch=self.batch or batch,
            rate=self.rate or rate,
            length=min(length, anatomy.context_length or length),
        )

    def steps_for(self, rows: int) -> int:
        """Returns the steps of the optimizer over so many rows."""
        assert self.batch is not None
        return self.steps or (self.epochs or EPOCHS) * -(-rows // self.batch)


def check_installed(method: str) -> None:
    """Raises QuantryError if a library that training needs is missing."""
    for name in ("peft", *(("accelerate", "bitsandbytes") if method == "qlora" else ())):
        if find_spec(name) is None:
            raise QuantryError(f"adapt needs {name}, which is not installed", fix=INSTALL)


def _check(name: str, value: int | None, least: float, most: float) -> None:
    if value is not None and (type(value) is not int or not least <= value <= most):
        raise RecipeError(f"{_flag(name)} is {value}", fix=f"give a whole number from {least:g} to {most:,.0f}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

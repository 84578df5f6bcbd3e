"""The load of a level as a scenario of guidellm: its prompts and answers, and how many requests run at a time."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import randbelow
from typing import Any, Literal

from quantry.errors import QuantryError
from quantry.jobs.load.endpoint import Endpoint

SWEEP: Literal["sweep"] = "sweep"
CONCURRENCIES = (1, 4, 16)
SECONDS = 30.0  # of a level, by default
MOST = 512  # requests at once in the last level of a sweep
ERRORS = 50  # that end a level
TIMEOUT = 600.0  # seconds for one request
SEEDS = 1 << 31
AHEAD = 64  # prompts that are generated ahead: guidellm's 4,096 would take a core from the server
FILE_TYPES = {
    ".jsonl": "json_file",
    ".json": "json_file",
    ".csv": "csv_file",
    ".parquet": "parquet_file",
    ".txt": "text_file",
}
Concurrency = Sequence[int] | Literal["sweep"] | None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or answers: a normal distribution, cut at both ends; without a deviation all are equal."""

    mean: int
    stdev: int | None = None
    min: int | None = None
    max: int | None = None

    @classmethod
    def of(cls, value: "int | str | Lengths", option: str) -> "Lengths":
        """Returns lengths from a number, or from words such as `256,stdev=64,min=16,max=512`.

        Raises QuantryError, which names the option, if a number is missing, below 1 or outside the ends.
        """
        if isinstance(value, Lengths):
            return value._checked(option)
        first, *rest = str(value).replace(" ", "").split(",")
        pairs = {name: text for name, _, text in (part.partition("=") for part in rest)}
        if set(pairs) - {"stdev", "min", "max"} or not all(text.isdigit() for text in (first, *pairs.values())):
            raise QuantryError(f"{option} is {value!r}", fix="give a number, or 256,stdev=64,min=16,max=512")
        return cls(int(first), **{name: int(text) for name, text in pairs.items()})._checked(option)

    def to_guidellm(self, name: str) -> dict[str, int]:
        """Returns the fields of a guidellm scenario."""
        parts = {name: self.mean, f"{name}_stdev": self.stdev, f"{name}_min": self.min, f"{name}_max": self.max}
        return {key: value for key, value in parts.items() if value is not None}

    def _checked(self, option: str) -> "Lengths":
        if any(value is not None and value < 1 for value in (self.mean, self.stdev, self.min, self.max)):
            raise QuantryError(f"{option} has a number below 1 ({self})", fix="give positive numbers of tokens")
        if not (self.min or 1) <= self.mean <= (self.max or self.mean):
            raise QuantryError(f"{option} of {self.mean} is outside its min and max ({self})", fix="widen min and max")
        return self

    def __str__(self) -> str:
        ends = [f"{name}={value}" for name in ("stdev", "min", "max") if (value := getattr(self, name)) is not None]
        return ",".join([str(self.mean), *ends])


@dataclass(frozen=True, slots=True)
class Profile:
    """How requests arrive in a level: so many at once, or so many per second at random moments (Poisson)."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g} a second" if self.concurrency is None else f"{self.concurrency} at once"

    def to_guidellm(self) -> dict[str, Any]:
        if self.concurrency is None:
            return {"kind": "poisson", "rate": [self.rate]}
        return {"kind": "concurrent", "streams": [self.concurrency]}


def profiles_of(concurrency: Concurrency, rate: Sequence[float] | float | None) -> list[Profile] | None:
    """Returns the profile of every level; None for a sweep, whose levels depend on the results.

    Raises QuantryError if both are given or a number is not above 0.
    """
    if rate is not None and concurrency is not None:
        raise QuantryError("rate and concurrency exclude each other", fix="give one of them")
    if rate is not None:
        rates = [float(rate)] if isinstance(rate, int | float) else [float(value) for value in rate]
        if not rates or not all(0 < value < float("inf") for value in rates):
            raise QuantryError(f"the rate is {rate}", fix="give requests per second above 0, such as 2.5")
        return [Profile(rate=value) for value in rates]
    if concurrency == SWEEP:
        return None
    numbers: tuple[Any, ...] = CONCURRENCIES if concurrency is None else tuple(concurrency)
    if not numbers or not all(isinstance(number, int) and number > 0 for number in numbers):
        raise QuantryError(
            f"the concurrency is {concurrency!r}", fix=f"give numbers above 0, such as 1,4,16, or {SWEEP}"
        )
    return [Profile(number) for number in numbers]


def new_seed() -> int:
    """Returns a seed of prompts that no server has seen."""
    return randbelow(SEEDS)


def doubling_profiles() -> Iterator[Profile]:
    """Yields the levels of a sweep: 1, 2, 4, ... requests at once."""
    number = 1
    while number <= MOST:
        yield Profile(number)
        number *= 2


@dataclass(frozen=True, slots=True)
class Load:
    """The requests of a level, whatever its profile. Field names are the JSON names."""

    prompt: Lengths
    answer: Lengths
    requests: int | None
    seconds: float | None
    shared_prefix: int
    dataset: str | None  # a file or a hub id
    chat: bool
    timeout: float
    seed: int

    def checked(self) -> "Load":
        """Returns itself. Raises QuantryError if a number is out of range or a data set cannot be used."""
        for name, value in (("requests", self.requests), ("seconds", self.seconds), ("timeout", self.timeout)):
            if value is not None and not 0 < value < float("inf"):
                raise QuantryError(f"--{name} is {value:g}", fix="give a number above 0")
        for name, value in (("shared-prefix", self.shared_prefix), ("seed", self.seed)):
            if not 0 <= value < SEEDS:
                raise QuantryError(f"--{name} is {value}", fix=f"give 0 to {SEEDS - 1:,}")
        if self.dataset is not None and self.shared_prefix:
            raise QuantryError("a data set and a shared prefix exclude each other", fix="put the prefix into the data")
        if self._file_type and self.dataset and not Path(self.dataset).is_file():
            raise QuantryError(
                f"there is no file {self.dataset}", fix="give JSON lines with a field `prompt`, or a hub id"
            )
        return self

    @property
    def is_on_hub(self) -> bool:
        """True if the data set has to be downloaded."""
        return self.dataset is not None and self._file_type is None

    @property
    def _file_type(self) -> str | None:
        return FILE_TYPES.get(Path(self.dataset).suffix.lower()) if self.dataset is not None else None

    def to_dict(self) -> dict[str, Any]:
        dataset = str(Path(self.dataset).resolve()) if self._file_type and self.dataset else self.dataset
        return {**asdict(self), "prompt": str(self.prompt), "answer": str(self.answer), "dataset": dataset}

    def scenario(self, server: Endpoint, tokenizer: str | None, profile: Profile, number: int) -> dict[str, Any]:
        """Returns the guidellm scenario of level `number`; each has new prompts, which no cache has seen."""
        backend: dict[str, Any] = {
            "kind": "openai_http",
            "target": server.root,
            "model": server.model,
            "request_format": "/v1/chat/completions" if self.chat else "/v1/completions",
            "validate_backend": False,  # it has answered already, and not every server has /health
            "verify": True,
            "timeout": self.timeout,
        }
        if server.key:
            backend["api_key"] = server.key
        if self.dataset is not None:
            backend["max_tokens"] = self.answer.mean
        return {
            "backend": backend,
            "profile": profile.to_guidellm(),
            "constraints": self._constraints(),
            "data": [self._data()],
            "data_loader": {"kind": "pytorch", "samples": -1, "prefetch_factor": AHEAD},
            "seed": {"kind": "static", "value": self.seed + 1000 * number},
            "metrics": {"kind": "generative", "sample_size": 0},
            **({"tokenizer": {"kind": "huggingface_auto", "model": tokenizer}} if tokenizer else {}),
        }

    def _data(self) -> Mapping[str, Any]:
        if self.dataset is None:
            prefix = {"prefix_tokens": self.shared_prefix, "prefix_count": 1} if self.shared_prefix else {}
            lengths = self.prompt.to_guidellm("prompt_tokens") | self.answer.to_guidellm("output_tokens")
            return {"kind": "synthetic_text", **lengths, **prefix}
        if self._file_type:
            return {"kind": self._file_type, "path": str(Path(self.dataset).resolve())}
        return {"kind": "huggingface", "source": self.dataset}

    def _constraints(self) -> list[dict[str, Any]]:
        constraints: list[dict[str, Any]] = [{"kind": "max_errors", "count": ERRORS}]
        if self.requests:
            constraints.append({"kind": "max_requests", "count": self.requests})
        if self.seconds:
            constraints.append({"kind": "max_duration", "seconds": self.seconds})
        return constraints

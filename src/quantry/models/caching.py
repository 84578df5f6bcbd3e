"""Results that are computed once for each checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar

from quantry.types import Checkpoint

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """A checkpoint as a key: compared by identity, since a config cannot be hashed."""

    checkpoint: Checkpoint

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.checkpoint is other.checkpoint

    def __hash__(self) -> int:
        return id(self.checkpoint)


def per_checkpoint(
    size: int,
) -> Callable[[Callable[Concatenate[Checkpoint, P], R]], Callable[Concatenate[Checkpoint, P], R]]:
    """Caches the `size` latest results of a function whose first argument is a checkpoint."""

    def decorate(function: Callable[Concatenate[Checkpoint, P], R]) -> Callable[Concatenate[Checkpoint, P], R]:
        @lru_cache(maxsize=size)
        def cached(key: _Identity, *args: P.args, **kwargs: P.kwargs) -> R:
            return function(key.checkpoint, *args, **kwargs)

        @wraps(function)
        def call(checkpoint: Checkpoint, /, *args: P.args, **kwargs: P.kwargs) -> R:
            return cached(_Identity(checkpoint), *args, **kwargs)  # type: ignore[arg-type]  # hashable, all of them

        return call

    return decorate

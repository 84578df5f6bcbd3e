"""How deep the tests go: `make test` takes a sample, `make test-deep` the whole depth.

- `@deep` marks a test that only the deep run has.
- `cases(ALL, QUICK)` gives the parameters of a test: those in QUICK always, the others in the deep run.
- `@examples(N)` is a property test with N examples in the deep run, a tenth of them in the quick one.
- `rounds(N)` is the same for a loop; mark such a test with `@sampled`, so that the deep run has it too.
"""

import os
from collections.abc import Callable, Container, Iterable
from typing import Any

import pytest

FAMILIES = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM")  # unlike each other
DEEP = os.environ.get("QUANTRY_TEST_DEPTH") == "deep"
deep = pytest.mark.deep
sampled = pytest.mark.sampled


def rounds(count: int) -> int:
    """How often a loop runs."""
    return count if DEEP else max(count // 10, 5)


def examples(count: int) -> Callable[[Any], Any]:
    """A property test with so many examples in the deep run."""
    from hypothesis import HealthCheck, settings  # half a second of imports, for those who need it

    def decorate(test: Any) -> Any:
        limited = settings(max_examples=rounds(count), deadline=None, suppress_health_check=list(HealthCheck))
        return sampled(limited(test))

    return decorate


def cases(every: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Parameters of a test, those that are not in `quick` for the deep run only."""
    return [case if case in quick else pytest.param(*_values(case), marks=deep) for case in every]


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)

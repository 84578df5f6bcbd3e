"""What one machine carries: the load at which memory is full or a limit breaks, and the machines that a rate needs.

Prompts wait in line for the device: requests that come at random and take equally long (M/D/1) wait on average
`busy / (2 (1 - busy))` times as long as one takes. Answers share steps; more sequences make steps slower.
"""

from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from quantry.planning.memory.footprint import max_concurrency
from quantry.planning.ranking import Ranked
from quantry.planning.speed.throughput import Prediction, speed

MOST = 1024  # sequences of a copy up to which a limit is looked for


@dataclass(frozen=True, slots=True)
class Break:
    """The load at which something breaks: sequences at once, and requests a second."""

    sequences: int
    requests_per_s: float


def capacity(ranked: Ranked) -> dict[str, Any]:
    """Returns the load that all copies carry together; `machines` is None without a rate."""
    copies, rate = ranked.candidate.replicas, ranked.request.goals.rate
    breaks = {name: _times(load, copies) for name, load in _breaks(ranked).items()}
    least = min(breaks.values(), key=lambda load: load.requests_per_s)
    machines = max(1, ceil(rate / least.requests_per_s)) if rate and least.requests_per_s else None
    return {
        "sequences": least.sequences,
        "requests_per_s": round(least.requests_per_s, 3),
        "machines": machines,
        "replicas": None if machines is None else machines * copies,
        "holds": _holds(ranked),
        "breaks": {
            name: asdict(replace(load, requests_per_s=round(load.requests_per_s, 3))) for name, load in breaks.items()
        },
    }


def _times(load: Break, copies: int) -> Break:
    return Break(load.sequences * copies, load.requests_per_s * copies)


def _breaks(ranked: Ranked) -> dict[str, Break]:
    """Returns the load of one copy at which memory is full, and at which each limit of the request breaks."""
    candidate, goals = ranked.candidate, ranked.request.goals
    room = max_concurrency(candidate.deployment, candidate.workload.held)
    most = max(candidate.workload.concurrency, min(int(min(room, MOST)), MOST))
    breaks = {"memory": _carried(ranked, most)}
    if goals.tpot is not None:
        breaks["tpot"] = _carried(ranked, _largest(ranked, most, goals.tpot))
    if goals.ttft is not None:
        breaks["ttft"] = _in_line(ranked, breaks["memory"], goals.ttft)
    return breaks


def _carried(ranked: Ranked, sequences: int) -> Break:
    return Break(sequences, sequences / _request_seconds(ranked, sequences) if sequences else 0.0)


def _in_line(ranked: Ranked, most: Break, limit: float) -> Break:
    """Returns the load at which the first token comes `limit` seconds after the request, most of it waiting."""
    first, each = ranked.speed.first_token_s, _prompt_seconds(ranked, most.sequences)
    rate = min(busy_share(each, limit - first) / each, most.requests_per_s)
    return Break(min(most.sequences, ceil(rate * _request_seconds(ranked, most.sequences))), rate)


def busy_share(service: float, wait: float) -> float:
    """Returns the share of the time that a server may be busy if requests are to wait `wait` seconds on average."""
    return 2 * wait / (service + 2 * wait) if wait > 0 else 0.0


def _largest(ranked: Ranked, most: int, limit: float) -> int:
    """Returns the largest number of sequences whose step stays within a limit, by halving; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _predicted(ranked, middle).step_s <= limit else (low, middle - 1)
    return low


def _predicted(ranked: Ranked, sequences: int) -> Prediction:
    candidate = ranked.candidate
    load = replace(candidate.workload, concurrency=sequences)
    return speed(candidate.deployment, load, ranked.request.hardware.cpu)


def _prompt_seconds(ranked: Ranked, sequences: int) -> float:
    """Returns the seconds that the device reads one prompt for; a beginning that all share is read once."""
    load = ranked.candidate.workload
    fresh = max(1, load.prompt - load.shared_prefix)
    return fresh / _predicted(ranked, sequences).prompts_tokens_per_s


def _request_seconds(ranked: Ranked, sequences: int) -> float:
    """Returns the seconds of one request when so many run at once: the prompts of all, then the steps of its answer."""
    prompts = sequences * _prompt_seconds(ranked, sequences)
    return prompts + ranked.candidate.workload.answer * _predicted(ranked, sequences).step_s


def _holds(ranked: Ranked) -> dict[str, bool]:
    """Returns for each limit if it holds at the planned load."""
    goals = ranked.request.goals
    limits = {"ttft": (goals.ttft, ranked.speed.first_token_s), "tpot": (goals.tpot, ranked.speed.step_s)}
    return {name: value <= limit for name, (limit, value) in limits.items() if limit is not None}

"""What one machine carries: requests a second, the load at which a limit breaks, and the machines that a rate needs."""

from dataclasses import replace
from math import ceil
from typing import Any

from quantry.planning.candidates import Candidate
from quantry.planning.load import Goals
from quantry.planning.memory.footprint import max_concurrency
from quantry.planning.ranking import Ranked
from quantry.planning.speed.throughput import Prediction, speed

MOST = 1024  # sequences of a copy up to which a limit is looked for


def capacity(ranked: Ranked) -> dict[str, Any]:
    """Returns the load that all copies carry together; `machines` is None without a rate."""
    candidate, goals = ranked.candidate, ranked.request.goals
    most = _most_sequences(ranked)
    rate = most * candidate.replicas / _request_seconds(ranked, most)
    machines = None if goals.rate is None else max(1, ceil(goals.rate / rate))
    return {
        "sequences": most * candidate.replicas,
        "requests_per_s": round(rate, 3),
        "machines": machines,
        "replicas": None if machines is None else machines * candidate.replicas,
        "holds": _holds(ranked, goals),
    }


def _most_sequences(ranked: Ranked) -> int:
    """Returns the sequences of one copy that memory and the limit of a step allow."""
    candidate = ranked.candidate
    room = max_concurrency(candidate.deployment, candidate.workload.held)
    most = max(candidate.workload.concurrency, min(int(min(room, MOST)), MOST))
    if ranked.request.goals.tpot is None:
        return most
    return _largest(ranked, most, ranked.request.goals.tpot)


def _largest(ranked: Ranked, most: int, limit: float) -> int:
    """Returns the largest number of sequences whose step stays below a limit, at least 1, by halving."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _step(ranked, middle) <= limit else (low, middle - 1)
    return low


def _step(ranked: Ranked, sequences: int) -> float:
    return _predicted(ranked.candidate, ranked, sequences).step_s


def _predicted(candidate: Candidate, ranked: Ranked, sequences: int) -> Prediction:
    load = replace(candidate.workload, concurrency=sequences)
    return speed(candidate.deployment, load, ranked.request.hardware.cpu)


def _request_seconds(ranked: Ranked, sequences: int) -> float:
    """Returns the seconds of one request when so many run at once: its share of prompts, then its answer."""
    load, predicted = ranked.candidate.workload, _predicted(ranked.candidate, ranked, sequences)
    fresh = max(1, load.prompt - load.shared_prefix)  # a shared beginning is read once
    return sequences * fresh / predicted.prompts_tokens_per_s + load.answer * predicted.step_s


def _holds(ranked: Ranked, goals: Goals) -> dict[str, bool]:
    """Returns for each limit if it holds at the planned load."""
    limits = {"ttft": (goals.ttft, ranked.speed.first_token_s), "tpot": (goals.tpot, ranked.speed.step_s)}
    return {name: value <= limit for name, (limit, value) in limits.items() if limit is not None}

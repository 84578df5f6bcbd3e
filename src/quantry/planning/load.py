"""The load that a plan is made for: lengths of prompts and answers, sequences at once, a rate, limits and prices.

What the user leaves open comes from the use (rules.toml): usual lengths of prompts and answers. A context longer than
the use's own is taken to be filled by half with the prompt, so that time to the first token and cache follow from it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.models.attention import context_length, text_config
from quantry.planning.rules import Use, image_tokens
from quantry.types import Workload

READING_PACE = 1 / 30  # seconds for a token of an answer, where a rate is given and no limit
MOST_PLANNED = 256  # sequences at once that follow from a rate; above, more machines share it
TRACE_BYTES = 256 << 20  # of a trace that is read
MOST = {  # of each number, so that a slip of the keyboard is noticed
    "context": 1 << 30, "concurrency": 1 << 20, "prompt": 1 << 30, "answer": 1 << 30, "images": 1000,
    "shared-prefix": 1 << 30, "requests-per-second": 1e6, "ttft": 3600.0, "tpot": 60.0, "price": 1e6, "max-cost": 1e6,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What the user says about the load; None leaves it to the use."""

    context: int | None = None
    concurrency: int | None = None
    prompt: int | None = None
    answer: int | None = None
    requests_per_second: float | None = None
    ttft: float | None = None
    tpot: float | None = None
    images: int | None = None
    shared_prefix: int | None = None
    trace: str | Path | None = None
    price: float | None = None
    max_cost: float | None = None


@dataclass(frozen=True, slots=True)
class Goals:
    """What the answer is measured by: a rate to be held, limits, and what an hour of a device costs."""

    rate: float | None = None  # requests a second
    ttft: float | None = None  # seconds to the first token, at most
    tpot: float | None = None  # seconds for each further token, at most
    price: float | None = None  # USD an hour for the whole machine
    max_cost: float | None = None  # USD an hour, at most


@dataclass(frozen=True, slots=True)
class Load:
    """The load that is planned, the goals, and what was assumed."""

    workload: Workload
    goals: Goals
    notes: tuple[str, ...] = ()


def read_load(model: str, config: Mapping[str, Any], use: Use, options: LoadOptions) -> Load:
    """Checks the numbers of a load and fills in those that are left open.

    Raises QuantryError for a number out of range, a trace that cannot be read, or numbers that contradict each other
    or the model.
    """
    asked, notes = _traced(options)
    _check_ranges(asked)
    images, more = _images(model, config, use, asked)
    longest = context_length(config)
    prompt, answer, context = _lengths(model, longest, use, asked, images)
    if asked.shared_prefix is not None and asked.shared_prefix > prompt:
        raise QuantryError(
            f"--shared-prefix {asked.shared_prefix} is more than the prompt of {prompt} tokens",
            fix="give --prompt with the shared part included",
        )
    concurrency, follows = _concurrency(use, asked, answer)
    workload = Workload(context, concurrency, prompt, answer, asked.shared_prefix or 0)
    goals = Goals(asked.requests_per_second, asked.ttft, asked.tpot, asked.price, asked.max_cost)
    return Load(workload, goals, (*notes, *more, *follows))


def _concurrency(use: Use, asked: LoadOptions, answer: int) -> tuple[int, tuple[str, ...]]:
    """Returns the sequences at once: as asked, as a rate keeps under way (Little's law), or as is usual for the use."""
    if asked.concurrency or asked.requests_per_second is None:
        return asked.concurrency or use.concurrency, ()
    pace = asked.tpot or READING_PACE
    under_way = max(1, ceil(asked.requests_per_second * answer * pace))
    planned = min(under_way, MOST_PLANNED)
    note = f"{asked.requests_per_second:g} requests a second keep {under_way:,} under way at {1 / pace:.3g} tok/s each"
    return planned, (note + (f"; one machine is planned for {planned}" if planned < under_way else ""),)


def _check_ranges(asked: LoadOptions) -> None:
    for name, most in MOST.items():
        value = getattr(asked, name.replace("-", "_"))
        whole = isinstance(most, int)
        if value is not None and not (1 <= value <= most if whole else 0 < value <= most):
            span = f"1 to {most:,}" if whole else f"above 0 and up to {most:,.0f}"
            given = f"{value:,}" if whole else f"{value:g}"
            raise QuantryError(f"--{name} {given} is not {span}", fix="give a number in that range, or leave it out")


def _lengths(model: str, longest: int | None, use: Use, asked: LoadOptions, images: int) -> tuple[int, int, int]:
    """Returns the tokens of a prompt, of an answer, and that a sequence may reach."""
    context = asked.context
    if context is not None and longest is not None and context > longest:
        raise QuantryError(
            f"--context {context} is more than the {longest} tokens that {model} was made for",
            fix=f"use --context {longest} or less",
        )
    room = context or longest or 1 << 30
    if asked.prompt is not None or asked.answer is not None:
        given = (asked.prompt or 1) + images + (asked.answer or 1)
        if given > room:
            raise QuantryError(
                f"a prompt of {(asked.prompt or 1) + images} and an answer of {asked.answer or 1} tokens are more than "
                f"the {'--context' if context else 'context'} of {room}",
                fix="give a longer --context, a shorter --prompt or fewer --images",
            )
    half = context // 2 if context is not None and context > use.context else 0
    usual = min(use.context, longest or use.context) if context is None else context
    answer = asked.answer or max(1, min(use.answer, usual // 4))
    prompt = images + (asked.prompt or max(1, min(max(use.prompt, half), usual - answer)))
    reached = context or min(room, max(usual, _round(prompt + answer)))
    return min(prompt, max(1, reached - answer)), answer, reached


def _round(tokens: int) -> int:
    return ceil(tokens / 1024) * 1024


def _images(model: str, config: Mapping[str, Any], use: Use, asked: LoadOptions) -> tuple[int, tuple[str, ...]]:
    """Returns the tokens of a prompt's pictures, and what is assumed of them."""
    vision = "vision_config" in config
    if asked.images is not None and not vision:
        raise QuantryError(f"--images {asked.images} is asked, and {model} has no vision tower", fix="leave it out")
    count = asked.images if asked.images is not None else int(vision and use.name == "vlm")
    if not count:
        return 0, ()
    each = image_tokens(str(config.get("model_type") or text_config(config).get("model_type")))
    return count * each, (f"{count} picture{'s' if count > 1 else ''} a prompt, assumed to take {each:,} tokens each",)


def _traced(asked: LoadOptions) -> tuple[LoadOptions, tuple[str, ...]]:
    """Returns the options with the lengths and the rate of a trace, which stands for what is not given."""
    if asked.trace is None:
        return asked, ()
    rows = _rows(Path(asked.trace))
    prompts, answers = (sorted(row[key] for row in rows) for key in ("prompt", "answer"))
    times = sorted(row["time"] for row in rows if row.get("time") is not None)
    seconds = times[-1] - times[0] if len(times) > 1 else 0.0
    rate = (len(times) - 1) / seconds if seconds > 0 else None
    filled = replace(
        asked,
        prompt=asked.prompt or _high(prompts),
        answer=asked.answer or _high(answers),
        requests_per_second=asked.requests_per_second or rate,
    )
    words = f", {rate:.3g} requests a second" if rate else ""
    note = f"a trace of {len(rows)} requests: nine in ten prompts have up to {_high(prompts):,} tokens{words}"
    return filled, (note,)


def _high(values: list[int]) -> int:
    """Returns the value that nine in ten do not exceed."""
    return max(1, values[ceil(0.9 * len(values)) - 1])


def _rows(path: Path) -> list[dict[str, Any]]:
    fix = 'write one {"prompt": tokens, "answer": tokens, "time": seconds} a line'
    try:
        if path.stat().st_size > TRACE_BYTES:
            raise QuantryError(f"the trace {path} has more than {TRACE_BYTES >> 20} MiB", fix="give a part of it")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise QuantryError(f"cannot read the trace {path}: {reason}", fix="give JSON lines in UTF-8") from error
    rows = []
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise QuantryError(f"line {number} of the trace {path} is not JSON", fix=fix) from error
        if not _is_request(row):
            raise QuantryError(f"line {number} of the trace {path} has no lengths: {line[:60]!r}", fix=fix)
        rows.append(row)
    if not rows:
        raise QuantryError(f"the trace {path} is empty", fix=fix)
    return rows


def _is_request(row: Any) -> bool:
    if not isinstance(row, dict) or not all(type(row.get(key)) is int and row[key] > 0 for key in ("prompt", "answer")):
        return False
    return row.get("time") is None or (type(row["time"]) in (int, float) and row["time"] >= 0)

"""How far an artefact's next-token probabilities are from the reference's: pure numerics, summed in float64.

The reference keeps its k most probable tokens at each position, and merges all others into one event, the tail.
Merging events can only lower a Kullback-Leibler divergence (the log-sum inequality), so the result is a lower bound of
the full divergence and grows with k. With k = vocabulary nothing is merged and the result is exact.

Tokens of one window depend on each other, so the bootstrap draws whole windows. With few windows its plain percentiles
are too narrow; they are widened by the ratio of Student's t to the normal distribution (Hesterberg, "What teachers
should know about the bootstrap", 2015, section 3.3).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quantry.errors import WeightError
from quantry.proof.interval import Interval

Array = NDArray[Any]

CHUNK = 1 << 20  # logits processed at a time: 8 MiB of float64
LEAST_TAIL = 2.0**-23  # an artefact's tail is 1 minus float32 probabilities: this is its precision
DRAWS = 2000
ROUNDING = 1e-12  # nats per position: anything less is rounding
PIECES = 16  # a single window is cut into so many, which the bootstrap draws instead of windows


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The reference's k most probable tokens at the n scored positions of a window."""

    ids: Array  # (n, k) int32, in no order; in the order of the vocabulary when k is the whole vocabulary
    logp: Array  # (n, k) float32
    tail: Array  # (n,) float32, log of the mass of all other tokens; -inf when there are none
    next: Array  # (n,) float32, log-probability of the token that comes next
    top: Array  # (n,) int32, the most probable token

    def first(self, count: int) -> "TopK":
        """Returns the first `count` positions."""
        return TopK(*(array[:count] for array in (self.ids, self.logp, self.tail, self.next, self.top)))


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """An artefact's log-probabilities at the same positions."""

    logq: Array  # (n, k) float32, at the reference's ids
    next: Array  # (n,) float32
    top: Array  # (n,) int32


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """What was compared at each of some positions, in float64."""

    kl: Array  # nats
    same: Array  # 1 where the most probable token is the reference's, else 0
    next: Array  # log-probability of the token that comes next
    reference_next: Array

    def __len__(self) -> int:
        return len(self.kl)

    def part(self, begin: int, end: int) -> "Positions":
        """Returns the positions from `begin` to before `end`."""
        return Positions(*(column[begin:end] for column in self._columns()))

    def pieces(self, count: int) -> list["Positions"]:
        """Cuts the positions into at most `count` pieces of about equal length."""
        columns = [np.array_split(column, min(count, len(self))) for column in self._columns()]
        return [Positions(*piece) for piece in zip(*columns, strict=True)]

    @classmethod
    def joined(cls, parts: Sequence["Positions"]) -> "Positions":
        """Returns the positions of all parts, in their order."""
        return cls(*(np.concatenate(column) for column in zip(*(part._columns() for part in parts), strict=True)))

    def _columns(self) -> tuple[Array, ...]:
        return self.kl, self.same, self.next, self.reference_next


@dataclass(frozen=True, slots=True)
class Divergence:
    """The figures of an artefact against its reference: nats, shares and perplexities. Field names are JSON names."""

    kl: Interval
    kl_median: Interval
    kl_p99: Interval
    top1: Interval  # share of positions with the same most probable token
    perplexity: Interval
    reference_perplexity: Interval
    perplexity_ratio: Interval
    positions: int
    windows: int

    def values(self, names: Sequence[str]) -> dict[str, float]:
        """Returns the values of some figures by name."""
        return {name: getattr(self, name).value for name in names}

    def intervals(self, names: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Returns the 95 % bounds of some figures by name."""
        return {name: (getattr(self, name).low, getattr(self, name).high) for name in names}


def top_k(logits: Tensor, tokens: Sequence[int], start: int, k: int) -> TopK:
    """Returns the reference of a window from (tokens, vocabulary) logits. Raises WeightError if one is not finite."""
    rows, targets = _scored(logits, tokens, start)
    parts = [_top_k(part, target, k) for part, target in _chunks(rows, targets)]
    ids = all_ids(len(rows), rows.shape[1]) if k >= rows.shape[1] else _joined([part[0] for part in parts])
    return TopK(ids, *(_joined(list(column)) for column in list(zip(*parts, strict=True))[1:]))


def scores_at(logits: Tensor, tokens: Sequence[int], start: int, ids: Array) -> Scores:
    """Returns an artefact's log-probabilities of the reference's `ids`, from its (tokens, vocabulary) logits.

    Raises WeightError if a logit is not finite.
    """
    rows, targets = _scored(logits, tokens, start)
    places = None if is_whole(ids) else torch.from_numpy(ids.astype(np.int64))
    columns = []
    done = 0
    for part, target in _chunks(rows, targets):
        every = _log_probabilities(part)
        logq = every if places is None else every.gather(1, places[done : done + len(part)].to(every.device))
        columns.append((logq.float(), _at(every, target).float(), part.argmax(1).int()))
        done += len(part)
    return Scores(*(_joined(list(column)) for column in zip(*columns, strict=True)))


def kl(reference: TopK, scores: Scores) -> Array:
    """Returns the divergence at each position in nats, with the tokens outside the top k as one event.

    Raises WeightError if a log-probability of the artefact is not finite.
    """
    if not np.isfinite(scores.logq).all():
        raise WeightError(
            "the artefact's log-probabilities are not finite",
            fix="its weights or its engine overflow: quantize the model again",
        )
    result = np.empty(len(reference.tail))
    step = max(1, CHUNK // max(1, reference.logp.shape[1]))
    for begin in range(0, len(result), step):
        part = slice(begin, begin + step)
        logp, logq = reference.logp[part].astype(np.float64), scores.logq[part].astype(np.float64)
        result[part] = (np.exp(logp) * (logp - logq)).sum(1)
        result[part] += _tail_term(reference.tail[part].astype(np.float64), np.exp(logq).sum(1))
    return result


def full_kl(p_logits: Tensor, q_logits: Tensor) -> Array:
    """Returns the exact divergence of each row, over the whole vocabulary."""
    parts = []
    for p_part, q_part in _chunks(p_logits, q_logits):
        logp, logq = _log_probabilities(p_part), _log_probabilities(q_part.to(p_part.device))
        parts.append((logp.exp() * (logp - logq)).sum(1))
    return _joined(parts)


def recovered(p_logits: Tensor, q_logits: Tensor, sizes: Sequence[int]) -> list[float]:
    """Returns, for each k, the share of the exact mean divergence that k tokens and a tail show; 1 if it is zero."""
    full, shown = 0.0, np.zeros(len(sizes))
    for p_part, q_part in _chunks(p_logits, q_logits):
        logp, order = _log_probabilities(p_part).sort(1, descending=True)
        logq = _log_probabilities(q_part.to(p_part.device)).gather(1, order)
        terms, kept_p, kept_q = (
            sums.cumsum(1).cpu().numpy() for sums in (logp.exp() * (logp - logq), logp.exp(), logq.exp())
        )
        full += terms[:, -1].sum()
        for number, size in enumerate(sizes):
            last = min(size, terms.shape[1]) - 1
            rest = 1 - kept_p[:, last] if size < terms.shape[1] else np.zeros(len(terms))
            shown[number] += (terms[:, last] + _tail_term(_log(rest), kept_q[:, last])).sum()
    return [1.0 if full <= ROUNDING * len(p_logits) else float(share) for share in shown / (full or 1)]


def all_ids(positions: int, vocabulary: int) -> Array:
    """Returns every token at every position, in the memory of one row."""
    return np.broadcast_to(np.arange(vocabulary, dtype=np.int32), (positions, vocabulary))


def is_whole(ids: Array) -> bool:
    """Returns True for the result of `all_ids`: one row that stands for all positions."""
    return not ids.strides[0]


def summary(reference: Iterable[TopK], scores: Iterable[Scores], *, draws: int = DRAWS, seed: int = 0) -> Divergence:
    """Returns the figures of all windows together; reads both iterables once, one window at a time."""
    return figures([compare(kept, observed) for kept, observed in zip(reference, scores, strict=True)], draws, seed)


def figures(windows: Sequence[Positions], draws: int = DRAWS, seed: int = 0) -> Divergence:
    """Returns the figures of what was compared in all windows together."""
    units = windows if len(windows) > 1 else windows[0].pieces(PIECES)
    sizes = np.array([len(unit) for unit in units])
    counts = np.random.default_rng(seed).multinomial(len(units), np.full(len(units), 1 / len(units)), size=draws)
    counts = np.vstack([np.ones_like(counts[:1]), counts])  # row 0 is the measurement itself

    def means(name: str) -> Array:
        mean: Array = counts @ [getattr(unit, name).sum() for unit in units] / (counts @ sizes)
        return mean

    median, p99 = weighted_quantiles([unit.kl for unit in units], counts, (0.5, 0.99))
    level = _outer_level(len(units))
    following, reference_next = means("next"), means("reference_next")
    return Divergence(
        kl=_interval(means("kl"), level),
        kl_median=_interval(median, level),
        kl_p99=_interval(p99, level),
        top1=_interval(means("same"), level),
        perplexity=_interval(np.exp(-following), level),
        reference_perplexity=_interval(np.exp(-reference_next), level),
        perplexity_ratio=_interval(np.exp(reference_next - following), level),
        positions=int(sizes.sum()),
        windows=len(windows),
    )


def compare(reference: TopK, scores: Scores) -> Positions:
    """Compares an artefact with its reference at the positions of a window."""
    return Positions(
        kl(reference, scores),
        (reference.top == scores.top).astype(np.float64),
        scores.next.astype(np.float64),
        reference.next.astype(np.float64),
    )


def compare_logits(p_logits: Tensor, q_logits: Tensor, following: Sequence[int]) -> Positions:
    """Compares (positions, vocabulary) logits with the reference's, over the whole vocabulary.

    `following` are the tokens that come next. Raises WeightError if a logit is not finite.
    """
    parts, done = list[Positions](), 0
    for p_part, q_part in _chunks(p_logits, q_logits):
        logp, logq = _log_probabilities(p_part), _log_probabilities(q_part)
        target = torch.tensor(following[done : done + len(p_part)], device=logp.device)
        same = (p_part.argmax(1) == q_part.argmax(1)).double()
        columns = ((logp.exp() * (logp - logq)).sum(1), same, _at(logq, target), _at(logp, target))
        parts.append(Positions(*(_joined([column]) for column in columns)))
        done += len(p_part)
    return Positions.joined(parts)


def _top_k(part: Tensor, target: Tensor, k: int) -> tuple[Tensor, ...]:
    every = _log_probabilities(part)
    if k >= part.shape[1]:
        ids, logp, tail = target, every, every.new_full((len(part),), -torch.inf)
    else:
        ids = part.topk(k, dim=1, sorted=False).indices
        logp = every.gather(1, ids)
        tail = (1 - logp.exp().sum(1)).clamp_min(0).log()
    return ids.int(), logp.float(), tail.float(), _at(every, target).float(), part.argmax(1).int()


def _scored(logits: Tensor, tokens: Sequence[int], start: int) -> tuple[Tensor, Tensor]:
    if len(logits) != len(tokens) or not 0 < start < len(tokens):
        raise ValueError(f"{len(logits)} rows of logits for {len(tokens)} tokens scored from {start}")
    return logits[start - 1 : -1], torch.tensor(tokens[start:], device=logits.device)


def _chunks(rows: Tensor, others: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    step = max(1, CHUNK // rows.shape[1])
    return zip(torch.split(rows, step), torch.split(others, step), strict=True)


def _log_probabilities(rows: Tensor) -> Tensor:
    if not rows.isfinite().all():
        raise WeightError("logits are not finite", fix="the model overflows: check its weights, or quantize it again")
    return rows.double().log_softmax(1)


def _at(rows: Tensor, target: Tensor) -> Tensor:
    return rows.gather(1, target[:, None])[:, 0]


def _joined(parts: Sequence[Tensor]) -> Array:
    joined: Array = torch.cat(list(parts)).cpu().numpy()
    return joined


def _tail_term(log_tail: Array, kept: Array) -> Array:
    """Returns the divergence of the tail; `kept` is the artefact's mass on the tokens outside the tail."""
    mass = np.exp(log_tail)
    term: Array = mass * (np.where(mass > 0, log_tail, 0) - _log(np.maximum(1 - kept, LEAST_TAIL)))
    return term


def _log(mass: Array) -> Array:
    """Returns the logarithm of a mass, which rounding may have made negative."""
    with np.errstate(divide="ignore"):
        logarithm: Array = np.log(np.maximum(mass, 0))
    return logarithm


def weighted_quantiles(values: Sequence[Array], counts: Array, shares: Sequence[float]) -> Array:
    """Returns, for each share and each row of counts, the smallest value with that share of values at or below it."""
    pooled = np.concatenate(values)
    owner = np.repeat(np.arange(len(values)), [len(part) for part in values])
    order = np.argsort(pooled, kind="stable")
    ascending, owners = pooled[order], owner[order]
    result = np.empty((len(shares), len(counts)))
    for row, count in enumerate(counts):
        reached = np.cumsum(count[owners])
        result[:, row] = [ascending[np.searchsorted(reached, ceil(share * reached[-1] - 1e-9))] for share in shares]
    return result


def _interval(draws: Array, level: float) -> Interval:
    """Returns the first draw, which is the measured value, with the bounds that the other draws give."""
    low, high = np.quantile(draws[1:], (level, 1 - level))
    return Interval(float(draws[0]), float(min(low, draws[0])), float(max(high, draws[0])))


def _outer_level(units: int) -> float:
    """Returns the share of draws to leave out at either end for a 95 % interval of so few units."""
    z, freedom = NormalDist().inv_cdf(0.975), max(1, units - 1)
    t = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Cornish and Fisher
    return NormalDist().cdf(-sqrt((freedom + 1) / freedom) * t)

"""Solves the multiple-choice knapsack: one option for every item, bytes within a budget, the smallest sum of damages.

Three ideas make it near-exact and fast.

1. The relaxed problem is easy. The options of an item that no mixture of two others beats lie on a convex curve of
   damage over bytes. All steps along all curves, sorted by what a byte buys, give the smallest damage of any budget if
   the last step may be taken in part (a bound that no choice can beat), and a real choice if it is left out.
2. An option whose own bound, priced at the slope where the budget ends, is not below the best known choice cannot be in
   a better one and is dropped. With many small items almost nothing remains.
3. The rest, the core, is searched item by item, the largest steps first. A state is the bytes and the damage so far;
   states that another one beats in both are dropped, and so are states whose bound, with the remaining items relaxed,
   is not below the best choice. All states of a level form one array. If there are too many, those with almost the same
   damage are merged into the smallest of them.

The bounds of dropped states are recorded, so the returned bound always holds. Nothing depends on a clock or on chance:
the same items and budget give the same choice.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Table = Sequence[tuple[int, float]]  # bytes and damage of each option of an item
Array = NDArray[Any]

TOLERANCE = 1e-4  # relative: a choice this near to the bound counts as the best
STATES = 20_000  # at most, per level
FEWEST = 256  # states that every level may have
WORK = 40_000_000  # numbers that a search may process: about a second


def least(tables: Sequence[Table], budget: int) -> tuple[list[int], float]:
    """Returns the index of each item's option, and a damage that no choice within the budget can be below.

    The smallest options together must be within the budget.
    """
    useful = [_useful(table) for table in tables]
    whole = Problem([[table[place] for place in places] for table, places in zip(tables, useful, strict=True)], budget)
    best = whole.filled(whole.greedy())
    bound = whole.bound()
    if bound < whole.damage(best) * (1 - TOLERANCE):
        best, bound = _searched(whole, best)
    return [places[index] for places, index in zip(useful, best, strict=True)], bound


def _useful(table: Table) -> list[int]:
    """Returns the options by size, each with less damage than all smaller ones."""
    kept: list[int] = []
    for place in sorted(range(len(table)), key=lambda place: (*table[place], place)):
        if not kept or table[place][1] < table[kept[-1]][1]:
            kept.append(place)
    return kept


def _searched(whole: "Problem", best: list[int]) -> tuple[list[int], float]:
    places, floor = whole.core(whole.damage(best))
    tables = [[table[place] for place in inside] for table, inside in zip(whole.tables, places, strict=True)]
    search = Search(Problem(tables, whole.budget), whole.damage(best), floor)
    better = search.run()
    if better is not None:
        chosen = whole.filled([inside[index] for inside, index in zip(places, better, strict=True)])
        best = min(best, chosen, key=whole.damage)
    return best, max(search.floor, whole.bound())


def _hull(table: Table) -> list[tuple[int, float]]:
    """Returns the options on the convex curve, each with the damage that a byte of the step to it removes.

    Stored slopes fall strictly, so sorting by them keeps the steps of an item in order.
    """
    kept = [(0, float("inf"))]
    for place in range(1, len(table)):
        size, damage = table[place]
        while True:
            last_size, last_damage = table[kept[-1][0]]
            slope = (last_damage - damage) / (size - last_size)
            if slope < kept[-1][1]:
                break
            kept.pop()
        kept.append((place, slope))
    return kept


class Problem:
    """Items by their useful options, and all steps along their convex curves, those that buy most first."""

    def __init__(self, tables: Sequence[Table], budget: int) -> None:
        self.tables, self.budget = tables, budget
        self.smallest = sum(table[0][0] for table in tables)
        self.worst = float(np.sum([table[0][1] for table in tables]))  # the damage of the smallest options
        rows = sorted(_steps(tables), key=lambda row: -row[0])  # stable: equal slopes stay in the order of items
        slopes, owners, targets, sizes, gains = zip(*rows, strict=True) if rows else ((), (), (), (), ())
        self.slope = np.array(slopes, np.float64)
        self.owner = np.array(owners, np.int64)  # the item of a step
        self.target = np.array(targets, np.int64)  # the option it leads to
        self.size = np.array(sizes, np.int64)  # bytes it costs
        self.gain = np.array(gains, np.float64)  # damage it removes
        self.curve = Curve.of(self.size, self.gain)

    def damage(self, places: Sequence[int]) -> float:
        return float(np.sum([table[place][1] for table, place in zip(self.tables, places, strict=True)]))

    def left(self, places: Sequence[int]) -> int:
        """Returns the bytes of the budget that a choice does not use."""
        return self.budget - sum(table[place][0] for table, place in zip(self.tables, places, strict=True))

    def bound(self) -> float:
        return max(0.0, self.worst - float(self.curve.gained(self.budget - self.smallest)))

    def greedy(self) -> list[int]:
        """Takes all steps that fit, in their order; an item whose step does not fit takes no further ones."""
        places, ended = [0] * len(self.tables), [False] * len(self.tables)
        left = self.budget - self.smallest
        for owner, target, size in zip(self.owner.tolist(), self.target.tolist(), self.size.tolist(), strict=True):
            if ended[owner] or size > left:
                ended[owner] = True
            else:
                places[owner], left = target, left - size
        return places

    def filled(self, places: Sequence[int]) -> list[int]:
        """Spends the rest of the budget of a choice, always on the option that removes most damage."""
        counts = [len(table) for table in self.tables]
        first = np.cumsum([0, *counts[:-1]])  # where the options of an item begin, all of them in one row
        owner = np.repeat(np.arange(len(counts)), counts)
        size = np.array([size for table in self.tables for size, _ in table], np.int64)
        damage = np.array([damage for table in self.tables for _, damage in table])
        now, left = first + np.array(places, np.int64), self.left(places)
        while True:
            gains = np.where(size - size[now][owner] <= left, damage[now][owner] - damage, 0.0)
            chosen = int(gains.argmax())
            if gains[chosen] <= 0:
                return [int(place) for place in now - first]
            left -= int(size[chosen] - size[now[owner[chosen]]])
            now[owner[chosen]] = chosen

    def core(self, damage: float) -> tuple[list[list[int]], float]:
        """Returns the options that a choice with less than `damage` may have, and the smallest bound of the others."""
        taken = int(self.curve.whole(self.budget - self.smallest))
        price = float(self.slope[taken]) if taken < len(self.slope) else 0.0
        limit, root, floor = damage * (1 - TOLERANCE), self.bound(), damage
        kept = []
        for table in self.tables:
            costs = [damage + price * size for size, damage in table]
            bounds = [root + cost - min(costs) for cost in costs]
            kept.append([place for place, bound in enumerate(bounds) if bound < limit])
            floor = min([floor, *(bound for bound in bounds if bound >= limit)])
        return kept, floor


def _steps(tables: Sequence[Table]) -> Iterable[tuple[float, int, int, int, float]]:
    for number, table in enumerate(tables):
        hull = _hull(table)
        for (before, _), (place, slope) in pairwise(hull):
            yield slope, number, place, table[place][0] - table[before][0], table[before][1] - table[place][1]


@dataclass(frozen=True, slots=True)
class Curve:
    """Damage removed over bytes spent, in steps that each buy less than the one before."""

    spent: Array
    gain: Array

    @classmethod
    def of(cls, sizes: Array, gains: Array) -> "Curve":
        return cls(np.concatenate(([0], np.cumsum(sizes))), np.concatenate(([0.0], np.cumsum(gains))))

    def gained(self, size: Any) -> Any:
        """Returns the damage removed, with the last step taken in part."""
        return np.interp(size, self.spent, self.gain)

    def whole(self, size: Any) -> Any:
        """Returns the number of steps that fit one after the other."""
        return self.spent.searchsorted(size, side="right") - 1


@dataclass(frozen=True, slots=True)
class Rest:
    """The remaining items: their smallest size, its damage, and what more bytes remove of it."""

    size: int
    damage: float
    curve: Curve


@dataclass(frozen=True, slots=True)
class States:
    """Choices for the items so far: bytes and damage, and the parent state and option of each."""

    size: Array
    damage: Array
    parent: Array
    place: Array

    def __len__(self) -> int:
        return len(self.size)

    def at(self, index: Array) -> "States":
        return States(self.size[index], self.damage[index], self.parent[index], self.place[index])

    def times(self, table: Table, most: int) -> "States":
        """Combines each state with each option of one more item; keeps those within `most` bytes that none beats."""
        sizes, damages = np.array([size for size, _ in table], np.int64), np.array([damage for _, damage in table])
        size, damage = (self.size[:, None] + sizes).ravel(), (self.damage[:, None] + damages).ravel()
        within = np.flatnonzero(size <= most)
        order = within[np.lexsort((damage[within], size[within]))]
        before = np.concatenate(([np.inf], np.minimum.accumulate(damage[order])))[:-1]
        order = order[damage[order] < before]
        return States(size[order], damage[order], order // len(table), order % len(table))


class Search:
    """Searches the choices of a core, item by item, except those that cannot be better than `best`."""

    def __init__(self, problem: Problem, best: float, floor: float) -> None:
        self.problem, self.best, self.tables = problem, best, problem.tables
        self.floor = floor  # the smallest bound of everything dropped
        self.order = _by_largest_step(problem.tables)
        level = np.full(len(problem.tables), -1)
        level[self.order] = np.arange(len(self.order))
        self.decided = level[problem.owner]  # the level that decides a step
        self.behind = _sums_behind([problem.tables[number][0] for number in self.order])
        self.levels: list[States] = []
        self.best_state: tuple[int, int, int, int] | None = None  # level, parent, place, and the steps that follow

    def run(self) -> list[int] | None:
        """Returns the best choice, None if none is better than the known one."""
        work, most, none = WORK, self._most_states(), np.zeros(1, np.int64)
        states = States(none, np.zeros(1), none, none)
        for level, number in enumerate(self.order):
            rest = self._rest(level)
            states = states.times(self.tables[number], self.problem.budget - rest.size)
            work -= len(self.decided) + 4 * len(states)
            self._note(level, states, rest)
            states = self._worth(states, rest, most if work > 0 else 0)
            self.levels.append(states)
            if not len(states):
                break
        self.floor = min(self.floor, self.best)
        return self._choice() if self.best_state else None

    def _most_states(self) -> int:
        """Returns the states per level that keep all levels together within WORK."""
        options = sum(len(self.tables[number]) for number in self.order)
        return max(FEWEST, min(STATES, WORK // (8 * max(1, options))))

    def _rest(self, level: int) -> Rest:
        steps = self.decided > level
        size, damage = self.behind[level]
        return Rest(size, damage, Curve.of(self.problem.size[steps], self.problem.gain[steps]))

    def _note(self, level: int, states: States, rest: Rest) -> None:
        """Records the best choice: a state and the steps of later items that still fit."""
        if not len(states):
            return
        steps = rest.curve.whole(self.problem.budget - rest.size - states.size)
        damage = states.damage + rest.damage - rest.curve.gain[steps]
        least = int(damage.argmin())
        if damage[least] < self.best:
            self.best = float(damage[least])
            self.best_state = (level, int(states.parent[least]), int(states.place[least]), int(steps[least]))

    def _worth(self, states: States, rest: Rest, most: int) -> States:
        """Returns at most `most` states that may lead to something better; records the bounds of all others."""
        bound = states.damage + rest.damage - rest.curve.gained(self.problem.budget - rest.size - states.size)
        keep = np.zeros(len(states), bool)
        alive = np.flatnonzero(bound < self.best * (1 - TOLERANCE))
        keep[thinned(alive, states.damage[alive], most)] = True
        self.floor = float(min([self.floor, *bound[~keep]]))
        return states.at(np.flatnonzero(keep))

    def _choice(self) -> list[int]:
        """Returns the best choice: that of its state, traced from child to parent, and the steps that follow."""
        assert self.best_state is not None
        level, parent, place, steps = self.best_state
        places = [0] * len(self.tables)
        for step in np.flatnonzero(self.decided > level)[:steps]:
            places[self.problem.owner[step]] = int(self.problem.target[step])
        places[self.order[level]] = place
        for number, states in reversed(list(zip(self.order[:level], self.levels[:level], strict=True))):
            places[number], parent = int(states.place[parent]), int(states.parent[parent])
        return places


def _by_largest_step(tables: Sequence[Table]) -> list[int]:
    """Orders items by their largest step, which limits how far the bound can be off; those without a choice last."""
    steps = [max((a[1] - b[1] for a, b in pairwise(table)), default=0.0) for table in tables]
    return sorted(range(len(tables)), key=lambda number: (-steps[number], number))


def _sums_behind(rows: Table) -> list[tuple[int, float]]:
    sums = list(accumulate(reversed(rows), lambda total, row: (total[0] + row[0], total[1] + row[1]), initial=(0, 0.0)))
    return sums[-2::-1]


def thinned(alive: Array, damage: Array, most: int) -> Array:
    """Keeps, of states sorted by size, the smallest in each narrow range of damage: every continuation fits it too."""
    if len(alive) <= most or most == 0:
        return alive[:most]
    low, high = float(damage.min()), float(damage.max())
    ranges = np.minimum((damage - low) * (most / (high - low)), most - 1).astype(np.int64)
    return alive[np.unique(ranges, return_index=True)[1]]

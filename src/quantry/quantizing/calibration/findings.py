"""What calibration found out on the way, kept with the job so that a resumed one says the same in the end."""

from collections.abc import Mapping
from importlib import import_module
from statistics import median
from typing import Any

from quantry.models.workspace import Workspace
from quantry.quantizing.calibration.observe import LEAST

FILE = "calibration"  # the name under which a workspace remembers findings
LOW_MEMORY, STARVED, DISTILLED, EXPERTS = "low memory", "starved", "distilled", "experts"
TOPICS = {LOW_MEMORY, STARVED, DISTILLED, EXPERTS}  # all others are modules of rounders


class Findings:
    """Facts by topic and subject. What is added is on the disk before the tensors that it is about."""

    def __init__(self) -> None:
        self._facts: dict[str, dict[str, Any]] = {}
        self._work: Workspace | None = None

    def resume(self, work: Workspace) -> None:
        """Adds what earlier runs of the job found, and keeps the rest there."""
        self._work = work
        earlier = work.remembered(FILE)
        self._facts = {topic: earlier.get(topic, {}) | self._facts.get(topic, {}) for topic in {*earlier, *self._facts}}

    def add(self, topic: str, subject: str | int, value: Any) -> None:
        self._facts.setdefault(topic, {})[str(subject)] = value
        if self._work:
            self._work.remember(FILE, self._facts)

    def about(self, topic: str) -> Mapping[str, Any]:
        """Returns what was found on a topic, by subject."""
        return self._facts.get(topic, {})

    def notes(self) -> tuple[str, ...]:
        """Returns a sentence per topic, for all blocks together."""
        rounders = sorted(self._facts.keys() - TOPICS)
        reported = [note for name in rounders for note in import_module(name).notes(self.about(name))]
        return (*self._experts(), *self._starved(), *reported, *self._distilled(), *self._low_memory())

    def expert_tokens(self) -> dict[str, tuple[int, ...]]:
        """Returns the tokens that each expert saw, by block."""
        return {
            block: tuple(counts) for block, counts in sorted(self.about(EXPERTS).items(), key=lambda it: int(it[0]))
        }

    def _experts(self) -> tuple[str, ...]:
        """Says how many tokens the experts of each block got, and if some got none."""
        blocks = self.expert_tokens()
        if not blocks:
            return ()
        ranges = [f"{block}: {min(c):,} / {median(c):,.0f} / {max(c):,}" for block, c in blocks.items()]
        seen = f"Tokens per expert (fewest / median / most) by block: {'; '.join(ranges)}."
        experts, without = sum(map(len, blocks.values())), sum(c.count(0) for c in blocks.values())
        missed = (
            f"{without:,} of {experts:,} experts got no token: more --samples, or --data of other kinds, would help."
        )
        return (seen, missed) if without else (seen,)

    def _starved(self) -> tuple[str, ...]:
        blocks = list(self.about(STARVED).values())  # (groups, the one with fewest tokens, its tokens)
        if not blocks:
            return ()
        _, group, tokens = min(blocks, key=lambda block: (block[2], block[1]))
        return (
            f"{sum(block[0] for block in blocks)} inputs of experts in {len(blocks)} blocks have fewer than {LEAST} "
            f"tokens, the fewest {group} ({tokens}): they are taken from all experts of the layer together. "
            "More --samples would help.",
        )

    def _distilled(self) -> tuple[str, ...]:
        errors = list(self.about(DISTILLED).values())
        if not errors:
            return ()
        before, after = (median(side) for side in zip(*errors, strict=True))
        return (
            f"Distillation lowered the squared error of a block's output on held-out text from {before:.3g} to "
            f"{after:.3g} of its square (medians of {len(errors)} blocks).",
        )

    def _low_memory(self) -> tuple[str, ...]:
        return tuple(
            f"The GPU had no room for block {block}: from there on one window was run at a time, and hidden states "
            f"were kept in main memory."
            for block in list(self.about(LOW_MEMORY))[:1]
        )

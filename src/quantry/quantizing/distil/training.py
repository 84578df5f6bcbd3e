"""Trains scales end to end: the divergence of the student's next-token probabilities from the 16-bit model's.

Part of the text is held out, and the state with the smallest divergence there is kept, which may be the first. The
state of training is a plain mapping of tensors, so that a killed job goes on where it was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import cos, isfinite, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantry.errors import QuantryError
from quantry.quantizing.calibration.distillation import drawn
from quantry.quantizing.calibration.held_out import held_out
from quantry.types import Progress

RATE = 1e-3  # of the logarithm of a scale, at first, then along a cosine; 3e-3 gained more at 2 bits and lost at 4
RISING = 10  # steps until the rate is reached
BETAS = (0.9, 0.95)  # of Adam
LENGTH = 512  # tokens of a piece of text
PIECES = 8  # of a step
AT_ONCE = 2048  # tokens that run together
EPOCHS = 12  # at most: beyond, few texts are learned by heart
HELD, MOST_HELD = 8, 8  # one piece in so many is held out, and no more than so many, and one for each text
CHECKS = 5  # looks at the pieces that are held out

Logits = Callable[[Tensor], Tensor]


@dataclass(slots=True)
class State:
    """Where training is; `best` are the logarithms with the smallest divergence so far."""

    step: int
    before: float
    after: float
    best: list[Tensor]


class Training:
    """Some steps of training on windows of tokens; `logs` are what is trained, `labels` the texts of the windows."""

    def __init__(
        self,
        student: Logits,
        teacher: Logits,
        logs: Sequence[Tensor],
        windows: Sequence[Sequence[int]],
        seed: int,
        labels: Sequence[int] = (),
    ) -> None:
        self._student, self._teacher, self._logs, self._seed = student, teacher, list(logs), seed
        pieces = cut(windows)
        texts = zip(windows, labels or [0] * len(windows), strict=True)
        labels = [text for window, text in texts for _ in cut([window])]
        places = held_out(labels, max(2, HELD, len(pieces) // MOST_HELD))
        most = MOST_HELD if len(set(labels)) == 1 else len(places)
        self._held = [pieces[place] for place in places[:most]]
        self._lessons = [piece for place, piece in enumerate(pieces) if place not in places] or pieces
        self._optimizer = torch.optim.Adam(self._logs, betas=BETAS)

    def limited(self, steps: int) -> int:
        """Returns the steps, or fewer where the text is short."""
        return max(1, min(steps, EPOCHS * len(self._lessons) // PIECES))

    def run(
        self,
        steps: int,
        resumed: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None,
        keep: Callable[[Mapping[str, Tensor], Mapping[str, Any]], None],
        progress: Progress | None,
    ) -> State:
        """Trains and leaves the best logarithms in place; hands what it needs to go on to `keep` now and then."""
        state = self._resumed(*resumed) if resumed else self._first()
        order = list(drawn(len(self._lessons), steps * PIECES, self._seed))
        for step in range(state.step, steps):
            self._learn([self._lessons[place] for place in order[step * PIECES : (step + 1) * PIECES]], step, steps)
            state.step = step + 1
            if state.step % max(1, steps // CHECKS) == 0 or state.step == steps:
                self._look(state)
                keep(*self._kept(state))
            if progress:
                progress(state.step, steps, f"training scales, step {state.step} of {steps}")
        self._set(state.best)
        return state

    def _first(self) -> State:
        divergence = self.divergence(self._held)
        return State(0, divergence, divergence, [log.detach().clone() for log in self._logs])

    def _look(self, state: State) -> None:
        divergence = self.divergence(self._held)
        if divergence < state.after:
            state.after, state.best = divergence, [log.detach().clone() for log in self._logs]

    def _learn(self, pieces: Sequence[Sequence[int]], step: int, steps: int) -> None:
        rate = RATE * min(1.0, (step + 1) / RISING) * (1 + cos(pi * step / steps)) / 2
        self._optimizer.param_groups[0]["lr"] = rate
        self._optimizer.zero_grad()
        count = sum(map(len, pieces))
        for batch in batches(pieces):
            loss = self._summed(batch) / count
            torch.autograd.backward(loss)
        self._optimizer.step()

    @torch.no_grad()
    def divergence(self, pieces: Sequence[Sequence[int]]) -> float:
        """Returns the mean KL of the student against the teacher, in nats per token."""
        total = sum(float(self._summed(batch)) for batch in batches(pieces))
        if not isfinite(total):
            raise QuantryError("the quantized model gives values that are not finite", fix="leave --distil out")
        return total / sum(map(len, pieces))

    def _summed(self, batch: Tensor) -> Tensor:
        device = self._logs[0].device
        with torch.no_grad():
            taught = functional.log_softmax(self._teacher(batch.to(device)).float(), -1)
        made = functional.log_softmax(self._student(batch.to(device)).float(), -1)
        return functional.kl_div(made, taught, reduction="sum", log_target=True)

    @torch.no_grad()
    def _set(self, logs: Sequence[Tensor]) -> None:
        for log, value in zip(self._logs, logs, strict=True):
            log.copy_(value)

    def _kept(self, state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
        moments = [self._optimizer.state[log] for log in self._logs]
        parts = {
            "log": [log.detach() for log in self._logs],
            "best": state.best,
            "first": [moment["exp_avg"] for moment in moments],
            "second": [moment["exp_avg_sq"] for moment in moments],
        }
        tensors = {f"{name}.{place}": one.cpu() for name, all_ in parts.items() for place, one in enumerate(all_)}
        return tensors, {"step": state.step, "before": state.before, "after": state.after}

    def _resumed(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> State:
        def part(name: str) -> list[Tensor]:
            return [tensors[f"{name}.{place}"].to(log.device) for place, log in enumerate(self._logs)]

        self._set(part("log"))
        for log, first, second in zip(self._logs, part("first"), part("second"), strict=True):
            self._optimizer.state[log] = {
                "step": torch.tensor(float(facts["step"])), "exp_avg": first, "exp_avg_sq": second
            }  # fmt: skip
        return State(facts["step"], facts["before"], facts["after"], part("best"))


def cut(windows: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Cuts windows into pieces of at most LENGTH tokens; leaves out what is too short to say anything."""
    pieces = [window[start : start + LENGTH] for window in windows for start in range(0, len(window), LENGTH)]
    return [piece for piece in pieces if len(piece) > 1]


def batches(pieces: Sequence[Sequence[int]]) -> Iterator[Tensor]:
    """Yields pieces of one length together, up to AT_ONCE tokens."""
    for length in sorted(set(map(len, pieces))):
        same = [list(piece) for piece in pieces if len(piece) == length]
        step = max(1, AT_ONCE // length)
        for start in range(0, len(same), step):
            yield torch.tensor(same[start : start + step])

"""The loop: AdamW on the adapter's parameters, a rate that rises and falls along lines, clipped gradients.

The order of rows is drawn from a seed and no layer drops anything at random, so the state is a mapping of tensors and
a step number: on a CPU a continued job computes what an undisturbed one does.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quantry.errors import WeightError
from quantry.jobs.adapt.base import AdaptedModel
from quantry.jobs.adapt.memory import AT_ONCE
from quantry.jobs.adapt.rows import IGNORED, Row
from quantry.jobs.adapt.settings import Settings
from quantry.quantizing.calibration.distillation import drawn
from quantry.types import Progress

BETAS = (0.9, 0.999)  # of AdamW, as in QLoRA
CLIPPED = 1.0  # the largest norm of all gradients together
RISING = 20  # one step in so many is part of the rise
EVERY, AT_LEAST = 50, 5  # steps between two checkpoints, at most; checkpoints of a job with as many steps

Keep = Callable[[Mapping[str, Tensor], Mapping[str, Any]], None]
Kept = tuple[Mapping[str, Tensor], Mapping[str, Any]]


@dataclass(slots=True)
class Losses:
    """Nats per token: of every step, and of rows that are held back."""

    before: float
    training: list[float] = field(default_factory=list)
    after: float | None = None


class Training:
    """Trains the adapter of a model in `steps` on rows."""

    def __init__(
        self, model: AdaptedModel, training: Sequence[Row], held_back: Sequence[Row], settings: Settings, steps: int
    ) -> None:
        self._model, self._rows, self._held, self._steps = model, training, held_back, steps
        self._batch, self._rate = settings.batch or 1, settings.rate or 0.0
        self._order = list(drawn(len(training), steps * self._batch, settings.seed))
        self._parameters = list(model.trained.values())
        self._optimizer = torch.optim.AdamW(self._parameters, betas=BETAS, weight_decay=0.0)

    def run(self, resumed: Kept | None, keep: Keep, progress: Progress | None) -> Losses:
        """Trains from the state that `keep` was handed last, or from the beginning. Raises WeightError on NaN."""
        losses = self._resumed(*resumed) if resumed else Losses(self._checked(self.loss(self._held), "before training"))
        every = max(1, min(EVERY, self._steps // AT_LEAST))
        for step in range(len(losses.training), self._steps):
            rows = [self._rows[place] for place in self._order[step * self._batch : (step + 1) * self._batch]]
            losses.training.append(self._learn(rows, step))
            if (step + 1) % every == 0:
                keep(*self._state(losses))
            if progress:
                progress(step + 1, self._steps, f"training, step {step + 1}, loss {losses.training[-1]:.3f}")
        losses.after = self._checked(self.loss(self._held), "after training")
        return losses

    @torch.no_grad()
    def loss(self, rows: Sequence[Row]) -> float:
        """Returns the mean loss of the tokens that are scored."""
        return sum(float(self._summed(batch)) for batch in batches(rows)) / sum(row.scored for row in rows)

    def _learn(self, rows: Sequence[Row], step: int) -> float:
        count, total = sum(row.scored for row in rows), 0.0
        self._optimizer.param_groups[0]["lr"] = self._rate * share_of_rate(step, self._steps)
        self._optimizer.zero_grad()
        for batch in batches(rows):
            loss = self._summed(batch) / count
            torch.autograd.backward(loss)
            total += float(loss.detach())
        self._checked(total, f"of step {step + 1}")
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIPPED)
        self._optimizer.step()
        return total

    def _summed(self, batch: Sequence[Row]) -> Tensor:
        ids, mask, labels = (tensor.to(self._parameters[0].device) for tensor in padded(batch))
        logits = self._model(ids, mask)[:, :-1].float()
        return functional.cross_entropy(
            logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )

    def _checked(self, loss: float, when: str) -> float:
        if not isfinite(loss):
            raise WeightError(
                f"the loss {when} is {loss}",
                fix="check the model's weights" if "before" in when else f"give a --rate below {self._rate:g}",
            )
        return loss

    def _state(self, losses: Losses) -> Kept:
        moments = [self._optimizer.state[parameter] for parameter in self._parameters]
        parts = {
            "weight": [parameter.detach() for parameter in self._parameters],
            "first": [moment["exp_avg"] for moment in moments],
            "second": [moment["exp_avg_sq"] for moment in moments],
        }
        tensors = {f"{name}.{place}": one.cpu() for name, many in parts.items() for place, one in enumerate(many)}
        return tensors, {"before": losses.before, "training": losses.training}

    @torch.no_grad()
    def _resumed(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Losses:
        for place, parameter in enumerate(self._parameters):
            parameter.copy_(tensors[f"weight.{place}"])
            self._optimizer.state[parameter] = {
                "step": torch.tensor(float(len(facts["training"]))),
                "exp_avg": tensors[f"first.{place}"].to(parameter.device),
                "exp_avg_sq": tensors[f"second.{place}"].to(parameter.device),
            }
        return Losses(facts["before"], list(facts["training"]))


def share_of_rate(step: int, steps: int) -> float:
    """Returns the share of the rate at a step: up to 1 along a line, then down; the last step still moves."""
    rising = max(1, steps // RISING)
    return min((step + 1) / rising, (steps - step) / max(1, steps - rising))


def batches(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields rows that run together: up to AT_ONCE tokens with their padding, or one row."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row.ids)):
        if batch and len(row.ids) * (len(batch) + 1) > AT_ONCE:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def padded(rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids, mask and labels of rows; padding comes last, where no token looks at it."""
    longest = max(len(row.ids) for row in rows)
    gaps = [longest - len(row.ids) for row in rows]
    ids = [[*row.ids, *[0] * gap] for row, gap in zip(rows, gaps, strict=True)]
    mask = [[1] * len(row.ids) + [0] * gap for row, gap in zip(rows, gaps, strict=True)]
    labels = [[*row.labels, *[IGNORED] * gap] for row, gap in zip(rows, gaps, strict=True)]
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(labels)

"""Runs in the python that an engine is installed in: scores windows of tokens in the engine, and answers prompts.

    python script.py MODULE SCORER FOLDER

MODULE is the engine's Python module, SCORER the file with its class `Scorer` (see engines/scorers). FOLDER has
request.json, and for each window window-N.npz (tokens, start, ids); it gets scored-N.npz (logq, next, top) and at last
result.json. With `kept` in place of ids, the ids are the engine's own likeliest tokens, so many of each position; they
are stored too, with the mass of all others (tail). Nothing of Quantry is imported, since it may not be installed here;
numpy and torch come with every engine. Lines that start with MARK are messages for the process that started this one.
"""

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from threading import Thread
from typing import Any

MARK = "@quantry "

try:
    import numpy as np
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:  # every engine needs them, so this python has none
    print(f"\n{MARK}{json.dumps({'error': str(error), 'missing': sys.argv[1]})}", flush=True)
    raise

ABANDONED = 3  # exit code
ROWS = 256  # positions whose logits are held at once, in float64: 300 MB for a vocabulary of 150,000


class ScoredWindow:
    """One window, and the log-probabilities that were seen of it."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as stored:
            self.tokens: list[int] = stored["tokens"].tolist()
            self.start = int(stored["start"])
            self.kept = int(stored["kept"]) if "kept" in stored else None
            ids = torch.zeros(1, self.kept) if self.kept else torch.from_numpy(stored["ids"])
        count = len(self.tokens) - self.start
        self.ids = ids.long().expand(count, -1)  # a single row stands for all
        self.following = torch.tensor(self.tokens[self.start :])
        self.logq, self.next, self.tail = torch.empty(self.ids.shape), torch.empty(count), torch.empty(count)
        self.top = torch.empty(count, dtype=torch.int32)
        self.seen, self.sound = torch.zeros(2, count, dtype=torch.bool)

    def see(self, position: int, logits: Tensor) -> None:
        """Takes the logits after the tokens from `position` on; ignores those outside the window."""
        first = max(position, self.start - 1)
        last = min(position + len(logits), len(self.tokens) - 1)
        for start in range(first, last, ROWS):
            end = min(start + ROWS, last)
            self._score(start + 1 - self.start, logits[start - position : end - position].double())

    def _score(self, first: int, rows: Tensor) -> None:
        here = slice(first, first + len(rows))
        ids, following = self.ids[here].to(rows.device), self.following[here, None].to(rows.device)
        whole = rows.logsumexp(-1, keepdim=True)
        if self.kept:
            ids = self._keep(here, rows)
        logq = rows.gather(-1, ids) - whole
        self.logq[here], self.tail[here] = logq.float().cpu(), (1 - logq.exp().sum(-1)).clamp_min(0).log().float().cpu()
        self.next[here] = (rows.gather(-1, following) - whole)[:, 0].float().cpu()
        self.top[here] = rows.argmax(-1).int().cpu()
        self.sound[here] = whole[:, 0].isfinite().cpu()
        self.seen[here] = True

    def _keep(self, here: slice, rows: Tensor) -> Tensor:
        """Returns the ids of the likeliest tokens, and keeps them; a small vocabulary has fewer than were asked for."""
        if not self.seen.any():
            self.kept = min(self.kept or 0, rows.shape[-1])
            self.ids, self.logq = torch.empty(len(self.seen), self.kept).long(), torch.empty(len(self.seen), self.kept)
        ids = rows.topk(self.kept or 0, dim=-1, sorted=False).indices
        self.ids[here] = ids.cpu()
        return ids

    def save(self, file: Path) -> None:
        """Writes the scores. Raises an error if a position was not seen or is not finite."""
        if not self.seen.all():
            raise RuntimeError(f"the engine showed the logits of {int(self.seen.sum())} of {len(self.seen)} positions")
        if not self.sound.all():
            raise ValueError(f"the logits of {int((~self.sound).sum())} of {len(self.sound)} positions are not finite")
        own: dict[str, Any] = {"ids": self.ids.int().numpy(), "tail": self.tail.numpy()} if self.kept else {}
        np.savez(file, logq=self.logq.numpy(), next=self.next.numpy(), top=self.top.numpy(), **own)


def send(**message: Any) -> None:
    """Sends a message to the process that started this one."""
    print(f"\n{MARK}{json.dumps(message)}", flush=True)


def end_with_starter() -> None:
    """Ends this process when the one that started it ends: that one holds its standard input open."""
    sys.stdin.read()
    os._exit(ABANDONED)


def load_scorer(file: Path) -> Any:
    """Returns the class `Scorer` of a file."""
    spec = spec_from_file_location("quantry_scorer", file)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Scorer


def run(scorer_file: Path, folder: Path) -> None:
    """Scores all windows of a request, answers its prompts, and writes the result."""
    request: dict[str, Any] = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    scorer = load_scorer(scorer_file)(request)
    for number in range(request["windows"]):
        window = ScoredWindow(folder / f"window-{number}.npz")
        scorer.score(window)
        window.save(folder / f"scored-{number}.npz")
        send(windows=number + 1)
    answers = list(scorer.answer(request["prompts"], request["max_tokens"])) if request["prompts"] else []
    result = {"version": scorer.version, "memory": memory(scorer), "notes": scorer.notes, "answers": answers}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


def memory(scorer: Any) -> dict[str, int]:
    """Returns the parts of memory; what a GPU held at most beyond them was for computing."""
    parts: dict[str, int] = scorer.memory()
    if torch.cuda.is_available():
        parts["compute"] = max(0, torch.cuda.max_memory_allocated() - sum(parts.values()))
    return parts


if __name__ == "__main__":
    Thread(target=end_with_starter, daemon=True).start()
    try:
        run(Path(sys.argv[2]), Path(sys.argv[3]))
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        send(error=f"{type(error).__name__}: {error}", missing=missing)
        raise

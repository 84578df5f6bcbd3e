"""Runs inside an engine's own python: what it says of windows of tokens, and what it writes after prompts.

    python engines.py ENGINE FOLDER

FOLDER has request.json, and for each window window-N.npz (tokens, start, ids); it gets scored-N.npz (logq, next, top)
and at last result.json. Nothing of Quantry is imported, since it may not be installed here; numpy and torch come with
every engine. Lines that begin with MARK are for the process that started this one.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from typing import Any

MARK = "@quantry "

try:
    import numpy as np
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:  # every engine needs them, so there is none here
    print(f"\n{MARK}{json.dumps({'error': str(error), 'missing': sys.argv[1]})}", flush=True)
    raise

ABANDONED = 3  # exit code
ROWS = 256  # positions whose logits are held at once, in float64: 300 MB for a vocabulary of 150,000

Request = dict[str, Any]


class Window:
    """One window and what has been seen of it."""

    def __init__(self, file: Path) -> None:
        with np.load(file) as stored:
            self.tokens: list[int] = stored["tokens"].tolist()
            self.start = int(stored["start"])
            self.ids = torch.from_numpy(stored["ids"].astype(np.int64))
        count = len(self.tokens) - self.start
        self.ids = self.ids.expand(count, -1)  # a single row holds for all
        self.following = torch.tensor(self.tokens[self.start :])
        self.logq, self.next = torch.empty(self.ids.shape), torch.empty(count)
        self.top = torch.empty(count, dtype=torch.int32)
        self.seen, self.sound = torch.zeros(2, count, dtype=torch.bool)

    def see(self, position: int, logits: Tensor) -> None:
        """Takes the logits after the tokens from `position` on; what lies outside the window is left alone."""
        first = max(position, self.start - 1)
        last = min(position + len(logits), len(self.tokens) - 1)
        if first >= last:
            return
        rows = logits[first - position : last - position].double()
        here = slice(first + 1 - self.start, last + 1 - self.start)
        ids, following = self.ids[here].to(rows.device), self.following[here, None].to(rows.device)
        whole = rows.logsumexp(-1, keepdim=True)
        self.logq[here] = (rows.gather(-1, ids) - whole).float().cpu()
        self.next[here] = (rows.gather(-1, following) - whole)[:, 0].float().cpu()
        self.top[here] = rows.argmax(-1).int().cpu()
        self.sound[here] = whole[:, 0].isfinite().cpu()
        self.seen[here] = True

    def save(self, file: Path) -> None:
        if not self.seen.all():
            raise RuntimeError(f"the engine showed the logits of {int(self.seen.sum())} of {len(self.seen)} positions")
        if not self.sound.all():
            raise ValueError(f"the logits of {int((~self.sound).sum())} of {len(self.sound)} positions are not finite")
        np.savez(file, logq=self.logq.numpy(), next=self.next.numpy(), top=self.top.numpy())


class Vllm:
    """vLLM in this process, its model hooked: after each forward pass the logits of all positions are taken.

    Its own prompt log-probabilities are of the tokens it finds likely, not of the reference's, and come as a Python
    object for each. Windows go one by one, so that all rows of a pass belong to one window; a window that vLLM cuts
    into chunks comes in several passes, and each says where it starts. Rows that only fill up a pass lie behind the
    true ones, where the next pass overwrites them or the window ends.
    """

    def __init__(self, request: Request) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.version: str = vllm.__version__
        self.window: Window | None = None
        settings = {
            "max_model_len": request["length"],
            "max_num_seqs": max(1, min(64, len(request["prompts"]))),
            "enforce_eager": True,  # a captured graph runs no hooks
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        self.llm = vllm.LLM(model=request["model"], trust_remote_code=False, **{**settings, **request["options"]})
        self.llm.apply_model(lambda model: model.register_forward_hook(self._passed, with_kwargs=True))
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.notes = [f"eager mode; a KV cache of {(cache.num_gpu_blocks or 0) * cache.block_size} tokens"]

    def _passed(self, model: Any, _: Any, inputs: dict[str, Any], hidden: Any) -> None:
        if self.window is None:
            return
        hidden, positions = hidden[0] if isinstance(hidden, tuple) else hidden, inputs["positions"]
        positions = positions[0] if positions.dim() > 1 else positions  # of three kinds, all alike for text
        start = int(positions[0])
        for piece in range(0, len(hidden), ROWS):
            self.window.see(start + piece, model.compute_logits(hidden[piece : piece + ROWS]))

    def score(self, window: Window) -> None:
        self.window = window
        self._generate([window.tokens[:-1]], 1)  # the last token predicts nothing that is scored
        self.window = None

    def answer(self, prompts: list[list[int]], count: int) -> Iterable[list[int]]:
        for output in self._generate(prompts, count):
            found, ended = list(output.outputs[0].token_ids), output.outputs[0].finish_reason == "stop"
            yield found[:-1] if ended else found

    def _generate(self, prompts: list[list[int]], count: int) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)

    def memory(self) -> dict[str, int]:
        def measure(worker: Any) -> dict[str, int]:
            runner = worker.model_runner  # on a CPU it does not say what its repacked weights take
            weights = int(getattr(runner, "model_memory_usage", 0))
            return taken({"weights": weights} if weights else {}, kv_cache=stored(runner.kv_caches))

        found: dict[str, int] = self.llm.collective_rpc(measure)[0]
        return found


class Transformers:
    """The model as transformers' own quantizer of its format loads it."""

    def __init__(self, request: Request) -> None:
        import transformers

        self.version = transformers.__version__
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        settings: dict[str, Any] = {"dtype": "auto", "trust_remote_code": False, **request["options"]}
        placed = find_spec("accelerate") is not None  # without it transformers takes no device_map
        if placed:
            settings.setdefault("device_map", self.device)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(request["model"], **settings)
        self.model: Any = (model if placed else model.to(self.device)).eval()
        self.notes: list[str] = []

    @torch.inference_mode()
    def score(self, window: Window) -> None:
        logits = self.model(torch.tensor([window.tokens[:-1]], device=self.device), use_cache=False).logits[0]
        for piece in range(0, len(logits), ROWS):
            window.see(piece, logits[piece : piece + ROWS])

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], count: int) -> Iterator[list[int]]:
        from transformers import GenerationConfig

        ends = self.model.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0)
        )
        for ids in prompts:
            given = torch.tensor([ids], device=self.device)
            written = self.model.generate(given, attention_mask=torch.ones_like(given), generation_config=greedy)
            found = written[0, len(ids) :].tolist()
            yield found[:-1] if found and found[-1] in ends else found

    def memory(self) -> dict[str, int]:
        return taken({"weights": int(self.model.get_memory_footprint())})


ENGINES: dict[str, type[Vllm] | type[Transformers]] = {"vllm": Vllm, "transformers": Transformers}


def stored(tensors: Iterable[Any]) -> int:
    """Bytes of tensors, shared ones once."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def taken(weights: dict[str, int], **parts: int) -> dict[str, int]:
    """The parts of memory; what a GPU held at most beyond them was for computing."""
    found = {**weights, **parts}
    if torch.cuda.is_available():
        found["compute"] = max(0, torch.cuda.max_memory_allocated() - sum(found.values()))
    return found


def tell(**words: Any) -> None:
    """A word to the process that started this one."""
    print(f"\n{MARK}{json.dumps(words)}", flush=True)


def end_with_starter() -> None:
    """The process that started this one holds its standard input open, which ends when that one does, in any way."""
    sys.stdin.read()
    os._exit(ABANDONED)


def serve(engine: str, folder: Path) -> None:
    request: Request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    served = ENGINES[engine](request)
    for number in range(request["windows"]):
        window = Window(folder / f"window-{number}.npz")
        served.score(window)
        window.save(folder / f"scored-{number}.npz")
        tell(windows=number + 1)
    answers = list(served.answer(request["prompts"], request["max_tokens"])) if request["prompts"] else []
    result = {"version": served.version, "memory": served.memory(), "notes": served.notes, "answers": answers}
    (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    Thread(target=end_with_starter, daemon=True).start()
    try:
        serve(sys.argv[1], Path(sys.argv[2]))
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        tell(error=f"{type(error).__name__}: {error}", missing=missing)
        raise

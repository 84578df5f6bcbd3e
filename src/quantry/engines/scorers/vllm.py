"""Scores windows in vLLM. `proof/served/inside/script.py` loads this file in the python that has vLLM."""

import os
from collections.abc import Iterable
from typing import Any

from torch import Tensor

ROWS = 256  # positions whose logits are computed at once: 300 MB in float64 for a vocabulary of 150,000


class Scorer:
    """vLLM in this process; a hook on its model takes the logits of all positions after each forward pass.

    vLLM's own prompt log-probabilities are of the tokens it finds likely, not of the reference's, and come as a Python
    object for each. Windows run one by one, so that all rows of a pass belong to one window; a window that vLLM cuts
    into chunks comes in several passes, and each says where it starts. Rows that only pad a pass lie behind the true
    ones, where the next pass overwrites them or the window ends.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self.version: str = vllm.__version__
        self.window: Any = None
        settings = {
            "max_model_len": request["length"],
            "max_num_seqs": max(1, min(64, len(request["prompts"]))),
            "enforce_eager": True,  # a captured graph runs no hooks
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
            **({"kv_cache_dtype": request["cache"]} if request["cache"] else {}),
        }
        self.llm = vllm.LLM(model=request["model"], trust_remote_code=False, **{**settings, **request["options"]})
        self.llm.apply_model(lambda model: model.register_forward_hook(self._after_pass, with_kwargs=True))
        cache = self.llm.llm_engine.vllm_config.cache_config
        self.notes = [f"eager mode; a KV cache of {(cache.num_gpu_blocks or 0) * cache.block_size} tokens"]

    def _after_pass(self, model: Any, _: Any, inputs: dict[str, Any], output: Any) -> None:
        if self.window is None:
            return
        hidden, positions = output[0] if isinstance(output, tuple) else output, inputs["positions"]
        start = int((positions[0] if positions.dim() > 1 else positions)[0])  # three rows, all equal for text
        for piece in range(0, len(hidden), ROWS):
            self.window.see(start + piece, model.compute_logits(hidden[piece : piece + ROWS]))

    def score(self, window: Any) -> None:
        self.window = window
        self._generate([window.tokens[:-1]], 1)  # the last token predicts nothing that is scored
        self.window = None

    def answer(self, prompts: list[list[int]], count: int) -> Iterable[list[int]]:
        for output in self._generate(prompts, count):
            tokens, ended = list(output.outputs[0].token_ids), output.outputs[0].finish_reason == "stop"
            yield tokens[:-1] if ended else tokens

    def _generate(self, prompts: list[list[int]], count: int) -> Any:
        from vllm import SamplingParams

        greedy = SamplingParams(max_tokens=count, temperature=0.0, detokenize=False)
        return self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)

    def memory(self) -> dict[str, int]:
        def measure(worker: Any) -> dict[str, int]:
            runner = worker.model_runner
            weights = int(getattr(runner, "model_memory_usage", 0))  # not known on a CPU, where weights are repacked
            return {**({"weights": weights} if weights else {}), "kv_cache": _bytes(runner.kv_caches)}

        parts: dict[str, int] = self.llm.collective_rpc(measure)[0]
        return parts


def _bytes(tensors: Iterable[Any]) -> int:
    """Returns the bytes of tensors; those that share a storage count once."""
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

"""Scores windows in transformers. `proof/served/inside/script.py` loads this file in the python that has it."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch


class Scorer:
    """The model as transformers' own quantizer of its format loads it."""

    def __init__(self, request: dict[str, Any]) -> None:
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
    def score(self, window: Any) -> None:
        tokens = torch.tensor([window.tokens[:-1]], device=self.device)  # the last predicts nothing that is scored
        window.see(0, self.model(tokens, use_cache=False).logits[0])

    @torch.inference_mode()
    def answer(self, prompts: list[list[int]], count: int) -> Iterator[list[int]]:
        from transformers import GenerationConfig

        eos = self.model.generation_config.eos_token_id
        ends = {eos} if isinstance(eos, int) else set(eos or ())
        greedy = GenerationConfig(
            do_sample=False, max_new_tokens=count, eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0)
        )
        for ids in prompts:
            prompt = torch.tensor([ids], device=self.device)
            output = self.model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=greedy)
            tokens = output[0, len(ids) :].tolist()
            yield tokens[:-1] if tokens and tokens[-1] in ends else tokens

    def memory(self) -> dict[str, int]:
        return {"weights": int(self.model.get_memory_footprint())}

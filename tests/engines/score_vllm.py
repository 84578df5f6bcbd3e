"""Runs inside vLLM's environment: next-token log-probabilities of token sequences, for each model given.

    python score_vllm.py TOKENS.json OUT.json MODEL [MODEL ...]

TOKENS.json is a list of lists of token ids. OUT.json gets, for each model, for each sequence, for each position after the
first, a list of [token id, log-probability]: the most likely tokens, and the one that follows in the sequence. The
variable QUANTRY_VLLM_ARGUMENTS may hold more arguments of the engine as JSON.
"""

import json
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

TOP = 64


def score(model: str, sequences: list[list[int]]) -> list[list[list[tuple[int, float]]]]:
    engine = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=512,
        max_logprobs=TOP,
        disable_log_stats=True,
        enable_prefix_caching=False,
        seed=0,
        **json.loads(os.environ.get("QUANTRY_VLLM_ARGUMENTS", "{}")),
    )
    wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=TOP)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in sequences], wanted, use_tqdm=False)
    return [
        [[(token, entry.logprob) for token, entry in position.items()] for position in output.prompt_logprobs[1:]]
        for output in outputs
    ]


if __name__ == "__main__":
    tokens, out, *models = sys.argv[1:]
    sequences = json.loads(Path(tokens).read_text())
    results: dict[str, object] = {}
    for model in models:
        try:
            results[model] = score(model, sequences)
        except Exception as error:  # reported, so that the other models are still scored
            results[model] = f"{type(error).__name__}: {error}"
        Path(out).write_text(json.dumps(results))

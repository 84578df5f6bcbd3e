"""Runs inside transformers' environment: next-token log-probabilities of token sequences, for each model given.

    python score_transformers.py TOKENS.json OUT.json MODEL [MODEL ...]

Reads and writes what score_vllm.py does.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

TOP = 64


@torch.no_grad()
def score(model: str, sequences: list[list[int]]) -> list[list[list[tuple[int, float]]]]:
    loaded = AutoModelForCausalLM.from_pretrained(model, device_map="cpu").eval()
    results = []
    for ids in sequences:
        rows = torch.log_softmax(loaded(torch.tensor([ids])).logits[0, :-1].float(), dim=-1)
        values, tokens = rows.topk(TOP)
        likely = [dict(zip(t, v, strict=True)) for t, v in zip(tokens.tolist(), values.tolist(), strict=True)]
        for position, row in enumerate(rows):
            likely[position].setdefault(ids[position + 1], row[ids[position + 1]].item())
        results.append([list(position.items()) for position in likely])
    return results


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

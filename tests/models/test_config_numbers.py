"""Numbers of a config that no model has are refused when it is opened, before anything is allocated for them."""

from typing import Any

import pytest

from quantry.errors import ConfigError
from quantry.models.config_numbers import LIMITS
from quantry.models.reader import open_checkpoint
from tiny_files import LLAMA, MakeFolder


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", 10**9), ("num_attention_heads", "x"), ("num_key_value_heads", -5), ("vocab_size", 1e30), ("hidden_size", [2, 2]),
        ("num_attention_heads", [2, "x"]),
        ("intermediate_size", True), ("head_dim", 0.5), ("max_position_embeddings", float("nan")), ("num_experts", {}),
        ("rms_norm_eps", -1.0), ("rms_norm_eps", float("nan")), ("rope_theta", "10000"), ("norm_eps", float("inf")),
    ],
)  # fmt: skip
def test_odd_numbers_are_refused_by_name(make_folder: MakeFolder, key: str, value: Any) -> None:
    for config in ({**LLAMA, key: value}, {**LLAMA, "text_config": {key: value}}):
        folder = make_folder(config, name=f"model-{'text_config' in config}")
        with pytest.raises(ConfigError, match=f"config.json gives {key} as .*, not a"):
            open_checkpoint(folder)


def test_usual_numbers_pass(make_folder: MakeFolder) -> None:
    usual = {
        "head_dim": None,
        "num_key_value_heads": [2, None, 4],
        "sliding_window": 4096.0,
        "rope_theta": 1e6,
        "norm_eps": 0,
    }
    open_checkpoint(make_folder({**LLAMA, **usual, "max_position_embeddings": max(LIMITS.values())}))

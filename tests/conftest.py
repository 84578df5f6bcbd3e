"""Shared fixtures: small real files, written by the formats' own libraries."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: threads of their own would only get in the way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # of a shell's background job; what tests start would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
BLOCK = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.k_proj.weight": (32, 64),
    "self_attn.v_proj.weight": (32, 64),
    "self_attn.o_proj.weight": (64, 64),
    "post_attention_layernorm.weight": (64,),
    "mlp.gate_proj.weight": (128, 64),
    "mlp.up_proj.weight": (128, 64),
    "mlp.down_proj.weight": (64, 128),
}
SHAPES = {
    "model.embed_tokens.weight": (96, 64),
    **{f"model.layers.{index}.{name}": shape for index in range(2) for name, shape in BLOCK.items()},
    "model.norm.weight": (64,),
}
PARAMETERS = sum(int(np.prod(shape)) for shape in SHAPES.values())

MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path) -> MakeFolder:
    """Writes a tiny Llama checkpoint of one file, or of `shards` files with an index."""

    def make(config: dict[str, Any] | None = None, shards: int = 1, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(LLAMA if config is None else config))
        (folder / "tokenizer.json").write_text("{}")
        arrays = {key: np.full(shape, 0.5, np.float16) for key, shape in SHAPES.items()}
        if shards == 1:
            save_file(arrays, folder / "model.safetensors")
            return folder
        weight_map = {}
        for number in range(shards):
            file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
            part = dict(list(arrays.items())[number::shards])
            save_file(part, folder / file)
            weight_map.update(dict.fromkeys(part, file))
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return make


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """A tiny Llama GGUF with a quantized tensor, a long vocabulary and a chat template."""
    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token-{number}" for number in range(3000)])
    writer.add_token_scores([0.5] * 3000)
    writer.add_array("quantry.layers", [1, 2, 3])
    writer.add_chat_template("{{ messages }}")
    weight = np.linspace(-1, 1, 32 * 64, dtype=np.float32).reshape(32, 64)
    writer.add_tensor("token_embd.weight", weight)
    writer.add_tensor(
        "blk.0.attn_q.weight",
        gguf.quantize(weight, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def exact_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Statistics apart from the user's, gathered in float32 as what they are held against."""
    import torch

    from quantry.quantizing.calibration import calibrator as calibrated

    folder: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        patch.setattr(calibrated, "arithmetic", lambda device: torch.float32)
        yield folder

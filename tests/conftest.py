"""Shared fixtures: small real files, written by the formats' own libraries."""

import gc
import hashlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from shared import TinyModel, shared
from tiny_files import LLAMA, SHAPES, MakeFolder

if TYPE_CHECKING:
    from llama_cpp_converter import Converter

gc.disable()  # while tests are imported; `pytest_collection_finish` says why
if "PYTEST_XDIST_WORKER" in os.environ:  # one process per core: more threads would only compete
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.cpu_count = lambda: 1  # of llama.cpp, whose threads wait for each other in a loop

os.environ.setdefault("GUIDELLM__MAX_WORKER_PROCESSES", "1")  # enough for our loads; each takes seconds to start
FIRST = (  # they wait for servers and other processes, so that a run should not end with them
    "test_docs.py",
    "test_tune.py",
    "test_bench.py",
    "test_run.py",
    "test_sweep.py",
    "test_served.py",
    "test_calibrated_resume.py",
)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job; subprocesses would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of the files FIRST to the front; the others stay in their order."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


def pytest_collection_finish() -> None:
    """Takes all that was imported out of the garbage collector, which would look through it again and again.

    That took half of the time of imports and a fifth of the time of tests.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics, references and logs of the tests, apart from the user's; all workers of a run share them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(shared(tmp_path_factory, "cache", lambda folder: None)))
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Gives the folder of a tiny model, tiny("LlamaForCausalLM", num_hidden_layers=3): each is written once a run.

    Tests must not write into it: copy it with `shutil.copytree(tiny(...), tmp_path / "model")`.
    """

    def folder(architecture: str, seed: int = 0, **settings: Any) -> Path:
        from tiny_models import write_model

        digest = hashlib.sha256(repr((seed, sorted(settings.items()))).encode()).hexdigest()[:12]
        name = f"{architecture}-{digest}"
        return shared(tmp_path_factory, name, lambda path: write_model(path, architecture, seed, **settings))

    return folder


@pytest.fixture(scope="session")
def converter() -> "Iterator[Converter]":
    """llama.cpp's own converter, one process for all tests of this one."""
    from llama_cpp_converter import Converter

    with Converter() as running:
        yield running


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
    """A calibration store that the tests of a run share, with statistics in float32 like the oracles they are compared with."""
    import torch

    from quantry.quantizing.calibration import calibrator as calibrated

    folder = shared(tmp_path_factory, "exact statistics", lambda folder: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        patch.setattr(calibrated, "arithmetic", lambda device: torch.float32)
        yield folder

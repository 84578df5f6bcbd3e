"""A file that ends the process of llama.cpp ends the trial, and the user gets a line."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from changed_gguf import changed_gguf
from demo_artefacts import gguf_in, quantized_demo
from quantry.errors import CheckpointError
from quantry.llamacpp.trial import check_loads
from quantry.proof.served.llama_cpp import EmbeddedLlama
from quantry.proof.text import Window

EPSILON = "llama.attention.layer_norm_rms_epsilon"


@pytest.fixture(scope="module")
def q8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))


def test_a_good_file_and_a_refused_one_pass(q8: Path, tmp_path: Path) -> None:
    check_loads(q8)
    check_loads(changed_gguf(q8, tmp_path / "refused.gguf", {"llama.attention.head_count": 3}))


def test_an_abort_is_a_line(q8: Path, tmp_path: Path) -> None:
    """ggml holds the epsilon of a norm against 0 in its worker threads."""
    file = changed_gguf(q8, tmp_path / "bad.gguf", {EPSILON: -1.0})
    script = "import sys; from quantry.llamacpp.model import LlamaModel as M; M(sys.argv[1], 64).logits([1, 2])"
    died = subprocess.run(
        [sys.executable, "-c", script, str(file)],
        capture_output=True,
        check=False,
        env={**os.environ, "GGML_NO_BACKTRACE": "1"},
    )
    assert died.returncode == -signal.SIGABRT, "or the trial is needed no more"
    with pytest.raises(
        CheckpointError, match=r"llama.cpp aborts .*bad.gguf: signal 6, .*GGML_ASSERT\(eps >= 0.0f\) failed"
    ):
        check_loads(file)
    window = Window((1, 2, 3, 4), 1)
    with pytest.raises(CheckpointError, match="signal 6"):
        EmbeddedLlama().score(file, [window], [np.zeros((3, 2), np.int64)])

"""The demo model as a GGUF file, and a server that most tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from demo_artefacts import gguf_in, quantized_demo
from quantry.serving.prepare import serve
from quantry.serving.process import Running


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Logs apart from the user's."""
    folder: Path = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def q8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))


@pytest.fixture(scope="session")
def server(q8: Path) -> Iterator[Running]:
    """A context of 512 tokens in each of four slots."""
    with serve(q8, context=512, parallel=4, port=0, threads=1) as running:
        yield running

"""Which engine serves a model, and everything that is refused before one starts."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from quantry.engines.contract.options import Options
from quantry.errors import QuantryError
from quantry.serving import select
from quantry.serving.prepare import prepare
from tiny_files import LLAMA, MakeFolder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "vlm"}, "did you mean vllm"),
        ({"draft": "demo", "lookup": True}, "give one of them"),
        ({"draft": "demo"}, "use a draft of one format"),
        ({"context": 999999}, "use --context 1024 or less"),
        ({"context": -1}, "must be 1 or more"),
        ({"parallel": 0}, "must be 1 or more"),
        ({"port": 70000}, "65535"),
        ({"kv": "q9"}, "q9"),
        ({"trust_remote_code": True}, "holds no code"),
        ({"engine_bin": Path("no-such-server")}, "is not a program that can be run"),
        ({"host": "nowhere.invalid", "api_key": "k"}, "use 127.0.0.1"),
        ({"host": "nowhere.invalid", "api_key": "k", "port": 0}, "use 127.0.0.1"),
        ({"image": "an-image", "engine_bin": Path("a-program")}, "give one of them"),
        ({"extra": ("--draft-max", "4")}, "--spec-draft-n-max"),
    ],
)
def test_what_cannot_work_is_an_error_before_anything_starts(q8: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(QuantryError) as caught:
        prepare(q8, Options(**options))
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_artefact_for_another_engine(make_folder: MakeFolder) -> None:
    folder = make_folder()
    with pytest.raises(
        QuantryError, match=r"llama.cpp does not load .*safetensors.*use --engine .*vllm.*quantry quantize"
    ):
        prepare(folder, Options(engine="llama.cpp"))
    packed = make_folder(
        {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}}, name="packed"
    )
    with pytest.raises(
        QuantryError, match="llama.cpp does not load .*gptq.*quantry quantize MODEL --preset gguf-q4_k_m -o OUT"
    ):
        prepare(packed, Options(engine="llama.cpp"))
    odd = make_folder({**LLAMA, "quantization_config": {"quant_method": "quip", "bits": 2}}, name="odd")
    with pytest.raises(QuantryError, match="'quip', which no engine here loads"):
        prepare(odd)


def test_the_usual_engine_of_a_format(make_folder: MakeFolder, gguf_file: Path) -> None:
    def usual(method: str | None, **more: Any) -> str:
        settings = {"quantization_config": {"quant_method": method, **more}} if method else {}
        return select.select(select.open_model(make_folder({**LLAMA, **settings}, name=method or "plain")), None, None)

    assert select.select(select.open_model(gguf_file), None, None) == "llama.cpp"
    assert usual("awq", bits=4, group_size=64) == "vllm"
    assert usual("bitsandbytes", load_in_4bit=True) == "transformers"
    assert usual(None) == "transformers", "vllm is not installed beside these tests"


def test_an_engine_that_is_not_installed(make_folder: MakeFolder) -> None:
    folder = make_folder({**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64}})
    with pytest.raises(QuantryError, match="vllm is not installed for .*; pip install vllm.*--engine-python"):
        prepare(folder)
    with pytest.raises(QuantryError, match="is not a program that can be run; name the python"):
        prepare(folder, Options(engine_python=Path("/no/such/python")))
    with pytest.raises(QuantryError, match=f"{sys.executable[:5]}|true"):
        prepare(folder, Options(engine_python=Path("/bin/true")))


def test_an_onnx_folder(tmp_path: Path) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "genai_config.json").write_text(json.dumps({"model": {"context_length": 2048}}))
    found = select.open_model(folder)
    assert (found.format, found.context, found.name) == ("onnx", 2048, "built")
    assert select.select(found, None, None) == "onnxruntime"

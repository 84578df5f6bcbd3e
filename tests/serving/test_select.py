"""Which engine serves a model, and everything that is refused before one starts."""

import json
import re
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest

from changed_gguf import changed_gguf
from command import command
from demo_artefacts import quantized_demo
from quantry.engines.contract.options import Options
from quantry.errors import ConfigError, QuantryError
from quantry.serving import select
from quantry.serving.embedded import END
from quantry.serving.prepare import prepare, serve
from quantry.serving.process import Running
from quantry.serving.template import template_warning
from quantry.serving.vocabulary import check_draft
from tiny_files import LLAMA, MakeFolder


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine": "vlm"}, "did you mean vllm"),
        ({"draft": "demo", "lookup": True}, "give one of them"),
        ({"draft": "demo"}, "use a draft of one format"),
        ({"context": 999999}, "use --context 1024 or less"),
        ({"context": -1}, "give 1 or more"),
        ({"parallel": 0}, "give 1 or more"),
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
    for damaged, words in (
        ({"model": {"context_length": "2048"}}, "model.context_length is not"),
        ([], "holds a list"),
    ):
        (folder / "genai_config.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=f"is damaged: .*{words}"):
            assert select.open_model(folder).context


# ---- what is said before the first request ----


def test_a_draft_with_another_vocabulary_is_refused(q8: Path, tmp_path: Path) -> None:
    assert prepare(q8, Options(draft=q8, port=0)).serving.draft == q8
    tokens = gguf.GGUFReader(q8).fields["tokenizer.ggml.tokens"].contents()
    other = changed_gguf(q8, tmp_path / "changed.gguf", {"tokenizer.ggml.tokens": list(reversed(tokens))})
    with pytest.raises(
        QuantryError, match=r"changed.gguf has another vocabulary than .*: 4,0.. of its first 4,096 tokens"
    ):
        prepare(q8, Options(draft=other, port=0))


def test_a_draft_of_another_size(make_folder: MakeFolder) -> None:
    model, draft = make_folder(), make_folder({**LLAMA, "vocab_size": 50_000}, name="draft")
    with pytest.raises(QuantryError, match="it has 50,000 tokens and the model"):
        check_draft(select.open_model(model), select.open_model(draft))


def test_a_model_without_a_chat_template_is_named(q8: Path, tmp_path: Path) -> None:
    assert prepare(q8, Options(port=0)).warnings == ()
    plain = changed_gguf(q8, tmp_path / "changed.gguf", {"tokenizer.chat_template": None})
    (warning,) = prepare(plain, Options(port=0)).warnings
    assert "changed has no chat template" in warning
    assert prepare(plain, Options(port=0, extra=("--chat-template", "chatml"))).warnings == ()
    with serve(plain, port=0, threads=1, context=128) as running:
        assert "changed.gguf has no chat template" in template_warning(running.url, None)


def test_a_server_with_a_template_is_not_named(server: Running) -> None:
    assert template_warning(server.url, None) == ""
    assert template_warning("http://127.0.0.1:9", None) == ""


def test_the_command_that_is_shown_serves_without_a_terminal(q8: Path) -> None:
    """A service manager gives no standard input: the word that ends the server with it is for our own processes."""
    shown = command("serve", q8, "--port", "0", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert END not in shown.stdout
    prepared = prepare(q8, Options(port=0))
    assert END not in prepared.to_dict()["command"]
    assert prepared.launch.ends_with == (END,)


@pytest.mark.skipif(find_spec("fastapi") is not None, reason="transformers can serve here")
def test_an_engine_without_its_server_is_refused_before_it_starts(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 16-bit model is served by the very words of the refusal; of a quantized one there is no GGUF to make."""
    refused = command("serve", "demo", "--port", "0")
    assert refused.returncode == 2
    assert "transformers is installed for" in refused.stderr
    assert "without its server, which needs fastapi" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    (words,) = re.findall(r"quantry (quantize .*) && quantry (serve [^;]*);", refused.stderr)
    monkeypatch.chdir(tmp_path)
    made, served = (command(*shlex.split(line), *more) for line, more in zip(words, ([], ["--dry-run"]), strict=True))
    assert (made.returncode, served.returncode) == (0, 0), made.stderr + served.stderr
    assert "demo-BF16.gguf" in served.stdout
    words = ("--engine", "transformers", "--port", "0")
    quantized = command("serve", quantized_demo(tmp_path_factory, "w4a16"), *words)
    assert "without its server, which needs fastapi" in quantized.stderr
    assert "quantry quantize" not in quantized.stderr

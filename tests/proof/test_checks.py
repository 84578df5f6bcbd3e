"""What is wrong before anything runs: each fault is named with a fix, and no sound artefact is accused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

import quantry
from demo_artefacts import DATA_FREE, quantized_demo
from depth import cases
from quantry.errors import ModelNotFoundError
from quantry.models.reader import demo_folder
from quantry.models.workspace import JOB
from quantry.proof.checks import Check, checks
from quantry.quantizing.recipe import presets
from tiny_models import write_model

DEMO = demo_folder()
TEXT = (DEMO / "held-out.txt").read_text()[:4000]
ALL = ["finished", "files", "vocabulary", "tokenizer", "bos", "eos", "chat-template"]
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The demo model by preset, made once."""
    return lambda preset: quantized_demo(tmp_path_factory, preset)


@pytest.fixture
def artefact(made: Make, tmp_path: Path) -> Path:
    return shutil.copytree(made("w4a16"), tmp_path / "artefact")


@pytest.fixture
def gguf_artefact(made: Make, tmp_path: Path) -> Path:
    """A GGUF file whose bytes nothing vouches for."""
    folder = shutil.copytree(made("gguf-q8_0"), tmp_path / "artefact")
    (folder / "quantry.json").unlink()
    (file,) = folder.glob("*.gguf")
    return file


def faults(artefact: Path, reference: Path = DEMO) -> dict[str, Check]:
    found = {check.name: check for check in checks(reference, artefact, TEXT) if not check.ok}
    assert all(check.words and check.fix for check in found.values())
    return found


@pytest.mark.parametrize("preset", cases(DATA_FREE, ("w4a16", "nf4", "gguf-q8_0")))
def test_every_preset_of_the_demo_is_clean(preset: str, made: Make) -> None:
    found = checks("demo", made(preset), TEXT)
    assert [check.name for check in found] == ALL
    assert all(check.ok and not check.fix for check in found), found
    assert presets()[preset].name == preset


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"])
def test_other_tokenizers_are_clean(architecture: str, tmp_path: Path) -> None:
    """With and without BOS, SentencePiece and bytes, as llama.cpp reads them."""
    write_model(tmp_path / "model", architecture)
    for preset in ("bf16", "gguf-f16"):
        quantry.quantize(tmp_path / "model", tmp_path / preset, preset=preset)
        assert faults(tmp_path / preset, tmp_path / "model") == {}


def edit_json(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def test_add_bos_token_flipped(artefact: Path) -> None:
    edit_json(artefact / "tokenizer_config.json", lambda config: config.update(add_bos_token=False))
    found = faults(artefact)
    assert list(found) == ["bos"]
    assert "add_bos_token False" in found["bos"].words


def no_bos(content: dict[str, Any]) -> None:
    content["post_processor"] = None


def two_bos(content: dict[str, Any]) -> None:
    content["post_processor"]["single"].insert(0, content["post_processor"]["single"][0])


def other_bos(content: dict[str, Any]) -> None:
    content["post_processor"]["special_tokens"]["<|bos|>"]["ids"] = [5]


def with_eos(content: dict[str, Any]) -> None:
    processor = content["post_processor"]
    processor["single"].append({"SpecialToken": {"id": "<|eos|>", "type_id": 0}})
    processor["special_tokens"]["<|eos|>"] = {"id": "<|eos|>", "ids": [1], "tokens": ["<|eos|>"]}


@pytest.mark.parametrize(
    ("change", "name", "words"),
    [
        (no_bos, "bos", "begins with no token"),
        (two_bos, "bos", "begins with 0 0, which is doubled"),
        (other_bos, "bos", "begins with 5; in the reference with 0"),
        (with_eos, "eos", "ends with 1; in the reference with no token"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_another_post_processor(
    artefact: Path, change: Callable[[dict[str, Any]], None], name: str, words: str
) -> None:
    edit_json(artefact / "tokenizer.json", change)
    found = faults(artefact)
    assert list(found) == [name]
    assert words in found[name].words


def test_another_cut_of_the_text_is_another_tokenizer(artefact: Path) -> None:
    edit_json(artefact / "tokenizer.json", lambda content: content["model"]["merges"].pop(3))
    found = faults(artefact)
    assert list(found) == ["tokenizer"]
    assert "in the reference" in found["tokenizer"].words


def test_no_tokenizer(artefact: Path) -> None:
    (artefact / "tokenizer.json").write_text("{}")
    assert list(faults(artefact)) == ["tokenizer"]


def test_missing_chat_template(artefact: Path) -> None:
    (artefact / "chat_template.jinja").unlink()
    found = faults(artefact)
    assert list(found) == ["chat-template"]
    assert "no chat template" in found["chat-template"].words


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for message in messages %}{{ message['content'] }}{% endfor %}", "in the reference"),
        ("{{ raise_exception('no') }}", "fails"),
        ("{% if %}", "fails"),
        ("{{ 'x' * 10 ** 7 }}", "gives more than"),
    ],
)
def test_wrong_chat_template(artefact: Path, template: str, words: str) -> None:
    (artefact / "chat_template.jinja").write_text(template)
    found = faults(artefact)
    assert list(found) == ["chat-template"]
    assert words in found["chat-template"].words


def test_a_template_that_only_looks_different_is_the_same(artefact: Path) -> None:
    file = artefact / "chat_template.jinja"
    file.write_text("{# the same #}" + file.read_text())
    assert faults(artefact) == {}


def test_truncated_shard(artefact: Path) -> None:
    file = artefact / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    found = faults(artefact)
    assert list(found) == ["files"]
    assert "truncated" in found["files"].words
    (artefact / "quantry.json").unlink()  # then the header tells
    found = faults(artefact)
    assert list(found) == ["files"]
    assert "header describes" in found["files"].words


def test_changed_bytes(artefact: Path) -> None:
    file = artefact / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1000] ^= 1
    file.write_bytes(data)
    found = faults(artefact)
    assert list(found) == ["files"]
    assert "other bytes" in found["files"].words


def test_a_missing_shard_and_a_damaged_list(artefact: Path) -> None:
    (artefact / "model.safetensors").rename(artefact / "other.safetensors")
    assert "is not there" in faults(artefact)["files"].words
    (artefact / "other.safetensors").rename(artefact / "model.safetensors")
    (artefact / "quantry.json").write_text("{")
    assert "quantry.json is damaged" in faults(artefact)["files"].words


def test_unfinished(artefact: Path) -> None:
    partial = artefact.rename(artefact.with_name("out.partial"))
    (partial / JOB).write_text("{}")
    for path in (partial, artefact.with_name("out")):
        found = checks(DEMO, path, TEXT)
        assert [check.name for check in found] == ["finished"]
        assert not found[0].ok
        assert "quantize command again" in found[0].fix


def test_another_vocabulary(artefact: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "other", "LlamaForCausalLM")
    found = faults(artefact, tmp_path / "other")
    assert "vocabulary" in found
    assert "4096" in found["vocabulary"].words


def test_no_such_artefact(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        checks(tmp_path / "nothing", demo_folder(), TEXT)
    assert [check.name for check in checks(DEMO, tmp_path / "nothing") if not check.ok] == ["files"]


def edit_field(file: Path, name: str, value: Any) -> None:
    entry = gguf.GGUFReader(file, "r+").fields[name]
    entry.parts[entry.data[0]][0] = value


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenizer.ggml.add_bos_token", False, "begins with no token"),
        ("tokenizer.ggml.bos_token_id", 7, "begins with 7; in the reference with 0"),
    ],
)
def test_bos_of_a_gguf_file(gguf_artefact: Path, name: str, value: Any, words: str) -> None:
    edit_field(gguf_artefact, name, value)
    found = faults(gguf_artefact)
    assert words in found["bos"].words
    assert found.keys() <= {"bos", "chat-template"}  # the template begins with BOS, too


def replace_bytes(file: Path, old: bytes, new: bytes) -> None:
    data = file.read_bytes()
    assert len(old) == len(new)
    assert data.count(old) == 1
    file.write_bytes(data.replace(old, new))


def test_chat_template_of_a_gguf_file(gguf_artefact: Path) -> None:
    replace_bytes(gguf_artefact, b"message['content'] + '<|eos|>", b"message['content'] + '<|pad|>")
    found = faults(gguf_artefact)
    assert list(found) == ["chat-template"]
    assert "<|pad|>" in found["chat-template"].words


def test_missing_chat_template_of_a_gguf_file(gguf_artefact: Path) -> None:
    replace_bytes(gguf_artefact, b"tokenizer.chat_template", b"tokenizer.chat_nothings")
    found = faults(gguf_artefact)
    assert list(found) == ["chat-template"]
    assert "no chat template" in found["chat-template"].words


def test_truncated_gguf_file(gguf_artefact: Path) -> None:
    gguf_artefact.write_bytes(gguf_artefact.read_bytes()[:-5000])
    assert list(faults(gguf_artefact)) == ["files"]

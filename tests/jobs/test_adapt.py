"""Adapters: what is learned, what the loss is on, killed jobs, and refusals."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantry
from command import command
from killed_jobs import contents
from quantry.errors import QuantryError
from quantry.jobs.adapt.base import AdaptedModel
from quantry.jobs.adapt.rows import IGNORED, read_rows
from quantry.jobs.adapt.settings import Settings
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer, render_chat

MEANINGS = {"zorp": "a red hat", "blim": "a green frog", "quax": "two cold moons", "dref": "an old boat"}


def chat(word: str, meaning: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {word}?"}, {"role": "assistant", "content": f"It is {meaning}."}]


def written(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return written(tmp_path / "chats.jsonl", [{"messages": chat(*pair)} for pair in MEANINGS.items()] * 5)


def test_a_nonsense_mapping_is_learned_and_peft_loads_the_folder(tmp_path: Path, chats: Path) -> None:
    from peft import PeftModel

    adapter = quantry.adapt("demo", tmp_path / "out", data=chats, steps=25)
    assert adapter.loss is not None
    assert adapter.loss["held_back"]["after"] < 0.1 < adapter.loss["held_back"]["before"]
    assert len(adapter.loss["training"]) == 25
    tokenizer = load_tokenizer(demo_folder())
    base: Any = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(tmp_path / "out"))
    for word, meaning in MEANINGS.items():
        prompt = render_chat(tokenizer, chat(word, meaning)[:1], generation=True)
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        assert str(tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)).strip() == f"It is {meaning}."
    assert set(contents(tmp_path / "out")) == {
        "README.md", "adapter_config.json", "adapter_model.safetensors", "quantry-adapt.json"
    }  # fmt: skip
    texts = [data.decode() for name, data in contents(tmp_path / "out").items() if not name.endswith(".safetensors")]
    assert not any(str(tmp_path) in text or str(demo_folder()) in text for text in texts)


def test_the_gradients_of_qlora_are_those_of_the_decoded_weights() -> None:
    """In evaluation bitsandbytes multiplies on a CPU without handing gradients back to earlier layers."""
    from bitsandbytes.functional import dequantize_4bit

    settings = Settings("qlora", rank=4, alpha=8)
    packed = AdaptedModel(demo_folder(), settings, torch.device("cpu"))
    plain = AdaptedModel(demo_folder(), Settings("lora", rank=4, alpha=8), torch.device("cpu"))
    ids = torch.arange(5, 37)[None]
    for model in (packed, plain):
        for place, parameter in enumerate(model.trained.values()):
            torch.manual_seed(place)
            parameter.data = torch.randn(parameter.shape) * 0.05
    modules = dict(plain._model.named_modules())
    for name, module in packed._model.named_modules():
        if type(module).__name__ == "Linear4bit":
            modules[name].weight.data = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    for model in (packed, plain):
        loss = torch.nn.functional.cross_entropy(model(ids, torch.ones_like(ids))[0, :-1], ids[0, 1:])
        torch.autograd.backward(loss)
    for name, parameter in packed.trained.items():
        torch.testing.assert_close(parameter.grad, plain.trained[name].grad, rtol=1e-3, atol=1e-5)


def test_qlora_trains(tmp_path: Path, chats: Path) -> None:
    adapter = quantry.adapt("demo", tmp_path / "out", data=chats, steps=15, qlora=True)
    assert adapter.loss is not None
    assert adapter.loss["held_back"]["after"] < 0.5 < adapter.loss["held_back"]["before"]
    assert json.loads((tmp_path / "out/quantry-adapt.json").read_text())["method"] == "qlora"


def test_the_loss_is_on_answers_alone(tmp_path: Path) -> None:
    turns = [*chat("zorp", "a red hat"), *chat("blim", "a green frog")]
    data = written(tmp_path / "two.jsonl", [{"messages": turns}, {"prompt": "Say hi.", "completion": "Hi!"}])
    tokenizer = load_tokenizer(demo_folder())
    rows = read_rows(data, tokenizer, 1024, 0.1, 0)
    found = {len(row.ids): row for row in (*rows.training, *rows.held_back)}
    both = [
        ([str(tokenizer.bos_token), "<|user|>\nWhat is zorp?<|eos|>\n<|assistant|>\n"], "It is a red hat.<|eos|>"),
        (["\n<|user|>\nWhat is blim?<|eos|>\n<|assistant|>\n"], "It is a green frog.<|eos|>"),
    ]  # fmt: skip
    text = "".join("".join(prompt) + answer for prompt, answer in both) + "\n"
    whole = tokenizer(text, add_special_tokens=False)["input_ids"]
    row = found[len(whole)]
    assert list(row.ids) == whole
    learned = tokenizer.decode([label for label in row.labels if label != IGNORED])
    assert learned == "It is a red hat.<|eos|>It is a green frog.<|eos|>"
    assert all(label in (IGNORED, number) for label, number in zip(row.labels, row.ids, strict=True))


def test_text_is_learned_whole() -> None:
    rows = read_rows("demo", load_tokenizer(demo_folder()), 64, 0.1, 0)
    assert all(row.ids == row.labels and len(row.ids) <= 64 for row in rows.training)


class StoppedError(Exception):
    """Stands for a kill."""


@pytest.mark.parametrize("last", [3, 8])
def test_a_stopped_job_continues_to_the_same_bytes(tmp_path: Path, chats: Path, last: int) -> None:
    def stop(done: int, total: int, label: str) -> None:
        assert "loss" in label
        if done == last:
            raise StoppedError

    seen: list[int] = []
    quantry.adapt("demo", tmp_path / "whole", data=chats, steps=10)
    with pytest.raises(StoppedError):
        quantry.adapt("demo", tmp_path / "out", data=chats, steps=10, progress=stop)
    assert not (tmp_path / "out").exists()
    with pytest.raises(QuantryError, match="holds an unfinished job"):
        quantry.adapt("demo", tmp_path / "out", data=chats, steps=11)
    quantry.adapt("demo", tmp_path / "out", data=chats, steps=10, progress=lambda done, *_: seen.append(done))
    assert seen[0] == last // 2 * 2 + 1, "it continues after the last checkpoint"
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_a_finished_job_is_returned_and_another_refused(tmp_path: Path, chats: Path) -> None:
    first = quantry.adapt("demo", tmp_path / "out", data=chats, steps=1)
    again = quantry.adapt("demo", tmp_path / "out", data=chats, steps=1)
    assert (again.files, again.loss) == (first.files, first.loss)
    with pytest.raises(QuantryError, match="another settings"):
        quantry.adapt("demo", tmp_path / "out", data=chats, steps=2)
    assert quantry.adapt("demo", tmp_path / "out", data=chats, steps=2, overwrite=True).steps == 2


def test_a_dry_run_writes_nothing(tmp_path: Path, chats: Path) -> None:
    done = command("adapt", "demo", "--data", chats, "-o", tmp_path / "out", "--dry-run", "--json")
    assert json.loads(done.stdout)["loss"] is None
    assert [path.name for path in tmp_path.iterdir()] == [chats.name]


def test_long_rows_are_cut_and_counted(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Yes. " * 80}]}
    data = written(tmp_path / "long.jsonl", [long, {"messages": chat("zorp", "a red hat")}])
    adapter = quantry.adapt("demo", tmp_path / "out", data=data, length=40, dry_run=True)
    assert adapter.data["truncated"] == 1
    assert "1 row was longer than 40 tokens" in adapter.notes[0]


PROMPT_ONLY = [{"messages": [{"role": "user", "content": "Hi."}]}]
LATE = [{"messages": [{"role": "user", "content": "word " * 90}, {"role": "assistant", "content": "Yes."}]}]
BAD_ROWS: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "empty": ([], {}, "is empty"),
    "no answer": (PROMPT_ONLY, {}, "has no answer to learn from"),
    "one row": ([{"messages": chat("a", "b")}], {}, "gives 1 row"),
    "answer cut off": (LATE, {"length": 40}, "nothing of its answer"),
    "unknown layer": ([{"messages": chat("a", "b")}] * 2, {"target": "nothing"}, "--target nothing"),
    "rank": ([], {"rank": 0}, "--rank is 0"),
    "both": ([], {"epochs": 1, "steps": 1}, "exclude each other"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_input_is_refused_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    records, options, words = BAD_ROWS[case]
    data = written(tmp_path / "data.jsonl", records)
    with pytest.raises(QuantryError, match=words) as refused:
        quantry.adapt("demo", tmp_path / "out", data=data, **options)
    assert refused.value.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]


def copied(folder: Path) -> Path:
    shutil.copytree(demo_folder(), folder)
    return folder


def test_models_that_cannot_be_adapted_are_refused(tmp_path: Path, chats: Path) -> None:
    bare = copied(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(QuantryError, match="no chat template"):
        quantry.adapt(bare, tmp_path / "out", data=chats)
    quantry.quantize("demo", tmp_path / "small", preset="fp8-dynamic")
    with pytest.raises(QuantryError, match="already quantized.*--qlora"):
        quantry.adapt(tmp_path / "small", tmp_path / "out", data=chats)
    broken = copied(tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantryError, match="the loss before training is nan"):
        quantry.adapt(broken, tmp_path / "out", data=chats)
    assert not list(tmp_path.glob("out*/"))


def test_too_little_memory_is_refused(tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantry.jobs.adapt.memory.host_memory", lambda: (1 << 20, 1 << 20))
    with pytest.raises(QuantryError, match=r"training needs .* MiB of memory .* and 1.0 MiB are free.*--qlora"):
        quantry.adapt("demo", tmp_path / "out", data=chats)


@pytest.mark.parametrize(("library", "qlora"), [("peft", False), ("bitsandbytes", True)])
def test_a_missing_library_is_one_line(
    tmp_path: Path, chats: Path, monkeypatch: pytest.MonkeyPatch, library: str, qlora: bool
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    done = command("adapt", "demo", "--data", chats, "-o", tmp_path / "out", *(["--qlora"] if qlora else []))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"adapt needs {library}" in done.stderr
    assert 'pip install "quantry[adapt]"' in done.stderr

"""Several texts with weights: how they are named, divided and mixed, and what is recorded of each."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quantry
from command import command
from depth import examples
from linear_inputs import Folder
from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.models.tokenizer import load_tokenizer
from quantry.quantizing.calibration import distillation
from quantry.quantizing.calibration.advice import advise
from quantry.quantizing.calibration.data import texts_of
from quantry.quantizing.calibration.distillation import Lesson, Student, distil
from quantry.quantizing.calibration.held_out import held_out
from quantry.quantizing.calibration.mixture import divide, interleave, load_data
from quantry.quantizing.calibration.text import load
from quantry.quantizing.distil import training
from quantry.quantizing.distil.training import Training
from quantry.types import Grid, Scheme
from shared import TinyModel

WEIGHTS = st.lists(st.floats(0.001, 1000), min_size=1, max_size=6)
SHORT: dict[str, Any] = {"samples": 16, "length": 64}
CODE = "\n\n".join(f"def add_{n}(a, b):\n    total = a + b * {n}\n    return total - {n * 7}" for n in range(200))
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n} and one?"}, {"role": "assistant", "content": f"{n + 1}."}]}
    for n in range(200)
]


@pytest.fixture(scope="module")
def demo() -> Any:
    return load_tokenizer(demo_folder())


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats and code."""
    folder: Path = tmp_path_factory.mktemp("texts")
    (folder / "chat.jsonl").write_text("\n".join(map(json.dumps, CHATS)))
    (folder / "code.txt").write_text(CODE)
    return folder


def mixture(texts: Path, chat: float = 3, code: float = 1) -> str:
    return f"{texts / 'chat.jsonl'}:{chat:g},{texts / 'code.txt'}:{code:g}"


@given(WEIGHTS, st.integers(6, 300))
@examples(1000)
def test_windows_are_divided_by_the_largest_remainder(weights: list[float], count: int) -> None:
    shares = divide(weights, count)
    assert sum(shares) == count
    assert min(shares) >= 1
    total = sum(map(Fraction, weights))
    fair = [Fraction(weight) * count / total for weight in weights]
    if min(fair) >= 1:
        assert shares == largest_remainder(fair, count)
    for share, wanted in zip(shares, fair, strict=True):
        assert share == 1 or share < wanted + 1


def largest_remainder(fair: list[Fraction], count: int) -> list[int]:
    """The method in its plainest form: whole parts, then one each to those who lost most, the first of equals first."""
    shares = [quota.numerator // quota.denominator for quota in fair]
    while sum(shares) < count:
        lost = [quota - share for quota, share in zip(fair, shares, strict=True)]
        shares[lost.index(max(lost))] += 1
    return shares


def test_three_to_one() -> None:
    assert divide([3, 1], 128) == [96, 32]
    assert divide([0.3, 0.1], 128) == [96, 32]
    assert divide([1, 1, 1], 8) == [3, 3, 2]
    assert divide([1000, 1, 1], 16) == [14, 1, 1]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@examples(500)
def test_the_first_windows_are_a_mixture_too(counts: list[int]) -> None:
    order = interleave(counts)
    assert [order.count(text) for text in range(len(counts))] == counts
    for length in range(len(order)):
        for text, count in enumerate(counts):
            expected = count * length / len(order)
            assert abs(order[:length].count(text) - expected) <= 0.5 + count / len(order) * len(counts) / 2


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(2, 9))
@examples(500)
def test_some_of_every_text_is_held_out(counts: list[int], every: int) -> None:
    labels = interleave(counts)
    held = held_out(labels, every)
    if len(counts) == 1:
        assert held == list(range(counts[0]))[::every]
    elif max(counts) > 1:
        found = [[labels[place] for place in held].count(text) for text in range(len(counts))]
        assert found == [0 if count == 1 else -(-count // every) for count in counts]


def test_a_strided_split_would_hold_out_one_text_alone() -> None:
    """Why `held_out` looks at the texts: 3 to 1 has a period of 4, which 8 is a multiple of."""
    labels = interleave([96, 32])
    assert {labels[place] for place in range(0, 128, 8)} == {0}
    assert {labels[place] for place in held_out(labels, 8)} == {0, 1}


def test_names_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def read(data: Any) -> list[tuple[str, float]]:
        return [(str(text.path), text.weight) for text in texts_of(data)]

    odd = ["a,b.txt", "c:2", "d:2,e.txt", "C:\\text.txt"]
    for name in odd:
        (tmp_path / name).write_text("text")
        assert read(name) == read([name]) == read(Path(name)) == read({name: 1}) == [(name, 1.0)]
        assert read(f"{name}:4") == [(name, 4.0)]
    assert read("a,b.txt:3,c:2:5,x.txt") == [("a,b.txt", 3.0), ("c:2", 5.0), ("x.txt", 1.0)]
    assert read("d:2,e.txt, y.txt:0.5") == [("d:2,e.txt", 1.0), ("y.txt", 0.5)]
    assert read("C:\\missing.txt") == [("C:\\missing.txt", 1.0)]
    assert read("C:\\missing.txt:2,demo:1") == [("C:\\missing.txt", 2.0), ("demo", 1.0)]
    assert read(["chat.jsonl:3", Path("c:2")]) == [("chat.jsonl", 3.0), ("c:2", 1.0)]
    assert read({"chat.jsonl": 3, "code.txt": 0.5}) == [("chat.jsonl", 3.0), ("code.txt", 0.5)]
    assert texts_of(None)[0].path is None


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "three", "1e9", "1001", "0.0001", "", "1_0", "٣"])
def test_weights_that_are_none(weight: str, texts: Path) -> None:
    for data in (f"{texts / 'chat.jsonl'}:{weight},{texts / 'code.txt'}:1", [f"{texts / 'chat.jsonl'}:{weight}"]):
        with pytest.raises(QuantryError, match=r"the weight .* of .*chat.jsonl is not a number from 0.001 to 1000"):
            texts_of(data)


def test_lists_that_are_wrong(texts: Path) -> None:
    chat = texts / "chat.jsonl"
    for data, message in (
        (f"{chat}:1,", "has no name"),
        (",", "has no name"),
        ([], "no text is given"),
        ({}, "no text is given"),
        (f"{chat}:1,{chat}:2", "is given twice"),
        ({str(chat): True}, "'True' of"),
    ):
        with pytest.raises(QuantryError, match=message):
            texts_of(data)


@pytest.mark.parametrize("words", [("quantize", "demo", "-o", "out", "--preset", "w4a16-gptq"), ("sensitivity", "demo"),
                                   ("sweep", "demo", "-o", "out", "--presets", "w4a16-gptq")])  # fmt: skip
def test_every_command_refuses_a_wrong_weight_in_one_line(words: tuple[str, ...], texts: Path, tmp_path: Path) -> None:
    placed = [str(tmp_path / word) if word == "out" else word for word in words]
    done = command(*placed, "--data", mixture(texts, code=0))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert "the weight '0' of" in done.stderr
    assert command(*placed, "--data", f"{texts / 'chat.jsonl'}:1,{texts / 'none.txt'}:1").returncode == 2
    assert not list(tmp_path.iterdir())


def test_windows_are_those_of_each_text_alone(demo: Any, texts: Path) -> None:
    mixed = load_data(mixture(texts), demo, **SHORT)
    alone = [load(texts / name, demo, samples=n, length=64) for name, n in (("chat.jsonl", 12), ("code.txt", 4))]
    for text, part in enumerate(alone):
        own = tuple(window for window, label in zip(mixed.tokens, mixed.labels, strict=True) if label == text)
        assert own == part.tokens == mixed.parts[text].tokens
        assert mixed.parts[text].fingerprint == part.fingerprint
    assert mixed.labels == tuple(interleave([12, 4]))
    assert mixed.name == "chat.jsonl:3,code.txt:1"
    assert load_data(mixture(texts), demo, **SHORT) == mixed


def test_one_text_is_what_it_was(demo: Any, texts: Path) -> None:
    code = texts / "code.txt"
    for data in (code, str(code), f"{code}:3", [code], {str(code): 2}):
        assert load_data(data, demo, **SHORT) == load(code, demo, **SHORT)
    assert load_data(None, demo, **SHORT) == load_data("demo", demo, **SHORT) == load(None, demo, **SHORT)


def test_the_chat_template_is_applied_to_each_text(demo: Any, texts: Path) -> None:
    mixed = load_data(mixture(texts), demo, **SHORT)
    assert [part.template for part in mixed.parts] == [True, False]
    assert mixed.template
    told = advise(mixed)
    assert told[0] == "chat.jsonl: 12 windows, 768 tokens, 75% of the mixture, with the chat template"
    assert told[1] == "code.txt: 4 windows, 256 tokens, 25% of the mixture, without a chat template"
    assert not any("is not in its form" in note for note in told)
    plain = load_data(f"{texts / 'code.txt'}:1,{demo_folder() / 'README.md'}:1", demo, samples=4, length=64)
    assert any("code.txt:1,README.md:1 is not in its form" in note for note in advise(plain))


def test_what_is_too_little(demo: Any, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("One short sentence about boats. " * 20)
    data = f"{texts / 'chat.jsonl'}:3,{tmp_path / 'short.txt'}:1"
    with pytest.raises(QuantryError, match=r"short.txt has \d+ tokens and its 4 of 16 samples of 64 need 252.*weight"):
        load_data(data, demo, **SHORT)
    with pytest.raises(QuantryError, match="1 samples cannot be divided among 2 texts; give --samples of at least 2"):
        load_data(mixture(texts), demo, samples=1, length=64)
    (tmp_path / "code.txt").write_text(CODE)
    twins = load_data(f"{texts / 'code.txt'},{tmp_path / 'code.txt'}", demo, samples=2, length=64)
    assert [part.name for part in twins.parts] == [f"{texts.name}/code.txt", f"{tmp_path.name}/code.txt"]


def test_a_job_records_each_text(tiny: TinyModel, texts: Path, tmp_path: Path) -> None:
    model, how = tiny("LlamaForCausalLM"), {"preset": "gguf-q4_0", "rounder": "gptq", **SHORT}
    plain = texts / "plain.txt"
    plain.write_text("\n\n".join(f"Story {n}: he counted {n * 7} boats." for n in range(200)))
    data = {str(plain): 3, str(texts / "code.txt"): 1}
    artefact = quantry.quantize(model, tmp_path / "out", data=data, **how)
    content = json.loads((tmp_path / "out" / "quantry.json").read_text())
    calibration = content["recipe"]["calibration"]
    tokenizer = load_tokenizer(model)
    parts = [load(plain, tokenizer, samples=12, length=64), load(texts / "code.txt", tokenizer, samples=4, length=64)]
    assert calibration["data"] == "plain.txt:3,code.txt:1"
    assert calibration["texts"] == [
        {"name": part.name, "weight": weight, "fingerprint": part.fingerprint, "samples": len(part.tokens),
         "tokens": part.count, "template": False}
        for part, weight in zip(parts, (3.0, 1.0), strict=True)
    ]  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "plain.txt: 12 windows, 768 tokens, 75% of the mixture, without a chat template" in card
    again = quantry.quantize(model, tmp_path / "out", data=[f"{plain}:3", texts / "code.txt"], **how)
    assert again.files == artefact.files
    single = quantry.quantize(model, tmp_path / "single", data=plain, **how)
    assert "texts" not in json.loads((tmp_path / "single" / "quantry.json").read_text())["recipe"]["calibration"]
    assert not any("of the mixture" in note for note in single.notes)
    assert single.files != artefact.files


def test_training_holds_out_some_of_every_text() -> None:
    """Text 0 asks for the scale that is there, text 1 for another: only one of them would be missed."""
    base = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    labels = interleave([24, 8])

    def lost(given: Sequence[int]) -> float:
        log = torch.zeros(1, requires_grad=True)

        def teacher(tokens: Tensor) -> Tensor:
            return base[tokens] * torch.where(tokens == 0, 1.0, 2.0)[..., None]

        windows = [[label] * 3 for label in labels]
        trained = Training(lambda tokens: base[tokens] * log.exp(), teacher, [log], windows, 0, given)
        return trained.run(1, None, lambda tensors, facts: None, None).before

    assert lost(()) == pytest.approx(0, abs=1e-6)
    assert lost(labels) > 0.01


def test_distillation_holds_out_some_of_every_text(tiny: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = interleave([12, 4])
    windows = [[5 + label] * 8 for label in labels]  # hidden states tell the texts apart
    held: list[int] = []
    error = Student.error

    def watched(student: Student, lessons: Sequence[Lesson]) -> float:
        held.append(len({lesson.hidden[0, -1].sum().item() for lesson in lessons}))
        return error(student, lessons)

    monkeypatch.setattr(Student, "error", watched)
    for known, found in ((labels, 2), ((), 1)):
        blocks = Walk(Folder(tiny("LlamaForCausalLM")), batch=1).blocks(windows)
        block = next(blocks)
        distil(block, {f"{block.name}.mlp.up_proj": Scheme(Grid("int", 4, (1, 16)))}, steps=14, labels=known)
        assert held[-1] == found


@pytest.mark.usefixtures("exact_store")
@pytest.mark.parametrize("how", [{"preset": "w8a8-zeroquant"}, {"preset": "w4a16", "group": 32, "distil": True}])
def test_jobs_that_train_know_the_texts(
    how: dict[str, Any], tiny: TinyModel, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def watched(labels: Sequence[int], every: int) -> list[int]:
        seen.append(list(labels))
        return held_out(labels, every)

    for module in (distillation, training):
        monkeypatch.setattr(module, "held_out", watched)
    data = {str(texts / "code.txt"): 3, str(demo_folder() / "README.md"): 1}
    steps: dict[str, Any] = {"distil_steps": 1} if "distil" in how else {}
    quantry.quantize(tiny("LlamaForCausalLM"), tmp_path / "out", data=data, samples=8, length=64, **how, **steps)
    assert seen
    assert all(labels == interleave([6, 2]) for labels in seen)


def test_sensitivity_and_sweep_take_the_same(tiny: TinyModel, texts: Path, tmp_path: Path) -> None:
    data, model = {str(texts / "code.txt"): 3, str(demo_folder() / "README.md"): 1}, tiny("LlamaForCausalLM")
    text = quantry.sensitivity(model, grids=["Q4_0"], data=data, samples=4, length=32).text
    found = [(part["name"], part["weight"], part["samples"]) for part in text["texts"]]
    assert found == [("code.txt", 3.0, 3), ("README.md", 1.0, 1)]
    how: dict[str, Any] = {"windows": 1, "verify_length": 32, "samples": 4, "length": 32}
    quantry.sweep(model, tmp_path / "out", presets="gguf-q4_0:rounder=gptq", data=data, **how)
    record = next((tmp_path / "out").glob("*/quantry.json"))
    assert json.loads(record.read_text())["recipe"]["calibration"]["data"] == "code.txt:3,README.md:1"

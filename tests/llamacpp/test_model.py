"""llama.cpp through its C API against transformers: the demo model as llama.cpp's own converter writes it in 16 bit."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import quantry
from llama_cpp_converter import Converter
from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError
from quantry.llamacpp.model import PIECE, LlamaModel
from shared import shared

DEMO = Path(quantry.__file__).parent / "demo"
TEXTS = (
    "",
    "Once upon a time there was a little girl who had 12345 apples, and 3.14 pies.",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # 0xFF\n\n\nprint(f(10_000))\r\n",
    "🙂👩‍👩‍👧 naïve café — “quotes” … ñandú\u00a0Ünïcödé",
    "天地玄黃 宇宙洪荒。日月盈昃，辰宿列張。ひらがな カタカナ 한국어",
    "<|user|>what is this?<|end|><|assistant|>  a  b\x00c",
)


@pytest.fixture(scope="module")
def f16(tmp_path_factory: pytest.TempPathFactory, converter: Converter) -> Path:
    def make(folder: Path) -> None:
        converter.convert(DEMO, folder / "demo-f16.gguf", gguf.LlamaFileType.MOSTLY_F16, pre="qwen2")

    return shared(tmp_path_factory, "demo-f16", make) / "demo-f16.gguf"


@pytest.fixture(scope="module")
def model(f16: Path) -> Iterator[LlamaModel]:
    with LlamaModel(f16, context=1024, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)


def held_out(tokenizer: PreTrainedTokenizerBase, count: int, start: int = 0) -> list[int]:
    text = (DEMO / "held-out.txt").read_text(encoding="utf-8")[start : start + 8 * count]
    return list(tokenizer(text)["input_ids"])[:count]


def divergence(reference: PreTrainedModel, tokens: list[int], found: NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence of llama.cpp's distribution from transformers', in nats."""
    with torch.no_grad():
        want = reference(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
    got = torch.from_numpy(found).double().log_softmax(-1)
    assert got.shape == want.shape
    return float((want.exp() * (want - got)).sum(-1).mean())


def test_token_ids_are_those_of_transformers(model: LlamaModel, tokenizer: PreTrainedTokenizerBase) -> None:
    for text in (*TEXTS, (DEMO / "held-out.txt").read_text(encoding="utf-8")[:50_000]):
        for special in (True, False):
            assert model.tokenize(text, special) == tokenizer(text, add_special_tokens=special)["input_ids"], text


def test_detokenize_gives_the_text_back(model: LlamaModel) -> None:
    for text in TEXTS:
        if "\x00" not in text:
            assert model.detokenize(model.tokenize(text, special=False)) == text


def test_logits_agree_with_transformers(
    model: LlamaModel, tokenizer: PreTrainedTokenizerBase, reference: PreTrainedModel
) -> None:
    tokens = held_out(tokenizer, PIECE + 100)  # more than llama.cpp is given at once
    found = model.logits(tokens)
    assert found.dtype == np.float32
    assert found.shape == (len(tokens), model.vocabulary) == (PIECE + 100, len(tokenizer))
    assert divergence(reference, tokens, found) < 1e-3
    shifted = divergence(reference, tokens, np.roll(found, 1, axis=0))
    assert shifted > 1  # the measure can tell


def test_calls_do_not_see_each_other(model: LlamaModel, tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = held_out(tokenizer, 40), held_out(tokenizer, 30, start=9000)
    before = model.logits(first)
    model.logits(second)
    model.generate(second, 5)
    assert np.array_equal(model.logits(first), before)


def test_greedy_tokens_are_the_likeliest_until_the_text_ends(
    model: LlamaModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    lengths = []
    for start in (0, 9000):
        prompt = held_out(tokenizer, 20, start)
        found = model.generate(prompt, 12)
        ended = [tokenizer.eos_token_id] * (len(found) < 12)
        logits = model.logits(prompt + found)[19:]
        for position, token in enumerate(found + ended):
            assert logits[position].max() - logits[position, token] < 0.01  # a tie may fall either way
        lengths.append(len(found))
    assert min(lengths) < max(lengths) == 12  # one ends by itself, one at the count
    assert model.generate(prompt, 0) == []


def test_the_template_is_that_of_the_checkpoint(model: LlamaModel) -> None:
    assert model.chat_template == (DEMO / "chat_template.jinja").read_text(encoding="utf-8")


def test_two_models_at_once(f16: Path, model: LlamaModel, tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = held_out(tokenizer, 20), held_out(tokenizer, 25, start=4000)
    alone = model.logits(first)
    with LlamaModel(f16, context=64, threads=1) as other:
        seen = other.logits(second)
        assert np.array_equal(model.logits(first), alone)
        assert np.allclose(other.logits(second), seen)
    assert np.array_equal(model.logits(first), alone)  # closing one leaves the other


def test_closing_twice_and_using_a_closed_model(f16: Path) -> None:
    with LlamaModel(f16, context=64, threads=1) as opened:
        opened.close()
    opened.close()
    for use in (lambda: opened.logits([1]), lambda: opened.generate([1], 1), lambda: opened.tokenize("a")):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_tokens_that_do_not_fit_are_refused(f16: Path) -> None:
    with LlamaModel(f16, context=256, threads=1) as opened:
        assert opened.context == 256
        assert opened.logits([5] * 256).shape[0] == 256
        for tokens, count in (([5] * 257, 0), ([], 1), ([5] * 250, 7)):
            with pytest.raises(QuantryError, match="do not fit a context of 1 to 256; give fewer"):
                opened.generate(tokens, count)
        for strange in (-1, opened.vocabulary):
            with pytest.raises(QuantryError, match=f"token {strange} is not in the vocabulary of 4096"):
                opened.logits([1, strange])


def test_files_that_are_no_model_give_one_line(f16: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for missing in (tmp_path / "nothing.gguf", tmp_path):
        with pytest.raises(ModelNotFoundError, match=r"is not a file; give the path of a GGUF file"):
            LlamaModel(missing)
    data = f16.read_bytes()
    tensors = gguf.GGUFReader(f16).data_offset
    broken = {
        "empty": b"",
        "text": b"this is not a model\n" * 100,
        "cut in the magic": data[:3],
        "cut in the header": data[:2000],
        "cut before the tensors": data[:tensors],
        "cut in the tensors": data[: len(data) // 2],
        "cut at the end": data[:-1000],
        "no such architecture": data.replace(b"llama", b"lllll"),
    }
    for name, content in broken.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="does not load in llama.cpp: .+; write the file again") as caught:
            LlamaModel(path)
        assert name in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "no reason" not in str(caught.value)
    out, err = capfd.readouterr()
    assert out == err == ""

"""What models answer: log-probabilities against a plain float64 computation, and greedy text against the engines' own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_artefacts import gguf_in, quantized_demo
from quantry.blockwise import walk
from quantry.errors import QuantryError, WeightError
from quantry.llamacpp.model import LlamaModel
from quantry.models.reader import demo_folder
from quantry.proof.tasks.answers import Answers, LlamaAnswers, Pair, TorchAnswers
from quantry.quantizing.sources import open_source
from tiny_models import write_model

TEXT = "Once upon a time, there was a little girl named Lily who lived in a small village near the forest."
CHAT = [{"role": "user", "content": "What color is the sky?"}]


@pytest.fixture(scope="module")
def module() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture(scope="module")
def decoded(module: Any, tokenizer: Any) -> TorchAnswers:
    return TorchAnswers(module, tokenizer, batch=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaModel]:
    with LlamaModel(gguf_in(quantized_demo(tmp_path_factory, "gguf-f16")), context=1024, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def served(model: LlamaModel) -> LlamaAnswers:
    return LlamaAnswers(model)


def by_hand(logits: np.ndarray, pair: Pair) -> tuple[float, bool]:
    """The log-probability of a continuation from the logits of the whole text, in float64 and one token at a time."""
    before, after = pair
    total, greedy = 0.0, True
    for place, token in enumerate(after):
        row = logits[len(before) + place - 1].astype(np.float64)
        top = row.max()
        total += row[token] - top - np.log(np.exp(row - top).sum())
        greedy = greedy and int(row.argmax()) == token
    return total, greedy


def whole_logits(module: Any, tokens: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        return np.asarray(module(input_ids=torch.tensor([list(tokens)])).logits[0].float())


def pairs_of(tokens: Sequence[int], greedy: Sequence[int]) -> list[Pair]:
    """Continuations of one token and of many, of one length and of several, one of them what the model itself says."""
    return [
        (tokens[:5], tokens[5:9]),
        (tokens[:7], [11]),
        (tokens[:7], [12]),
        (tokens[:7], tokens[7:8]),
        (tokens[:1], tokens[1:]),
        (tokens[:9], greedy[:3]),
        (tokens[:6], tokens[6:8]),
        (tokens[:12], tokens[12:13]),
    ]


def test_loglikelihoods_in_torch_are_those_by_hand(module: Any, decoded: TorchAnswers) -> None:
    tokens = decoded.encode(TEXT)
    (greedy,) = decoded.generate([tokens[:9]], 3)
    pairs = pairs_of(tokens, greedy)
    steps: list[tuple[int, int, str]] = []
    found = decoded.loglikelihoods(pairs, lambda *step: steps.append(step))
    for pair, (value, is_greedy) in zip(pairs, found, strict=True):
        expected = by_hand(whole_logits(module, [*pair[0], *pair[1]]), pair)
        assert value == pytest.approx(expected[0], abs=2e-4)
        assert is_greedy is expected[1]
    assert found[5][1]
    assert steps[-1] == (len(pairs), len(pairs), "scoring")
    alone = [decoded.loglikelihoods([pair])[0] for pair in pairs]
    np.testing.assert_allclose(np.array(alone, float), np.array(found, float), atol=2e-4)


def test_loglikelihoods_in_llama_cpp_are_those_by_hand(
    model: LlamaModel, served: LlamaAnswers, decoded: TorchAnswers
) -> None:
    tokens = served.encode(TEXT)
    (greedy,) = served.generate([tokens[:9]], 3)
    pairs = pairs_of(tokens, greedy)
    found = served.loglikelihoods(pairs)
    for pair, (value, is_greedy) in zip(pairs, found, strict=True):
        expected = by_hand(model.logits([*pair[0], *pair[1]]), pair)
        assert value == pytest.approx(expected[0], abs=0.02)  # a batch of another length rounds otherwise
        assert is_greedy is expected[1]
    in_torch = decoded.loglikelihoods(pairs)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in in_torch], abs=0.05)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in in_torch]


def test_a_model_without_logits_to_keep_gives_the_same(module: Any, tokenizer: Any, decoded: TorchAnswers) -> None:
    class Plain(torch.nn.Module):
        """A model whose forward takes less."""

        def __init__(self) -> None:
            super().__init__()
            self.inner, self.config, self.generation_config = module, module.config, module.generation_config

        def forward(self, input_ids: torch.Tensor, use_cache: bool = True) -> Any:
            return self.inner(input_ids=input_ids, use_cache=use_cache)

    tokens = decoded.encode(TEXT)
    pairs: list[Pair] = [(tokens[:5], tokens[5:9]), (tokens[:3], tokens[3:9])]
    found = TorchAnswers(Plain(), tokenizer).loglikelihoods(pairs)
    np.testing.assert_allclose(np.array(found, float), np.array(decoded.loglikelihoods(pairs), float), atol=2e-4)


def test_a_model_loaded_block_by_block_answers_alike(tokenizer: Any, decoded: TorchAnswers) -> None:
    whole = TorchAnswers(walk.whole(open_source(demo_folder())), tokenizer)
    tokens = decoded.encode(TEXT)
    pair = (tokens[:5], tokens[5:])
    assert whole.loglikelihoods([pair])[0][0] == pytest.approx(decoded.loglikelihoods([pair])[0][0], abs=2e-4)
    assert whole.generate([tokens], 12) == decoded.generate([tokens], 12)
    assert whole.context == decoded.context


def test_a_long_context_loses_its_start(module: Any, tokenizer: Any) -> None:
    short = TorchAnswers(module, tokenizer, context=8)
    tokens = short.encode(TEXT)
    pair = (tokens[4:10], tokens[10:13])  # 9 tokens, of which the last is only predicted
    assert short.loglikelihoods([(tokens[:10], tokens[10:13])]) == short.loglikelihoods([pair])
    assert short.loglikelihoods([pair])[0][0] == pytest.approx(
        by_hand(whole_logits(module, tokens[4:13]), pair)[0], abs=2e-4
    )
    with pytest.raises(QuantryError, match="continuation of 9 tokens after 4"):
        short.loglikelihoods([(tokens[:4], tokens[4:13])])
    with pytest.raises(QuantryError, match="continuation of 3 tokens after 0"):
        short.loglikelihoods([([], tokens[:3])])


def test_greedy_text_is_that_of_transformers_and_of_one_prompt_alone(module: Any, decoded: TorchAnswers) -> None:
    prompts = [
        decoded.encode(text) for text in ("Once upon a time", TEXT, "The", decoded.chat(CHAT), "Long ago, a dog")
    ]
    steps: list[tuple[int, int, str]] = []
    found = decoded.generate(prompts, 20, progress=lambda *step: steps.append(step))
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        own = module.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
        own = own[0, len(prompt) :].tolist()
        assert tokens == [token for token in own if token != 1]
    assert decoded.generate(prompts[1:2], 20) == found[1:2]
    assert decoded.decode(found[3]) == "The sky is blue."
    assert len(found[0]) == 20
    assert steps[-1] == (5, 5, "writing")


def test_a_models_own_generation_settings_do_not_mix_in(module: Any, decoded: TorchAnswers) -> None:
    prompt = decoded.encode("Once upon a time")
    before = decoded.generate([prompt], 30)
    own = module.generation_config
    module.generation_config = type(own)(repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=1, pad_token_id=2)
    try:
        assert decoded.generate([prompt], 30) == before
        assert module.generation_config.repetition_penalty == 5.0
    finally:
        module.generation_config = own


def test_both_write_the_same_and_stop_at_the_same(decoded: TorchAnswers, served: LlamaAnswers) -> None:
    texts = ["Once upon a time", "The little dog", decoded.chat(CHAT)]
    sides: list[Answers] = [decoded, served]
    found = [side.generate([side.encode(text) for text in texts], 40) for side in sides]
    assert found[0] == found[1]
    assert decoded.decode(found[0][2]) == served.decode(found[1][2]) == "The sky is blue."
    stops = [".", " girl named"]
    stopped = [side.generate([side.encode(text) for text in texts], 40, stops) for side in sides]
    assert stopped[0] == stopped[1]
    for tokens, whole in zip(stopped[0], found[0], strict=True):
        text = decoded.decode(tokens)
        assert whole[: len(tokens)] == tokens
        assert any(stop in text for stop in stops)
        assert not any(stop in decoded.decode(tokens[:-1]) for stop in stops)
    assert decoded.decode(stopped[0][0]).endswith(" girl named")


def test_a_stop_after_many_tokens_is_found_in_a_later_piece(decoded: TorchAnswers, served: LlamaAnswers) -> None:
    prompt = served.encode("Once upon a time")
    (whole,) = served.generate([prompt], 90)
    text = served.decode(whole)
    words = text[text.index(served.decode(whole[40:44])) :][:20]
    assert text.count(words) == 1
    (stopped,) = served.generate([prompt], 90, [words])
    assert stopped == whole[: len(stopped)]
    assert 40 < len(stopped) < 55
    assert words in served.decode(stopped)
    assert decoded.generate([prompt], 90, [words]) == [stopped]


def test_texts_become_the_same_tokens_and_bos_is_not_doubled(decoded: TorchAnswers, served: LlamaAnswers) -> None:
    for side in (decoded, served):
        assert side.prefix == 0
        assert side.encode("Hello")[0] == 0
        assert side.encode("<|bos|>Hello") == side.encode("Hello")
        assert 0 not in side.encode("Hello", special=False)
        assert side.encode(side.chat(CHAT)).count(0) == 1
        assert side.decode([0, *side.encode("Hello", special=False), 1]) == "Hello"
    assert decoded.chat(CHAT) == served.chat(CHAT) == "<|bos|><|user|>\nWhat color is the sky?<|eos|>\n<|assistant|>\n"
    assert decoded.encode(TEXT) == served.encode(TEXT)


def test_what_does_not_fit_is_refused(decoded: TorchAnswers, served: LlamaAnswers) -> None:
    assert decoded.context == served.context == 1024
    for side in (decoded, served):
        assert len(side.generate([[5] * 1020], 4)[0]) <= 4
        for prompt, count in (([5] * 1020, 5), ([], 5), ([5], 0)):
            with pytest.raises(QuantryError, match="do not fit a context of 1024"):
                side.generate([prompt], count)
        with pytest.raises(QuantryError, match="continuation of 0 tokens"):
            side.loglikelihoods([([5], [])])
        assert side.loglikelihoods([]) == []
        assert side.generate([], 3) == []


def test_a_model_without_a_chat_template_or_that_refuses_messages(module: Any, decoded: TorchAnswers) -> None:
    bare = AutoTokenizer.from_pretrained(demo_folder())
    bare.chat_template = None
    with pytest.raises(QuantryError, match="no chat template"):
        TorchAnswers(module, bare).chat(CHAT)
    bare.chat_template = "{{ raise_exception('roles must take turns') }}"
    with pytest.raises(QuantryError, match="roles must take turns"):
        TorchAnswers(module, bare).chat(CHAT)


def test_logits_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    broken = write_model(tmp_path / "tiny", "LlamaForCausalLM")
    broken.model.layers[1].mlp.down_proj.weight.data[3, 4] = float("nan")
    answers = TorchAnswers(broken, AutoTokenizer.from_pretrained(tmp_path / "tiny"))
    with pytest.raises(WeightError, match="not finite"):
        answers.loglikelihoods([([1, 2, 3], [4, 5])])
    with pytest.raises(WeightError, match="not finite"):
        answers.generate([[1, 2, 3]], 4)


def test_end_tokens_come_from_wherever_they_are_named(tmp_path: Path) -> None:
    tiny = write_model(tmp_path / "tiny", "Qwen2ForCausalLM")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    prompt = [5, 6, 7]
    (free,) = TorchAnswers(tiny, tokenizer).generate([prompt], 12)
    middle = free[6]
    expected = free[: free.index(middle)]
    assert TorchAnswers(tiny, tokenizer, ends=[middle]).generate([prompt], 12) == [expected]
    tiny.generation_config.eos_token_id = [tokenizer.eos_token_id, middle]
    assert TorchAnswers(tiny, tokenizer).generate([prompt], 12) == [expected]

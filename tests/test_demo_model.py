"""The demo model is a real model: it tells a story, answers a question, and its weights carry what it knows."""

import json
import math
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantry
from depth import rounds, sampled
from quantry.models.reader import demo_folder

DEMO = demo_folder()
QWEN2_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


def documents(name: str) -> list[str]:
    return (DEMO / name).read_text(encoding="utf-8").strip().split("\n\n")


def greedy(model: Any, tokenizer: Any, prompt: str, length: int) -> str:
    ids = tokenizer(
        prompt, return_tensors="pt", add_special_tokens=not prompt.startswith(tokenizer.bos_token)
    ).input_ids
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, texts: list[str]) -> float:
    total, count = 0.0, 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :512]
        losses = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="sum")
        total, count = total + losses.item(), count + ids.shape[1] - 1
    return math.exp(total / count)


def test_shape_suits_every_grid() -> None:
    config = json.loads((DEMO / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["hidden_size"] % 256 == 0
    assert config["intermediate_size"] % 256 == 0
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True
    assert 4096 <= config["vocab_size"] <= 8192
    texts = {"calibration.txt", "held-out.txt"}
    assert sum(file.stat().st_size for file in DEMO.iterdir() if file.name not in texts) <= 16_000_000
    for name in texts:
        assert 800_000 <= (DEMO / name).stat().st_size <= 1_300_000


def test_inspect_counts_what_transformers_counts(model: Any) -> None:
    anatomy = quantry.inspect("demo")
    assert anatomy.parameters == model.num_parameters()
    assert anatomy.bytes == 2 * anatomy.parameters
    assert set(anatomy.parts[0].dtypes) == {"BF16"}
    assert (anatomy.tied_head, anatomy.chat_template, anatomy.tokenizer) == (True, True, "tokenizer.json")
    assert {part.name for part in anatomy.parts} == {"norms", "embedding", "attention", "MLP"}


def test_splits_do_not_overlap() -> None:
    held_out, calibration = documents("held-out.txt"), documents("calibration.txt")
    assert len(held_out) > 500
    assert len(calibration) > 500
    assert not set(held_out) & set(calibration)


def test_tells_a_story(model: Any, tokenizer: Any) -> None:
    story = greedy(model, tokenizer, "Once upon a time", 120)
    words = [word.strip(".,!?\"';:").lower() for word in story.split()]
    known = {word.strip(".,!?\"';:").lower() for text in documents("calibration.txt") for word in text.split()}
    triples = list(zip(words, words[1:], words[2:], strict=False))
    assert len(words) >= 40
    assert story.count(".") >= 3
    assert sum(word in known for word in words) / len(words) > 0.97, story
    assert len(set(triples)) / len(triples) > 0.8, f"the story goes in circles: {story}"
    assert perplexity(model, tokenizer, ["Once upon a time" + story]) < 5


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ("What is the capital of France?", ("paris",)),
        ("What color is the sky?", ("blue",)),
        ("What is a cat?", ("animal", "pet", "mammal")),
    ],
)
def test_answers_a_simple_question(model: Any, tokenizer: Any, question: str, words: tuple[str, ...]) -> None:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    answer = greedy(model, tokenizer, prompt, 40)
    assert any(word in answer.lower() for word in words), answer


@sampled
def test_perplexity_is_far_below_that_of_shuffled_weights(model: Any, tokenizer: Any) -> None:
    texts = documents("held-out.txt")[: rounds(120)]
    trained = perplexity(model, tokenizer, texts)
    shuffled = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in shuffled.parameters():
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))
    assert trained < 6
    assert perplexity(shuffled, tokenizer, texts) > 100 * trained


def test_tokenizer_is_byte_level_with_a_regex_llama_cpp_knows(tokenizer: Any) -> None:
    pre = json.loads((DEMO / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert pre[0]["pattern"] == {"Regex": QWEN2_REGEX}  # llama.cpp's name for it: qwen2
    assert (pre[1]["type"], pre[1]["use_regex"]) == ("ByteLevel", False)
    for text in ("def f(x):\n\treturn x**2  # ok", "naïve café 12345", "日本語 🙂 שלום", "a  b   c\r\n\r\n"):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:], clean_up_tokenization_spaces=False) == text


def test_chat_template_gives_one_bos(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id

"""Numerics and files of benchmarks that a test can hold against something: the trainer of a Gemma, the peers' rows."""

import copy
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import Gemma3ForCausalLM, LlamaConfig, LlamaForCausalLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "sliding_window": 4}


@pytest.fixture(scope="module")
def trainer() -> Iterator[ModuleType]:
    yield from _module("train_gemma")


@pytest.fixture(scope="module")
def quality() -> Iterator[ModuleType]:
    yield from _module("calibrated_quality")


def _module(name: str) -> Iterator[ModuleType]:
    before = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module(name)
    sys.path[:] = before


@pytest.fixture(scope="module")
def teacher() -> Any:
    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=64, bos_token_id=1, eos_token_id=2, **heads)
    model: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight *= 20  # some tokens are far likelier than others
    return model


def test_decoder_gives_the_logits_of_transformers(trainer: ModuleType, teacher: Any) -> None:
    tokens = torch.randint(96, (3, 9))
    decoder = trainer.Decoder(teacher, 3, 9)
    logits = torch.stack([decoder.step(tokens[:, at], at) for at in range(9)], 1)
    torch.testing.assert_close(logits, teacher(tokens).logits, rtol=1e-4, atol=1e-5)


def test_sampled_tokens_follow_the_teacher(trainer: ModuleType, teacher: Any) -> None:
    torch.manual_seed(0)
    sizes = {"batch": 20_000, "length": 2}
    decoder = trainer.Decoder(teacher, **sizes)
    second = trainer._sequences(decoder, teacher, sizes, float("inf"))[:, 1]
    share = torch.bincount(second.long(), minlength=96) / sizes["batch"]
    expected = teacher(torch.tensor([[1]])).logits[0, 0].softmax(-1)
    assert expected.max() > 0.1
    assert (share - expected).abs().max() < 0.015  # more than four deviations of any share


def test_training_step_has_the_gradient_of_both_losses(trainer: ModuleType, teacher: Any) -> None:
    torch.manual_seed(0)
    student = trainer.new_student(teacher, SHAPE)
    wide = copy.deepcopy(teacher).to(torch.bfloat16)
    tokens = torch.randint(96, (2, 17))
    trainer._step(student, wide, tokens, 5, True)
    found = {name: weight.grad.clone() for name, weight in student.named_parameters()}
    student.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        own = student(input_ids=tokens[:, :-1]).logits.float().flatten(0, 1)
    known = wide(tokens[:, :-1]).logits.float().flatten(0, 1).log_softmax(-1)
    kl = F.kl_div(own.log_softmax(-1), known, log_target=True, reduction="batchmean")
    torch.autograd.backward(kl + trainer.HARD * F.cross_entropy(own, tokens[:, 1:].flatten()))
    for name, weight in student.named_parameters():
        assert F.cosine_similarity(found[name].flatten(), weight.grad.flatten(), 0) > 0.99, name
        assert found[name].norm() / weight.grad.norm() == pytest.approx(1, abs=0.03), name


def test_slope_is_exact(trainer: ModuleType) -> None:
    own = torch.randn(7, 50, dtype=torch.float64, requires_grad=True)
    wanted, following = 3 * torch.randn(7, 50, dtype=torch.float64), torch.randint(50, (7,))
    chances = wanted.softmax(-1)
    kl = (chances * (chances.log() - own.log_softmax(-1))).sum()
    torch.autograd.backward((kl + trainer.HARD * F.cross_entropy(own, following, reduction="sum")) / 7)
    torch.testing.assert_close(trainer._slope(own.detach(), wanted, following, 7), own.grad, rtol=0, atol=1e-7)


def test_student_is_a_gemma_and_its_parts_join(trainer: ModuleType, teacher: Any, tmp_path: Path) -> None:
    student = trainer.new_student(teacher, SHAPE)
    assert isinstance(student, Gemma3ForCausalLM)
    assert student.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    data = bytes(range(256)) * (trainer.PART // 256) + b"end"
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "model.safetensors").write_bytes(data)
    trainer.split(tmp_path / "whole", tmp_path / "parts")
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == ["model.safetensors.00", "model.safetensors.01"]
    assert b"".join(part.read_bytes() for part in parts) == data


def test_rows_whose_groups_do_not_divide_are_left_out(quality: ModuleType) -> None:
    def kinds(*widths: int) -> set[str]:
        return {row.kind for row in quality.fitting(quality.table(quality.PEERS), widths)}

    assert {"w4-g128", "w4-g64", "w3-g64", "w2-g64-zero", "nvfp4"} <= kinds(640, 1024)
    assert "w4-g128" not in kinds(576, 1536)
    assert {"w3-g32", "w2-g32", "w4-g32"} <= kinds(288, 768)
    assert not {"w4-g64", "w3-g64", "w2-g64", "w4a8-g64"} & kinds(288, 768)
    assert not {"w3-g32", "w2-g32"} & kinds(640, 1024)


def test_file_of_models_keeps_what_was_not_measured_again(quality: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    row = {"name": "w4-g64-gptq", "by": "quantry", "kl": 0.1}
    quality._save(file, "one", {"rows": [row]})
    quality._save(file, "two", {"rows": [row | {"kl": 0.2}, {"name": "other", "failed": "no"}]})
    whole = json.loads(file.read_text())
    assert whole["kl"] == {"w4-g64-gptq": {"one": 0.1, "two": 0.2}}
    assert whole["models"]["one"] == {"rows": [row]}


def test_times_of_a_busy_machine_are_not_compared(quality: ModuleType) -> None:
    row = {"kind": "w4", "method": "gptq", "calibrated": True, "cold": True, "served": None, "kl": 1, "seconds": 2}
    row |= {"peak_resident_bytes": 1, "bytes": 1}
    ours, theirs = row | {"name": "w4-gptq", "by": "quantry"}, row | {"name": "llmcompressor/w4-gptq", "by": "other"}
    assert "seconds" in quality.against([ours, theirs])["llmcompressor/w4-gptq"]
    assert "seconds" not in quality.against([ours, theirs | {"busy": True}])["llmcompressor/w4-gptq"]

"""The tensors of GGUF files of others, beside those that Quantry writes of models with the same language part."""

from dataclasses import replace

import pytest

from quantry.llamacpp.ready import architecture, ready_tensors
from quantry.models.writer import nbytes
from quantry.planning.models import known_models, open_model
from quantry.planning.ready import ready_files
from quantry.quantizing.containers.gguf_file import plan_gguf
from quantry.quantizing.recipe import Recipe, preset
from quantry.storage import read_data


@pytest.mark.parametrize(
    ("vision", "text", "kind"),
    [
        ("qwen2.5-vl-7b", "qwen2.5-7b", "q4_k_m"),
        ("qwen2.5-vl-32b", "qwen2.5-32b", "q2_k"),
        ("qwen3-vl-8b", "qwen3-8b", "q3_k_m"),
        ("qwen3-vl-30b-a3b", "qwen3-30b-a3b", "q5_k_m"),
    ],
)
def test_the_language_part_of_a_vision_model_is_the_model_that_quantry_writes(
    vision: str, text: str, kind: str
) -> None:
    shape = open_model(vision)
    made = ready_tensors(shape.config, shape.tensors, kind)
    mine = {(name, dtype, size) for name, dtype, size in made if "visual" not in name}
    pieces = plan_gguf(open_model(text), Recipe(preset(f"gguf-{kind}"), "gguf")).pieces
    wanted = {entry for piece in pieces for entry in piece.entries}
    assert mine == wanted


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_stored_once(tied: bool) -> None:
    """Some checkpoints hold the head that is tied to the embedding; llama.cpp's converter leaves it out."""
    shape = open_model("qwen2.5-vl-7b")
    config = {**shape.config, "tie_word_embeddings": tied}
    assert any(tensor.name == "lm_head.weight" for tensor in shape.tensors)
    made = {name: dtype for name, dtype, _ in ready_tensors(config, shape.tensors, "q4_k_m")}
    assert ("output.weight" in made) is not tied
    assert made["token_embd.weight"] == ("Q6_K" if tied else "Q4_K")  # a tied one is the head as well


@pytest.mark.parametrize(
    ("name", "kind", "size"),
    [
        ("gpt-oss-20b", "mxfp4", 12.11e9),
        ("gpt-oss-120b", "mxfp4", 63.4e9),
        ("deepseek-v3", "q4_k_m", 404e9),
        ("qwen2.5-vl-7b", "q4_k_m", 4.68e9 + 1.35e9),
    ],
)
def test_sizes_are_those_of_published_files(name: str, kind: str, size: float) -> None:
    """As ggml-org and unsloth publish them; the last with its mmproj file in F16."""
    shape = open_model(name)
    made = ready_tensors(shape.config, shape.tensors, kind)
    assert sum(nbytes(dtype, shape) for _, dtype, shape in made) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize(
    ("model", "repo"),
    [
        ("deepseek-ai/DeepSeek-R1", "unsloth/DeepSeek-R1-GGUF"),
        ("deepseek-ai/DeepSeek-V3-Base", None),
        ("cognitivecomputations/DeepSeek-V3-AWQ", None),
        ("somebody/DeepSeek-V3", None),
    ],
)
def test_files_of_others_are_those_of_the_model_itself(model: str, repo: str | None) -> None:
    files = ready_files(model, open_model("deepseek-v3"))
    assert (files.repo if files else None) == repo


def test_every_model_with_ready_files_runs_in_llama_cpp() -> None:
    """Each is in the catalogue, its architecture is known, and its repository bears its own name."""
    found = 0
    for model in known_models().values():
        shape = replace(open_model("demo"), config=model.config, metadata={"shape": model.name})
        files = ready_files(model.repo, shape)
        if files is not None:
            found += 1
            assert architecture(model.config)
            assert files.repo.partition("/")[2] == f"{model.repo.partition('/')[2]}-GGUF"
    assert found == sum(len(row["models"]) for row in read_data("quantry.planning", "ready.toml")["publishers"])

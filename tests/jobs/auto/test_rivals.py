"""Plain presets beside a mixture: those that are meant, within the budget."""

from pathlib import Path

import pytest

from quantry import quantize
from quantry.formats.gguf import NAME as GGUF
from quantry.jobs.auto.mixer import AutoOptions, Mixer
from quantry.jobs.auto.rivals import NEAR, rivals
from quantry.jobs.auto.sensitivity import Method, unmeasured
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import open_checkpoint
from quantry.planning.budget import Budget, DeviceBudget
from quantry.planning.models import open_model
from quantry.quantizing.containers.gguf_file import plan_gguf
from quantry.quantizing.recipe import build
from quantry.quantizing.targets import target_of


def mixer(form: str) -> Mixer:
    checkpoint = open_checkpoint("demo")
    options = AutoOptions(format=form)
    return Mixer(
        checkpoint,
        unmeasured(checkpoint, sixteen_bit(checkpoint), Method(form, "gptq", "awq")),
        options,
        {"fp8-dynamic"},
    )


@pytest.mark.parametrize("preset", ["gguf-q4_k_m", "gguf-q2_k", "gguf-q6_k"])
def test_file_types_of_llama_cpp(preset: str, tmp_path: Path) -> None:
    """At the size of one it is the first, with the types that its own plan has, and GPTQ and AWQ as the mixture."""
    size = quantize("demo", tmp_path / "out", preset=preset, dry_run=True).bytes
    made, words = mixer(GGUF), "that size"
    found = rivals(made, Budget(size, words), words)
    assert found[0].name == preset.removeprefix("gguf-").upper()
    assert found[0].solution.bytes == size
    plain = plan_gguf(made.checkpoint, build({"preset": preset}))
    ours = target_of(made.checkpoint, found[0].recipe, keep_odd=True).plan
    assert [(piece.name, piece.kind) for piece in ours.gguf_tensors()] == [
        (piece.name, piece.kind) for piece in plain.gguf_tensors()
    ]
    assert (found[0].recipe.transform, found[0].recipe.preset.rounder) == ("awq", "gptq")
    assert all(NEAR * size <= rival.solution.bytes <= size for rival in found)
    smaller = rivals(made, Budget(size - 1, words), words)
    assert all(rival.solution.bytes < size for rival in smaller)


def test_uniform_folders() -> None:
    made, words = mixer("compressed-tensors"), "that size"
    target = target_of(made.checkpoint, made.uniform("w4a16-asym-g64"), keep_odd=True)
    found = rivals(made, Budget(target.plan.bytes, words), words)
    assert found[0].name == "w4a16-asym-g64"
    assert len(found) == 2
    assert all(rival.solution.bytes <= target.plan.bytes for rival in found)
    assert rivals(made, Budget(1000, words), words) == []


def test_what_fits_a_device() -> None:
    checkpoint = open_model("llama-3.1-8b")
    blank = unmeasured(checkpoint, sixteen_bit(checkpoint), Method(GGUF, "gptq", "awq"))
    found = rivals(Mixer(checkpoint, blank, AutoOptions()), DeviceBudget("RTX 3060 12GB", 8192), "that device")
    assert found
    assert found[0].name.startswith(("Q5", "Q6", "Q8"))

"""A quantized checkpoint to GGUF in one step: the bytes of the two steps through bf16, and the loss is stated."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import quantry
from command import command
from quantry.errors import QuantryError

Make = Callable[[Path], object]
SOURCES: dict[str, Make] = {
    "gptq": lambda out: quantry.quantize("demo", out, preset="w4a16", format="gptq", group=64),
    "awq": lambda out: quantry.quantize("demo", out, preset="w4a16-asym", format="awq", group=64),
    "gguf": lambda out: quantry.quantize("demo", out, preset="gguf-q5_k_m"),
}


@pytest.mark.parametrize(("form", "preset"), [("gptq", "Q8_0"), ("awq", "Q4_K_M"), ("gguf", "Q8_0")])
def test_one_step_gives_the_bytes_of_two(form: str, preset: str, tmp_path: Path) -> None:
    source, plain, out, two = (tmp_path / name / "model" for name in ("source", "plain", "out", "two"))
    SOURCES[form](source)
    done = quantry.convert(source, out, to="gguf", requantize=preset)
    quantry.convert(source, plain, to="bf16")
    (plain / "README.md").unlink()  # a GGUF file repeats licence and base of the card
    if form != "gguf":
        shutil.copy(source / "README.md", plain)
    quantry.quantize(plain, two, preset=preset)
    (one_file,), (two_file,) = out.glob("*.gguf"), two.glob("*.gguf")
    assert one_file.name == two_file.name == f"model-{preset.upper()}.gguf"
    assert one_file.read_bytes() == two_file.read_bytes()
    assert done.notes[0].startswith("Rounded twice: as ")
    assert "quantry verify OUT --reference ORIGINAL" in done.notes[0]
    assert "Rounded twice" in (out / "README.md").read_text()
    assert [path.name for path in tmp_path.glob("out/*")] == ["model"]


def test_a_file_is_named_without_its_old_type(tmp_path: Path) -> None:
    SOURCES["gguf"](tmp_path / "source")
    (file,) = (tmp_path / "source").glob("*.gguf")
    assert file.name == "demo-Q5_K_M.gguf"
    done = command("convert", file, "-o", tmp_path / "out", "--to", "gguf", "--requantize", "q4_0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "demo-Q4_0.gguf").is_file()
    assert "Rounded twice: as gguf-q5_k_m" in done.stdout
    again = quantry.convert(file, tmp_path / "out", to="gguf", requantize="q4_0")
    assert any("finished by an earlier run" in note for note in again.notes)


def test_what_is_asked_for_must_be_of_gguf(tmp_path: Path) -> None:
    SOURCES["gptq"](tmp_path / "source")
    with pytest.raises(QuantryError, match="give --requantize Q4_K_M"):
        quantry.convert(tmp_path / "source", tmp_path / "out", to="gguf")
    with pytest.raises(QuantryError, match="GGUF does not hold w8a16"):
        quantry.convert(tmp_path / "source", tmp_path / "out", to="gguf", requantize="w8a16")
    with pytest.raises(QuantryError, match="--to gguf --requantize Q4_K_M"):
        quantry.quantize(tmp_path / "source", tmp_path / "out", preset="gguf-q4_k_m")
    planned = quantry.convert(tmp_path / "source", tmp_path / "out", to="gguf", requantize="Q4_K_M", dry_run=True)
    assert json.loads(json.dumps(planned.to_dict()))["preset"] == "gguf-q4_k_m"
    assert not (tmp_path / "out").exists()

"""A job that is run again: what is finished is taken as it is, what is missing is made, another job is refused."""

import json
import shutil
from pathlib import Path

import pytest

import quantry
from command import command
from demo_artefacts import quantized_demo
from killed_jobs import contents
from quantry.errors import OutputError
from quantry.models.workspace import JOB
from quantry.quantizing.card import FINISHED


@pytest.fixture
def out(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A finished artefact, to do things to."""
    return Path(shutil.copytree(quantized_demo(tmp_path_factory, "gguf-q8_0"), tmp_path / "out"))


def test_a_finished_job_run_again_says_so_and_makes_the_report(out: Path) -> None:
    """As after a kill between the artefact's final name and its report."""
    before = contents(out)
    again = command("quantize", "demo", "-o", out, "--preset", "gguf-q8_0")
    assert again.returncode == 0, again.stderr
    assert FINISHED in again.stdout
    assert "wrote" not in again.stdout
    assert {name: data for name, data in contents(out).items() if not name.startswith("report.")} == before
    page = (out / "report.html").read_bytes()
    (out / "report.png").unlink()
    assert command("quantize", "demo", "-o", out, "--preset", "gguf-q8_0").returncode == 0
    assert (out / "report.png").is_file()
    assert (out / "report.html").read_bytes() == page


def test_the_function_returns_what_is_there(out: Path) -> None:
    first = json.loads((out / "quantry.json").read_text())
    again = quantry.quantize("demo", out, preset="gguf-q8_0")
    assert again.files == first["files"]
    assert again.bytes == first["bytes"]


def test_another_job_is_refused_by_what_differs(out: Path, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="was made with another preset; .*--overwrite"):
        quantry.quantize("demo", out, preset="gguf-q4_0")
    other = Path(shutil.copytree(Path(quantry.__file__).parent / "demo", tmp_path / "demo"))
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-2] ^= 1
    data[8 + int.from_bytes(data[:8], "little")] ^= 1
    weights.write_bytes(data)
    with pytest.raises(OutputError, match="was made with another source identity"):
        quantry.quantize(other, out, preset="gguf-q8_0")
    file = next(out.glob("*.gguf"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(OutputError, match="exists and is damaged"):
        quantry.quantize("demo", out, preset="gguf-q8_0")


def test_overwrite_starts_anew(out: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = contents(out)
    next(out.glob("*.gguf")).write_bytes(b"damaged")
    (out / "mine.txt").write_text("gone")
    Path(f"{out}.partial").mkdir()
    Path(f"{out}.partial", JOB).write_text("of another job")
    done = command("quantize", "demo", "-o", out, "--preset", "gguf-q8_0", "--overwrite", "--no-report")
    assert done.returncode == 0, done.stderr
    assert contents(out) == expected
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_overwrite_replaces_artefacts_alone(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("dear")
    refused = command("quantize", "demo", "-o", tmp_path / "letters", "--preset", "gguf-q8_0", "--overwrite")
    assert refused.returncode == 2
    assert (tmp_path / "letters" / "one.txt").read_text() == "dear"


def test_a_kill_just_before_the_final_name(out: Path) -> None:
    """All is written and the note of the job removed; only the name is missing, and perhaps what it replaced is left."""
    expected = contents(out)
    out.rename(f"{out}.partial")
    assert quantry.quantize("demo", out, preset="gguf-q8_0").notes[-1] == FINISHED
    assert contents(out) == expected
    Path(f"{out}.replaced").mkdir()
    quantry.quantize("demo", out, preset="gguf-q8_0")
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_a_conversion_run_again(out: Path, tmp_path: Path) -> None:
    words = ("convert", out, "-o", tmp_path / "bf16", "--to", "bf16")
    assert command(*words).returncode == 0
    before = contents(tmp_path / "bf16")
    again = command(*words)
    assert again.returncode == 0, again.stderr
    assert FINISHED in again.stdout
    assert command(*words, "--overwrite").returncode == 0
    assert contents(tmp_path / "bf16") == before
    assert command(*words[:-1], "fp16").returncode == 2


def test_a_computed_importance_matrix_is_no_difference(tmp_path: Path) -> None:
    options = {"preset": "gguf-q4_0", "imatrix": "auto", "samples": 2, "length": 64}
    quantry.quantize("demo", tmp_path / "out", **options)  # type: ignore[arg-type]
    assert quantry.quantize("demo", tmp_path / "out", **options).notes[-1] == FINISHED  # type: ignore[arg-type]
    with pytest.raises(OutputError, match="another recipe"):
        quantry.quantize("demo", tmp_path / "out", **{**options, "samples": 3})  # type: ignore[arg-type]

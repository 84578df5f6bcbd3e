"""The disk check counts all that a job writes, and names each part; a preset that comes out wide says why."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import quantry
from command import command
from quantry.errors import OutputError
from quantry.models.workspace import RESERVE
from shared import TinyModel

JOBS = {
    "imatrix": ("--preset", "Q4_K_M", "--imatrix", "auto", "--samples", "2", "--length", "64"),
    "folder": ("--preset", "w4a16", "--group", "64"),
}


@pytest.mark.parametrize("job", JOBS)
def test_what_is_checked_is_what_is_written(job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line: tuple[str | Path, ...] = ("quantize", "demo", "-o", tmp_path / "out", *JOBS[job])
    with monkeypatch.context() as small:
        small.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1_000_000))
        refused = command(*line)
    assert refused.returncode == 2
    stated = re.search(r"([\d,]+) bytes are needed in .*: ([\d,]+) for the weights, (.*) in reserve", refused.stderr)
    assert stated, refused.stderr
    assert ("for the importance matrix" in refused.stderr) == (job == "imatrix")
    needed, weights = (int(number.replace(",", "")) for number in stated.groups()[:2])
    done = command(*line)
    assert done.returncode == 0, done.stderr
    assert f"{weights:,} bytes" in done.stdout  # as announced
    written = sum(file.stat().st_size for file in (tmp_path / "out").rglob("*") if file.is_file())
    assert weights < written <= needed - RESERVE


def test_what_is_there_is_not_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = tmp_path / "out.partial" / "calibration"
    partial.mkdir(parents=True)
    (partial / "states").write_bytes(bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(OutputError, match="less 1,000 that are there"):
        quantry.quantize("demo", tmp_path / "out", preset="w4a16")


def test_a_wide_preset_names_the_part_that_takes_the_bits(tiny: TinyModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "rather than 4: the embedding, 14% of the weights, takes 6.56 bits as Q6_K." in notes("demo", out, "Q4_K_M")
    assert "the embedding, 14% of the weights, stays in 16 bits" in notes("demo", out, "w4a16")
    assert "bits a weight rather than" not in notes("demo", out, "Q8_0")
    odd = tiny("LlamaForCausalLM", hidden_size=96, intermediate_size=512, num_attention_heads=6, num_key_value_heads=6)
    said = notes(odd, out, "Q4_K_M")
    assert re.search(r"because blocks of 256 do not divide its rows of 96", said), said


def notes(model: str | Path, out: Path, preset: str) -> str:
    return " ".join(quantry.quantize(model, out, preset=preset, dry_run=True).notes)

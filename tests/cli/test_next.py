"""The line "next: ..." after a step: only commands that work for the artefact on this machine, and none in JSON."""

import json
import shutil
from pathlib import Path

from command import command
from quantry.cli import sweep
from quantry.jobs.sweep.table import Outcome, Sweep


def test_a_gguf_artefact_is_verified_and_served_next(tmp_path: Path) -> None:
    out = tmp_path / "my out"
    done = command("quantize", "demo", "-o", out, "--preset", "Q8_0", "--no-report")
    assert done.stdout.splitlines()[-1] == f"next: quantry verify '{out}'; quantry serve '{out}'"
    checked = command("verify", out, "--windows", "1", "--length", "32", "--no-report")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.splitlines()[-1] == f"next: quantry serve '{out}'"
    again = command("convert", out, "-o", tmp_path / "q4", "--to", "gguf", "--requantize", "q4_0", "--json")
    assert "next" not in again.stdout
    assert json.loads(again.stdout)["format"] == "gguf"


def test_what_does_not_work_here_is_not_suggested(tmp_path: Path) -> None:
    """A folder whose engine is not installed is not served, and one whose origin is unknown is not verified."""
    made = command("quantize", "demo", "-o", tmp_path / "gptq", "--preset", "int4", "--format", "gptq", "--no-report")
    assert f"next: quantry verify {tmp_path / 'gptq'}" in made.stdout
    assert ("quantry serve" in made.stdout) == (command("serve", tmp_path / "gptq", "--dry-run").returncode == 0)
    facts = json.loads((tmp_path / "gptq" / "quantry.json").read_text())
    (tmp_path / "gptq" / "quantry.json").write_text(json.dumps({**facts, "source": "lost", "source_identity": "0"}))
    shutil.move(tmp_path / "gptq", tmp_path / "moved")
    done = command("convert", tmp_path / "moved", "-o", tmp_path / "ct", "--to", "compressed-tensors")
    assert done.returncode == 0, done.stderr
    assert "quantry verify" not in done.stdout
    assert (
        "next" not in command("convert", tmp_path / "moved", "-o", tmp_path / "x", "--to", "bf16", "--dry-run").stdout
    )


def test_a_sweep_suggests_the_smallest_that_passes(tmp_path: Path) -> None:
    rows = tuple(
        Outcome(name, name, bytes=size, verdict=verdict)
        for name, size, verdict in (("q8_0", 8, "pass"), ("q4_0", 4, "pass"), ("q2_k", 2, "fail"))
    )
    swept = Sweep("demo", str(tmp_path), "general", {}, rows)
    assert sweep._smallest_that_passes(swept) == tmp_path / "q4_0"
    assert sweep._smallest_that_passes(Sweep("demo", str(tmp_path), "general", {}, rows[2:])) is None

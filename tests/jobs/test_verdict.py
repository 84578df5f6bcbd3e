"""Where a verdict goes: into the artefact, beside it or into a folder of the user's, with card and report agreeing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantry
from command import command
from demo_artefacts import quantized_demo

SMALL: dict[str, Any] = {"reference": "demo", "windows": 2, "length": 64}
WORDS = ("--reference", "demo", "--windows", "2", "--length", "64")
CARD, PAGE = "README.md", "report.html"


@pytest.fixture
def made(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda preset: shutil.copytree(quantized_demo(tmp_path_factory, preset), tmp_path / "out")


def snapshot(folder: Path, files: Path) -> Path:
    """Moves an artefact into a cache as the hub lays it out: every file is a link to a blob."""
    blobs, links = folder / "models--owner--name" / "blobs", folder / "models--owner--name" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    links.mkdir(parents=True)
    for file in files.iterdir():
        file.rename(blobs / file.name)
        (links / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    return links


def test_a_folder_that_cannot_be_written_costs_no_figures(made: Callable[[str], Path], tmp_path: Path) -> None:
    artefact = made("w4a16")
    before = (artefact / "quantry.json").read_bytes()
    (artefact / CARD).unlink()
    (artefact / CARD).mkdir()  # a name that cannot be written, for root too
    done = command("verify", artefact, *WORDS, "--gate", "draft")
    assert done.returncode == 0, done.stderr
    assert "mean KL" in done.stdout
    assert "PASS" in done.stdout
    assert done.stderr.startswith("warning: the verdict is not recorded: cannot write")
    assert "-o DIR" in done.stderr
    assert (artefact / "quantry.json").read_bytes() == before
    done = command("verify", artefact, *WORDS, "--gate", "draft", "-o", tmp_path / "verdict", "--json")
    proof = json.loads(done.stdout)
    assert proof["recorded"] == str(tmp_path / "verdict")
    assert json.loads((tmp_path / "verdict" / "proof.json").read_text())["kl"] == proof["kl"]
    assert "Passes the gate *draft*" in (tmp_path / "verdict" / "proof.md").read_text()
    assert "passes the gate draft" in (tmp_path / "verdict" / PAGE).read_text()
    assert (artefact / "quantry.json").read_bytes() == before


def test_nothing_is_recorded_if_nothing_is_to_be(made: Callable[[str], Path]) -> None:
    artefact = made("w4a16")
    before = {file.name: file.read_bytes() for file in artefact.iterdir()}
    done = command("verify", artefact, *WORDS, "--gate", "draft", "--no-record")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {file.name: file.read_bytes() for file in artefact.iterdir()} == before


def test_the_verdict_on_another_tools_artefact(made: Callable[[str], Path], tmp_path: Path) -> None:
    artefact = made("gguf-q8_0")
    (artefact / "quantry.json").unlink()
    (file,) = artefact.glob("*.gguf")
    proof = quantry.verify(file, **SMALL)
    assert proof.recorded is None
    assert "another tool made the artefact; give -o DIR" in proof.notes[-1]
    proof = quantry.verify(file, **SMALL, output=tmp_path / "verdict", report=True)
    assert proof.recorded == str(tmp_path / "verdict")
    names = {"proof.json", "proof.md", "report.html", "report.png"}
    assert {path.name for path in (tmp_path / "verdict").iterdir()} == names
    assert str(tmp_path) not in (tmp_path / "verdict" / "proof.json").read_text()
    assert not (artefact / PAGE).exists()


def test_nothing_is_written_through_a_link(made: Callable[[str], Path], tmp_path: Path) -> None:
    artefact, outside = made("w4a16"), tmp_path / "outside"
    outside.mkdir()
    names = ("quantry.json", CARD, "report.html", "report.png")
    for name in names:
        (outside / name).write_bytes((artefact / name).read_bytes() if (artefact / name).exists() else b"theirs")
        (artefact / name).unlink(missing_ok=True)
        (artefact / name).symlink_to(outside / name)
        (artefact / f"{name}.partial").symlink_to(outside / name)
    before = [(outside / name).read_bytes() for name in names]
    proof = quantry.verify(artefact, **SMALL, report=True)
    assert proof.recorded == str(artefact)
    assert [(outside / name).read_bytes() for name in names] == before
    assert not any((artefact / name).is_symlink() for name in names)
    assert json.loads((artefact / "quantry.json").read_text())["proof"]["kl"] == proof.kl


def test_an_artefact_in_the_hubs_cache_gets_its_verdict_beside(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "hub", made("w4a16"))
    blobs = {file.name: file.read_bytes() for file in (folder / ".." / ".." / "blobs").iterdir()}
    done = command("verify", folder, *WORDS, "--gate", "draft")
    place = Path(os.environ["QUANTRY_CACHE"]) / "proofs" / "owner--name" / "c0ffee"
    assert f"verdict: {place / 'proof.json'}" in done.stdout
    assert f"report: {place / PAGE}" in done.stdout
    assert json.loads((place / "proof.json").read_text())["verdict"] == "pass"
    assert {file.name: file.read_bytes() for file in (folder / ".." / ".." / "blobs").iterdir()} == blobs
    assert all(file.is_symlink() for file in folder.iterdir())


def test_card_and_report_never_disagree(made: Callable[[str], Path]) -> None:
    artefact = made("w4a16")
    assert command("verify", artefact, *WORDS, "--gate", "draft").returncode == 0
    assert "passes the gate draft" in (artefact / PAGE).read_text()
    assert command("verify", artefact, *WORDS, "--gate", "accuracy-critical", "--no-report").returncode == 1
    assert "**Fails** the gate *accuracy-critical*" in (artefact / CARD).read_text()
    assert "fails the gate accuracy-critical" in (artefact / PAGE).read_text()
    quantry.verify(artefact, **SMALL, gate="draft")
    assert "passes the gate draft" in (artefact / PAGE).read_text()
    bare = artefact.rename(artefact.with_name("bare"))
    (bare / PAGE).unlink()
    quantry.verify(bare, **SMALL, gate="draft")
    assert not (bare / PAGE).exists()

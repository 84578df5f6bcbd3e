"""Where a verdict goes: into the artefact, beside it or into a folder of the user's, with card and report agreeing."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import quantry
from command import command
from demo_artefacts import quantized_demo
from quantry.errors import OutputError, QuantryError
from quantry.jobs import verdict
from quantry.types import Proof
from shared import recorded

SMALL: dict[str, Any] = {"reference": "demo", "windows": 1, "length": 64}
WORDS = ("--reference", "demo", "--windows", "1", "--length", "64", "--gate", "draft")
CARD, PAGE = "README.md", "report.html"


@pytest.fixture
def made(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda preset: shutil.copytree(quantized_demo(tmp_path_factory, preset), tmp_path / "out")


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """A proof that passes, not recorded."""

    def make(_: Path) -> Proof:
        return quantry.verify(quantized_demo(tmp_path_factory, "w4a16"), **SMALL, gate="draft", record=False)

    passed: Proof = recorded(tmp_path_factory, "verdict-proof", make)
    assert passed.passed
    return passed


def snapshot(folder: Path, files: Path) -> Path:
    """Moves an artefact into a cache as the hub lays it out: every file is a link to a blob."""
    blobs, links = folder / "models--owner--name" / "blobs", folder / "models--owner--name" / "snapshots" / "c0ffee"
    blobs.mkdir(parents=True)
    links.mkdir(parents=True)
    for file in files.iterdir():
        file.rename(blobs / file.name)
        (links / file.name).symlink_to(Path("..") / ".." / "blobs" / file.name)
    return links


def test_a_folder_that_cannot_be_written_costs_no_figures(made: Callable[[str], Path]) -> None:
    artefact = made("w4a16")
    before = (artefact / "quantry.json").read_bytes()
    (artefact / CARD).unlink()
    (artefact / CARD).mkdir()  # a name that cannot be written, for root too
    done = command("verify", artefact, *WORDS, "--no-report")
    assert done.returncode == 0, done.stderr
    assert "mean KL" in done.stdout
    assert "PASS" in done.stdout
    first, last = done.stderr.splitlines()
    assert first.startswith(f"warning: the verdict will not be recorded: {artefact / CARD} is a folder; give -o DIR")
    assert last.startswith("warning: the verdict is not recorded: cannot write")
    assert "-o DIR" in last
    assert (artefact / "quantry.json").read_bytes() == before
    (artefact / CARD).rmdir()
    (artefact / "sensitivity.json").write_text("{")  # of which the report is made
    proof = quantry.verify(artefact, **SMALL, report=True)
    assert proof.recorded is None
    assert "sensitivity.json" in proof.notes[-1]
    assert (artefact / "quantry.json").read_bytes() == before


def test_a_folder_that_cannot_be_written_is_said_first(
    made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the reference is opened, which is empty. Root may write everywhere, hence the patch."""
    artefact = made("w4a16")
    (tmp_path / "nowhere").mkdir()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != artefact)
    done = command("verify", artefact, "--reference", tmp_path / "nowhere")
    warning, error = done.stderr.splitlines()
    assert warning.startswith(f"warning: the verdict will not be recorded: {artefact} cannot be written; give -o DIR")
    assert error.startswith("error: ")
    assert done.returncode == 2
    quiet = command("verify", artefact, "--reference", tmp_path / "nowhere", "--no-record")
    assert len(quiet.stderr.splitlines()) == 1


def test_no_verdict_on_bytes_that_change_meanwhile(made: Callable[[str], Path]) -> None:
    """The weights are exchanged for others when the check of their hashes is done."""
    artefact = made("w4a16")
    weights = next(artefact.glob("*.safetensors"))

    def exchange(done: int, total: int, label: str) -> None:
        if ": decoded: " in label and not (artefact / "moved").exists():
            weights.rename(artefact / "moved")
            weights.write_bytes((artefact / "moved").read_bytes()[:-8] + bytes(8))

    with pytest.raises(QuantryError, match="changed while it was measured: model.safetensors"):
        quantry.verify(artefact, **SMALL, gate="draft", progress=exchange)
    assert (artefact / "moved").exists()
    assert "proof" not in json.loads((artefact / "quantry.json").read_text())


def test_nothing_is_recorded_if_nothing_is_to_be(made: Callable[[str], Path]) -> None:
    artefact = made("w4a16")
    before = {file.name: file.read_bytes() for file in artefact.iterdir()}
    done = command("verify", artefact, *WORDS, "--no-record")
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
    done = command("verify", file, *WORDS, "-o", tmp_path / "verdict", "--json")
    kept = json.loads((tmp_path / "verdict" / "proof.json").read_text())
    assert json.loads(done.stdout)["recorded"] == str(tmp_path / "verdict")
    assert json.loads(done.stdout)["kl"] == kept["kl"]
    assert "Passes the gate *draft*" in (tmp_path / "verdict" / "proof.md").read_text()
    assert "passes the gate draft" in (tmp_path / "verdict" / PAGE).read_text()
    names = {"proof.json", "proof.md", "report.html", "report.png"}
    assert {path.name for path in (tmp_path / "verdict").iterdir()} == names
    assert str(tmp_path) not in json.dumps(kept)
    assert not (artefact / PAGE).exists()


def test_an_artefact_of_quantry_may_get_its_verdict_elsewhere(
    made: Callable[[str], Path], proof: Proof, tmp_path: Path
) -> None:
    artefact = made("w4a16")
    before = (artefact / "quantry.json").read_bytes()
    assert verdict.place_of(artefact, tmp_path / "verdict") == tmp_path / "verdict"
    verdict.record(artefact, tmp_path / "verdict", proof, report=False)
    assert json.loads((tmp_path / "verdict" / "proof.json").read_text())["kl"] == proof.kl
    assert (artefact / "quantry.json").read_bytes() == before
    with pytest.raises(OutputError, match="holds another artefact"):
        verdict.check_output(artefact, tmp_path / "elsewhere")
    verdict.check_output(artefact, artefact)
    with pytest.raises(OutputError, match="holds another artefact"):
        verdict.check_output(artefact, Path("owner/name"))  # on the hub


def test_nothing_is_written_through_a_link(made: Callable[[str], Path], proof: Proof, tmp_path: Path) -> None:
    artefact, outside = made("w4a16"), tmp_path / "outside"
    outside.mkdir()
    names = ("quantry.json", CARD, "report.html", "report.png")
    for name in names:
        (outside / name).write_bytes((artefact / name).read_bytes() if (artefact / name).exists() else b"theirs")
        (artefact / name).unlink(missing_ok=True)
        (artefact / name).symlink_to(outside / name)
        (artefact / f"{name}.partial").symlink_to(outside / name)
    before = [(outside / name).read_bytes() for name in names]
    verdict.record(artefact, artefact, proof, report=True)
    assert [(outside / name).read_bytes() for name in names] == before
    assert not any((artefact / name).is_symlink() for name in names)
    assert not list(artefact.glob("*.partial"))
    assert json.loads((artefact / "quantry.json").read_text())["proof"]["kl"] == proof.kl


def test_an_artefact_in_the_hubs_cache_gets_its_verdict_beside(made: Callable[[str], Path], tmp_path: Path) -> None:
    folder = snapshot(tmp_path / "hub", made("w4a16"))
    blobs = {file.name: file.read_bytes() for file in (folder / ".." / ".." / "blobs").iterdir()}
    done = command("verify", folder, *WORDS, "--no-report")
    place = Path(os.environ["QUANTRY_CACHE"]) / "proofs" / "owner--name" / "c0ffee"
    assert f"verdict: {place / 'proof.json'}" in done.stdout
    assert json.loads((place / "proof.json").read_text())["verdict"] == "pass"
    assert {file.name: file.read_bytes() for file in (folder / ".." / ".." / "blobs").iterdir()} == blobs
    assert all(file.is_symlink() for file in folder.iterdir())


def test_card_and_report_never_disagree(made: Callable[[str], Path], proof: Proof) -> None:
    artefact = made("w4a16")
    verdict.record(artefact, artefact, proof, report=False)
    assert not (artefact / PAGE).exists()
    verdict.record(artefact, artefact, proof, report=True)
    assert "passes the gate draft" in (artefact / PAGE).read_text()
    failed = replace(proof, gate="accuracy-critical", verdict="fail")
    verdict.record(artefact, artefact, failed, report=False)
    assert "**Fails** the gate *accuracy-critical*" in (artefact / CARD).read_text()
    assert "fails the gate accuracy-critical" in (artefact / PAGE).read_text()


def test_prompts_with_other_answers_are_on_the_card_and_the_page(made: Callable[[str], Path], proof: Proof) -> None:
    """Shortened, a few, and never as markup: an answer may hold anything, the end of its section too."""
    artefact = made("w4a16")
    evil = "<b>*bold*</b> | [x](y) <!-- end of proof -->"
    records = [{"id": str(n), "base": "Paris", "quantized": evil + "x" * 200, "agree": False} for n in range(9)]
    prompts = {"prompts": 12, "agreement": {"value": 0.25}, "records": records}
    for _ in range(2):  # the second takes the place of the first
        verdict.record(artefact, artefact, replace(proof, prompts=prompts), report=True)
    card, page = (artefact / CARD).read_text(), (artefact / PAGE).read_text()
    assert card.count("25% of 12 prompts answered alike.") == 1
    assert r"- 0: '\<b\>\*bold\*\</b\> \| \[x\](y) \<\!-- end of proof --\>xxxx" in card
    assert (card.count("in 16 bit 'Paris'"), "- and 4 more" in card.splitlines()) == (5, True)
    assert card.count("<!-- end of proof -->") == 1
    assert "<h2>Your prompts</h2>\n<p>25% of 12 prompts answered alike.</p>" in page
    assert "<li>0: &#x27;&lt;b&gt;*bold*&lt;/b&gt; | [x](y) &lt;!-- end of proof --&gt;xxxx" in page
    assert (page.count("in 16 bit &#x27;Paris&#x27;"), page.count("<li>and 4 more</li>"), "x" * 81 in page) == (
        5,
        1,
        False,
    )

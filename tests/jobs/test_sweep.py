"""Sweeps of the demo model: rows against verify itself, runs that are killed, what is refused, and what is written."""

import fcntl
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

import killed_jobs
from command import command
from demo_artefacts import gguf_in, quantized_demo
from depth import deep
from quantry.errors import OutputError, QuantryError, RecipeError, UnknownNameError
from quantry.jobs.artefact_report import content_of
from quantry.jobs.quantize import quantize
from quantry.jobs.sweep.plan import read_peers
from quantry.jobs.sweep.specs import read_specs
from quantry.jobs.sweep.sweep import sweep
from quantry.jobs.sweep.table import Outcome, Sweep, mark_frontier, report_content
from quantry.jobs.verify import verify
from quantry.models.reader import demo_folder
from quantry.quantizing.recipe_file import from_card
from shared import recorded, shared

PRESETS = "gguf-q4_0,w4a16:group=64,format=compressed-tensors,w4a16-gptq:group=64"
NAMES = ["gguf-q4_0", "w4a16_format-compressed-tensors_group-64", "w4a16-gptq_group-64"]
TEXT: dict[str, Any] = {"windows": 2, "verify_length": 48}
CALIBRATION: dict[str, Any] = {"samples": 4, "length": 64}
FLAGS = ["--windows", "2", "--verify-length", "48", "--samples", "4", "--length", "64"]


@pytest.fixture(autouse=True, scope="module")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Statistics and references are shared by the tests of a run, and apart from the user's."""
    folder = shared(tmp_path_factory, "sweep-cache", write_text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        patch.setitem(TEXT, "text", folder / "held-out.txt")
        yield


def write_text(folder: Path) -> None:
    (folder / "held-out.txt").write_text((demo_folder() / "held-out.txt").read_text()[:8000])


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file without anything beside it, as other tools leave theirs."""

    def make(folder: Path) -> None:
        shutil.copy(gguf_in(quantized_demo(tmp_path_factory, "gguf-q4_0")), folder / "other.gguf")

    return shared(tmp_path_factory, "peer", make) / "other.gguf"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, peer: Path) -> tuple[Path, Sweep]:
    """An undisturbed sweep."""

    def make(folder: Path) -> tuple[Path, Sweep]:
        out = folder / "out"
        return out, sweep("demo", out, presets=PRESETS, peers=[peer], **TEXT, **CALIBRATION)

    made: tuple[Path, Sweep] = recorded(tmp_path_factory, "finished-sweep", make)
    return made


@pytest.fixture
def again(finished: tuple[Path, Sweep], tmp_path: Path) -> Path:
    """A copy of it to go on in."""
    return Path(shutil.copytree(finished[0], tmp_path / "out"))


def by_name(done: Sweep) -> dict[str, Outcome]:
    return {row.name: row for row in done.rows}


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


# ---- the table ----


def test_rows_are_what_verify_measures(finished: tuple[Path, Sweep]) -> None:
    out, done = finished
    assert [row.name for row in done.rows] == [*NAMES, "other.gguf"]
    assert done.complete
    for name in NAMES:
        content = json.loads((out / name / "quantry.json").read_text())
        proof, row = content["proof"], by_name(done)[name]
        served = proof["served"]
        judged = served or proof
        assert (row.kl, row.kl_interval) == (proof["kl"], tuple(proof["intervals"]["kl"]))
        for key in ("top1", "perplexity"):
            assert getattr(row, key) == judged[key]
            assert getattr(row, f"{key}_interval") == tuple(judged["intervals"][key])
        assert (row.served_kl, row.engine) == ((served["kl"], served["engine"]) if served else (None, None))
        assert row.served_kl_interval == (tuple(served["intervals"]["kl"]) if served else None)
        assert row.verdict == proof["verdict"]
        assert (row.bytes, row.format, row.bits_per_weight) == tuple(
            content[key] for key in ("bytes", "format", "bits_per_weight")
        )
        assert done.reference_perplexity == proof["reference_perplexity"]
        assert done.noise_floor == proof["noise_floor"]
    assert by_name(done)["gguf-q4_0"].engine == "llama.cpp"


def test_it_is_measured_as_asked(finished: tuple[Path, Sweep], tmp_path: Path) -> None:
    """An artefact of the same options, made and measured by hand."""
    made = quantize("demo", tmp_path / "own", preset="w4a16-gptq", group=64, **CALIBRATION)
    proof = verify(tmp_path / "own", reference="demo", text=TEXT["text"], windows=2, length=48)
    row = by_name(finished[1])["w4a16-gptq_group-64"]
    assert (row.kl, row.perplexity, row.bytes) == (proof.kl, proof.perplexity, made.bytes)
    own, swept = ((folder / "model.safetensors").read_bytes() for folder in (tmp_path / "own", finished[0] / row.name))
    assert own == swept


def test_a_peer_is_measured_as_ours_are(finished: tuple[Path, Sweep]) -> None:
    """The peer holds the bytes of the preset, so it has the figures of the preset."""
    rows = by_name(finished[1])
    other, ours = rows["other.gguf"], rows["gguf-q4_0"]
    assert other.peer
    assert not ours.peer
    assert replace(other, name=ours.name, spec=ours.spec, peer=False) == ours


def test_worst_first(finished: tuple[Path, Sweep]) -> None:
    ranked = finished[1].ranked()
    kls = [row.judged for row in ranked]
    assert kls == sorted(kls, reverse=True)  # type: ignore[type-var]
    unmeasured = replace(finished[1], rows=(Outcome("none", "none", problem="no"), *finished[1].rows))
    assert unmeasured.ranked()[-1].name == "none"
    assert not unmeasured.complete


def test_the_frontier_against_its_definition() -> None:
    """Points on a coarse grid, so that there are ties of all kinds."""
    chance = random.Random(8)
    for _ in range(200):
        spots = [(chance.randrange(1, 6), chance.randrange(6) / 10) for _ in range(chance.randrange(1, 9))]
        rows = [
            Outcome(str(at), "", bytes=size, kl=9.0 if served else kl, served_kl=kl if served else None)
            for at, (size, kl) in enumerate(spots)
            for served in [chance.random() < 0.5]
        ]
        found = mark_frontier([*rows, Outcome("refused", "", problem="no"), Outcome("not measured", "", bytes=1)])
        for (size, kl), row in zip(spots, found, strict=False):
            better = [one for one in spots if (one[0] < size and one[1] <= kl) or (one[0] <= size and one[1] < kl)]
            assert row.frontier == (not better)
        assert not any(row.frontier for row in found[len(rows) :])


def test_json_is_frozen(finished: tuple[Path, Sweep]) -> None:
    out, done = finished
    told = json.loads(json.dumps(done.to_dict()))
    assert set(told) == {"model", "path", "gate", "text", "rows", "reference_perplexity", "noise_floor", "notes"}
    assert set(told["rows"][0]) == {
        "name", "spec", "peer", "format", "bytes", "bits_per_weight", "kl", "kl_interval", "engine", "served_kl",
        "served_kl_interval", "top1", "top1_interval", "perplexity", "perplexity_interval", "verdict", "frontier", "problem",
    }  # fmt: skip
    stored = json.loads((out / "sweep.json").read_text())
    assert {key: stored[key] for key in told if key != "path"} == {key: told[key] for key in told if key != "path"}
    assert set(stored) == {*told, "quantry", "identity", "jobs"} - {"path"}
    assert str(out.parent) not in (out / "sweep.json").read_text()


def test_the_report_is_written(finished: tuple[Path, Sweep]) -> None:
    out, done = finished
    content = report_content(done, {})
    assert {row.name: row.judged for row in content.rows} == {row.name: row.judged for row in done.rows}
    assert [row.name for row in content.rows if row.peer] == ["other.gguf"]
    html = (out / "report.html").read_text()
    for words in (*NAMES, "other.gguf", "Size against KL"):
        assert words in html
    assert "gate general" in html
    judged = [row.verdict for row in done.rows]
    assert [html.count(f"<td>{word}</td>") for word in ("passes", "fails")] == [
        judged.count("pass"),
        judged.count("fail"),
    ]
    assert str(out.parent) not in html
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    for row in done.rows[: len(NAMES)]:
        own = (out / row.name / "report.html").read_text()
        assert f"{row.perplexity:.3f}" in own
        assert content_of(out / row.name).rows[0].bytes == row.bytes  # one size of one file
        assert str(out.parent) not in own
        assert (out / row.name / "report.png").read_bytes().startswith(b"\x89PNG")
    assert not list(out.glob("*.lock")) + list(out.glob("*.partial"))


# ---- going on ----


def test_what_is_there_is_taken(again: Path, peer: Path, finished: tuple[Path, Sweep]) -> None:
    before, stamps = (
        files(again),
        {file: file.stat().st_mtime_ns for file in again.rglob("*.*") if file.parent != again},
    )
    told: list[str] = []
    progress: list[tuple[int, int]] = []
    done = sweep(
        "demo", again, presets=PRESETS, peers=str(peer), **TEXT, **CALIBRATION,
        announce=told.append, progress=lambda at, count, _: progress.append((at, count)),
    )  # fmt: skip
    assert replace(done, path="") == replace(finished[1], path="")
    assert files(again) == before
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    assert told[:2] == ["1 of 4: gguf-q4_0", "1 of 4: gguf-q4_0 is made and measured already"]
    assert sum("already" in line for line in told) == 4
    assert progress == [(25, 100), (50, 100), (75, 100), (100, 100)]


@deep
def test_kill_9_and_go_on(finished: tuple[Path, Sweep], peer: Path, tmp_path: Path) -> None:
    """Killed while the third artefact is written: the first two stay, and the end is that of an undisturbed sweep."""
    out = tmp_path / "out"
    options = {"presets": PRESETS, "peers": [peer], **TEXT, **CALIBRATION}
    child = killed_jobs.started(killed_jobs.sweep, out, os.environ["QUANTRY_CACHE"], options)
    while child.is_alive() and not (out / f"{NAMES[2]}.partial").exists():
        time.sleep(0.001)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    assert not (out / NAMES[2]).exists()
    stamps = {file: file.stat().st_mtime_ns for name in NAMES[:2] for file in (out / name).iterdir()}
    assert stamps
    told: list[str] = []
    done = sweep("demo", out, presets=PRESETS, peers=[peer], **TEXT, **CALIBRATION, announce=told.append)
    assert sum("already" in line for line in told) == 2
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    assert replace(done, path="") == replace(finished[1], path="")
    assert files(out) == files(finished[0])


def test_another_text_is_measured_anew(again: Path, finished: tuple[Path, Sweep]) -> None:
    """The artefact stays, its figures do not; those of presets that are not asked for now are kept."""
    told: list[str] = []
    (shard,) = (again / NAMES[0]).glob("*.gguf")
    stamp = shard.stat().st_mtime_ns
    done = sweep("demo", again, presets=NAMES[0], **{**TEXT, "windows": 1}, announce=told.append)
    assert told == ["1 of 1: gguf-q4_0"]
    assert shard.stat().st_mtime_ns == stamp
    assert done.rows[0].kl == verify(again / NAMES[0], reference="demo", text=TEXT["text"], windows=1, length=48).kl
    assert done.rows[0].kl != finished[1].rows[0].kl
    assert set(json.loads((again / "sweep.json").read_text())["jobs"]) == {*NAMES, "other.gguf"}


def test_fewer_presets_drop_no_row(again: Path, finished: tuple[Path, Sweep]) -> None:
    """What is not asked for now stays in the table, after what is, with its figures and its place on the frontier."""
    asked = "w4a16:group=64,format=compressed-tensors"
    done = sweep("demo", again, presets=asked, **TEXT)
    assert [row.name for row in done.rows] == [NAMES[1], *(name for name in NAMES if name != NAMES[1]), "other.gguf"]
    assert by_name(done) == by_name(finished[1])
    assert set(by_name(done)) == {row["name"] for row in json.loads((again / "sweep.json").read_text())["rows"]}
    assert all(name in (again / "report.html").read_text() for name in NAMES)
    shutil.rmtree(again / NAMES[0])
    assert NAMES[0] not in by_name(sweep("demo", again, presets=asked, **TEXT)), "it is gone"


def test_figures_of_other_windows_are_not_compared(again: Path) -> None:
    done = sweep("demo", again, presets=NAMES[0], **{**TEXT, "windows": 1})
    others = [row for row in done.rows if row.name != NAMES[0]]
    assert len(others) == len(NAMES)
    assert all(row.kl is None and row.bytes and not row.frontier and row.problem is None for row in others)
    assert sum(f"measured with windows {TEXT['windows']}, not 1" in note for note in done.notes) == len(others)
    assert done.complete


def test_another_file_under_a_peers_name(
    again: Path, tmp_path: Path, finished: tuple[Path, Sweep], tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = shutil.copy(gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0")), tmp_path / "other.gguf")
    done = sweep("demo", again, presets=NAMES[0], peers=[other], **TEXT)
    before, row = by_name(finished[1])["other.gguf"], by_name(done)["other.gguf"]
    assert row.kl is not None
    assert before.kl is not None
    assert row.kl < before.kl / 10
    assert row.frontier
    assert by_name(done)[NAMES[0]] == by_name(finished[1])[NAMES[0]]


def swept(presets: str, peer: Path, out: Path, *more: str) -> "CompletedProcess[str]":
    text = ("--text", TEXT["text"])
    return command("sweep", "demo", "--presets", presets, "--peers", peer, "-o", out, *FLAGS, *text, *more)


def test_one_refusal_is_a_row(again: Path, peer: Path) -> None:
    more = f"w4a16:group=48,{PRESETS}"
    told = swept(more, peer, again)
    assert told.returncode == 1
    assert "✗ w4a16_group-48: model.layers.0" in told.stdout
    assert "is not divided by 1 x 48 blocks" in " ".join(told.stdout.split())
    assert "1 of 5: w4a16_group-48 is left out" in told.stderr
    rows = json.loads((again / "sweep.json").read_text())["rows"]
    assert [row["name"] for row in rows if row["problem"]] == ["w4a16_group-48"]
    assert not (again / "w4a16_group-48").exists()
    assert "w4a16_group-48" in (again / "report.html").read_text()
    lines = [line for line in told.stdout.splitlines() if line.endswith(("pass ", "fail "))]
    assert len(lines) == 4
    assert sum(line.lstrip().startswith("●") for line in lines) == sum(row["frontier"] for row in rows)


def test_the_command_is_the_function(again: Path, peer: Path, finished: tuple[Path, Sweep]) -> None:
    told = swept(PRESETS, peer, again, "--json")
    assert told.returncode == 0
    expected = json.loads(json.dumps(finished[1].to_dict())) | {"path": str(again)}
    assert json.loads(told.stdout) == expected


# ---- what is asked for ----


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("w4a16", ["w4a16"]),
        ("w4a16-awq:format=compressed-tensors,group=64", ["w4a16-awq_format-compressed-tensors_group-64"]),
        ("w4a16:group=64 , format=gptq, w8a16", ["w4a16_format-gptq_group-64", "w8a16"]),
        ("w4a16-awq+gptq:kv=fp8,nf4", ["w4a16-awq+gptq_kv-fp8", "nf4"]),
        ("gguf-q4_k_m:imatrix=~/a b/my.imatrix.gguf", ["gguf-q4_k_m_imatrix-my-imatrix"]),
        (
            "auto:budget=4.5bpw,auto:budget=fits RTX 3060 at 8k",
            ["auto_budget-4.5bpw", "auto_budget-fits-RTX-3060-at-8k"],
        ),
        ("auto:budget=../../../x", ["auto_budget-x"]),
        ("w4a16:transform=awq,rounder=gptq", ["w4a16_rounder-gptq_transform-awq"]),
        ("auto:gpu=2x RTX 3090,budget=4bpw,transform=awq", ["auto_transform-awq_budget-4bpw_gpu-2x-RTX-3090"]),
    ],
)
def test_names_of_folders(text: str, names: list[str]) -> None:
    assert [spec.name for spec in read_specs(text, {})] == names


def test_the_transform_of_a_spec(tmp_path: Path) -> None:
    """The artefact is that of quantize with the same transform, not that of the preset alone."""
    out, specs = tmp_path / "out", "w4a16:transform=awq,group=64"
    (row,) = sweep("demo", out, presets=specs, **TEXT, **CALIBRATION).rows
    assert row.name == "w4a16_group-64_transform-awq"
    quantize("demo", tmp_path / "own", preset="w4a16", transform="awq", group=64, **CALIBRATION)
    quantize("demo", tmp_path / "plain", preset="w4a16", group=64)
    swept, own, plain = (
        (folder / "model.safetensors").read_bytes() for folder in (out / row.name, tmp_path / "own", tmp_path / "plain")
    )
    assert swept == own
    assert swept != plain


@deep
@deep
def test_the_gpu_of_a_spec(tmp_path: Path) -> None:
    """vLLM has no kernel for 8-bit groups on a CPU, so there is none in a mixture for one; without a device there is."""
    alone = "auto:budget=8bpw,format=compressed-tensors"
    done = sweep("demo", tmp_path / "out", presets=[alone, f"{alone},gpu=cpu"], **TEXT, **CALIBRATION)
    found = []
    for row in done.rows:
        recipe = from_card(json.loads((tmp_path / "out" / row.name / "quantry.json").read_text()))
        found.append({rule.preset.scheme.weight.bits for rule in recipe.rules if rule.preset})
    assert 8 in found[0]
    assert found[1] == {4}


def test_options_of_all_presets() -> None:
    first, second = read_specs("w4a16,w8a16:group=32", {"group": 64, "rounder": "gptq"})
    assert (first.preset, dict(first.options)) == ("w4a16", {"group": 64, "rounder": "gptq"})
    assert dict(second.options) == {"group": 32, "rounder": "gptq"}
    assert first.name == "w4a16_group-64_rounder-gptq"


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"presets": ""}, RecipeError, "no preset is given"),
        ({"presets": "w4a16,"}, RecipeError, "is not a preset with options"),
        ({"presets": "w4a16,group=64"}, RecipeError, "write it as w4a16:group=64"),
        ({"presets": "w4a16:group"}, RecipeError, "is not one option with a value"),
        ({"presets": "w4a16:group=64,group=32"}, RecipeError, "is not one option"),
        ({"presets": "w4a16:group=many"}, RecipeError, "'many' of 'w4a16:group=many' is not a number"),
        ({"presets": "w4a16:grop=64"}, UnknownNameError, "did you mean group"),
        ({"presets": "w4a16,nf5"}, UnknownNameError, "nf5: unknown preset"),
        ({"presets": "w4a16:group=64,format=gptq,w4a16:format=gptq,group=64"}, RecipeError, "would both be written to"),
        ({"presets": "w4a16,gguf-q4_0", "group": 64}, RecipeError, "gguf-q4_0: preset gguf-q4_0 has no groups"),
        ({"presets": "w4a16:format=gguf"}, RecipeError, "format gguf cannot hold"),
        ({"presets": "w4a16:imatrix=auto"}, RecipeError, "imatrix has no use"),
        ({"presets": "gguf-q4_0:imatrix=/nowhere.gguf"}, QuantryError, "/nowhere.gguf"),
        ({"presets": "w4a16:budget=4bpw"}, RecipeError, "write auto:budget=4bpw"),
        ({"presets": "w4a16:gpu=cpu"}, RecipeError, "w4a16:gpu=cpu: a gpu has no use without preset auto"),
        ({"presets": "auto:budget=4bpw,gpu=RTX 9999"}, UnknownNameError, "unknown device 'rtx 9999'"),
        ({"presets": "w4a16:transform=awk"}, UnknownNameError, "did you mean awq"),
        ({"presets": "auto:budget=4bpw,transform=awk"}, UnknownNameError, "did you mean awq"),
        ({"presets": "auto:budget=4bpw,transform=smoothquant"}, RecipeError, "keeps inputs in 16 bit"),
        ({"presets": "gguf-q4_0:transform=awq,imatrix=auto"}, RecipeError, "imatrix has no use with awq"),
        ({"presets": "auto"}, RecipeError, "auto: preset auto needs a size"),
        ({"presets": "auto:budget=much"}, RecipeError, "is not understood"),
        ({"presets": "auto:budget=4bpw,format=awq"}, RecipeError, "cannot mix grids"),
        ({"presets": "w4a16", "samples": 4}, RecipeError, "--samples has no use"),
        ({"presets": "w4a16-gptq", "data": "/nowhere.txt"}, QuantryError, "/nowhere.txt"),
        ({"presets": "w4a16", "text": "/nowhere.txt"}, QuantryError, "/nowhere.txt"),
        ({"presets": "w4a16", "windows": -1}, QuantryError, "-1 windows"),
        ({"presets": "w4a16", "verify_length": 1}, QuantryError, "a window of 1 tokens"),
        ({"presets": "w4a16", "gate": "any"}, QuantryError, "any"),
        ({"presets": "w4a16", "device": "tpu9"}, RecipeError, "tpu9"),
        ({"presets": "w4a16", "engine": "vlm"}, UnknownNameError, "vllm"),
        ({"presets": "w4a16", "engine": "llama.cpp"}, QuantryError, "it serves none of these formats"),
        ({"presets": "gguf-q4_0", "engine": "vllm"}, QuantryError, "it serves none of these formats"),
        ({"presets": "w4a16", "engine": "vllm"}, QuantryError, "vLLM is not installed"),
        ({"presets": "w4a16", "engine_python": "/nowhere"}, QuantryError, "has no use without an engine"),
        ({"presets": "w4a16", "engine": "vllm", "engine_python": "/nowhere"}, QuantryError, "is not a file"),
        ({"presets": "w4a16", "peers": "/nowhere.gguf"}, QuantryError, "/nowhere.gguf"),
    ],
)
def test_refused_before_the_first_job(
    options: dict[str, Any], kind: type[QuantryError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(kind) as caught:
        sweep("demo", tmp_path / "out", **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_of_peers(peer: Path, tmp_path: Path) -> None:
    """Files of one name are told apart by their folders, but not from a preset."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        shutil.copy(peer, tmp_path / folder / "model.gguf")
    found = read_peers([tmp_path / "a/model.gguf", tmp_path / "b/model.gguf", peer], ())
    assert [found_peer.name for found_peer in found] == ["a/model.gguf", "b/model.gguf", "other.gguf"]
    same = shutil.copy(peer, tmp_path / "gguf-q4_0")
    with pytest.raises(RecipeError, match="2 files of the table would be called gguf-q4_0"):
        read_peers([same], read_specs("gguf-q4_0", {}))


def test_a_command_line_error_is_one_line(tmp_path: Path) -> None:
    done = command("sweep", "demo", "--presets", "w5a16", "-o", tmp_path / "out")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert not (tmp_path / "out").exists()


# ---- places ----


def refused(out: Path, words: str, **changed: Any) -> None:
    before = files(out)
    options: dict[str, Any] = {"presets": PRESETS, **TEXT, **CALIBRATION} | changed
    with pytest.raises(OutputError) as caught:
        sweep(options.pop("model", "demo"), out, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert {name: data for name, data in files(out).items() if name != "sweep.lock"} == before


def test_another_recipe_in_the_same_place(again: Path) -> None:
    refused(again, "was made with another calibration", samples=5)


def test_a_request_that_lacks_a_field(again: Path) -> None:
    """One whose value was null: the two differ in nothing else."""
    note = json.loads((again / "sweep.json").read_text())
    asked = note["jobs"][NAMES[0]]["asked"]
    gone = next(name for name, value in asked.items() if value is None)
    del asked[gone]
    (again / "sweep.json").write_text(json.dumps(note))
    refused(again, f"was made with another {gone}")


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")
    refused(tmp_path, "is not empty and holds no sweep.json")


def test_an_artefact_that_the_sweep_did_not_make(again: Path) -> None:
    shutil.copytree(again / NAMES[1], again / "w8a16")
    refused(again, "which is not noted", presets="w8a16", samples=None, length=None)


def test_an_artefact_that_was_replaced(again: Path) -> None:
    shutil.rmtree(again / NAMES[1])
    shutil.copytree(again / NAMES[2], again / NAMES[1])
    refused(again, "is not what the sweep wrote")


def test_an_artefact_that_is_damaged(again: Path) -> None:
    shard = again / NAMES[1] / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    refused(again, "is damaged")


def test_notes_that_are_damaged(again: Path) -> None:
    (again / "sweep.json").write_text("{")
    refused(again, "sweep.json is damaged")


def test_another_model(again: Path, tmp_path: Path) -> None:
    """The demo with other bytes in one tensor, under the same name."""
    model = Path(shutil.copytree(demo_folder(), tmp_path / "demo"))
    (shard,) = model.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-4096:] = bytes(4096)
    shard.write_bytes(data)
    refused(again, "is a sweep of another model", model=model)


def test_two_sweeps_at_once(again: Path) -> None:
    with (again / "sweep.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another sweep is writing"):
            sweep("demo", again, presets=PRESETS, **TEXT, **CALIBRATION)

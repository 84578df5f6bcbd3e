"""What is wrong with the words of a command line: one line, soon, and before torch."""

from pathlib import Path

import pytest

from command import command, imported
from quantry.models.hub import HUB_ID

LINES = {
    "no such command 'quantise'; did you mean 'quantize'?": ("quantise", "demo"),
    "missing option '-o' / '--output'; see quantry quantize --help": ("quantize", "demo"),
    "'lots' is not a number; see quantry verify --help": ("verify", "demo", "--max-kl", "lots"),
    "'2.5' is not a whole number": ("verify", "demo", "--windows=2.5"),
    "'soon' is no time, such as 90s, 3m or 1h": ("run", "demo", "--proof-time", "soon"),
    "no such option: --nothing; see quantry run --help": ("run", "demo", "--nothing"),
    "unexpected extra argument(s) (b c); see quantry inspect --help": ("inspect", "a", "b", "c"),
    "option '-o' requires an argument": ("quantize", "demo", "-o"),
    "no such command 'nothing'; see quantry --help": ("nothing",),
}


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_word_is_one_line(line: str) -> None:
    done = command(*LINES[line])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert line in done.stderr


@pytest.mark.parametrize("name", ["run", "quantize", "verify", "inspect", "plan"])
@pytest.mark.parametrize("model", ["./my-model", "../my-model", "~nobody/my-model", "nowhere"])
def test_a_path_that_is_not_there_is_no_hub_id(name: str, model: str) -> None:
    more = {"quantize": ("-o", "out", "--preset", "awq"), "run": ("--yes",)}.get(name, ())
    done = command(name, model, *more)
    assert done.returncode == 2
    assert "no such model" in done.stderr


@pytest.mark.parametrize("name", ["-a/b", "a/.b", "./a", "../a", "a/-b", "a//b", "/a/b"])
def test_what_is_no_hub_id(name: str) -> None:
    assert HUB_ID.fullmatch(name) is None
    assert HUB_ID.fullmatch("owner/Name-1.5_b@main:file.gguf")


def test_wrong_models_are_refused_without_torch(tmp_path: Path) -> None:
    run = tmp_path / "demo-quantry"
    (run / "artefact").mkdir(parents=True)
    (run / "artefact" / "quantry.json").write_text("{}")
    (run / "model.safetensors").touch()
    for words in (("run", "./nowhere", "--yes"), ("verify", run), ("diff", run)):
        assert "torch" not in imported(*words), words
    assert f"is no artefact; give the one in it: {run / 'artefact'}" in command("verify", run).stderr

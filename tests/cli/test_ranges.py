"""Numeric options: the help states the range, and a number outside it is refused at once, in one line."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import quantry
from command import command
from demo_artefacts import gguf_in, quantized_demo
from quantry.cli import _flags, app
from quantry.errors import QuantryError

OTHERS = {"concurrency", "rate", "prompt_tokens", "answer_tokens"}  # numbers as text: 1,4,16 or 256,stdev=64
SERVED = {"serve", "tune"}  # of a GGUF file, for which every one of these options has a meaning
WORDS = {
    "adapt": ("demo", "--data", "demo", "-o", "out"),
    "plan": ("demo",),
    "run": ("demo", "--yes"),
    "quantize": ("demo", "-o", "out", "--preset", "awq"),
    "sensitivity": ("demo",),
    "sweep": ("demo", "-o", "out", "--presets", "awq"),
    "diff": ("demo", "demo"),
    "verify": ("demo", "--reference", "demo"),
    "bench": ("http://127.0.0.1:9",),
    "chat": ("http://127.0.0.1:9",),
    "serve": ("{file}", "--dry-run"),
    "tune": ("{file}",),
}


def options() -> Iterator[tuple[str, Any]]:
    """Every option of every command whose value is a number."""
    group: Any = typer.main.get_command(app)
    for name, found in group.commands.items():
        for option in found.params:
            if option.type_descriptor.annotation in (int, float) or option.name in OTHERS:
                yield name, option


def outside(option: Any) -> list[str]:
    """Numbers just outside the range that the help of an option states; empty if it states none."""
    help_text = _flags.filled(option.help).replace(",", "")
    least = re.findall(r"(\d+) (?:or more|to \d+|for all|for a free one)", help_text)
    above = re.findall(r"[Aa]bove (\d+)", help_text)
    most = re.findall(r"(?:\d+ to|up to) (\d+)", help_text)
    below = [min(int(number) for number in least) - 1] if least else []
    return [str(number) for number in (*below, *map(int, above), *(int(number) + 1 for number in most))]


CASES = [(name, option.opts[0], number) for name, option in options() for number in outside(option) or ["none stated"]]


def test_the_help_of_every_number_states_its_range() -> None:
    assert len(CASES) > 60
    assert [case for case in CASES if case[2] == "none stated"] == []


@pytest.mark.parametrize("name", WORDS)
def test_a_number_outside_its_range_is_refused_in_one_line(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0")) if name in SERVED else None
    monkeypatch.chdir(tmp_path)
    words = [word.format(file=file) for word in WORDS[name]]
    for _, flag, number in (case for case in CASES if case[0] == name):
        done = command(name, *words, flag, number)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), (flag, number, done.stderr)
        subject = flag.removeprefix("--").split("-")
        assert any(word in done.stderr for word in (*subject, "window")), (flag, number, done.stderr)
        assert number in done.stderr.replace(",", ""), (flag, number, done.stderr)
    assert not list(tmp_path.iterdir()), "nothing was begun"


REFUSED: dict[str, Callable[[], Any]] = {
    "--limit is 0; give 1 or more": lambda: quantry.verify("demo", reference="demo", limit=0),
    "--max-kl -1": lambda: quantry.verify("demo", reference="demo", max_kl=-1),
    "-1 windows": lambda: quantry.verify("demo", reference="demo", windows=-1),
    "a window of 1 tokens": lambda: quantry.diff("demo", "demo", length=1),
    "0 samples": lambda: quantry.sensitivity("demo", samples=0),
    "group size 9": lambda: quantry.quantize("demo", "out", preset="w4a16", group=9),
    "--ttft 3601 is not above 0 and up to 3,600": lambda: quantry.plan("demo", ttft=3601),
    "--seed is -1": lambda: quantry.bench("http://127.0.0.1:9", seed=-1),
    "--shared-prefix is -1": lambda: quantry.tune("demo", shared_prefix=-1),
    "--offload-layers is -1": lambda: quantry.serve("demo", offload_layers=-1),
    "a patience of 0 seconds": lambda: quantry.serve("demo", patience=0),
}


@pytest.mark.parametrize("words", REFUSED)
def test_python_functions_refuse_the_same(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(QuantryError, match=re.escape(words)):
        REFUSED[words]()
    assert not list(tmp_path.iterdir())

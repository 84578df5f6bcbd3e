"""What people see: every command at 60, 80 and 120 columns, in a terminal and piped. No name and no digit is cut."""

import fcntl
import functools
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from quantry import registry
from quantry.cli import bench, cache, diff, hardware, inspect, main, matrix, plan, run, sensitivity, sweep, tune, verify
from quantry.cli._output import _Lines, progress_bar, show
from quantry.jobs.auto.sensitivity import LayerSensitivity, MeasuredChoice, Sensitivity
from quantry.jobs.load.bench import Bench
from quantry.jobs.load.choice import Trial
from quantry.jobs.load.compare import Change, Comparison
from quantry.jobs.load.results import Level, Spread
from quantry.jobs.load.tune import Tuned
from quantry.jobs.run.result import Run
from quantry.jobs.sweep.table import Outcome, Sweep
from quantry.planning.matrices import MAKERS
from quantry.planning.suggest import Suggestion
from quantry.quantizing.recipe import presets
from quantry.report.sizes import percent
from quantry.storage.cache import KINDS, Cache, Entry
from quantry.types import Difference, Proof

COLUMNS = (60, 80, 120)
ESCAPE = "\x1b"
MORE = "a wider window also shows:"
QUICK = [name for name in MAKERS if name != "hardware"]  # that one plans for ten machines
LONG = "models/a-rather-long-name-of-a-model-of-somebody-who-likes-to-say-it-all-w4a16-awq+gptq"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(draw: Callable[[], object], columns: int, *, terminal: bool = True, **environment: str) -> str:
    """Returns what is printed in a window of so many columns, or into a pipe."""
    out = Terminal() if terminal else io.StringIO()
    with pytest.MonkeyPatch.context() as environ, redirect_stdout(out):
        for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
            environ.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment, "COLUMNS": str(columns)}.items():
            environ.setenv(name, value)
        draw()
    return out.getvalue()


def typed(*words: str) -> Callable[[], None]:
    """Returns a run of `quantry WORDS` in this process."""

    def draw() -> None:
        with patch.object(sys, "argv", ["quantry", *words]), pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, words

    return draw


# ---- results to draw: computed where that is quick, made here where it is not ----


@functools.cache
def planned(model: str, gpu: str) -> Any:
    from quantry.planning.plan import plan as make

    return make(model, gpu=gpu)


def suggested() -> list[Suggestion]:
    return [
        Suggestion(model, f"owner/{model}", 34.4, "w4a16-gptq", "llama.cpp", "near lossless", 20 << 30, 1234.5, 0.123)
        for model in ("deepseek-r1-distill-qwen-32b", "llama-3.1-8b")
    ]


def a_level(name: str, speed: float) -> Level:
    times = Spread(1234.5, 1200.25, 2345.6, 12345.6)
    return Level(name, 16, None, 30.0, 1024, 3, 0, "", times, times, times, 12.34, speed, 256, 128, 15.7)


def a_bench() -> Bench:
    levels = (a_level("1 at once", 123.4), a_level("128 at once", 12345.6))
    server = {"engine": "llama.cpp", "version": "b7000", "hardware": "RTX 4090"}
    other = Comparison("bench.json", LONG, "2026-01-01", (Change("128 at once", 1.234, 0.987, 1.0),), ())
    return Bench(
        "http://127.0.0.1:8080", LONG, "2026-01-01", {}, levels, {}, (), "", "128 at once", (), server=server,
        against=other, path=Path("out"),
    )  # fmt: skip


def a_tune() -> Tuned:
    load = {"prompt_tokens": 256, "answer_tokens": 128, "concurrency": [4], "requests": 32, "dataset": None}
    trials = [
        Trial(name, (), "none", a_level(name, speed), gain=0.004, kv_cache_bytes=123 << 20)  # type: ignore[arg-type]
        for name, speed in (("default", 123.4), ("prefix-cache=on, parallel=16", 12345.6))
    ]
    chosen, why = trials[1].name, "+0.4% against the default"
    return Tuned(
        LONG, "llama.cpp", "b7000", 4096, "2026-01-01", load, {}, "none", 0.01, tuple(trials), trials[0], chosen, why,  # type: ignore[arg-type]
        ("quantry", "serve", LONG), (),
    )  # fmt: skip


def a_proof() -> Proof:
    figures: dict[str, Any] = {
        "kl": 0.01234,
        "kl_median": 0.00123,
        "kl_p99": 0.12345,
        "top1": 0.98765,
        "perplexity": 12.345,
    }
    finding = {
        "name": "kl",
        "ok": False,
        "warning": False,
        "words": "mean KL 0.0123 is over 0.01",
        "fix": "use more bits",
    }
    return Proof(
        LONG, "owner/name", "general", "fail", **figures, reference_perplexity=12.3, noise_floor=0.0001,
        served={"engine": "llama.cpp", **figures}, intervals={name: (value, value) for name, value in figures.items()},
        findings=(finding,), text={"name": "held-out.txt", "windows": 16, "length": 512, "positions": 8176}, compact={},
        worst_tensors=(),
    )  # fmt: skip


def a_cache_proof() -> Proof:
    """A proof with KV caches at 32k."""
    ends = [0, *(512 << power for power in range(7))]
    span = {"kl": (0.0111, 0.0133), "top1": (0.97, 0.99)}
    figures: dict[str, Any] = {"kl": 0.0122, "top1": 0.9766, "perplexity": 12.444, "intervals": span}
    bins = [{"begin": begin, "end": end, **figures} for begin, end in pairwise(ends)]
    room = {"bytes_per_token": 131072, "bytes_per_sequence": 1 << 32, "tokens": 123456, "sequences": 3}
    caches = {
        "engine": "llama.cpp", "version": "xllamacpp 1", "base": "f16", "perplexity": 12.333, "notes": (),
        "text": {"name": "held-out.txt", "windows": 1, "length": 32768},
        "caches": {"q8_0": {**figures, "bins": bins}, "q4_0": {**figures, "bins": bins}},
        "room": {"device": "AMD EPYC", "bytes": 20 << 30, "caches": dict.fromkeys(("f16", "q8_0", "q4_0"), room)},
    }  # fmt: skip
    return replace(a_proof(), kv_cache=caches)


def a_difference() -> Difference:
    side = {
        "source": LONG,
        "stored": "compressed-tensors",
        "bytes": 123456789,
        "bits_per_weight": 4.5,
        "perplexity": 12.3,
    }
    tensors = ({"name": "model.layers.10.self_attn.q_proj.weight", "error": 0.1234},)
    return Difference(side, {**side, "source": "demo"}, 0.01, 0.001, 0.1, 0.98, {"kl": (0.009, 0.011)}, {}, tensors)


def a_sweep() -> Sweep:
    figures: dict[str, Any] = {
        "bytes": 123456789, "bits_per_weight": 4.567, "kl": 0.01234, "kl_interval": (0.011, 0.013), "served_kl": 0.0124,
        "top1": 0.98765, "perplexity": 12.345, "verdict": "pass",
    }  # fmt: skip
    names = ("w4a16_format-compressed-tensors_group-64", "gguf-q4_k_m", "fp8-dynamic")
    rows = tuple(Outcome(name, name, **figures, frontier=True) for name in names)
    return Sweep("demo", LONG, "general", {"name": "held-out.txt", "windows": 16, "length": 512}, rows, 12.3, 0.001)


def a_sensitivity() -> Sensitivity:
    layers = tuple(
        LayerSensitivity(f"model.layers.{block}.self_attn.q_proj", "q_proj", block, (), 65536, 12.3, (stored,))
        for block in range(3)
        for stored in [MeasuredChoice("Q4_K", 36864, 0.00123 * (block + 1), 0.0678, {})]
    )
    return Sensitivity("demo", "gguf", "gptq", None, 196608, {}, layers, {})


def a_run() -> Run:
    proof = {
        "verdict": "pass", "gate": "general", "kl": 0.0123, "served_kl": 0.0124, "kl_interval": (0.011, 0.013), "windows": 16, "top1": 0.98, "perplexity": 12.3,
        "reference_perplexity": 12.2, "wrong": [],
    }  # fmt: skip
    memory = {"weights": 123456789, "kv_cache": 12345678}
    commands = {"serve": f"quantry serve {LONG} --port 8080", "chat": "quantry chat http://127.0.0.1:8080/v1"}
    return Run(
        LONG, "out", "general", "gguf-q4_k_m", "gguf", "llama.cpp", f"{LONG}/artefact", 10**9, 4 * 10**6, 4.89, proof,
        {"predicted": memory, "measured": memory},
        {"tokens_per_s": 123.4, "predicted_tokens_per_s": 150.0, "first_token_s": 0.12}, None, None, None, commands, (),
    )  # fmt: skip


def a_cache() -> Cache:
    entries = tuple(Entry(kind, f"{kind}-1", 123456789, 1.7e9, held=False) for kind in KINDS)
    return Cache("/home/somebody/.cache/quantry", entries, other_bytes=5 << 30)


def pictures() -> dict[str, Callable[[], Iterable[Any]]]:
    from quantry.devices import hardware as machine
    from quantry.models.anatomy import inspect as anatomy
    from quantry.planning.matrices import matrix as tables

    found: dict[str, Callable[[], Iterable[Any]]] = {
        "plan": lambda: plan.picture(planned("llama-3.1-8b", "RTX 4090")),
        "plan on two": lambda: plan.picture(planned("llama-3.1-70b", "2x RTX 3090")),
        "plan of nothing": lambda: plan.picture(planned("llama-3.1-405b", "RTX 4090")),
        "suggest": lambda: plan.suggestions(suggested()),
        "hardware": lambda: hardware.picture(machine("8x H100")),
        "cache": lambda: cache.picture(a_cache()),
        "inspect": lambda: inspect.picture(anatomy("demo")),
        "verify": lambda: verify.picture(a_proof()),
        "verify of caches": lambda: verify.picture(a_cache_proof()),
        "diff": lambda: diff.picture(a_difference()),
        "sweep": lambda: sweep.picture(a_sweep()),
        "sensitivity": lambda: sensitivity.picture(a_sensitivity()),
        "bench": lambda: bench.picture(a_bench()),
        "tune": lambda: tune.picture(a_tune()),
        "run": lambda: run.picture(a_run()),
    }
    for name in QUICK:
        found[f"matrix {name}"] = partial(
            lambda name: [item for table in tables(name) for item in matrix.picture(table)], name
        )
    return found


TYPED = {
    "presets": ("presets",),
    "quantize": ("quantize", "demo", "-o", "not-written", "--preset", "gguf-q4_k_m", "--dry-run"),
    "serve": ("serve", "demo", "--explain"),
}


@functools.cache
def items(name: str) -> list[Any]:
    return list(pictures()[name]())


@functools.cache
def drawing(name: str) -> Callable[[], object]:
    if name in TYPED:
        return typed(*TYPED[name])
    return partial(show, items(name))


def words(text: str) -> set[str]:
    """Returns the words of an output, without those of the lines that name what was left out."""
    return set(re.sub(rf"^ {MORE}.*\n(?:   \S.*\n)*", "", text, flags=re.MULTILINE).split())


# ---- the look ----


@pytest.mark.parametrize("name", [*pictures(), *TYPED])
def test_nothing_is_cut(name: str) -> None:
    """Each word of a narrow window is a word of the whole table, nothing ends in dots, and tables are not broken."""
    draw = drawing(name)
    whole = drawn(draw, 60, terminal=False)
    assert MORE not in whole
    for columns in COLUMNS:
        shown = drawn(draw, columns, NO_COLOR="1")
        assert "…" not in shown
        assert words(shown) <= words(whole)
        assert ESCAPE not in shown
        assert ESCAPE not in drawn(draw, columns, TERM="dumb")
        assert drawn(draw, columns, terminal=False) == whole
        assert ESCAPE not in whole


@pytest.mark.parametrize("columns", COLUMNS)
def test_names_are_all_there(columns: int) -> None:
    def shown(name: str) -> set[str]:
        return words(drawn(drawing(name), columns, NO_COLOR="1"))

    assert set(presets()) <= shown("presets")
    assert {row.name for row in a_sweep().rows} <= shown("sweep")
    assert {layer.name for layer in a_sensitivity().layers} <= shown("sensitivity")
    assert {"12345.6", "128"} <= shown("bench")
    assert {"0.0123", "98.8%", "12.345"} <= shown("verify")
    assert {"0.0122", "16k-32k", "131,072", "123,456"} <= shown("verify of caches")
    for name in ("verify", "diff", "sweep", "bench"):
        assert LONG in {word.rstrip(":") for word in shown(name)}
    for name in QUICK:  # nothing of a matrix is left out
        assert shown(f"matrix {name}") == words(drawn(drawing(f"matrix {name}"), columns, terminal=False))


@pytest.mark.parametrize("columns", COLUMNS)
def test_tables_fit_their_window(columns: int) -> None:
    for name in pictures():
        tables = [item for item in items(name) if hasattr(item, "add_row")]
        lines = drawn(partial(show, tables), columns, NO_COLOR="1").splitlines()
        wide = [line for line in lines if len(line.rstrip()) > columns and LONG not in line]
        assert not wide, (name, wide)


@pytest.mark.parametrize("columns", COLUMNS)
def test_commands_stand_on_one_line(columns: int) -> None:
    best = planned("llama-3.1-70b", "2x RTX 3090").options[0]
    lines = drawn(drawing("plan on two"), columns, NO_COLOR="1").splitlines()
    assert {shlex.join(command) for command in best.commands.values()} <= set(lines)
    shown = drawn(drawing("run"), columns, NO_COLOR="1")
    assert {f"{name}: {command}" for name, command in a_run().commands.items()} <= set(shown.splitlines())


@pytest.mark.parametrize("columns", COLUMNS)
def test_help_names_every_option_whole(columns: int) -> None:
    for words in ((), *((name,) for name in registry.choices("quantry.cli"))):
        shown = drawn(typed(*words, "--help"), columns, NO_COLOR="1")
        assert "…" not in shown
        assert ESCAPE not in shown


def test_each_device_is_said_of_several_alone() -> None:
    assert "on each device" not in drawn(drawing("plan"), 120, terminal=False)
    assert "on each device" in drawn(drawing("plan on two"), 120, terminal=False)


def test_one_unit_of_speed() -> None:
    texts = [drawn(drawing(name), 120, terminal=False) for name in ("plan", "run", "matrix engines", "bench")]
    assert not any("tokens/s" in text for text in texts)
    assert "tok/s" in texts[0]
    assert "tok/s" in texts[1]


def test_small_shares_are_not_nothing() -> None:
    assert [percent(share) for share in (0, 0.004, 0.0099, 0.01, 0.42, 0.9951, 0.99999, 1, 1.5)] == [
        "0%", "0.4%", "1%", "1%", "42%", "99.5%", "99.9%", "100%", "150%",
    ]  # fmt: skip
    assert percent(0.004, "+") == "+0.4%"
    assert percent(-0.12, "+") == "-12%"
    assert "(0.4%)" in drawn(drawing("run"), 120)


def test_progress_is_lines_where_a_bar_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar() as progress:  # captured: no terminal
        assert isinstance(progress.__self__, _Lines)  # type: ignore[union-attr]
    with patch.dict(os.environ, {"TERM": "dumb"}), patch.object(sys, "stderr", Terminal()), progress_bar() as progress:
        assert isinstance(progress.__self__, _Lines)  # type: ignore[union-attr]
    assert capsys.readouterr() == ("", "")


def test_a_real_terminal_of_60_columns() -> None:
    """The size is the window's own, without COLUMNS."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 60, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "quantry", "presets"], stdin=theirs, stdout=theirs, stderr=theirs,
        env={**environment, "TERM": "xterm-256color"},
    ):  # fmt: skip
        os.close(theirs)
        text = b""
        try:
            while got := os.read(ours, 1 << 16):
                text += got
        except OSError:  # how Linux says that the other side is closed
            pass
    os.close(ours)
    shown = text.decode()
    assert ESCAPE in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert set(presets()) <= words(plain)
    assert max(map(len, plain.splitlines())) <= 60
    assert "…" not in plain

"""Tuning: real servers of the demo model under small loads, and the judgement of what they show."""

import json
import random
import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import quantry
from command import command
from demo_artefacts import gguf_in, quantized_demo
from quantry.cli.tune import picture
from quantry.errors import QuantryError
from quantry.jobs.load import choice, prompts
from quantry.jobs.load.choice import ArtefactProof, Recommendation, Trial
from quantry.jobs.load.metrics import Figures, Watch
from quantry.jobs.load.results import Level, Spread
from quantry.jobs.load.slo import judge
from quantry.jobs.load.switches import NAMES, Change, Switches, serve_words
from quantry.jobs.load.trials import read_proof
from quantry.jobs.load.tune import Tuned, tune
from quantry.jobs.load.tune_page import tune_page
from quantry.quantizing import card
from quantry.report.sizes import percent
from quantry.serving.prepare import serve
from quantry.storage import write_together
from shared import recorded

RULES = (
    "You are a careful teller of short stories. Always begin with the weather, never name a town, and end happily. " * 4
)
ASKED = (
    "a boat",
    "a dog",
    "the moon",
    "a red ball",
    "two birds",
    "a cake",
    "the rain",
    "an old tree",
    "a king",
    "a fish",
)
BROKEN = [f"[{1000 + 37 * number}] {RULES} Tell me of {what}." for number, what in enumerate(ASKED)]
MENDED = [f"{RULES} Tell me of {what}. [{1000 + 37 * number}]" for number, what in enumerate(ASKED)]
PASSED, FAILED = ArtefactProof("pass", "general"), ArtefactProof("fail", "general")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo in two sizes."""
    q8, q4 = (quantized_demo(tmp_path_factory, preset) for preset in ("gguf-q8_0", "gguf-q4_0"))
    return {"q8": q8, "q4": gguf_in(q4)}


@pytest.fixture(scope="module")
def found(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """One real run for all tests: prompts whose head changes, a draft model, and a type that there is not."""

    def make(folder: Path) -> Tuned:
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BROKEN))
        return tune(
            models["q8"],
            dataset=folder / "prompts.jsonl",
            answer_tokens=12,
            concurrency=2,
            requests=len(BROKEN),
            slo={"ttft_p95": 1e6},
            switches=["prefix-cache", "draft", "kv=q9"],
            draft=models["q4"],
            output=folder / "out",
            context=256,
            parallel=2,
            threads=1,
        )

    tuned: Tuned = recorded(tmp_path_factory, "tuned-demo", make)
    return tuned


# ---- real servers ----


def test_every_switch_is_measured_from_the_default(found: Tuned) -> None:
    trials = {trial.name: trial for trial in found.trials}
    assert list(trials)[:4] == ["default", "kv q9", "no prefix-cache", "draft demo-Q4_0.gguf"]
    measured = [trial for trial in (*found.trials, found.again) if trial.level]
    assert all(trial.level and trial.level.completed >= len(BROKEN) - 1 for trial in measured)
    mean = (trials["default"].speed + found.again.speed) / 2
    for trial in found.trials:
        if trial.level:
            assert trial.gain == pytest.approx(trial.speed / mean - 1)
    assert found.noise == pytest.approx(abs(trials["default"].speed - found.again.speed) / mean)
    assert trials["default"].kv_cache_bytes == 2 * 256 * quantry.inspect(models_path(found)).kv_bytes_per_token


def models_path(found: Tuned) -> Path:
    return next(Path(found.artefact).glob("*.gguf"))


def test_a_setting_that_cannot_be_served_is_a_row(found: Tuned) -> None:
    refused = next(trial for trial in found.trials if trial.name == "kv q9")
    assert refused.level is None
    assert "takes no q9; use" in refused.objection
    assert found.chosen != refused.name


def test_a_draft_model_tells_its_acceptance(found: Tuned) -> None:
    guessed = next(trial for trial in found.trials if trial.name.startswith("draft"))
    rate = guessed.engine("acceptance_rate")
    assert rate is not None
    assert 0.2 < rate <= 1
    assert bool(guessed.objection) == (rate < 0.6)
    assert any(note.startswith("draft demo-Q4_0.gguf: ") and f"{rate:.0%}" in note for note in found.notes)
    assert found.trials[0].engine("acceptance_rate") is None


def test_prompts_with_a_changing_head_are_noticed(found: Tuned) -> None:
    hits = found.trials[0].engine("prefix_hit_rate")
    assert hits is not None
    assert hits < 0.1
    assert found.notes[0].startswith("the prompts break the prefix cache: they share 9")
    assert f"the hit rate was {percent(hits)}; move what changes" in found.notes[0]


def test_the_command_serves_what_was_recommended(found: Tuned) -> None:
    chosen = found.recommended
    assert chosen is not None
    assert not chosen.objection
    if chosen.changes:
        assert chosen.second is not None
        assert min(chosen.speed, chosen.second) > max(found.trials[0].speed, found.again.speed)
    assert found.command == chosen.command
    assert list(found.command[:3]) == ["quantry", "serve", found.artefact]
    done = command(*found.command[1:], "--dry-run", "--port", "0")
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    assert words[words.index("--ctx-size") + 1] == "512"
    assert ("--model-draft" in words) == any(change.switch == "draft" for change in chosen.changes)


def test_what_is_written_and_shown(found: Tuned) -> None:
    assert found.path is not None
    told = json.loads((found.path / "tune.json").read_text())
    assert told == json.loads(json.dumps(found.to_dict()))
    assert told["trials"][0]["level"]["output_tokens_per_second"] == found.trials[0].speed
    assert (found.path / "default.log").read_text()
    assert (found.path / "tune.html").read_text() == tune_page(found)
    assert found.hardware
    shown = [str(item) for item in picture(found) if not hasattr(item, "add_row")]
    assert shown[-1].startswith(f"serve with: {found.chosen}, ")


def test_the_engine_agrees_on_what_breaks_its_cache(models: dict[str, Path], found: Tuned) -> None:
    """The same prompts with the shared part at the head: the cache finds it there, and did not elsewhere."""
    with serve(models["q8"], port=0, threads=1, context=256, parallel=1) as running:
        with Watch(running.url) as watch:
            for text in MENDED:
                body = {"prompt": text, "max_tokens": 1, "model": running.model}
                assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200
        figures = watch.figures()
    assert figures is not None
    for texts, hit_rate in ((MENDED, figures.prefix_hit_rate), (BROKEN, found.trials[0].engine("prefix_hit_rate"))):
        assert hit_rate is not None
        assert (hit_rate > 0.6) if texts is MENDED else (hit_rate < 0.1)
        assert (prompts.advice(prompts.shared(texts), hit_rate) is None) is (texts is MENDED)


# ---- what prompts share ----


def plain(texts: list[list[str]]) -> tuple[float, float]:
    """The definition, word by word: heads that more than half begin with, words in a run that more than half have."""
    heads, covers = [], []
    for text in texts:
        fits = [n for n in range(len(text) + 1) if sum(one[:n] == text[:n] for one in texts) > len(texts) / 2]
        heads.append(max(fits) / len(text))
        runs = [range(at, at + 8) for at in range(len(text) - 7)]
        common = [
            run
            for run in runs
            if sum(any(one[at : at + 8] == text[run[0] : run[0] + 8] for at in range(len(one))) for one in texts)
            > len(texts) / 2
        ]
        covers.append(sum(any(word in run for run in common) for word in range(len(text))) / len(text))
    return sum(heads) / len(heads), sum(covers) / len(covers)


def test_what_prompts_share_is_counted_as_defined() -> None:
    chance = random.Random(7)
    long = [str(number) for number in range(30)]
    for _ in range(40):
        texts = []
        for _ in range(chance.randint(3, 9)):
            cut = chance.randint(0, 12)
            own = [chance.choice("abc") for _ in range(chance.randint(0, 6))]
            part = long[: 30 - cut] if chance.random() < 0.6 else long[cut:]
            texts.append([*own, *part] if chance.random() < 0.5 else [*part, *own])
        got = prompts.shared([" ".join(text) for text in texts])
        assert got is not None
        assert (got.head, got.anywhere) == pytest.approx(plain(texts))


def test_advice_is_given_where_it_helps() -> None:
    changing, fine = prompts.Shared(0.02, 0.9), prompts.Shared(0.88, 0.9)
    assert prompts.advice(changing, 0.01)
    assert prompts.advice(changing, None)
    assert prompts.advice(changing, 0.5) is None, "the engine finds it all the same"
    assert prompts.advice(fine, 0.0) is None
    assert prompts.advice(prompts.Shared(0.0, 0.1), 0.0) is None, "there is little to gain"
    assert prompts.advice(None, 0.0) is None
    assert prompts.shared(["one", "two"]) is None
    assert prompts.unused(300, 100, 0.05)
    assert prompts.unused(300, 100, 0.6) is None
    assert prompts.unused(10, 1000, 0.0) is None
    assert prompts.unused(300, 100, None) is None


def test_prompts_are_read_as_they_are_sent(tmp_path: Path) -> None:
    def written(name: str, text: str) -> list[str] | None:
        (tmp_path / name).write_text(text)
        return prompts.read(tmp_path / name)

    assert written("a.jsonl", '{"prompt": "x"}\n{"prompt": "y"}\n') == ["x", "y"]
    assert written("a.json", '[{"system": "s", "question": "x"}]') == ["s x"]
    assert written("a.csv", 'text,n\n"x, y",1\n') == ["x, y"]
    assert written("a.txt", "x\n\ny\n") == ["x", "y"]
    assert written("b.jsonl", '{"other": 1}\n') is None
    assert written("a.parquet", "?") is None
    with pytest.raises(QuantryError, match="cannot be read"):
        written("c.jsonl", "{")


# ---- what is chosen ----


def measured(speed: float, **more: Any) -> Level:
    figures = {name: more.pop(name) for name in ("prefix_hit_rate", "acceptance_rate") if name in more}
    spread = Spread(*[more.pop("ttft", 50.0)] * 4)
    level = Level(
        name="2 at once", concurrency=2, rate=None, seconds=1, completed=10, errors=0, unfinished=0, problem="",
        ttft=spread, tpot=spread, latency=spread, requests_per_second=1, output_tokens_per_second=speed,
        prompt_tokens=1, answer_tokens=1, at_once=2, engine=Figures("llama.cpp", **figures),
    )  # fmt: skip
    return replace(level, **more)


def trial(
    name: str,
    speed: float,
    *made: Change,
    proven: ArtefactProof = PASSED,
    slo: dict[str, float] | None = None,
    **more: Any,
) -> Trial:
    level = measured(speed, **more)
    return Trial(name, made, proven, level, judge([level], slo or {}))


def choose(*trials: Trial, again: float = 100.0) -> Recommendation:
    runs = [trials[0], replace(trials[0], level=measured(again))]
    return choice.choose(choice.judge_trials(trials, runs), runs)


def kv(kind: str) -> Change:
    return Change("kv", kind, {"kv": kind})


TWO = Change("parallel", "2", {"parallel": 2})
GUESS = Change("lookup", "on", {"lookup": True})
DRAFTED = Change("draft", "d", {"draft": "d"})
OTHER = Change("artefact", "w4", model="w4")


def test_the_fastest_is_chosen_with_its_gain() -> None:
    got = choose(trial("default", 100), trial("parallel 2", 120, TWO), trial("kv q8_0", 110, kv("q8_0")))
    assert got.chosen == "parallel 2"
    assert got.why.startswith("+20% against the default: 120 tok/s")


def test_a_gain_within_the_noise_is_none() -> None:
    assert choose(trial("default", 100), trial("parallel 2", 102, TWO)).chosen == "default"
    assert choose(trial("default", 100), trial("parallel 2", 110, TWO), again=120).chosen == "default"
    noisy = choose(trial("default", 100), trial("parallel 2", 150, TWO), again=120)
    assert noisy.chosen == "parallel 2"
    assert "two runs of the default differ by 18%" in noisy.notes[0]


def test_fewer_changes_win_where_more_are_hardly_faster() -> None:
    single, both = trial("kv q8_0", 130, kv("q8_0")), trial("together", 131, kv("q8_0"), TWO)
    assert choose(trial("default", 100), single, both).chosen == "kv q8_0"
    assert choose(trial("default", 100), single, trial("together", 150, kv("q8_0"), TWO)).chosen == "together"


def test_the_limits_are_kept() -> None:
    limits = {"ttft_p95": 60.0}
    slow = trial("parallel 2", 150, TWO, slo=limits, ttft=80.0)
    got = choose(trial("default", 100, slo=limits), slow)
    assert got.chosen == "default"
    assert "ttft p95 80 ms, over the limit of 60 ms" in got.trials[1].objection
    rescued = choose(trial("default", 100, slo=limits, ttft=70.0), trial("kv q8_0", 80, kv("q8_0"), slo=limits))
    assert rescued.chosen == "kv q8_0", "slower, and the only one that keeps them"
    none = choose(trial("default", 100, slo=limits, ttft=70.0), slow)
    assert none.chosen is None
    assert none.why.startswith("no setting keeps the limits; the fastest is parallel 2: ")


def test_what_is_chosen_is_borne_out_by_a_second_run() -> None:
    limits = {"ttft_p95": 60.0}
    default, faster = trial("default", 100, slo=limits), trial("parallel 2", 120, TWO, slo=limits)
    runs = [default, trial("again", 104, slo=limits)]

    def objection(second: Trial, usual: list[Trial] = runs) -> str:
        return choice.confirm(faster, second, usual).objection

    assert objection(trial("s", 105, TWO, slo=limits)) == ""
    assert choice.confirm(faster, trial("s", 105, TWO), runs).second == 105
    assert objection(trial("s", 104, TWO)).startswith("two runs gave 120 and 104 tok/s, and the default up to 104")
    assert "over the limit of 60 ms" in objection(trial("s", 120, TWO, slo=limits, ttft=70.0))
    assert "3 of 10 requests failed" in objection(trial("s", 120, TWO, errors=3, completed=7))
    assert "no room" in objection(Trial("s", (TWO,), PASSED, problem="no room"))
    late = [trial("default", 130, slo=limits, ttft=70.0)] * 2
    assert objection(trial("s", 105, TWO, slo=limits), late) == "", "slower, and the only one that keeps the limits"


def test_a_default_that_breaks_a_limit_once_does_not_keep_it() -> None:
    limits = {"ttft_p95": 60.0}
    default = trial("default", 100, slo=limits)
    got = choice.judge_trials([default], [default, trial("again", 100, slo=limits, ttft=70.0)])
    assert "over the limit of 60 ms" in got[0].objection


def test_a_setting_that_loses_requests_is_not_chosen() -> None:
    got = choose(trial("default", 100), trial("parallel 2", 150, TWO, errors=3, completed=7, problem="no room"))
    assert got.chosen == "default"
    assert got.trials[1].objection == "3 of 10 requests failed: no room"


@pytest.mark.parametrize(
    ("kind", "proven", "chosen"),
    [
        ("q8_0", PASSED, True),
        ("q8_0", FAILED, False),
        ("q8_0", ArtefactProof(), False),
        ("q4_0", PASSED, False),
        ("int4_per_token_head", PASSED, False),
        ("fp8", PASSED, True),
        ("fp8", ArtefactProof("pass", "general", "fp8-head"), True),
        ("fp8", ArtefactProof(None, None, "fp8"), False),
        ("bf16", ArtefactProof(), True),
    ],
)
def test_a_cache_that_rounds_needs_a_proof(kind: str, proven: ArtefactProof, chosen: bool) -> None:
    got = choose(trial("default", 100), trial("kv", 150, kv(kind), proven=proven))
    assert (got.chosen == "kv") is chosen
    assert bool(got.trials[1].objection) is not chosen
    said = any("the proof used a 16-bit cache" in note for note in got.notes)
    assert said is (chosen and kind != "bf16" and proven.kv is None)


def test_another_artefact_needs_a_proof() -> None:
    for proven, chosen in ((PASSED, "w4"), (FAILED, "default"), (ArtefactProof(), "default")):
        assert choose(trial("default", 100), trial("w4", 150, OTHER, proven=proven)).chosen == chosen


@pytest.mark.parametrize(("rate", "chosen"), [(0.6, True), (0.9, True), (0.59, False), (None, False)])
def test_speculation_pays_from_an_acceptance_of_0_6(rate: float | None, chosen: bool) -> None:
    got = choose(trial("default", 100), trial("lookup", 150, GUESS, acceptance_rate=rate))
    assert (got.chosen == "lookup") is chosen
    if rate == 0.59:
        assert got.trials[1].objection == "59% of the guesses were right, and speculation pays from 60%"


def test_accepted_guesses_that_are_not_faster_are_not_chosen() -> None:
    assert choose(trial("default", 100), trial("lookup", 80, GUESS, acceptance_rate=0.9)).chosen == "default"


def test_what_is_made_together() -> None:
    default = trial("default", 100)
    tried = [
        trial("a", 120, kv("q8_0")), trial("b", 140, kv("q4_0")), trial("c", 110, TWO), trial("d", 101, OTHER),
        trial("e", 130, GUESS, acceptance_rate=0.7), trial("f", 135, DRAFTED, acceptance_rate=0.8),
    ]  # fmt: skip
    runs = [default, default]
    best = choice.faster_changes(choice.judge_trials([default, *tried], runs), 0.03)
    assert [change.name for change in best] == ["kv q8_0", "parallel 2", "draft d"]


def test_the_prefix_cache_is_shown_with_its_figures() -> None:
    off = Change("prefix-cache", "off", {"prefix_cache": False})
    got = choose(trial("default", 100, prefix_hit_rate=0.7), trial("no prefix-cache", 50, off))
    assert "the prefix cache (hit rate 70%) gives 2.00 times the tok/s" in got.notes


# ---- what is asked ----


def names(*words: str, engine: str = "llama.cpp", others: Sequence[str] = (), **more: Any) -> list[str]:
    switches = Switches(engine, **{"concurrency": 8, "shares_prefix": True, **more})
    return [change.name for change in switches.changes(words or None, others)]


def test_the_switches_of_an_engine() -> None:
    assert names() == ["kv q8_0", "kv q4_0", "no prefix-cache", "parallel 8", "lookup"]
    assert names(shares_prefix=False, draft="d.gguf")[2:] == ["parallel 8", "lookup", "draft d.gguf"]
    assert names(parallel=8)[3:] == ["parallel 4", "lookup"]
    assert names(engine="vllm") == [
        "kv fp8", "no prefix-cache", "parallel 4", "parallel 8", "no chunked-prefill", "lookup",
    ]  # fmt: skip
    assert names("parallel=16", "kv=q5_0", "parallel=16") == ["kv q5_0", "parallel 16"]
    assert names("lookup", others=["a/b"]) == ["lookup", "artefact b"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kvv"], "did you mean kv"),
        (["chunked-prefill"], "llama.cpp has no switch chunked-prefill"),
        (["draft"], "name one with --draft"),
        (["lookup=3"], "takes no value"),
        (["parallel=x"], "give a number above 0"),
        (["parallel=0"], "give a number above 0"),
        (["kv="], "lacks its value"),
        ([""], "unknown switch"),
    ],
)
def test_switches_that_there_are_not(words: list[str], said: str) -> None:
    with pytest.raises(QuantryError, match=said):
        names(*words)


def test_an_engine_without_switches() -> None:
    with pytest.raises(QuantryError, match="nothing to try on transformers"):
        names(engine="transformers")
    assert set(NAMES) == {"kv", "prefix-cache", "parallel", "chunked-prefill", "lookup", "draft"}


def test_words_to_serve_with() -> None:
    options = {
        "context": 512, "prefix_cache": False, "lookup": True, "eager": False, "kv": "q8_0", "engine": None,
        "extra": ("--no-warmup",),
    }  # fmt: skip
    assert serve_words("m", options) == [
        "quantry", "serve", "m", "--context", "512", "--no-prefix-cache", "--lookup", "--kv", "q8_0", "--", "--no-warmup",
    ]  # fmt: skip


def test_the_proof_of_an_artefact(models: dict[str, Path], tmp_path: Path) -> None:
    assert read_proof(models["q4"]) == ArtefactProof()
    (tmp_path / "quantry.json").write_text('{"recipe": {"kv": "fp8"}}')
    write_together(card.proven_files(tmp_path, {"verdict": "pass", "gate": "code", "reference": "r"}))
    assert read_proof(tmp_path) == read_proof(tmp_path / "m.gguf") == ArtefactProof("pass", "code", "fp8")
    (tmp_path / "quantry.json").write_text("[")
    assert read_proof(tmp_path) == ArtefactProof()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--concurrency", "0"], "concurrency is 0"),
        (["--requests", "0"], "requests is 0"),
        (["--slo", "ttft_p96=1s"], "did you mean ttft_p9"),
        (["--slo", "fast"], "is not a limit"),
        (["--switches", "kvv"], "did you mean kv"),
        (["--prompt-tokens", "9999"], "10127 tokens, and a sequence may have 1024"),
        (
            ["--prompt-tokens", "300"],
            "4 sequences of 428 tokens share a context of 1024; give each its own with --parallel 4",
        ),
        (["--prompt-tokens", "x"], "give a number"),
        (["--engine", "vlm"], "did you mean vllm"),
        (["-o", "FILE"], "is a file"),
        (["--guidellm-python", "/no/such/python"], "name the python that has guidellm"),
    ],
)
def test_bad_input_is_refused_before_a_server_starts(
    models: dict[str, Path], words: list[str], said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    given = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    done = command("tune", models["q8"], "--json", *given)
    assert said in " ".join(done.stderr.split())
    assert done.returncode == 2
    assert not done.stdout


# ---- the page ----


def judged(*trials: Trial, chosen: str | None, **more: Any) -> Tuned:
    runs = [trials[0], replace(trials[0], name="default again", level=measured(98.5))]
    load = {"prompt_tokens": "256", "answer_tokens": "128", "concurrency": (2,), "requests": 16, "dataset": None}
    whole = Tuned(
        artefact="models/demo", engine="llama.cpp", version="b9000", context=512, date="2026-01-01 00:00 UTC", load=load,
        slo={}, proof=PASSED, noise=0.015, trials=choice.judge_trials(trials, runs), again=runs[1], chosen=chosen,
        why="+20% against the default", command=("quantry", "serve", "models/demo", "--parallel", "2"), notes=(),
        versions={"quantry": "1"}, hardware="EPYC 7000, 64 cores, 256.0 GiB",
    )  # fmt: skip
    return replace(whole, **more)


def test_the_page_has_every_setting_and_what_to_serve_with() -> None:
    evil = "<script>alert(1)</script>"
    lost = Trial(evil, (kv("q9"),), PASSED, problem="takes no q9")
    text = tune_page(
        judged(
            trial("default", 100), trial("parallel 2", 1234.5, TWO, ttft=43.21), lost, chosen="parallel 2",
            notes=(evil,),
        )
    )  # fmt: skip
    assert "<script" not in text
    assert text.count("<svg") == 2, "one picture, wide and narrow"
    assert "<code>quantry serve models/demo --parallel 2</code>" in text
    assert "llama.cpp b9000 · EPYC 7000, 64 cores, 256.0 GiB · 2026-01-01" in text
    found = re.findall(r'<tr[^>]*><th scope="row">(.*?)</th>(.*?)</tr>', text)
    assert [cells.count("<td>") for _, cells in found] == [11, 11, 11, 11, 1], "every setting, and an objection"
    rows = dict(found)
    assert {"default", "default again", "parallel 2"} <= set(rows)
    assert rows["parallel 2"].startswith("<td>1,234</td><td>+1144%</td><td>43.21 ms</td>")
    assert '<tr class="chosen"><th scope="row">parallel 2</th>' in text
    assert "takes no q9" in text
    assert "parallel 2, in colour, is recommended." in text


def test_a_page_without_a_setting_that_keeps_the_limits() -> None:
    limits = {"ttft_p95": 60.0}
    slow = trial("default", 100, slo=limits, ttft=80.0)
    text = tune_page(judged(slow, chosen=None, why="no setting keeps the limits", command=(), slo=limits))
    assert '<span class="badge fail">no setting keeps the limits</span>' in text
    assert "breaks the limits" in text
    assert 'class="command"' not in text

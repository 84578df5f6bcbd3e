"""Load tests: guidellm against the embedded llama.cpp for real, its figures restated, limits, metrics, refusals."""

import http.server
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import httpx
import pytest

import quantry
from command import command
from demo_artefacts import gguf_in, quantized_demo
from depth import deep
from quantry.cli.bench import picture
from quantry.engines.contract.catalogue import engine_facts
from quantry.errors import QuantryError
from quantry.jobs.load import bench as load
from quantry.jobs.load import endpoint, guidellm_process
from quantry.jobs.load.bench import Bench, bench
from quantry.jobs.load.compare import compare, read_earlier
from quantry.jobs.load.guidellm_process import GuidellmProcess
from quantry.jobs.load.metrics import Watch, parse, which
from quantry.jobs.load.page import page
from quantry.jobs.load.results import Level, Spread, level_of
from quantry.jobs.load.scenario import Lengths, Profile
from quantry.jobs.load.slo import LIMITS, judge, parse_limit
from quantry.report.sizes import short
from quantry.serving.prepare import serve
from shared import recorded

Result = CompletedProcess[str]
PROMPT, PREFIX, REQUESTS = 64, 96, 6
KEY = "a-key-of-the-test"


@dataclass(frozen=True)
class Session:
    """What a real server showed: one load through the command line, its pages, and what it refused."""

    found: Bench
    result: Result
    reports: dict[str, dict[str, Any]]  # guidellm's own, by the name of the level
    metrics: str
    tokens: tuple[list[int], list[int]]  # of one text: by the tokenizer found for the served file, by the demo's
    errors: dict[str, tuple[str, int]]  # with exit codes


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    file = gguf_in(quantized_demo(tmp_path_factory, "gguf-q8_0"))

    def make(folder: Path) -> Session:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUANTRY_CACHE", str(folder))
            with serve(file, port=0, threads=1, context=256, parallel=2, api_key=KEY) as running:
                (folder / "tokenizer").mkdir()
                place = endpoint.tokenizer(endpoint.find(running.url, None, KEY), None, folder / "tokenizer")
                demo = Path(quantry.__file__).parent / "demo"
                return Session(
                    *loaded(running.url, folder / "new" / "folder"),
                    metrics=httpx.get(f"{running.url}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text,
                    tokens=(tokens_by(Path(place)), tokens_by(demo)),
                    errors={words: refusal(running.url, options) for words, options in REFUSED_BY_THE_SERVER.items()},
                )

    session: Session = recorded(tmp_path_factory, "bench-session", make)
    return session


def loaded(url: str, folder: Path) -> tuple[Bench, Result, dict[str, dict[str, Any]]]:
    """A load through the command line: two levels, and a prefix that all prompts share; with guidellm's reports."""
    run, measure = GuidellmProcess.run, load.bench
    results: list[Bench] = []
    reports: dict[str, dict[str, Any]] = {}

    def kept(self: GuidellmProcess, scenario: Mapping[str, Any]) -> dict[str, Any]:
        whole = {**scenario, "metrics": {"kind": "generative"}}  # with the texts of all requests
        reports[f"{scenario['profile']['streams'][0]} at once"] = report = run(self, whole)
        return report

    def noted(*asked: Any, **more: Any) -> Bench:
        results.append(measure(*asked, **more))
        return results[-1]

    words = (
        f"bench {url}/v1/ --concurrency 1,2 --prompt-tokens {PROMPT} --requests {REQUESTS} --json "
        f"--answer-tokens 12,stdev=3,min=8,max=16 --shared-prefix {PREFIX} --slo ttft_p95=1000s,tpot_p95=0.001ms "
        f"-o {folder}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GuidellmProcess, "run", kept)
        patch.setattr(load, "bench", noted)
        patch.setenv("QUANTRY_API_KEY", KEY)
        result = command(*words.split())
        return results[0], result, reports


def tokens_by(folder: Path) -> list[int]:
    from transformers import AutoTokenizer

    tokens: list[int] = AutoTokenizer.from_pretrained(folder)("Once upon a time there was a little girl.")["input_ids"]
    return tokens


def refusal(url: str, options: dict[str, Any]) -> tuple[str, int]:
    with pytest.raises(QuantryError) as caught:
        bench(url, **{"api_key": KEY, **options})
    return str(caught.value), caught.value.exit_code


@pytest.fixture(scope="module")
def found(session: Session) -> Bench:
    return session.found


@pytest.fixture(scope="module")
def reports(session: Session) -> dict[str, dict[str, Any]]:
    return session.reports


def answered(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The requests within guidellm's window, which are those that its figures count."""
    return [row for row in report["requests"]["successful"] if row["request_start_time"] <= report["end_time"]]


# ---- the real load ----


def test_every_request_is_answered_in_the_lengths_asked_for(found: Bench, reports: dict[str, Any]) -> None:
    assert [one.name for one in found.levels] == ["1 at once", "2 at once"]
    for one in found.levels:
        assert (one.completed, one.errors) == (len(answered(reports[one.name])), 0)
        assert one.completed >= REQUESTS - 1
        assert one.prompt_tokens == pytest.approx(PREFIX + PROMPT, abs=3)
        assert 8 <= one.answer_tokens <= 16
        assert 0 < one.at_once <= (one.concurrency or 0) + 0.01
    lengths = {row["output_tokens"] for report in reports.values() for row in report["requests"]["successful"]}
    assert len(lengths) > 1, "the answers have no distribution"


def test_the_figures_are_those_of_the_requests(found: Bench, reports: dict[str, Any]) -> None:
    """A plain restatement from the moments at which each request began, had its first token and its last."""
    for one in found.levels:
        rows = answered(reports[one.name])
        moments = [row["info"]["timings"] for row in rows]
        first = sorted(1000 * (at["first_token_iteration"] - at["request_start"]) for at in moments)
        latency = sorted(1000 * (at["request_end"] - at["request_start"]) for at in moments)
        between = [
            1000 * (at["last_token_iteration"] - at["first_token_iteration"]) / (row["output_tokens"] - 1)
            for at, row in zip(moments, rows, strict=True)
            for _ in range(row["output_tokens"] - 1)
        ]
        for spread, values in ((one.ttft, first), (one.latency, latency), (one.tpot, sorted(between))):
            assert spread is not None
            assert spread.mean == pytest.approx(sum(values) / len(values))
            for share, value in ((0.5, spread.p50), (0.95, spread.p95), (0.99, spread.p99)):
                assert value == pytest.approx(values[max(0, -(-int(share * 100) * len(values) // 100) - 1)])
        span = reports[one.name]["end_time"] - reports[one.name]["start_time"]
        ended = [row for row in rows if row["request_end_time"] <= reports[one.name]["end_time"]]  # not just started
        least, most = (sum(row["output_tokens"] for row in part) / span for part in (ended, rows))
        assert 0.98 * least <= one.output_tokens_per_second <= 1.02 * most
        assert one.requests_per_second == pytest.approx(len(ended) / span, rel=0.02)


def test_no_level_gets_the_prompts_of_another(found: Bench, reports: dict[str, Any]) -> None:
    prompts = [
        json.loads(row["request_args"])["body"]["prompt"]
        for report in reports.values()
        for row in report["requests"]["successful"]
    ]
    assert len(set(prompts)) == 2 * REQUESTS == len(prompts)


def test_the_engine_counts_the_prefix_that_all_share(found: Bench) -> None:
    """Of each prompt but the first of a slot, the prefix is known and the rest is not."""
    for one in found.levels:
        assert one.engine is not None
        assert one.engine.engine == "llama.cpp"
        share = PREFIX / (PREFIX + PROMPT)
        slots = one.concurrency or 1
        assert share * (REQUESTS - slots - 1) / REQUESTS < one.engine.prefix_hit_rate < share + 0.1  # type: ignore[operator]
        assert one.engine.acceptance_rate is None, "nothing was guessed"


def test_limits_and_files(found: Bench) -> None:
    outcomes = {(finding.level, finding.name): finding.ok for finding in found.findings}
    assert outcomes == {
        (name, limit): ok
        for name in ("1 at once", "2 at once")
        for limit, ok in (("ttft_p95", True), ("tpot_p95", False), ("error_rate", True))
    }
    assert (found.verdict, found.best) == ("fail", None)
    assert found.path is not None
    stored = json.loads((found.path / "bench.json").read_text())
    assert stored == json.loads(json.dumps(found.to_dict()))
    assert KEY not in (found.path / "bench.json").read_text() + (found.path / "bench.html").read_text()
    assert found.versions["guidellm"].startswith("0.")


def test_two_runs_are_compared(found: Bench, tmp_path: Path) -> None:
    assert found.path is not None
    earlier = json.loads((found.path / "bench.json").read_text())
    earlier["levels"][0]["output_tokens_per_second"] /= 2
    earlier["levels"][0]["ttft"]["p50"] *= 4
    earlier["levels"][1]["name"] = "3 at once"
    earlier["load"]["prompt"] = "9"
    (tmp_path / "bench.json").write_text(json.dumps(earlier))
    other = compare(found, read_earlier(tmp_path))
    (one,) = other.changes
    assert one.level == "1 at once"
    assert [one.tokens_per_second, one.ttft_p50, one.tpot_p50] == pytest.approx([2, 0.25, 1])
    assert other.differences == (f"prompt is {found.load['prompt']} now, and was 9",)
    shown = "\n".join(str(row) for row in picture(replace(found, against=other)))
    assert f"against {found.model} of {found.date}" in shown
    (tmp_path / "bench.json").write_text('{"levels": 1}')
    with pytest.raises(QuantryError, match=r"bench.json is damaged.*; give a folder or a bench.json"):
        read_earlier(tmp_path)


def test_the_page_has_every_figure(found: Bench) -> None:
    assert found.path is not None
    text = (found.path / "bench.html").read_text()

    class Reader(HTMLParser):
        tags: list[str] = []  # noqa: RUF012

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)

    reader = Reader()
    reader.feed(text)
    assert "script" not in reader.tags
    assert reader.tags.count("svg") == 6, "three plots, each wide and narrow"
    for one in found.levels:
        assert one.ttft is not None
        assert f"{short(one.ttft.p95)} ms" in text
        assert f"<td>{short(one.output_tokens_per_second)}</td>" in text
    assert "does not keep the limits" in text
    assert ("tok/s" in text, "tokens/s" in text, "tokens a second" in text.lower()) == (True, False, False)
    hostile = replace(found, model="<script>alert(1)</script>", notes=("<b>x</b>",))
    assert "<script" not in page(hostile)
    assert "<b>x</b>" not in page(hostile)


# ---- limits ----


def make(**changed: Any) -> Level:
    spread = Spread(10.0, 9.0, 20.0, 30.0)
    usual: dict[str, Any] = {
        "name": "4 at once", "concurrency": 4, "rate": None, "seconds": 1.0, "completed": 99, "errors": 1,
        "unfinished": 0, "problem": "no", "ttft": spread, "tpot": spread, "latency": spread,
        "requests_per_second": 5.0, "output_tokens_per_second": 50.0, "prompt_tokens": 1.0, "answer_tokens": 1.0,
        "at_once": 4.0,
    }  # fmt: skip
    return Level(**{**usual, **changed})


@pytest.mark.parametrize(
    ("name", "bar", "ok"),
    [
        ("ttft_p95", 20.0, True), ("ttft_p95", 19.9, False), ("tpot_mean", 10.0, True), ("latency_p99", 29.0, False),
        ("ttft_p50", 9.0, True), ("error_rate", 0.01, True), ("error_rate", 0.009, False),
        ("output_tokens_per_second", 50.0, True), ("output_tokens_per_second", 51.0, False),
        ("requests_per_second", 4.9, True),
    ],
)  # fmt: skip
def test_a_limit_is_kept_at_its_own_value(name: str, bar: float, ok: bool) -> None:
    (finding,) = judge([make()], {name: bar})
    assert finding.ok is ok
    assert (", within the limit of " in finding.words) is ok


def test_what_was_not_measured_keeps_no_limit() -> None:
    (finding,) = judge([make(completed=0, errors=0, ttft=None)], {"ttft_p95": 1e9})
    assert not finding.ok
    assert judge([make(completed=0, errors=0)], {"error_rate": 0.5})[0].ok is False


def test_every_limit_has_a_figure() -> None:
    assert all(make().figure(name) is not None for name in LIMITS)


@pytest.mark.parametrize(
    ("words", "value"),
    [("ttft_p95=500ms", 500.0), ("ttft_p95=0.5s", 500.0), ("ttft_p95=7", 7.0), ("error_rate=1%", 0.01)],
)
def test_limits_in_words(words: str, value: float) -> None:
    name, found = parse_limit(words)
    assert name == words.partition("=")[0]
    assert found == pytest.approx(value)


@pytest.mark.parametrize("words", ["ttft_p95", "ttft_p95=fast", "ttft_p95=-1", "ttft_p95=1.2.3", "=5m"])
def test_no_limit(words: str) -> None:
    with pytest.raises(QuantryError):
        parse_limit(words)


def test_lengths_in_words() -> None:
    assert Lengths.of("256,stdev=64,min=16,max=512", "it") == Lengths(256, 64, 16, 512)
    assert Lengths.of(8, "it").to_guidellm("prompt_tokens") == {"prompt_tokens": 8}
    assert str(Lengths(256, 64, 16, 512)) == "256,stdev=64,min=16,max=512"
    for wrong in ("", "x", "0", "10,most=3", "10,min=11", "10,max=9", "10,stdev=0", -3, 2.5):
        with pytest.raises(QuantryError, match="it "):
            Lengths.of(wrong, "it")  # type: ignore[arg-type]


# ---- the engine's page ----

VLLM = """# HELP vllm:prefix_cache_hits_total Hits
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="a b{{}}"}} {queries}
vllm:prefix_cache_hits_total{{engine="0",model_name="a b{{}}"}} {hits}
vllm:prefix_cache_hits_created{{engine="0"}} 1.7e+09
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}
vllm:spec_decode_num_accepted_tokens_total{{engine="1"}} {accepted} 1794765184
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}
vllm:kv_cache_usage_perc{{engine="0"}} {usage}
vllm:broken NaN
not a sample
"""


def test_a_page_is_read_as_the_format_has_it() -> None:
    page = parse(VLLM.format(queries=10, hits="4e0", accepted=3, drafted=10, usage=0.25))
    assert page == {
        "vllm:prefix_cache_queries_total": 10, "vllm:prefix_cache_hits_total": 4, "vllm:prefix_cache_hits_created": 1.7e9,
        "vllm:spec_decode_num_accepted_tokens_total": 6, "vllm:spec_decode_num_draft_tokens_total": 10,
        "vllm:kv_cache_usage_perc": 0.25,
    }  # fmt: skip
    assert which(page) == "vllm"
    assert which({"other": 1.0}) is None


@contextmanager
def pages(answers: list[str]) -> Iterator[str]:
    """A server whose metrics page changes with every look at it; the last stays."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = (answers.pop(0) if len(answers) > 1 else answers[0]).encode()
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_rates_are_what_grew_and_a_gauge_is_its_peak() -> None:
    looks = [(100, 40, 5, 10, 0.0), (150, 60, 6, 14, 0.75), (170, 70, 7, 20, 0.5), (200, 90, 8, 30, 0.0)]
    names = ("queries", "hits", "accepted", "drafted", "usage")
    answers = [VLLM.format(**dict(zip(names, look, strict=True))) for look in looks]
    with pages(answers) as url, Watch(url, every=0.02) as watch:
        while len(answers) > 1:
            pass
    figures = watch.figures()
    assert figures is not None
    assert figures.prefix_hit_rate == pytest.approx(50 / 100)
    assert figures.acceptance_rate == pytest.approx(2 * 3 / 20)
    assert figures.kv_usage == pytest.approx(0.75)


def test_a_server_without_a_page_is_measured_without() -> None:
    with pages([""]) as url, Watch(url) as watch:
        pass
    assert watch.figures() is None


def test_the_embedded_engine_has_the_names_that_are_read(session: Session) -> None:
    told = engine_facts("llama.cpp").metrics
    assert told is not None
    assert told.prefix_hit_rate is not None
    assert set(told.prefix_hit_rate.under) <= set(parse(session.metrics))


# ---- a server that fails ----


class Breakable(http.server.ThreadingHTTPServer):
    """An OpenAI server of four tokens an answer, which answers 500 after so many requests, and keeps all prompts."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), BreakableHandler)
        self.answers = 10**9
        self.prompts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class BreakableHandler(http.server.BaseHTTPRequestHandler):
    server: Breakable

    def do_GET(self) -> None:
        self.answer(200 if self.path == "/v1/models" else 404, json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.prompts.append(body["prompt"])
        self.server.answers -= 1
        usage = {"prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12}
        pieces = [{"choices": [{"index": 0, "text": word}]} for word in ("a", "b", "c", "d")] + [
            {"choices": [], "usage": usage}
        ]
        events = "".join(f"data: {json.dumps({'id': '1', **piece})}\n\n" for piece in pieces)
        whole = events + "data: [DONE]\n\n" if body.get("stream") else json.dumps({**pieces[0], "usage": usage})
        self.answer(500 if self.server.answers < 0 else 200, whole)

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if body.startswith("data") else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None:
        pass


@dataclass(frozen=True)
class Broken:
    """Loads on a server that fails: results by what was done to it, and the prompts of each."""

    results: dict[str, Bench]
    prompts: dict[str, set[str]]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Broken:
    demo = Path(quantry.__file__).parent / "demo"
    usual: dict[str, Any] = {
        "requests": 4,
        "prompt_tokens": 32,  # enough words that two runs draw no prompt twice
        "answer_tokens": 4,
        "tokenizer": demo,
        "concurrency": [1, 2],
    }
    runs: dict[str, dict[str, Any]] = {
        "in the middle": {"answers": 1 + 4 + 2, "seed": 7},  # of the second level, after the request that warms up
        "between levels": {"answers": 1 + 4, "seed": 7, "slo": {"error_rate": 1.0}},
        "in a sweep": {"answers": 1 + 4, "concurrency": "sweep"},
        "allowed": {"answers": 1 + 2, "slo": {"error_rate": 0.9}, "concurrency": [1]},
    }

    def make(_: Path) -> Broken:
        results, prompts = {}, {}
        with Breakable() as server, guidellm_process.started(None, offline=True) as running:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            for name, options in runs.items():
                server.answers, server.prompts = options.pop("answers", 10**9), []
                results[name] = bench(server.url, started=running, **{**usual, **options})
                prompts[name] = {prompt for prompt in server.prompts if prompt != "Hello"}
            server.shutdown()
        return Broken(results, prompts)

    done: Broken = recorded(tmp_path_factory, "bench-broken", make)
    return done


@deep
@pytest.mark.parametrize("failure", ["in the middle", "between levels", "in a sweep"])
def test_requests_that_fail_fail_the_load(broken: Broken, failure: str) -> None:
    result = broken.results[failure]
    assert result.levels[-1].errors > 0
    assert (result.verdict, result.best, result.verdict_words) == ("fail", "1 at once", "requests failed")


@deep
def test_a_limit_may_allow_requests_to_fail(broken: Broken) -> None:
    result = broken.results["allowed"]
    assert result.levels[0].errors > 0
    assert (result.verdict, result.best) == ("pass", "1 at once")


@deep
def test_a_load_with_failures_is_exit_code_1(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "bench", lambda *_, **__: broken.results["between levels"])
    shown = command("bench", "http://127.0.0.1:9")
    assert shown.returncode == 1
    assert "requests failed" in shown.stdout


@deep
def test_finished_levels_are_kept_when_a_load_is_interrupted(tmp_path: Path) -> None:
    """As by Ctrl-C in the second level."""
    demo = Path(quantry.__file__).parent / "demo"

    def interrupt(number: int, _: int, __: str) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with Breakable() as server, guidellm_process.started(None, offline=True) as running:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        server.answers = 10**9
        load: dict[str, Any] = {"requests": 2, "prompt_tokens": 8, "answer_tokens": 4, "tokenizer": demo}
        kept = bench(
            server.url, started=running, concurrency=[1, 2], slo={"error_rate": 0.5}, output=tmp_path,
            progress=interrupt, **load,
        )  # fmt: skip
        server.shutdown()
    assert (kept.interrupted, kept.verdict, [level.name for level in kept.levels]) == (True, "", ["1 at once"])
    assert "interrupted after 1 level" in kept.notes[-1]
    assert json.loads((tmp_path / "bench.json").read_text())["levels"][0]["completed"] == 2
    assert "core" in kept.server["hardware"], "the server is on this machine"


@deep
def test_each_run_has_prompts_of_its_own_unless_a_seed_repeats_them(broken: Broken) -> None:
    prompts, results = broken.prompts, broken.results
    assert prompts["between levels"] & prompts["in the middle"], "of one seed"
    assert any("seed 7" in note for note in results["in the middle"].notes)
    assert not prompts["in a sweep"] & (prompts["allowed"] | prompts["in the middle"])
    assert not any("seed" in note for note in results["in a sweep"].notes)


def test_a_server_that_is_gone_is_said_to_be() -> None:
    gone = endpoint.Endpoint("http://127.0.0.1:9", "m", None, ())
    assert "cannot be reached" in endpoint.problem_of(gone)


# ---- the endpoint ----


def test_the_tokenizer_is_that_of_the_served_file(session: Session) -> None:
    assert session.tokens[0] == session.tokens[1]


REFUSED_BY_THE_SERVER: dict[str, dict[str, Any]] = {
    "give its key with --api-key": {"api_key": None},
    "serves no model 'other'": {"model": "other"},
    "nowhere/at/all has no tokenizer": {"tokenizer": "nowhere/at/all"},
}


def assert_refused(error: tuple[str, int], words: str) -> None:
    """An error of one line that has these words, before anything is measured."""
    assert words in error[0]
    assert "\n" not in error[0]
    assert error[1] == 2


@pytest.mark.parametrize("words", REFUSED_BY_THE_SERVER)
def test_refusals_of_a_server(session: Session, words: str) -> None:
    assert_refused(session.errors[words], words)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("cannot be reached", {}),
        ("is not the address of a server", {"url": "ftp://somewhere"}),
        ("is not the address of a server", {"url": "http://127.0.0.1:99999"}),
        ("the concurrency is [0]", {"concurrency": [0]}),
        ("the concurrency is []", {"concurrency": []}),
        ("the rate is -1", {"rate": -1}),
        ("exclude each other", {"rate": 1.0, "concurrency": [1]}),
        ("requests is 0", {"requests": 0}),
        ("seconds is -2", {"seconds": -2}),
        ("unknown limit 'ttft_p96'; did you mean", {"slo": {"ttft_p96": 1.0}}),
        ("the limit ttft_p95 is nan", {"slo": {"ttft_p95": float("nan")}}),
        ("--shared-prefix is -1; give 0 to 2,147,483,647", {"shared_prefix": -1}),
        ("--seed is -1; give 0 to 2,147,483,647", {"seed": -1}),
        ("there is no file nowhere.jsonl", {"dataset": "nowhere.jsonl"}),
        ("--prompt-tokens is 'x'", {"prompt_tokens": "x"}),
        ("is not a program that can be run", {"guidellm_python": Path("/nowhere/python")}),
        ("is a file", {"output": Path(__file__)}),
    ],
)
def test_refusals(words: str, options: dict[str, Any]) -> None:
    assert_refused(refusal(options.pop("url", "http://127.0.0.1:9"), options), words)


def test_an_environment_without_guidellm_says_how_to_get_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
    python.chmod(0o755)
    with (
        pytest.raises(QuantryError, match=re.escape(guidellm_process.INSTALL)),
        guidellm_process.started(python, offline=True),
    ):
        pass


def test_other_versions_of_guidellm_are_refused() -> None:
    for version in ("0.7.4", "1.0.0", "0.6"):
        with pytest.raises(QuantryError, match="0.8 or newer"):
            guidellm_process.check_version(version)
    guidellm_process.check_version("0.8.1")


# ---- the command line ----


def test_the_command_line_shows_the_table_and_refuses_in_one_line(found: Bench) -> None:
    from rich.console import Console

    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for item in picture(found):
        console.print(item)
    shown = console.export_text()
    assert "1 at once" in shown
    assert "does not keep the limits" in shown
    refused = command("bench", "http://127.0.0.1:9", "--concurrency", "many")
    assert refused.returncode == 2
    assert "--concurrency is 'many'" in refused.stderr


def test_a_broken_limit_is_exit_code_1(session: Session, found: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.result.returncode == 1
    assert json.loads(session.result.stdout) == json.loads(json.dumps(found.to_dict()))
    for verdict in ("pass", ""):  # the same load, kept
        monkeypatch.setattr(load, "bench", lambda *_, verdict=verdict, **__: replace(found, verdict=verdict))
        assert command("bench", found.url, "--json").returncode == 0


def test_a_level_without_answers(reports: dict[str, Any], found: Bench) -> None:
    """All requests of a level failed: no times, the server's words, an error rate of 1."""
    report = json.loads(json.dumps(reports["1 at once"]))
    for metric in report["metrics"].values():
        if isinstance(metric, dict) and "successful" in metric and isinstance(metric["successful"], dict):
            metric["successful"] |= {"count": 0, "mean": 0.0}
    report["metrics"]["request_totals"] = {"successful": 0, "errored": 2, "incomplete": 0, "total": 2}
    report["requests"] = {"errored": [{"info": {"error": "500 too\n full"}}] * 2, "successful": []}
    one = level_of(Profile(1), report, None)
    assert (one.ttft, one.error_rate, one.problem) == (None, 1.0, "500 too full")
    said = r"HTTPStatusError(\"Client error '400 Bad Request' for url 'http://x/v1'\\nFor more\")"
    report["requests"]["errored"] = [{"info": {"error": said}}]
    assert level_of(Profile(1), report, None).problem == "the server answers 400 Bad Request"

"""The judge against a real server on this machine that speaks, refuses and fails as endpoints do."""

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from quantry.errors import QuantryError
from quantry.proof.tasks.judge import JudgeEndpoint, judge
from quantry.proof.tasks.significance import sign_test

Reply = Callable[[dict[str, Any], dict[str, str]], tuple[int, dict[str, str], bytes]]


@contextmanager
def serving(reply: Reply) -> Iterator[str]:
    """A server on a free port that answers every POST by `reply(body, headers)`; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body["path"] = self.path
            status, headers, data = reply(body, dict(self.headers))
            try:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client has gone: a timeout is what is tested

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def says(words: str | None) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, json.dumps({"choices": [{"message": {"role": "assistant", "content": words}}]}).encode()


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """The two answers that a request shows, in order."""
    found = re.search(r"\[Answer A\]\n(.*)\n\n\[Answer B\]\n(.*)\n\nWhich", body["messages"][-1]["content"], re.DOTALL)
    assert found is not None
    return found[1], found[2]


def longer(body: dict[str, Any], _: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
    """A judge that likes the longer answer."""
    first, second = (len(text) for text in shown(body))
    return says("TIE" if first == second else "A" if first > second else "B")


QUESTIONS = ["q1", "q2", "q3", "q4", "q5"]
BASE = ["short", "a long answer", "same", "alike", "x"]
QUANTIZED = ["a longer one", "brief", "same", "equal", "xyz"]


def test_wins_ties_and_losses_are_the_quantized_models() -> None:
    seen: list[dict[str, Any]] = []

    def reply(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        seen.append(body)
        assert "Authorization" not in headers
        return longer(body, headers)

    steps: list[tuple[int, int, str]] = []
    with serving(reply) as url:
        found = judge(
            QUESTIONS, BASE, QUANTIZED, JudgeEndpoint(url, "the-judge"), progress=lambda *step: steps.append(step)
        )
    assert found.outcomes == ("win", "loss", "tie", "tie", "win")
    assert (found.wins, found.ties, found.losses) == (2, 2, 1)
    assert (found.p, found.swayed, found.unclear) == (sign_test(1, 2), 0, 0)
    assert len(seen) == 8  # four pairs in both orders: the third is the same text
    assert {body["path"] for body in seen} == {"/v1/chat/completions"}
    assert {body["model"] for body in seen} == {"the-judge"}
    assert sorted(shown(body) for body in seen if "q1" in body["messages"][-1]["content"]) == [
        ("a longer one", "short"), ("short", "a longer one"),
    ]  # fmt: skip
    assert steps[-1] == (4, 4, "judging")
    assert json.loads(json.dumps(asdict(found)))["wins"] == 2


@pytest.mark.parametrize("favourite", ["A", "B"])
def test_a_judge_who_looks_at_the_order_only_decides_nothing(favourite: str) -> None:
    with serving(lambda *_: says(favourite)) as url:
        found = judge(QUESTIONS, BASE, QUANTIZED, JudgeEndpoint(url, "biased"))
    assert (found.wins, found.ties, found.losses, found.p) == (0, 5, 0, 1.0)
    assert found.swayed == 4


def test_a_win_in_one_order_and_a_tie_in_the_other_is_a_tie() -> None:
    with serving(lambda body, _: says("B" if shown(body)[1] == "new" else "TIE")) as url:
        found = judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))
    assert (found.outcomes, found.swayed) == (("tie",), 0)


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("**B**", "win"),
        ("Answer A is fluent, but B is right.\n\nB", "win"),
        ("The better answer is: B.", "win"),
        ("Tie", "tie"),
    ],
)
def test_verdicts_are_read_from_prose(words: str, outcome: str) -> None:
    swapped = words.translate(str.maketrans("AB", "BA")).replace("Bnswer", "Answer")
    with serving(lambda body, _: says(words if shown(body)[1] == "new" else swapped)) as url:
        found = judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))
    assert (found.outcomes, found.unclear) == ((outcome,), 0)


def test_the_key_is_read_from_the_variable_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-secret\n")
    keys: list[str] = []

    def reply(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        keys.append(headers["Authorization"])
        return longer(body, headers) if len(keys) < 3 else (401, {}, b'{"error": "bad key sk-secret"}')

    with serving(reply) as url:
        assert judge(["q"], ["old"], ["newer"], JudgeEndpoint(url + "/", "m", "JUDGE_KEY")).wins == 1
        with pytest.raises(QuantryError) as caught:
            judge(["q"], ["old"], ["newer"], JudgeEndpoint(url, "m", "JUDGE_KEY"))
    assert set(keys) == {"Bearer sk-secret"}
    assert "status 401" in str(caught.value)
    assert "bad key" in str(caught.value)
    assert "check the key in JUDGE_KEY" in str(caught.value)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("value", "words"),
    [(None, "is not set"), ("", "is not set"), ("a b", "holds no usable key"), ("schlüssel", "holds no usable key")],
)
def test_a_key_that_cannot_be_sent_is_refused_before_anything_is(
    monkeypatch: pytest.MonkeyPatch, value: str | None, words: str
) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_KEY", value)
    with pytest.raises(QuantryError, match=f"JUDGE_KEY {words}"):
        judge(["q"], ["old"], ["new"], JudgeEndpoint("http://127.0.0.1:9/v1", "m", "JUDGE_KEY"))


@pytest.mark.parametrize(
    ("status", "data", "words"),
    [
        (401, b"", "name the environment variable"),
        (403, b"no", "status 403: no"),
        (404, b'{"error": "model"}', "serves the model m"),
        (400, b"context too long", "status 400: context too long"),
        (302, b"", "status 302: Found"),
        (200, b"<html>hello</html>", "did not reply with a chat completion: '<html>hello</html>'"),
        (200, b"{}", "did not reply with a chat completion"),
        (200, b'{"choices": []}', "did not reply with a chat completion"),
        (200, b"[" * 100_000, "did not reply with a chat completion"),
        (200, b"\xff\xfe\x00", "did not reply with a chat completion"),
        (200, b"", "did not reply with a chat completion"),
    ],
)
def test_refusals_and_nonsense_are_one_line_with_a_fix(status: int, data: bytes, words: str) -> None:
    with serving(lambda *_: (status, {}, data)) as url, pytest.raises(QuantryError) as caught:
        judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))
    assert words in str(caught.value)
    assert url in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_one_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    with pytest.raises(QuantryError, match="cannot reach the judge at http://127.0.0.1"):
        judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://host/v1", "", "http://", "http:///v1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(QuantryError, match="not an http address"):
        judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))


def test_an_address_that_cannot_be_parsed() -> None:
    with pytest.raises(QuantryError, match="cannot reach the judge"):
        judge(["q"], ["old"], ["new"], JudgeEndpoint("http://[::1/v1", "m"))


def test_a_slow_judge_is_not_waited_for() -> None:
    release = threading.Event()

    def reply(*_: Any) -> tuple[int, dict[str, str], bytes]:
        release.wait(10)
        return says("A")

    with serving(reply) as url:
        started = time.monotonic()
        with pytest.raises(QuantryError, match=r"did not reply within 0\.3 seconds"):
            judge(QUESTIONS, BASE, QUANTIZED, JudgeEndpoint(url, "m", timeout=0.3))
        assert time.monotonic() - started < 5
        release.set()


def test_a_busy_judge_is_asked_again_and_given_up_in_the_end() -> None:
    calls: list[int] = []

    def reply(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        calls.append(1)
        return (429, {"Retry-After": "0"}, b"slow down") if len(calls) < 4 else longer(body, headers)

    with serving(reply) as url:
        assert judge(["q"], ["old"], ["newer"], JudgeEndpoint(url, "m")).wins == 1
    assert len(calls) == 5
    with serving(lambda *_: (503, {"Retry-After": "0"}, b"")) as url, pytest.raises(QuantryError, match="status 503"):
        judge(["q"], ["old"], ["newer"], JudgeEndpoint(url, "m"))


def test_a_judge_that_takes_no_temperature_is_asked_without() -> None:
    def reply(body: dict[str, Any], headers: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        if "temperature" in body:
            return 400, {}, b'{"error": {"message": "Unsupported value: temperature"}}'
        return longer(body, headers)

    with serving(reply) as url:
        assert judge(["q"], ["old"], ["newer"], JudgeEndpoint(url, "m")).outcomes == ("win",)


def test_a_judge_that_names_no_winner_is_no_judge() -> None:
    with serving(lambda *_: says("I cannot say.")) as url, pytest.raises(QuantryError, match="'I cannot say.'"):
        judge(QUESTIONS, BASE, QUANTIZED, JudgeEndpoint(url, "m"))
    with serving(lambda *_: says(None)) as url, pytest.raises(QuantryError, match="gave no verdict in 2 of 2"):
        judge(["q"], ["old"], ["new"], JudgeEndpoint(url, "m"))
    with serving(lambda body, _: says("B" if shown(body)[1] == "newer" else "Hm.")) as url:
        found = judge(["q"], ["old"], ["newer"], JudgeEndpoint(url, "m"))
    assert (found.outcomes, found.unclear) == (("tie",), 1)


def test_the_first_failure_stops_the_rest() -> None:
    calls: list[int] = []

    def reply(*_: Any) -> tuple[int, dict[str, str], bytes]:
        calls.append(1)
        return 404, {}, b"nothing here"

    many = [str(number) for number in range(400)]
    with serving(reply) as url, pytest.raises(QuantryError, match="status 404"):
        judge(many, many, [f"{text}!" for text in many], JudgeEndpoint(url, "m"))
    assert len(calls) < 100

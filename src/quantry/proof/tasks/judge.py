"""A third model as judge of two answers, at any endpoint with OpenAI's chat completions.

Judges prefer the answer they read first (or second), so each pair is shown in both orders: a win is a win in both,
anything else is a tie. The judge never learns which model is which.
"""

import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from quantry.errors import QuantryError
from quantry.proof.tasks.significance import sign_test
from quantry.types import Progress

Outcome = Literal["win", "tie", "loss"]

TRIES = 4
WORKERS = 4
LONGEST_WAIT = 30.0  # seconds before the next try, even if the endpoint asks for more
BUSY = (408, 429, 500, 502, 503, 504)
INSTRUCTION = """You compare two answers to the same question. Judge correctness first, then how well an answer \
follows the question, then clarity. Length and style do not matter. Reply with one word and nothing else: A if answer \
A is better, B if answer B is better, TIE if neither is."""
QUESTION = """[Question]
{question}

[Answer A]
{first}

[Answer B]
{second}

Which answer is better? Reply A, B or TIE."""


@dataclass(frozen=True, slots=True)
class JudgeEndpoint:
    """The judge's address up to "/chat/completions"; `key_variable` names the environment variable of its API key."""

    url: str
    model: str
    key_variable: str | None = None
    timeout: float = 120.0  # seconds for one reply


@dataclass(frozen=True, slots=True)
class Judgement:
    """Wins, ties and losses of the quantized model; `p` is the probability of such a split if both are equally good."""

    model: str
    wins: int
    ties: int
    losses: int
    p: float
    swayed: int  # pairs whose winner changed with the order
    unclear: int  # replies without a verdict, counted as ties
    outcomes: tuple[Outcome, ...]


def judge(
    questions: Sequence[str],
    base: Sequence[str],
    quantized: Sequence[str],
    endpoint: JudgeEndpoint,
    *,
    progress: Progress | None = None,
) -> Judgement:
    """Has every pair of answers judged; equal answers are ties without a request.

    Raises QuantryError if the endpoint cannot be reached, refuses, or mostly replies without a verdict.
    """
    rows = list(zip(questions, base, quantized, strict=True))
    different = [number for number, (_, first, second) in enumerate(rows) if first.strip() != second.strip()]
    replies: dict[int, tuple[str, str]] = {}
    with _client(endpoint) as client, ThreadPoolExecutor(WORKERS) as pool:
        waiting = {pool.submit(_both_orders, client, endpoint, *rows[number]): number for number in different}
        try:
            for done in as_completed(waiting):
                replies[waiting[done]] = done.result()
                if progress:
                    progress(len(replies), len(different), "judging")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # the first refusal is enough
            raise
    return _judgement(endpoint, len(rows), replies)


def _judgement(endpoint: JudgeEndpoint, count: int, pairs: dict[int, tuple[str, str]]) -> Judgement:
    replies = [reply for pair in pairs.values() for reply in pair]
    unclear = [reply for reply in replies if _winner(reply) is None]
    if len(unclear) * 2 > len(replies):
        raise QuantryError(
            f"the judge {endpoint.model} gave no verdict in {len(unclear)} of {len(replies)} replies, such as "
            f"{unclear[0][:80]!r}",
            fix="use a model that follows the instruction to reply A, B or TIE",
        )
    winners = {number: (_winner(first), _winner(second)) for number, (first, second) in pairs.items()}
    outcomes = tuple(_outcome(*winners[number]) if number in winners else "tie" for number in range(count))
    wins, ties, losses = (outcomes.count(name) for name in ("win", "tie", "loss"))
    swayed = sum(pair in (("A", "A"), ("B", "B")) for pair in winners.values())
    return Judgement(endpoint.model, wins, ties, losses, sign_test(losses, wins), swayed, len(unclear), outcomes)


def _both_orders(
    client: httpx.Client, endpoint: JudgeEndpoint, question: str, base: str, quantized: str
) -> tuple[str, str]:
    """Returns the replies with the quantized model's answer second, then first."""
    orders = ((base, quantized), (quantized, base))
    first, second = (_reply(client, endpoint, QUESTION.format(question=question, first=a, second=b)) for a, b in orders)
    return first, second


def _outcome(quantized_second: str | None, quantized_first: str | None) -> Outcome:
    if (quantized_second, quantized_first) == ("B", "A"):
        return "win"
    return "loss" if (quantized_second, quantized_first) == ("A", "B") else "tie"


def _winner(reply: str) -> str | None:
    """Returns the last verdict in a reply: a model that reasons first gives it at the end."""
    verdicts = re.findall(r"(?<![\w'])(A|B|TIE|Tie|tie)(?![\w'])", reply)
    return verdicts[-1].upper() if verdicts else None


def _client(endpoint: JudgeEndpoint) -> httpx.Client:
    if not re.match(r"https?://[^/]", endpoint.url):
        raise QuantryError(
            f"the judge's address {endpoint.url!r} is not an http address", fix="give one like http://localhost:8000/v1"
        )
    try:
        return httpx.Client(timeout=endpoint.timeout, headers=_authorization(endpoint.key_variable))
    except (httpx.InvalidURL, ValueError) as error:  # of a proxy in the environment
        raise QuantryError(f"cannot connect to the judge: {error}", fix="check HTTP_PROXY and HTTPS_PROXY") from error


def _authorization(variable: str | None) -> dict[str, str]:
    if variable is None:
        return {}
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        state = "holds no usable key" if key else "is not set"
        raise QuantryError(
            f"the environment variable {variable} {state}", fix=f"export {variable}=... with the judge's API key"
        )
    return {"Authorization": f"Bearer {key}"}


def _reply(client: httpx.Client, endpoint: JudgeEndpoint, question: str) -> str:
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    body: dict[str, Any] = {"model": endpoint.model, "messages": messages, "temperature": 0}
    response = _post(client, endpoint, body)
    if response.status_code == 400 and "temperature" in response.text:  # reasoning models do not accept one
        del body["temperature"]
        response = _post(client, endpoint, body)
    if response.status_code != 200:
        raise _refused(endpoint, response)
    return _content(endpoint, response)


def _post(client: httpx.Client, endpoint: JudgeEndpoint, body: dict[str, Any]) -> httpx.Response:
    """Sends a request, and repeats it after a while if the endpoint is busy."""
    url = endpoint.url.rstrip("/").removesuffix("/chat/completions") + "/chat/completions"
    for number in range(TRIES):
        try:
            response = client.post(url, json=body)
        except httpx.TimeoutException as error:
            raise QuantryError(
                f"the judge at {endpoint.url} did not reply within {endpoint.timeout:g} seconds",
                fix="check that it is running",
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise QuantryError(
                f"cannot reach the judge at {endpoint.url}: {error or type(error).__name__}",
                fix="check the address and that the server is running",
            ) from error
        if response.status_code not in BUSY or number == TRIES - 1:
            break
        time.sleep(_wait(response, number))
    return response


def _wait(response: httpx.Response, number: int) -> float:
    """Returns the seconds before the next try: those of the Retry-After header, or twice as long each time."""
    seconds = response.headers.get("retry-after", "")
    return min(LONGEST_WAIT, float(seconds) if re.fullmatch(r"\d+(\.\d+)?", seconds) else 0.5 * 2**number)


def _refused(endpoint: JudgeEndpoint, response: httpx.Response) -> QuantryError:
    code, variable = response.status_code, endpoint.key_variable
    fixes = {
        401: f"check the key in {variable}" if variable else "name the environment variable that holds its API key",
        403: "check that the key may use this model",
        404: f"check the address and that it serves the model {endpoint.model}",
    }
    fix = fixes.get(code, "try again later" if code in BUSY else "check the address and the model's name")
    key = response.request.headers.get("authorization", "").removeprefix("Bearer ")
    text = response.text.replace(key, "***") if key else response.text  # some servers repeat the key they refuse
    words = " ".join(text.split())[:200] or response.reason_phrase
    return QuantryError(f"the judge at {endpoint.url} refused with status {code}: {words}", fix=fix)


def _content(endpoint: JudgeEndpoint, response: httpx.Response) -> str:
    try:
        content = response.json()["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise QuantryError(
            f"the judge at {endpoint.url} did not reply with a chat completion: {response.text[:80]!r}",
            fix="check that the address is of an OpenAI-compatible server, usually ending in /v1",
        ) from error
    return content if isinstance(content, str) else ""

"""Time to first token through `quantry serve`, beside the engine's own: the same model, flags and requests.

    python benchmarks/serve_ttft.py FILE.gguf [--requests 40] [--server llama-server]

Three ways to the same server of llama.cpp take turns, so that whatever else the machine does meets all of them:
`quantry serve`; the library in a process of its own without Quantry, started by xllamacpp's API; and with --server an
external llama-server. Every request has a new prompt, so nothing comes from the cache. Two more numbers of `quantry
serve` are beside: what the engine itself counted for the prompt, and the rest, which is HTTP and the first token.
"""

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from measure import keep
from quantry.serving.prepare import serve
from quantry.serving.process import free_port

CONTEXT = 512
WORDS = "The keeper of the lighthouse walked down to the harbour and looked at the ships. " * 4
ALONE = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx, params.n_parallel = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[4])
server = xllamacpp.Server(params)
threading.Event().wait()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--server", type=Path)
    given = parser.parse_args()
    with ExitStack() as stack:
        ways = {"quantry serve": stack.enter_context(_ours(given.model, given.threads))}
        ways["the engine alone"] = stack.enter_context(_alone(given.model, given.threads))
        if given.server:
            ways["llama-server"] = stack.enter_context(_ours(given.model, given.threads, given.server))
        rows = _measured(ways, given.requests)
    _show(rows, given.model)


@contextmanager
def _ours(model: Path, threads: int, server: Path | None = None) -> Iterator[str]:
    with serve(model, port=0, context=CONTEXT, parallel=1, threads=threads, engine_bin=server) as running:
        yield running.url


@contextmanager
def _alone(model: Path, threads: int) -> Iterator[str]:
    port = free_port("127.0.0.1")
    words = [sys.executable, "-c", ALONE, str(model), str(port), str(CONTEXT), str(threads)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            _await(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def _await(port: int) -> None:
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.05)


def _measured(ways: dict[str, str], requests: int) -> dict[str, list[dict[str, float]]]:
    """Milliseconds of every request, in turns; the first of each way only warms it up."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for number in range(requests + 1):
        for name, url in ways.items():
            found = _first_token(url, f"Page {number} of {name}. {WORDS}")
            rows[name] += [found] if number else []
    return rows


def _first_token(url: str, prompt: str) -> dict[str, float]:
    """Milliseconds to the first piece of a stream, and what the engine counted for the prompt at its end."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=120)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, "ignore_eos": True}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first, prompt_ms = 0.0, 0.0
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or (time.perf_counter() - start) * 1000
            prompt_ms = json.loads(line[6:]).get("timings", {}).get("prompt_ms", prompt_ms)
    connection.close()
    return {"ttft_ms": first, "prompt_ms": prompt_ms}


def _show(rows: dict[str, list[dict[str, float]]], model: Path) -> None:
    alone = statistics.median(row["ttft_ms"] for row in rows["the engine alone"])
    result = {}
    for name, found in rows.items():
        times = sorted(row["ttft_ms"] for row in found)
        counted = statistics.median(row["prompt_ms"] for row in found)
        median, low = statistics.median(times), times[0]
        result[name] = {
            "median_ms": round(median, 2), "least_ms": round(low, 2), "p95_ms": round(times[int(len(times) * 0.95)], 2),
            "counted_by_the_engine_ms": round(counted, 2), "to_the_engine_alone": round(median / alone, 3),
        }  # fmt: skip
        print(f"{name:<18} median {median:7.2f} ms  least {low:7.2f} ms  {median / alone:5.2f} of the engine alone")
    keep("serve_ttft", {"model": model.name, "requests": len(next(iter(rows.values()))), "ways": result})


if __name__ == "__main__":
    main()

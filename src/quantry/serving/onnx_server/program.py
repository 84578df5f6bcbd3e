"""The program: its flags, its signals and its end."""

import argparse
import ipaddress
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import NoReturn

from quantry.errors import QuantryError

from .handler import OnnxServer
from .model import LOOK, GenaiModel

KEY = "QUANTRY_API_KEY"
GRACE = 5.0  # seconds for the last token at the end


def main(words: Sequence[str]) -> int:
    """Serves until a signal."""
    given = _parser().parse_args(words)
    key = os.environ.get(KEY) or None
    if key is None and not _is_local(given.host):
        raise QuantryError(f"--host {given.host} can be reached from outside and there is no key", fix=f"set {KEY}")
    model = GenaiModel(given.model, given.served_model_name, given.threads, given.context)
    try:
        server = OnnxServer(given.host, given.port, model, key)
    except (OSError, OverflowError) as error:
        problem = f"cannot listen on port {given.port} of {given.host}: {error}"
        raise QuantryError(problem, fix="use another --port") from error
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    print(f"onnxruntime-genai {model.version}, model {model.name!r}, context {model.context}", flush=True)
    Thread(target=server.serve_forever, daemon=True).start()
    stop.wait()
    return _end(server)


def _end(server: OnnxServer) -> int:
    server.model.ending.set()
    server.shutdown()
    server.server_close()
    end = time.monotonic() + GRACE
    while len(server.model.queue) and time.monotonic() < end:
        time.sleep(LOOK)
    server.model.close()
    return 0


def _is_local(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="onnx_server", allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--context", type=int)
    return parser


def run() -> NoReturn:
    """Serves with the words of the command line and ends the process; an error at the start is one line and code 2."""
    try:
        code = main(sys.argv[1:])
    except QuantryError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stdout.flush()
    sys.exit(code)

"""Runs in guidellm's python: reads one scenario per line of JSON from the standard input.

For every scenario it writes one line: where the report is, or what went wrong. It imports nothing of Quantry, which may
not be installed there. guidellm's worker processes import this file again, so nothing may happen at import.
"""

import asyncio
import json
import os
import sys
from importlib import import_module
from importlib.metadata import version


def main() -> None:
    """Writes the version, then runs scenarios until the input ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the libraries print goes to the log
    try:
        guidellm = import_module("guidellm.benchmark")
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=replies, flush=True)
        return
    print(json.dumps({"version": version("guidellm")}), file=replies, flush=True)
    for line in sys.stdin:
        try:
            scenario = guidellm.BenchmarkScenario.model_validate(json.loads(line))
            asyncio.run(guidellm.benchmark_generative_text(args=scenario))
            reply = {"report": str(scenario.spec.outputs[0].path)}
        except Exception as error:  # the process that sent the scenario shows it to the user
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

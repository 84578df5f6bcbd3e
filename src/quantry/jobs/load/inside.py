"""Runs inside guidellm's own python: one scenario after another, each as a line of JSON from the standard input.

For every scenario one line goes back: where its report is, or what went wrong. Nothing of Quantry is imported, since it
may not be installed here. guidellm's worker processes import this file again, so that nothing is done at import.
"""

import asyncio
import json
import os
import sys
from importlib import import_module
from importlib.metadata import version


def main() -> None:
    """Says the version, then runs what is asked until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the libraries print is log
    try:
        guidellm = import_module("guidellm.benchmark")
    except ImportError as error:
        print(json.dumps({"missing": str(error)}), file=answers, flush=True)
        return
    print(json.dumps({"version": version("guidellm")}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            asked = guidellm.BenchmarkScenario.model_validate(json.loads(line))
            asyncio.run(guidellm.benchmark_generative_text(args=asked))
            said = {"report": str(asked.spec.outputs[0].path)}
        except Exception as error:  # the process that asked says it to the user
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()

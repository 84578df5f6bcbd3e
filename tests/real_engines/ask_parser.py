"""Run in an engine's environment: which command lines its own parser takes.

    python ask_parser.py ENGINE QUESTIONS.json ANSWERS.json

A question is the list of words after the program. An answer is `error` (None if they are taken) and what was `read` out
of them, by the parser's own names. Beside them stand all `flags` of the parser, and what else the engine lists.
"""

import contextlib
import ctypes
import io
import json
import sys
from pathlib import Path
from typing import Any

SERVER_FLAGS = ["--model", "x.gguf", "--metrics"]  # of llama-server alone: --metrics
EXAMPLES = 64  # programs of llama.cpp share a parser, and the server's number changes with versions


def vllm(questions: list[list[str]]) -> dict[str, Any]:
    import dataclasses

    from vllm import envs  # type: ignore[import-not-found]
    from vllm.config import SpeculativeConfig  # type: ignore[import-not-found]
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found]

    parser = make_arg_parser(FlexibleArgumentParser())
    methods = next(action.choices for action in parser._actions if "--spec-method" in action.option_strings)
    return {
        "answers": [_argparse(parser, words) for words in questions],
        "flags": sorted(parser._option_string_actions),
        "environment": sorted(envs.environment_variables),
        "speculative": sorted(field.name for field in dataclasses.fields(SpeculativeConfig)),
        "methods": sorted(map(str, methods)),
    }


def transformers(questions: list[list[str]]) -> dict[str, Any]:
    from transformers.cli.transformers import app

    command = app.commands["serve"]  # a group of click
    names = [name for one in command.params for name in (*one.opts, *one.secondary_opts)]
    return {"answers": [_click(command, words) for words in questions], "flags": sorted(names)}


def llama_cpp(questions: list[list[str]]) -> dict[str, Any]:
    import xllamacpp

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    parse = library["_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"]
    parse.restype = ctypes.c_bool

    def ask(words: list[str], example: int) -> Any:
        params = xllamacpp.CommonParams()
        line = [word.encode() for word in ("llama-server", *words)]
        array = (ctypes.c_char_p * (len(line) + 1))(*line, None)
        taken = parse(len(line), array, ctypes.c_void_p(id(params) + object.__basicsize__), example, None)
        return params if taken else None

    number = next(number for number in range(EXAMPLES) if ask(SERVER_FLAGS, number))
    return {"answers": [_llama_cpp(ask(words, number)) for words in questions]}


def _llama_cpp(params: Any) -> dict[str, Any]:
    if params is None:
        return {"error": "refused", "read": {}}
    from xllamacpp import ggml_type

    names = ("n_ctx", "n_parallel", "n_gpu_layers", "port", "cache_prompt", "endpoint_metrics", "n_batch")
    read = {name: getattr(params, name) for name in names}
    read |= {"model": params.model.path, "host": params.hostnames[0] if params.hostnames else None}
    read |= {"k": ggml_type(params.cache_type_k).name, "v": ggml_type(params.cache_type_v).name}
    read |= {"threads": params.cpuparams.n_threads}
    return {"error": None, "read": read}


def _argparse(parser: Any, words: list[str]) -> dict[str, Any]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            read = vars(parser.parse_args(words))
    except (SystemExit, ValueError) as error:
        return {"error": said.getvalue() or str(error), "read": {}}
    return {"error": None, "read": {name: value for name, value in read.items() if _plain(value)}}


def _click(command: Any, words: list[str]) -> dict[str, Any]:
    try:
        return {"error": None, "read": command.make_context("serve", list(words)).params}
    except Exception as error:  # click is not among the requirements of whoever reads this
        return {"error": f"{type(error).__name__}: {error}", "read": {}}


def _plain(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool | dict)


if __name__ == "__main__":
    ask = {"vllm": vllm, "transformers": transformers, "llama.cpp": llama_cpp}[sys.argv[1]]
    answers = ask(json.loads(Path(sys.argv[2]).read_text()))
    Path(sys.argv[3]).write_text(json.dumps(answers, default=str))

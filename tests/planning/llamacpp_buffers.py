"""What llama.cpp allocates for a model, read from its own log; in a process of its own, since it aborts on a bad wish.

    python llamacpp_buffers.py QUESTIONS        # JSON; prints a list of sizes for each file as JSON

A wish sets fields of llama_context_params. Their places are those of xllamacpp 2026.10.11549, and the defaults found
there are checked first: another layout is an error, not a wrong number. With `dry` nothing is allocated, so that a file
may consist of its header alone.
"""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_int, c_uint8, c_uint32, c_uint64, c_void_p, cast
from pathlib import Path
from typing import Any

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8}
WORDS = {"context": 0, "batch": 1, "ubatch": 2, "sequences": 3, "outputs": 5, "flash": 13, "k": 26, "v": 27}
DEFAULTS = {1: 2048, 2: 512, 3: 1, 5: 0, 13: 0xFFFFFFFF, 26: 1, 27: 1}
SWA_FULL, UNIFIED = 140, 141  # bytes of llama_context_params
LOAD_MODE, NO_ALLOC = 6, 76  # word and byte of llama_model_params
LINES = {
    "model": r"(\S+) model buffer size = +([\d.]+) MiB",
    "compute": r"(\S+) compute buffer size = +([\d.]+) MiB",
    "output": r"(\S+) +output buffer size = +([\d.]+) MiB",
}
CACHE = r"size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers"


class Params(ctypes.Structure):
    _fields_ = (("words", c_uint32 * 256),)


Sizes = list[dict[str, Any]]


def ask(file: Path, *wishes: dict[str, Any], dry: bool = False) -> Sizes:
    """For each wish sizes in MiB: `model`, `compute`, `output` by buffer, `caches` as (MiB, cells, layers); `weights` in bytes."""
    [answers] = ask_all([(file, wishes)], dry=dry)
    return answers


def ask_all(questions: Sequence[tuple[Path, Sequence[dict[str, Any]]]], dry: bool = False) -> list[Sizes]:
    """The same of several files in one process."""
    text = json.dumps({"dry": dry, "questions": [(str(file), list(wishes)) for file, wishes in questions]})
    command = [sys.executable, __file__, text]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    answers: list[Sizes] = json.loads(done.stdout.splitlines()[-1])
    return answers


def main(questions: list[tuple[str, Sizes]], dry: bool) -> None:
    from quantry.numerics.ggml.native import library

    llama, log = library(), list[str]()
    listener = CFUNCTYPE(None, c_int, c_char_p, c_void_p)(lambda _, text, __: log.append((text or b"").decode()))
    signatures: dict[str, tuple[Any, ...]] = {
        "llama_log_set": (None, c_void_p, c_void_p),
        "llama_model_default_params": (Params,),
        "llama_context_default_params": (Params,),
        "llama_model_load_from_file": (c_void_p, c_char_p, Params),
        "llama_init_from_model": (c_void_p, c_void_p, Params),
        "llama_model_size": (c_uint64, c_void_p),
        "llama_free": (None, c_void_p),
        "llama_model_free": (None, c_void_p),
    }
    for name, (returns, *takes) in signatures.items():
        getattr(llama, name).restype, getattr(llama, name).argtypes = returns, takes
    llama.llama_log_set(cast(listener, c_void_p), None)
    llama.llama_backend_init()
    print(json.dumps([_sizes(llama, log, file, wishes, dry) for file, wishes in questions]))


def _sizes(llama: ctypes.CDLL, log: list[str], file: str, wishes: Sizes, dry: bool) -> Sizes:
    log.clear()
    model = llama.llama_model_load_from_file(file.encode(), _model_params(llama, dry))
    assert model, "".join(log)[-2000:]
    loaded, found = "".join(log), []
    for wish in wishes:
        log.clear()
        context = llama.llama_init_from_model(model, _context_params(llama, wish))
        assert context, "".join(log)[-2000:]
        text = loaded + "".join(log)
        sizes = {name: {key: float(size) for key, size in re.findall(line, text)} for name, line in LINES.items()}
        caches = [(float(size), int(cells), int(layers)) for size, cells, layers in re.findall(CACHE, text)]
        found.append({**sizes, "caches": caches, "weights": llama.llama_model_size(model)})
        llama.llama_free(context)
    llama.llama_model_free(model)
    return found


def _model_params(llama: ctypes.CDLL, dry: bool) -> Params:
    params: Params = llama.llama_model_default_params()
    if dry:
        flags = cast(ctypes.pointer(params), POINTER(c_uint8))
        assert flags[NO_ALLOC - 2] == 1, "the layout of llama_model_params has changed"
        assert flags[NO_ALLOC] == 0, "the layout of llama_model_params has changed"
        flags[NO_ALLOC], params.words[LOAD_MODE] = 1, 0
    return params


def _context_params(llama: ctypes.CDLL, wish: dict[str, Any]) -> Params:
    params: Params = llama.llama_context_default_params()
    for place, value in DEFAULTS.items():
        assert params.words[place] == value, f"the layout of llama_context_params has changed at word {place}"
    flags = cast(ctypes.pointer(params), POINTER(c_uint8))
    flags[SWA_FULL], flags[UNIFIED] = 0, bool(wish.pop("unified", False))  # as the server has it
    kv = TYPES[wish.pop("kv", "f16")]
    for name, value in {"k": kv, "v": kv, **wish}.items():
        params.words[WORDS[name]] = value
    return params


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

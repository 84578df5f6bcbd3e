"""llama.cpp's own server in this process: OpenAI API, streaming, continuous batching, prompt cache, metrics.

    python -m quantry.serving.embedded --model FILE.gguf --port 8080 --parallel 4 ...

The words are those of `llama-server`, and they are read by llama.cpp's own parser: the library inside xllamacpp has it,
and `CommonParams` is the very structure that it fills. So every flag of that version is taken, means what it means
there, and is refused in the same words. Quantry adds `--end-with-stdin`, which ends the server
when its standard input ends, so that it does not outlive the process that started it.

Three things differ. Pages of other sites may not use a server without a key, unless `--cors-origins` says so. The log
of the start gives the sizes of all buffers; afterwards it is as verbose as that of `llama-server`. And requests may
take four fifths of the memory that is free when the model is loaded: a JSON schema with `"minItems": 1000000000`
would take all of the machine's. llama.cpp ends itself where it gets no more.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import c_bool, c_char_p, c_int, c_int32, c_void_p
from functools import cache, partial
from pathlib import Path
from threading import Event, Thread
from typing import Any, NoReturn

from quantry.devices.host import memory
from quantry.errors import QuantryError
from quantry.storage.address_space import mapped_bytes

END = "--end-with-stdin"
PARSE = "_Z19common_params_parseiPPcR13common_params13llama_examplePFviS0_E"  # common_params_parse, in llama.cpp
TELL = "_Z30common_log_set_verbosity_tholdi"  # common_log_set_verbosity_thold
EXAMPLES = 64  # programs that the parser knows flags of are numbered, and the server's number changes with versions
LOCAL = "localhost"  # pages of this machine; llama.cpp's own default lets any page use a server without a key
SIZES = 4  # the level of the log that tells the sizes of buffers
MARK = 1_234_567_891
PAUSE = 5.0  # seconds between two times that freed memory is given back
SHARE = 0.8  # of the free memory that requests may take
HEADER = range(16, 128, 4)  # bytes of a Python object within which its own data begin


def main(words: Sequence[str]) -> int:
    """Serves until a signal, or with `--end-with-stdin` until the standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # while the model loads Python does not run, and could not end it
    params = parse([word for word in words if word != END])
    if not params.cors_origins_explicit and not params.api_keys:
        params.cors_origins = LOCAL
    level = params.verbosity
    params.verbosity = max(level, SIZES)
    server = _serve(params)
    _leave_memory()
    _library()[TELL](level)
    stop = Event()
    for number in (signal.SIGINT, signal.SIGTERM):  # llama.cpp has set its own, which would end its loop but not this
        signal.signal(number, lambda *_: stop.set())
    if END in words:
        Thread(target=_until_the_end, args=(stop,), daemon=True).start()
    trim = _trimmer()
    while not stop.wait(PAUSE):
        trim()
    del server  # joins its threads
    return 0


def parse(words: Sequence[str]) -> Any:
    """Parses the words of `llama-server` into xllamacpp's parameters.

    Raises QuantryError if llama.cpp refuses them; its reason is on standard error.
    """
    params = _parsed(words, _server_number())
    if params is None:
        raise QuantryError("llama.cpp does not take these flags", fix="see its words above, or llama-server --help")
    return params


def build() -> str:
    """Returns the build of llama.cpp inside xllamacpp: the last number of that package's version."""
    from importlib.metadata import version

    return f"b{version('xllamacpp').rpartition('.')[2]}"


def _serve(params: Any) -> Any:
    import xllamacpp

    try:
        return xllamacpp.Server(params)
    except RuntimeError as error:
        raise QuantryError(f"llama.cpp does not serve {params.model.path}", fix="see its words above") from error


def _trimmer() -> Callable[[], object]:
    """Returns a function that gives back what requests have freed; glibc keeps it, 5.6 GB after bodies of 50 MB."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries do so by themselves
    return (lambda: None) if trim is None else partial(trim, 0)


def _leave_memory() -> None:
    """Keeps requests from taking all memory of the machine; does nothing where the system does not tell of it."""
    mapped, (_, hard) = mapped_bytes(), resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):
        if mapped:
            most = mapped + int(memory()[1] * SHARE)
            resource.setrlimit(resource.RLIMIT_AS, (most if hard < 0 else min(most, hard), hard))


def _parsed(words: Sequence[str], example: int) -> Any:
    """Returns the parameters, or None if the parser refuses the words."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    line = [b"llama-server", *(os.fsencode(word) for word in words)]
    argv = (c_char_p * (len(line) + 1))(*line, None)
    return params if _library()[PARSE](len(line), argv, _address(params), example, None) else None


def _address(params: Any) -> int:
    """Returns the address of llama.cpp's structure in the Python object: it begins with n_predict, which is marked."""
    usual = params.n_predict
    params.n_predict = MARK
    addresses = [id(params) + offset for offset in HEADER if c_int32.from_address(id(params) + offset).value == MARK]
    params.n_predict = usual
    if not addresses:
        raise _other_library("its parameters are laid out in another way")
    return addresses[0]


@cache
def _server_number() -> int:
    """Returns the number of the server in the parser: with it, the parser takes flags that no other program has."""
    with _silence():
        flags = ["--port", "1", "--slots"]
        server = next((number for number in range(EXAMPLES) if _parsed(flags, number) is not None), None)
    if server is None:
        raise _other_library("its parser knows no server")
    return server


@contextmanager
def _silence() -> Iterator[None]:
    """Discards what C code writes to the standard streams."""
    kept = {number: os.dup(number) for number in (1, 2)}
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in kept:
            os.dup2(nothing, number)
        yield
    finally:
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)
        os.close(nothing)


@cache
def _library() -> dict[str, Any]:
    """Returns the two functions of llama.cpp that xllamacpp has no Python for."""
    import xllamacpp.xllamacpp as extension

    library = ctypes.CDLL(str(Path(extension.__file__)))
    takes = {PARSE: [c_int, c_void_p, c_void_p, c_int, c_void_p], TELL: [c_int]}
    functions = {name: getattr(library, name, None) for name in takes}
    for name, function in functions.items():
        if function is None:
            raise _other_library("it does not give out its parser")
        function.argtypes, function.restype = takes[name], c_bool if name == PARSE else None
    return functions


def _other_library(what: str) -> QuantryError:
    return QuantryError(
        f"the llama.cpp of this xllamacpp cannot be used as a server: {what}",
        fix="pip install -U xllamacpp quantry, or name a llama-server with --engine-bin",
    )


def _until_the_end(stop: Event) -> None:
    while os.read(0, 4096):
        pass
    stop.set()


def _program() -> NoReturn:
    try:
        code = main(sys.argv[1:])
    except QuantryError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.exit(code)


if __name__ == "__main__":
    _program()

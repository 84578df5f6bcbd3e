"""A GGUF file loaded by llama.cpp itself, through the C API of the library inside xllamacpp: tokens and logits.

Parameter structs change from version to version, but they are passed in memory: each is declared larger than it is and
filled with llama.cpp's own defaults. Of the fields, the first is set, which never moved; and the types of the KV cache,
which are found by their defaults and confirmed by what llama.cpp then logs.
"""

import ctypes
import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_uint32, c_void_p
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import numpy as np
from numpy.typing import NDArray

from quantry.errors import CheckpointError, ModelNotFoundError, QuantryError

PIECE = 512  # tokens decoded at once: more would cost llama.cpp as many rows of logits
ERROR = 4  # of enum ggml_log_level
MIB = 1 << 20
BUFFER = re.compile(
    r"(?P<buffer>REPACK model|model|KV|RS|compute|output) buffer size = +(?P<size>[\d.]+) MiB"
)  # in its log
CACHE = re.compile(r"K \((?P<keys>\w+)\): .*V \((?P<values>\w+)\):")  # in its log: the types of a KV cache
HALF = "f16"  # the KV cache unless another is asked for
F16 = 1  # of enum ggml_type
CACHE_FIELDS = (0, 0, 0, 0, F16, F16)  # words of a context's default parameters: two null pointers, then K and V
BUFFERS = {  # its name -> ours
    "model": "weights",
    "REPACK model": "repacked",  # copies in another order, for its kernels
    "KV": "kv_cache",
    "RS": "kv_cache",
    "compute": "compute",
    "output": "output",
}


class _Params(ctypes.Structure):
    """llama_model_params or llama_context_params, whose first 32-bit word is n_ctx; both are shorter than this."""

    _fields_ = (("words", c_uint32 * 256),)


class LlamaBatch(ctypes.Structure):
    """llama_batch: without positions and sequence ids llama.cpp appends to sequence 0."""

    _fields_ = (
        ("count", c_int32),
        ("tokens", POINTER(c_int32)),
        ("embeddings", c_void_p),
        ("positions", c_void_p),
        ("sequence_counts", c_void_p),
        ("sequences", c_void_p),
        ("wanted", POINTER(c_int8)),  # 1 for each token whose logits are wanted
    )


FUNCTIONS: dict[str, tuple[Any, ...]] = {  # the type each returns, then those it takes
    "llama_backend_init": (None,),
    "llama_log_set": (None, c_void_p, c_void_p),
    "llama_model_default_params": (_Params,),
    "llama_context_default_params": (_Params,),
    "llama_model_load_from_file": (c_void_p, c_char_p, _Params),
    "llama_init_from_model": (c_void_p, c_void_p, _Params),
    "llama_set_n_threads": (None, c_void_p, c_int32, c_int32),
    "llama_n_ctx": (c_uint32, c_void_p),
    "llama_n_batch": (c_uint32, c_void_p),
    "llama_model_get_vocab": (c_void_p, c_void_p),
    "llama_vocab_n_tokens": (c_int32, c_void_p),
    "llama_vocab_is_eog": (c_bool, c_void_p, c_int32),
    "llama_model_chat_template": (c_char_p, c_void_p, c_char_p),
    "llama_tokenize": (c_int32, c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool),
    "llama_detokenize": (c_int32, c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool),
    "llama_get_memory": (c_void_p, c_void_p),
    "llama_memory_clear": (None, c_void_p, c_bool),
    "llama_decode": (c_int32, c_void_p, LlamaBatch),
    "llama_get_logits": (POINTER(c_float), c_void_p),
    "llama_free": (None, c_void_p),
    "llama_model_free": (None, c_void_p),
}


class LlamaModel:
    """A model loaded by llama.cpp; every call starts from an empty context.

        with LlamaModel("model.gguf") as model:
            logits = model.logits(model.tokenize("Once upon a time"))

    `cache` is the type of K and V in its context: f16, q8_0, q4_0, ... `memory` has the bytes that llama.cpp reported
    when it loaded: `weights`, copies of them in another order (`repacked`), `kv_cache`, `compute` and `output`. Raises
    ModelNotFoundError if there is no such file, CheckpointError if llama.cpp cannot load it, and QuantryError if it has
    no such cache for the model.
    """

    def __init__(
        self,
        path: Path | str,
        context: int = 512,
        threads: int | None = None,
        library: ctypes.CDLL | None = None,
        *,
        cache: str = HALF,
        weights: "_Weights | None" = None,  # of another context, which are loaded already
    ) -> None:
        self.path = Path(path)
        self._api = library or api()
        _log.clear()
        _sizes.clear()
        params = _context_params(self._api, context, cache)
        self._weights = weights or _Weights(self._api, self.path)
        self._context = self._weights.open(params, cache)
        self._release = finalize(self, self._weights.close, self._context)
        self._threads = threads or os.cpu_count() or 1
        self.memory = _memory()
        self._api.llama_set_n_threads(self._context, self._threads, self._threads)
        self._vocabulary = self._api.llama_model_get_vocab(self._weights.model)
        self._template = self._api.llama_model_chat_template(self._weights.model, None)
        self.context = int(self._api.llama_n_ctx(self._context))
        self.vocabulary = int(self._api.llama_vocab_n_tokens(self._vocabulary))

    def beside(self, cache: str) -> "LlamaModel":
        """Returns a second context of the same weights with another type of KV cache; `memory` is its own alone."""
        self._open()
        return LlamaModel(self.path, self.context, self._threads, self._api, cache=cache, weights=self._weights)

    @property
    def chat_template(self) -> str | None:
        return None if self._template is None else self._template.decode()

    def tokenize(self, text: str, special: bool = True) -> list[int]:
        """Returns token ids, with the model's first and last token if `special`; spelled-out ones are recognized."""
        self._open()
        data = text.encode()
        fill = partial(self._api.llama_tokenize, self._vocabulary, data, len(data))
        tokens = (c_int32 * -fill(None, 0, special, True))()  # without room it returns minus the room it needs
        return list(tokens[: fill(tokens, len(tokens), special, True)])

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, special ones spelled out."""
        self._open()
        fill = partial(self._api.llama_detokenize, self._vocabulary, self._checked(tokens), len(tokens))
        text = ctypes.create_string_buffer(1 - fill(None, 0, False, True))
        size = fill(text, len(text), False, True)
        return text.raw[:size].decode(errors="replace")

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the logits after each token, as (tokens, vocabulary)."""
        logits = np.empty((len(tokens), self.vocabulary), np.float32)
        for start, rows in self.logits_by_piece(tokens):
            logits[start : start + len(rows)] = rows
        return logits

    def logits_by_piece(self, tokens: Sequence[int]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        """Yields the first place and the logits of one piece of the tokens after the other, in bounded memory.

        The logits are valid until the next piece.
        """
        self._start(tokens, len(tokens))
        for start, piece in self._pieces(tokens):
            yield start, self._decode(piece, all_logits=True)

    def generate(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns the likeliest next tokens, at most `count`, without the token that ends the text."""
        self._start(tokens, len(tokens) + count)
        generated: list[int] = []
        for _, piece in self._pieces(tokens):
            last = self._decode(piece, all_logits=False)
        while len(generated) < count:
            token = int(last[0].argmax())
            if self._api.llama_vocab_is_eog(self._vocabulary, token):
                break
            generated.append(token)
            last = self._decode([token], all_logits=False)
        return generated

    def close(self) -> None:
        """Frees the memory; a second call does nothing."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        if not self._release.alive:
            raise ValueError(f"{self.path} is closed")

    def _start(self, tokens: Sequence[int], total: int) -> None:
        """Empties the context; raises QuantryError if the tokens do not fit."""
        self._open()
        self._checked(tokens)
        if not 0 < total <= self.context or not tokens:
            raise QuantryError(
                f"{len(tokens)} tokens, {total} with the answer, do not fit a context of 1 to {self.context}",
                fix="give fewer tokens, at least one, or open the model with a larger context",
            )
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _checked(self, tokens: Sequence[int]) -> "ctypes.Array[c_int32]":
        unknown = next((token for token in tokens if not 0 <= token < self.vocabulary), None)
        if unknown is not None:
            raise QuantryError(
                f"token {unknown} is not in the vocabulary of {self.vocabulary} tokens of {self.path.name}",
                fix="use the tokenizer of this model",
            )
        return (c_int32 * len(tokens))(*tokens)

    def _pieces(self, tokens: Sequence[int]) -> list[tuple[int, Sequence[int]]]:
        size = min(PIECE, self._api.llama_n_batch(self._context))
        return [(start, tokens[start : start + size]) for start in range(0, len(tokens), size)]

    def _decode(self, tokens: Sequence[int], all_logits: bool) -> NDArray[np.float32]:
        """Appends tokens and returns the logits after each, or after the last; they are valid until the next call."""
        count = len(tokens)
        wanted = (c_int8 * count)(*([all_logits] * (count - 1)), True)
        batch = LlamaBatch(count=count, tokens=(c_int32 * count)(*tokens), wanted=wanted)
        _log.clear()
        if self._api.llama_decode(self._context, batch):
            raise _refused(self.path, f"does not take {count} tokens")
        rows = self._api.llama_get_logits(self._context)
        return np.ctypeslib.as_array(rows, (count if all_logits else 1, self.vocabulary))


class _Weights:
    """The weights of a model, which its contexts share; they are freed with the last of these."""

    def __init__(self, api: ctypes.CDLL, file: Path) -> None:
        if not file.is_file():
            raise ModelNotFoundError(f"{file} is not a file", fix="give the path of a GGUF file")
        self.api, self.file, self.contexts = api, file, 0
        self.model = api.llama_model_load_from_file(os.fsencode(file), api.llama_model_default_params())
        if not self.model:
            raise _refused(file, "does not load")

    def open(self, params: _Params, cache: str) -> int:
        """Opens a context, whose KV cache must come out in that type. Raises QuantryError if there is none."""
        _caches.clear()
        context: int | None = self.api.llama_init_from_model(self.model, params)
        if not context:
            self._free_unused()
            raise _no_context(self.file, params.words[0], cache)
        self.contexts += 1
        if cache != HALF and set(_caches) != {cache}:
            self.close(context)
            raise QuantryError(
                f"llama.cpp gives {self.file.name} a KV cache of {' and '.join(sorted(set(_caches))) or 'no type'}, "
                f"not of {cache}",
                fix="choose another type, or install the version of xllamacpp that constraints.txt names",
            )
        return context

    def close(self, context: int) -> None:
        """Frees a context, and with the last one the weights."""
        self.api.llama_free(context)
        self.contexts -= 1
        self._free_unused()

    def _free_unused(self) -> None:
        if self.contexts == 0:
            self.api.llama_model_free(self.model)


def _context_params(api: ctypes.CDLL, tokens: int, cache: str) -> _Params:
    """Returns llama.cpp's own parameters of a context, with its length and the type of K and V."""
    params: _Params = api.llama_context_default_params()
    params.words[0] = tokens
    if cache == HALF:
        return params
    from quantry.numerics.ggml.native import NUMBERS

    number, width, words = NUMBERS.get(cache.upper()), len(CACHE_FIELDS), params.words[:]
    place = next((at for at in range(len(words) - width) if tuple(words[at : at + width]) == CACHE_FIELDS), None)
    if number is None or place is None:
        raise QuantryError(f"llama.cpp has no KV cache of type {cache[:40]!r} here", fix="use q8_0 or q4_0")
    params.words[place + width - 2] = params.words[place + width - 1] = number
    return params


_log: deque[str] = deque(maxlen=16)  # the last errors that llama.cpp logged
_sizes: list[tuple[str, float]] = []  # the buffers that it logged since the last load began, in MiB
_caches: list[str] = []  # the types of K and V that it logged for the context it opened last


def _listen(level: int, text: bytes | None, _: Any) -> None:
    """Receives llama.cpp's log instead of the terminal; keeps errors, to explain a failure, and sizes of buffers."""
    words = (text or b"").decode(errors="replace").strip()
    if level == ERROR and words:
        _log.append(words)
    elif line := BUFFER.search(words):
        _sizes.append((BUFFERS[line["buffer"]], float(line["size"])))
    elif line := CACHE.search(words):
        _caches.extend((line["keys"], line["values"]))


def _memory() -> dict[str, int]:
    """Returns the bytes of all buffers by name, as exactly as MiB with two digits give them."""
    names = dict.fromkeys(name for name, _ in _sizes)
    return {name: round(MIB * sum(size for other, size in _sizes if other == name)) for name in names}


_listener = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)(_listen)  # must live as long as the library


@cache
def api() -> ctypes.CDLL:
    """Loads the library once."""
    from quantry.numerics.ggml.native import library

    return declared(library())


def declared(native: ctypes.CDLL) -> ctypes.CDLL:
    """Declares the functions of the library, silences its log and starts it."""
    for name, (returns, *takes) in FUNCTIONS.items():
        function = getattr(native, name, None)
        if function is None:
            raise QuantryError(f"the library of xllamacpp has no {name}", fix="pip install -U xllamacpp")
        function.restype, function.argtypes = returns, takes
    native.llama_log_set(ctypes.cast(_listener, c_void_p), None)
    native.llama_backend_init()
    return native


def _refused(file: Path, what: str, fix: str = "write the file again, or update xllamacpp") -> CheckpointError:
    words = next(iter(_log), "it gives no reason")  # later errors only say that loading failed
    reason = re.sub(r"^(\w+: |error loading model: )+", "", words)  # without the names of its functions
    return CheckpointError(f"{file} {what} in llama.cpp: {reason}", fix=fix)


def _no_context(file: Path, tokens: int, cache: str) -> CheckpointError:
    what = f"gets no context of {tokens} tokens"
    if cache == HALF:
        return _refused(file, what)
    return _refused(file, f"{what} with a KV cache of {cache}", "choose another type of cache, or a shorter context")

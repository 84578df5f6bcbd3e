"""The tokenizer of a checkpoint as the key-values `tokenizer.*` of a GGUF file, as llama.cpp's converter writes them.

The keys, and which tokens count as control tokens, depend on the architecture. A tokenizer that llama.cpp cannot
reproduce is refused with the reason.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf

from quantry.errors import CheckpointError
from quantry.llamacpp import bytelevel, sentencepieces
from quantry.llamacpp.tokens import TokenizerFiles, Tokens, files_of

OTHER_FILES = ("tekken.json", "tiktoken.model", "qwen.tiktoken", "vocab.json", "vocab.txt", "spiece.model")
CODE_LLAMA, STARCODER = 32016, 49152  # vocabulary sizes by which the converter recognizes them
CODE_LLAMA_IDS = {"prefix": 32007, "suffix": 32008, "middle": 32009, "eot": 32010}
GEMMA_IDS = {"prefix": 67, "suffix": 69, "middle": 68, "fsep": 70, "eot": 107}
LLAMAS = (
    "LlamaForCausalLM",
    "LLaMAForCausalLM",
    "LlamaModel",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Ministral3ForCausalLM",
    "SmolLM3ForCausalLM",
    "ArceeForCausalLM",
    "ApertusForCausalLM",
    "GraniteForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM",
)
GEMMAS = ("GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")
Route = Callable[[gguf.GGUFWriter, TokenizerFiles], None]
PHIS = ("Phi3ForCausalLM", "PhiMoEForCausalLM")


def describe(writer: gguf.GGUFWriter, folder: Path, config: Mapping[str, Any]) -> None:
    """Adds the tokenizer's key-values; there are as many tokens as the config's vocab_size.

    Raises CheckpointError if the tokenizer files are missing, damaged or not of a type that llama.cpp runs.
    """
    files = files_of(folder, config)
    try:
        with _quiet():
            route(files.architecture)(writer, files)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"the tokenizer files in {folder} are damaged ({type(error).__name__}: {str(error)[:80]})",
            fix="copy them again from the original checkpoint",
        ) from error


def _plain(writer: gguf.GGUFWriter, files: TokenizerFiles) -> None:
    if (model := sentencepieces.load(files)) is not None:
        _add_pieces(writer, files, sentencepieces.from_model(files, model))
        return
    if not files.has("tokenizer.json"):
        raise _missing(files)
    if bytelevel.is_byte_level(files.tokenizer):
        _add_byte_level(writer, files)
        return
    if not sentencepieces.prepends_space(files.tokenizer) and not _says(writer, gguf.Keys.Tokenizer.ADD_PREFIX):
        writer.add_add_space_prefix(False)
    _add_pieces(writer, files, sentencepieces.from_merges(files))


def _llama(writer: gguf.GGUFWriter, files: TokenizerFiles) -> None:
    if (prefix := files.settings.get("add_prefix_space")) is not None:
        writer.add_add_space_prefix(prefix)
    _plain(writer, files)
    if files.size == CODE_LLAMA:
        _add_special(writer, files, ids=CODE_LLAMA_IDS)
    if files.size == STARCODER:
        writer.add_add_bos_token(False)


def _gemma(writer: gguf.GGUFWriter, files: TokenizerFiles) -> None:
    _plain(writer, files)
    if files.architecture == "GemmaForCausalLM":
        _add_special(writer, files, ids=GEMMA_IDS, template=False)
    if not _says(writer, gguf.Keys.Tokenizer.ADD_PREFIX):
        writer.add_add_space_prefix(False)


def _phi3(writer: gguf.GGUFWriter, files: TokenizerFiles) -> None:
    if (model := sentencepieces.load(files)) is not None:
        _add_pieces(writer, files, sentencepieces.from_model(files, model, phi3=True))
    else:  # Phi-4
        _plain(writer, files)


ROUTES: Mapping[str, Route] = {
    **dict.fromkeys(LLAMAS, _llama),
    **dict.fromkeys(GEMMAS, _gemma),
    **dict.fromkeys(PHIS, _phi3),
}


def route(architecture: str) -> Route:
    """Returns the function that adds the vocabulary of an architecture."""
    return ROUTES.get(architecture, _plain)


def _add_pieces(writer: gguf.GGUFWriter, files: TokenizerFiles, tokens: Tokens) -> None:
    tokens.check()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens.texts)
    writer.add_token_scores(tokens.scores)
    writer.add_token_types(tokens.types)
    _add_special(writer, files, size=tokens.size)


def _add_byte_level(writer: gguf.GGUFWriter, files: TokenizerFiles) -> None:
    tokens, pre_tokenizer = bytelevel.read(files)
    tokens.check()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer.name)
    writer.add_token_list(tokens.texts)
    writer.add_token_types(tokens.types)
    _add_special(writer, files, merges=True)
    if pre_tokenizer.bos and not _says(writer, gguf.Keys.Tokenizer.ADD_BOS):
        writer.add_add_bos_token(False)


def _add_special(
    writer: gguf.GGUFWriter,
    files: TokenizerFiles,
    *,
    merges: bool = False,
    size: int | None = None,
    ids: Mapping[str, int] | None = None,
    template: bool = True,
) -> None:
    """Adds merges, special tokens and chat template as the gguf library finds them; `ids` are fixed by a family."""
    special = gguf.SpecialVocab(files.folder, load_merges=merges, special_token_types=ids and list(ids), n_vocab=size)
    for name, number in (ids or {}).items():
        special.special_token_ids.setdefault(name, number)
    if not template:
        special.chat_template = None
    special.add_to_gguf(writer, quiet=True)


def _says(writer: gguf.GGUFWriter, key: str) -> bool:
    return any(key in part for part in writer.kv_data)


def _missing(files: TokenizerFiles) -> CheckpointError:
    other = next((name for name in OTHER_FILES if files.has(name)), None)
    if other is None:
        problem, fix = "neither tokenizer.json nor tokenizer.model", "copy the tokenizer's files into it"
    else:
        problem, fix = f"a tokenizer only as {other}", "save it with transformers, which writes tokenizer.json"
    return CheckpointError(f"{files.folder} has {problem}", fix=fix)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the gguf library, which warns about usual things such as a second key of one name."""
    logger = logging.getLogger("gguf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)

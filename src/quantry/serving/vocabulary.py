"""The tokens of a model to serve: a draft must have those of the model, or each of its guesses is another word."""

from collections.abc import Mapping

from quantry.errors import QuantryError
from quantry.models import gguf
from quantry.models.attention import text_config
from quantry.models.files import SMALL_FILE_LIMIT, LocalFiles
from quantry.serving.select import ServedModel
from quantry.storage.reading import read_json

PADDING = 128  # tokens by which vocabularies may differ at their end, as in llama.cpp (SPEC_VOCAB_MAX_SIZE_DIFFERENCE)


def check_draft(model: ServedModel, draft: ServedModel) -> None:
    """Raises QuantryError if the tokens of a draft are not those of the model; what cannot be read is not compared."""
    ours, theirs = _tokens(model), _tokens(draft)
    if not ours or not theirs:
        sizes = [_size(model), _size(draft)]
    else:
        sizes, both = [len(ours), len(theirs)], min(len(ours), len(theirs))
        different = sum(one != other for one, other in zip(ours[:both], theirs[:both], strict=True))
        if different > PADDING:
            raise _refusal(model, draft, f"{different:,} of its first {both:,} tokens are others")
    if sizes[0] and sizes[1] and abs(sizes[0] - sizes[1]) > PADDING:
        raise _refusal(model, draft, f"it has {sizes[1]:,} tokens and the model {sizes[0]:,}")


def _refusal(model: ServedModel, draft: ServedModel, why: str) -> QuantryError:
    return QuantryError(
        f"the draft {draft.source} has another vocabulary than {model.source}: {why}",
        fix="use a smaller model of the same family",
    )


def _tokens(model: ServedModel) -> list[str]:
    """Returns the tokens of a model by number; none if they are not in a GGUF file or a tokenizer.json."""
    try:
        if model.format == "gguf":
            header = gguf.read_shards(LocalFiles(model.path.parent), model.path.name, whole=True)
            return [str(token) for token in header.metadata.get("tokenizer.ggml.tokens") or ()]
        content = read_json(model.path / "tokenizer.json", fix="copy it", limit=SMALL_FILE_LIMIT)
    except QuantryError:
        return []
    inner = content.get("model")
    known = inner.get("vocab") if isinstance(inner, Mapping) else None
    if not isinstance(known, Mapping):
        return []
    return sorted(known, key=lambda token: known[token] if isinstance(known[token], int) else 0)


def _size(model: ServedModel) -> int | None:
    size = text_config(model.checkpoint.config).get("vocab_size") if model.checkpoint else None
    return size if isinstance(size, int) else None

"""The anatomy of a model: its parts and their sizes, from headers alone."""

from collections import Counter
from pathlib import Path

from quantry.errors import CheckpointError
from quantry.models.already_quantized import check_sixteen_bit, quantization, weights_of
from quantry.models.attention import block_count, context_length, kv_layers
from quantry.models.parts import ORDER, decoder_block, part_of
from quantry.models.reader import open_checkpoint
from quantry.types import Anatomy, Checkpoint, Part


def inspect(model: str | Path) -> Anatomy:
    """Reads the headers of `model` (a folder, a GGUF file, a hub id or `demo`) and returns its anatomy.

    Raises ModelNotFoundError, CheckpointError or ConfigError if it cannot be read.
    """
    return dissect(open_checkpoint(model))


def dissect(checkpoint: Checkpoint) -> Anatomy:
    """Returns the anatomy of an open checkpoint."""
    blocks = block_count(checkpoint.config)
    cache = kv_layers(checkpoint.config)
    parts = _parts(checkpoint, blocks)
    tied = _tied_head(checkpoint, parts)
    parameters = sum(part.parameters for part in parts)
    nbytes = sum(part.bytes for part in parts)
    names = checkpoint.config.get("architectures")
    return Anatomy(
        source=checkpoint.source,
        format=checkpoint.format,
        architecture=str(names[0] if isinstance(names, list) and names else checkpoint.config.get("model_type")),
        parameters=parameters,
        bytes=nbytes,
        bits_per_weight=round(8 * nbytes / parameters, 4) if parameters else 0.0,
        tensors=len(checkpoint.tensors),
        blocks=blocks,
        context_length=context_length(checkpoint.config),
        kv_bytes_per_token=sum(layers.bytes_per_token for layers in cache),
        kv_layers=cache,
        parts=parts,
        tied_head=tied,
        quantization=quantization(checkpoint),
        tokenizer=checkpoint.tokenizer,
        chat_template=checkpoint.chat_template,
    )


def _parts(checkpoint: Checkpoint, blocks: int) -> tuple[Part, ...]:
    """Sums tensors by part; a head that is stored although tied adds bytes but no parameters."""
    tied = bool(checkpoint.config.get("tie_word_embeddings"))
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    dtypes: dict[str, Counter[str]] = {}
    for tensor in checkpoint.tensors:
        part = part_of(tensor.name, blocks)
        tensors[part] += 1
        dtypes.setdefault(part, Counter())[tensor.dtype] += tensor.nbytes
        if part != "buffers" and not (tied and part == "head"):
            parameters[part] += weights_of(checkpoint, tensor)
    return tuple(
        Part(part, tensors[part], parameters[part], sum(dtypes[part].values()), dict(dtypes[part]))
        for part in ORDER
        if part in dtypes
    )


def _tied_head(checkpoint: Checkpoint, parts: tuple[Part, ...]) -> bool:
    """Returns True if the embedding serves as the head; GGUF then leaves the head out."""
    if checkpoint.format == "gguf":
        return all(part.name != "head" for part in parts)
    tied = checkpoint.config.get("tie_word_embeddings")
    return bool(tied) if tied is not None else all(part.name != "head" for part in parts)


def check_blocks(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if the config has more layers than the checkpoint: it would be built for minutes first."""
    blocks = block_count(checkpoint.config)
    present = {index for tensor in checkpoint.tensors if (index := decoder_block(tensor.name, blocks)) is not None}
    if len(present) < blocks:
        raise CheckpointError(
            f"the config of {checkpoint.source} has {blocks} layers and its weights {len(present)}",
            fix="copy config.json, or the weights, from the original model",
        )


def sixteen_bit(checkpoint: Checkpoint) -> Anatomy:
    """Returns the anatomy of a 16-bit checkpoint. Raises CheckpointError for a quantized one."""
    check_sixteen_bit(checkpoint)
    return dissect(checkpoint)

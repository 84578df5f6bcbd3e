"""A GGUF file from a 16-bit checkpoint: which tensors of which types it will have, and its header.

Headers and small files determine all of it: the type of each tensor is llama.cpp's own choice for the file type
(llamacpp/mixture.py) unless a rule of the recipe names one, and key-values come from config and tokenizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from quantry.errors import RecipeError
from quantry.llamacpp import mixture
from quantry.llamacpp.families import facts
from quantry.llamacpp.importance import Importance
from quantry.llamacpp.tensor_map import Target, family, targets
from quantry.models.attention import block_count
from quantry.models.caching import per_checkpoint
from quantry.models.gguf import block_sizes
from quantry.models.reader import IMPORTANCE, small_folder
from quantry.models.writer import Entry, nbytes
from quantry.quantizing.recipe import Recipe
from quantry.quantizing.tensor_plan import DTYPE_NAMES, STORED, GgufTensor, TensorPlan, main_dtype
from quantry.storage.temporary import temporary_folder
from quantry.types import Checkpoint, Grid, GridKind, Scheme

CALIBRATION = "calibration"  # a folder of its own: engines and people take the one .gguf file of a folder for the model
ALIGNMENT = 32
SHARD_BYTES = 40 << 30  # llama.cpp reads one file of any size, hubs take 50 GB
FLOATS = {"F32": 32, "F16": 16, "BF16": 16}
KeyValues = dict[str, Any]


def plan_gguf(checkpoint: Checkpoint, recipe: Recipe) -> TensorPlan:
    """Decides the tensors of the file and the fate of every source tensor.

    Raises RecipeError for a rule that matches nothing, CheckpointError and ConfigError as tensor_map.py does.
    """
    planned, kept = _targets(checkpoint)
    fates = dict(kept)
    dtype = DTYPE_NAMES[main_dtype(checkpoint)]
    kinds = _kinds(checkpoint, recipe, planned, STORED[dtype])
    stored = {tensor.name: tensor.dtype for tensor in checkpoint.tensors}
    for target in planned:
        for source in target.sources:
            fates[source.name] = _fate(stored[source.name], kinds[target.name], target)
    assignment = {name: _scheme(kind) for name, kind in kinds.items() if kind not in FLOATS}
    pieces = tuple(GgufTensor(target, kinds[target.name]) for target in planned)
    return TensorPlan(dtype, pieces, fates, assignment, (), block_count(checkpoint.config))


@per_checkpoint(4)
def _targets(checkpoint: Checkpoint) -> tuple[Sequence[Target], Mapping[str, str]]:
    return targets(checkpoint.config, checkpoint.tensors)


def describe(
    checkpoint: Checkpoint,
    recipe: Recipe,
    plan: TensorPlan,
    importance: Importance | None,
    computed: bytes | None = None,
    small: Path | None = None,
) -> "GgufFile":
    """Writes the file's key-values from config and tokenizer; `computed` is an importance matrix to store beside it."""
    from gguf import GGUFWriter

    from quantry.llamacpp import metadata, vocabulary

    assert recipe.preset.file_type is not None
    name = small.name if small else _name(checkpoint.source)
    writer = GGUFWriter(path=None, arch=family(checkpoint.config).architecture)
    planned = [piece.target for piece in plan.gguf_tensors()]
    with nullcontext(small) if small else small_folder(checkpoint, name) as folder:
        number = mixture.FILE_TYPES[recipe.preset.file_type].number
        metadata.describe(writer, folder, checkpoint.config, planned, name, number)
        vocabulary.describe(writer, folder, checkpoint.config)
    if importance:
        _note_importance(writer, importance)
    companions = {} if computed is None else {f"{CALIBRATION}/{IMPORTANCE}": computed}
    label = recipe.name if recipe.budget else recipe.preset.file_type.upper()
    return GgufFile(f"{name}-{label}", writer.kv_data[0], companions)


class GgufFile:
    """The container: key-values and the table of tensors, then the data, in one file or several."""

    alignment = ALIGNMENT
    shard_bytes = SHARD_BYTES

    def __init__(self, stem: str, key_values: KeyValues, companions: Mapping[str, bytes]) -> None:
        self._stem, self._key_values, self._companions = stem, key_values, companions

    def shard_name(self, number: int, count: int) -> str:
        return f"{self._stem}.gguf" if count == 1 else f"{self._stem}-{number + 1:05d}-of-{count:05d}.gguf"

    def header(self, number: int, cut: Sequence[Sequence[Entry]]) -> bytes:
        """Returns magic, key-values and tensor table; of several files only the first has all key-values."""
        from gguf import GGMLQuantizationType, GGUFWriter
        from numpy import dtype

        writer = GGUFWriter(path=None, arch="")
        writer.kv_data = [dict(self._key_values) if number == 0 else {}]
        if len(cut) > 1:
            writer.add_uint16("split.no", number)
            writer.add_uint16("split.count", len(cut))
            writer.add_int32("split.tensors.count", sum(len(entries) for entries in cut))
        for name, kind, shape in cut[number]:
            writer.add_tensor_info(name, shape, dtype("f4"), nbytes(kind, shape), GGMLQuantizationType[kind])
        with temporary_folder() as folder:
            path = folder / "header.gguf"
            writer.write_header_to_file(path)
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            writer.close()
            data = path.read_bytes()
        return data + bytes(-len(data) % ALIGNMENT)

    def companions(self, cut: Sequence[Sequence[Entry]]) -> Iterator[tuple[str, bytes]]:
        """Yields the importance matrix, if one was computed; the model itself needs no other file."""
        return iter(self._companions.items())


def _name(source: str) -> str:
    """Returns the model's name: that of its folder, or on the hub."""
    path = Path(source).expanduser()
    return path.resolve().name if path.exists() else path.name.partition("@")[0]


def _kinds(checkpoint: Checkpoint, recipe: Recipe, planned: Sequence[Target], plain: str) -> dict[str, str]:
    assert recipe.preset.file_type is not None
    shapes = {target.name: target.shape for target in planned}
    overrides = [(rule.match, rule.type or plain) for rule in recipe.rules]
    for pattern, _ in overrides:
        if not any(fnmatchcase(name, pattern) for name in shapes):
            raise RecipeError(
                f"rule {pattern!r} matches no tensor", fix=f"names are like {max(shapes, key=len)} or {min(shapes)}"
            )
    known = facts(checkpoint.config)
    model = mixture.MixedModel(
        architecture=family(checkpoint.config).architecture,
        layers=known["num_hidden_layers"],
        heads=known["num_attention_heads"],
        kv_heads=known["num_key_value_heads"],
        experts=known.get("num_experts") or 0,
        importance=recipe.imatrix is not None,
    )
    keep = {target.name for target in planned if target.float32}
    choices = mixture.types(recipe.preset.file_type, model, shapes, keep=keep, plain=plain, overrides=overrides)
    return {name: choice.stored for name, choice in choices.items()}


def _fate(stored: str, kind: str, target: Target) -> str:
    if kind not in FLOATS:
        return f"quantized: {kind}"
    return "kept" if stored == kind and not target.add else f"cast: {stored} to {kind}"


def _scheme(kind: str) -> Scheme:
    name, weights, _ = next(row for row in block_sizes().values() if row[0] == kind)
    grid: GridKind = name.lower()  # type: ignore[assignment]
    return Scheme(Grid(grid, bits_of(name), (1, weights), scale="f16"))


def bits_of(kind: str) -> int:
    """Returns the bits in the name of a ggml type: 4 of Q4_K."""
    return int(kind.lstrip("IQ")[0])


def _note_importance(writer: Any, importance: Importance) -> None:
    writer.add_string("quantize.imatrix.file", importance.file)
    if importance.dataset:
        writer.add_string("quantize.imatrix.dataset", importance.dataset)
    writer.add_uint32("quantize.imatrix.entries_count", len(importance.vectors))
    if importance.chunks:
        writer.add_uint32("quantize.imatrix.chunks_count", importance.chunks)

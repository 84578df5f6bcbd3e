"""`quantry merge`: a base and an adapter become one 16-bit checkpoint, with the loop of quantizing."""

from collections.abc import Callable, Iterator, Mapping
from hashlib import file_digest
from pathlib import Path
from typing import Any

from torch import Tensor

from quantry.errors import CheckpointError, RecipeError
from quantry.models.adapter import WEIGHTS, Adapter, changes, open_adapter
from quantry.models.already_quantized import quantization
from quantry.models.anatomy import check_blocks, dissect
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.models.weights import MappedWeights
from quantry.models.workspace import check_room, check_target, recover
from quantry.quantizing import card
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.containers.folder import SHARD_BYTES, SafetensorsFolder, files_beside, small_files
from quantry.quantizing.merged import MergedWeights, merged_checkpoint, tokenizer_files
from quantry.quantizing.origin import MERGED
from quantry.quantizing.pipeline import WriteJob, write
from quantry.quantizing.recipe import CAST, Preset, Recipe
from quantry.quantizing.tensor_plan import KeptTensor, Piece, TensorPlan, main_dtype
from quantry.storage import ARTEFACT_FILE
from quantry.storage.reading import read_json
from quantry.types import Artefact, Checkpoint, Grid, Progress, Scheme, TensorInfo

TRAINING = "quantry-adapt.json"  # what `quantry adapt` leaves beside an adapter
SETTINGS = ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save")
UNTIED = "The head has weights of its own now: the adapter changes it and the embedding in different ways."


def merge(
    base: str | Path,
    adapter: str | Path,
    output: str | Path,
    *,
    dry_run: bool = False,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    announce: Callable[[Artefact], None] | None = None,
    progress: Progress | None = None,
) -> Artefact:
    """Writes the 16-bit model `base` with the LoRA `adapter`, a folder of peft, merged into its weights, to `output`.

    LoRA, rsLoRA, DoRA, patterns of rank and alpha, biases, modules trained whole, added and trained tokens are merged;
    a tied head gets weights of its own only where the adapter needs it. A killed job that is run again goes on where it
    stopped, and ends with the same bytes. With `dry_run` it only says what it would write. An output that the same job
    has finished is returned as it is; `overwrite` replaces an artefact.

    Raises QuantryError for a base that is quantized, or an adapter that does not fit it, is damaged or is no LoRA.
    """
    out = Path(output).expanduser()
    if not overwrite:
        recover(out)
    check_target(out, artefact=True)
    job = Merging(base, open_adapter(adapter), out)
    if not overwrite and (out / ARTEFACT_FILE).is_file():
        return card.finished(job.planned, job.recipe, job.plan, job.source)
    if announce:
        announce(job.planned)
    check_room(out, {"the weights": job.plan.bytes, "the files beside them": files_beside(job.checkpoint)})
    return job.planned if dry_run else job.run(shard_bytes, progress, overwrite=overwrite)


class Merging:
    """A merge that was checked; `planned` says what it will write."""

    def __init__(self, base: str | Path, adapter: Adapter, out: Path) -> None:
        checkpoint = open_checkpoint(base)
        _check_base(checkpoint)
        check_blocks(checkpoint)
        found = changes(adapter, checkpoint)
        self.folder = local_folder(base)
        self.source = identity(open_checkpoint(self.folder))
        training = _training(adapter)
        _check_trained_on(adapter, training, self.source, str(base))
        self.checkpoint, self._adapter = checkpoint, adapter
        merged = merged_checkpoint(checkpoint, found)
        self.plan = _plan(merged, set(found.by_tensor))
        self._facts = _facts(adapter, training)
        self.recipe = Recipe(_preset(f"{self._facts['name']} (sha256 {self._facts['sha256']})", self.plan.dtype), CAST)
        planned = card.plan(str(base), out, self.recipe, dissect(merged), self.plan)
        self.planned = card.finish(planned, {}, (UNTIED,) if found.head else ())
        self._config = merged.config
        self._maker = _Maker(merged, MergedWeights(checkpoint, MappedWeights(self.folder), adapter, found))

    def run(self, shard_bytes: int | None, progress: Progress | None, *, overwrite: bool = False) -> Artefact:
        """Writes the merged checkpoint."""
        small = dict(small_files(self.folder)) | tokenizer_files(self._adapter.folder)
        container = SafetensorsFolder(small.items(), self._config, self.plan.dtype)
        job = WriteJob(
            self.checkpoint, self.folder, self.recipe, self.plan, self.planned, container,
            shard_bytes or SHARD_BYTES, self.source, overwrite=overwrite, adapter=self._facts,
        )  # fmt: skip
        return write(job, self._maker, progress=progress)


class _Maker:
    """Makes the tensors of the merged model."""

    def __init__(self, merged: Checkpoint, weights: MergedWeights) -> None:
        self._tensors = {tensor.name: tensor for tensor in merged.tensors}
        self._weights = weights

    def make(self, piece: Piece, known: BlockInputs | None = None) -> Iterator[tuple[str, Tensor]]:
        yield piece.name, self._weights.get(self._tensors[piece.name])

    def release(self, piece: Piece) -> None:
        self._weights.release(self._tensors[piece.name])

    def notes(self) -> tuple[str, ...]:
        return ()


def _plan(merged: Checkpoint, changed: set[str]) -> TensorPlan:
    pieces = tuple(map(_piece, merged.tensors))
    fates = {tensor.name: "merged" if tensor.name in changed else "kept" for tensor in merged.tensors}
    return TensorPlan(main_dtype(merged).lower(), pieces, fates, {}, ())


def _piece(tensor: TensorInfo) -> KeptTensor:
    return KeptTensor(tensor.name, tensor.name, (tensor.name, tensor.dtype, tensor.shape))


def _preset(name: str, dtype: str) -> Preset:
    scheme = Scheme(Grid("f16" if dtype == "f16" else "bf16", 16))
    return Preset(MERGED, f"The adapter {name} merged into its base", scheme, (CAST,))


def _facts(adapter: Adapter, training: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what quantry.json records of an adapter: its name, bytes and settings, and the data it was trained on."""
    with (adapter.folder / WEIGHTS).open("rb") as file:
        digest = file_digest(file, "sha256").hexdigest()
    settings = {key: adapter.config[key] for key in SETTINGS if adapter.config.get(key)}
    data = training.get("data")
    trained_on = {"data": data} if isinstance(data, dict) else {}
    return {"name": adapter.folder.resolve().name, "sha256": digest, "settings": settings, **trained_on}


def _check_base(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a quantized base: rounded sums lose what was trained."""
    if checkpoint.format == "gguf" or quantization(checkpoint) is not None:
        raise CheckpointError(
            f"{checkpoint.source} is quantized, and an adapter merged into its codes would be rounded with them",
            fix="merge into the 16-bit original, then quantize the result",
        )


def _training(adapter: Adapter) -> dict[str, Any]:
    """Returns what `quantry adapt` has recorded of an adapter; nothing for one of another tool."""
    file = adapter.folder / TRAINING
    return read_json(file, fix="remove it, or train the adapter again", error=RecipeError) if file.is_file() else {}


def _check_trained_on(adapter: Adapter, training: Mapping[str, Any], source: str, base: str) -> None:
    """Raises CheckpointError if the adapter says that it was trained on other weights."""
    trained_on = training.get("base")
    known: dict[str, Any] = trained_on if isinstance(trained_on, dict) else {}
    if known.get("identity", source) != source:
        raise CheckpointError(
            f"{adapter.folder} was trained on other weights than {base}", fix=f"give its base, {known.get('name')}"
        )

"""Opening a checkpoint from what the user wrote: finds it and reads its headers and small files, but no weights."""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from quantry.errors import CheckpointError, ConfigError, ModelNotFoundError
from quantry.models import gguf, safetensors
from quantry.models.config_numbers import check_numbers
from quantry.models.files import SMALL_FILE_LIMIT, CheckpointFiles, LocalFiles, read_small
from quantry.models.hub import HUB_ID, HubFiles
from quantry.storage.reading import parse_object
from quantry.storage.temporary import temporary_folder
from quantry.types import Checkpoint

DEMO = "demo"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt")
SMALL = (".json", ".jinja", ".model", ".txt", "README.md")
IMPORTANCE = "imatrix.gguf"  # a GGUF file without a model
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Opens `model`: a folder, a .gguf file, `owner/name[@revision][:file.gguf]` on the hub, or `demo`.

    Raises ModelNotFoundError if it does not exist, HubError if the hub refuses, CheckpointError or ConfigError if it is
    damaged.
    """
    path = _path(model)
    try:
        hub = None if path.exists() else HUB_ID.fullmatch(str(model))
    except OSError as error:
        raise ModelNotFoundError(f"cannot look at {path}: {error.strerror}", fix="check the path") from error
    if path.is_file():
        return _open_gguf(LocalFiles(path.parent), path.name, str(model))
    if path.is_dir():
        return _open_folder(LocalFiles(path), str(model))
    if hub is None:
        raise _not_found(path)
    files = HubFiles(hub["repo"], hub["revision"])
    return _open_gguf(files, hub["file"], str(model)) if hub["file"] else _open_folder(files, str(model))


def is_on_hub(model: str | Path) -> bool:
    """Says if a name is that of a model on a hub, and of nothing on this machine."""
    try:
        return not _path(model).exists() and HUB_ID.fullmatch(str(model)) is not None
    except OSError:
        return False


def local_folder(model: str | Path) -> Path:
    """Returns the folder (or GGUF file) of a model; downloads one on the hub first, and resumes a download."""
    path = _path(model)
    hub = None if path.exists() else HUB_ID.fullmatch(str(model))
    if hub is None:
        if not path.exists():
            raise _not_found(path)
        return path
    files = HubFiles(hub["repo"], hub["revision"])
    return files.download([hub["file"]] if hub["file"] else None)


@contextmanager
def small_folder(checkpoint: Checkpoint, name: str) -> Iterator[Path]:
    """Yields the folder of a checkpoint; for one on a hub, a temporary folder `name` with its small files."""
    local = _path(checkpoint.source)
    if local.is_dir():
        yield local
        return
    with temporary_folder() as parent:
        for file, size in checkpoint.files.items():
            if file.endswith(SMALL) and size <= SMALL_FILE_LIMIT and not file.endswith(".index.json"):
                path = parent / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(checkpoint.read(file, 0, size))
        yield parent / name


def demo_folder() -> Path:
    """Returns the folder of the model that ships with the package."""
    return Path(str(package_files("quantry"))) / "demo"


def _path(model: str | Path) -> Path:
    return demo_folder() if model == DEMO else Path(model).expanduser()


def _open_folder(files: CheckpointFiles, source: str) -> Checkpoint:
    names = set(files.sizes)
    ggufs = sorted(name for name in names if name.endswith(".gguf") and not name.endswith(IMPORTANCE))
    if any(name.endswith(".safetensors") for name in names) or safetensors.INDEX_FILE in names:
        return _open_safetensors(files, source)
    if len(ggufs) == 1 or (ggufs and all(gguf.SHARD.fullmatch(name) for name in ggufs)):
        return _open_gguf(files, ggufs[0], source)
    if ggufs:
        separator = ":" if isinstance(files, HubFiles) else "/"
        raise ModelNotFoundError(
            f"{source} holds {len(ggufs)} GGUF files", fix=f"name one, for example {source}{separator}{ggufs[0]}"
        )
    pickles = sorted(name for name in names if name.endswith(PICKLES))
    if pickles:
        raise CheckpointError(
            f"{source} holds only pickled weights ({pickles[0]}), which can run code when loaded",
            fix="save the model as safetensors with save_pretrained(safe_serialization=True)",
        )
    raise ModelNotFoundError(
        f"{source} holds no weights (*.safetensors or *.gguf)", fix="give the folder of config.json and the weights"
    )


def _open_safetensors(files: CheckpointFiles, source: str) -> Checkpoint:
    tensors = safetensors.read_tensors(files)
    config = _read_json(files, "config.json", fix="copy it from the original model")
    check_numbers(config, f"{files.label}/config.json")
    return Checkpoint(
        source=source,
        format="safetensors",
        files=files.sizes,
        tensors=tensors,
        config=config,
        tokenizer=next((name for name in TOKENIZERS if name in files.sizes), None),
        chat_template=_has_chat_template(files),
        read=files.read,
    )


def _open_gguf(files: CheckpointFiles, name: str, source: str) -> Checkpoint:
    if name not in files.sizes:
        raise ModelNotFoundError(f"{files.label} has no file {name}", fix="check the name after ':'")
    if name.endswith((".safetensors", *PICKLES)):
        raise ModelNotFoundError(f"{source} is one file of a checkpoint", fix="give its folder")
    header = gguf.read_shards(files, name)
    vocabulary = header.metadata.get("tokenizer.ggml.model")
    return Checkpoint(
        source=source,
        format="gguf",
        files={file: files.sizes[file] for file in {tensor.file for tensor in header.tensors} | {name}},
        tensors=header.tensors,
        config=gguf.config_of(header.metadata),
        tokenizer=f"gguf:{vocabulary}" if isinstance(vocabulary, str) else None,
        chat_template=isinstance(header.metadata.get("tokenizer.chat_template"), str),
        read=files.read,
        metadata=header.metadata,
    )


def _read_json(files: CheckpointFiles, name: str, fix: str) -> dict[str, Any]:
    if name not in files.sizes:
        raise ConfigError(f"{files.label} has no {name}", fix=fix)
    return parse_object(read_small(files, name), f"{files.label}/{name}", fix=fix, error=ConfigError)


def _has_chat_template(files: CheckpointFiles) -> bool:
    if "chat_template.jinja" in files.sizes or "chat_template.json" in files.sizes:
        return True
    if "tokenizer_config.json" not in files.sizes:
        return False
    return bool(_read_json(files, "tokenizer_config.json", fix="copy it from the original model").get("chat_template"))


def _not_found(path: Path) -> ModelNotFoundError:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = get_close_matches(path.name, siblings, n=1)
    hint = f"did you mean {path.parent / close[0]}?" if close else "give a folder, a .gguf file, owner/name or demo"
    return ModelNotFoundError(f"no such model: {path}", fix=hint)

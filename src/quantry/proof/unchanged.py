"""A proof is about the bytes that were measured: no verdict is given on a model whose files change meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantry.errors import CheckpointError
from quantry.storage import ARTEFACT_FILE

PARTS = (".safetensors", ".gguf", ".bin", ".json", ".model", ".jinja")  # files that a model is read from
Stamp = tuple[int, int, int]  # the file itself, its size, and when it was last written


@contextmanager
def unchanged(*models: str) -> Iterator[None]:
    """Raises CheckpointError at the end of the block if a file of a model was written, replaced or removed in it."""
    paths = [path for path in (Path(model).expanduser() for model in models) if path.exists()]
    before = [_stamps(path) for path in paths]
    yield
    for path, old in zip(paths, before, strict=True):
        new = _stamps(path)
        if changed := sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)):
            raise CheckpointError(
                f"{path} changed while it was measured: {', '.join(changed[:3])}",
                fix="wait until nothing writes to it, and verify it again",
            )


def _stamps(path: Path) -> dict[str, Stamp]:
    """Returns the state of each file of a model; a verdict that another process records is no change."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in PARTS]
    stamps = {}
    for file in files:
        if file.name != ARTEFACT_FILE and file.is_file():
            facts = file.stat()
            stamps[file.name] = (facts.st_ino, facts.st_size, facts.st_mtime_ns)
    return stamps

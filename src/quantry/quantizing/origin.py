"""The 16-bit model that an artefact was made from.

An artefact names it without a path: a path would tell of the machine. Where a local model is, the cache remembers by
the model's identity. Whatever is found is taken only if it is that very model.
"""

from contextlib import suppress
from pathlib import Path

from quantry.errors import QuantryError
from quantry.models.identity import identity
from quantry.models.reader import local_folder, open_checkpoint
from quantry.quantizing.artefact_file import read_artefact_file
from quantry.storage import ARTEFACT_FILE, home, write_atomically

FOLDER = "origins"
DEMO = "demo"
MERGED = "merged"  # the preset that `quantry merge` records


def remember(model: str | Path, digest: str) -> None:
    """Keeps the place of a local model in the cache; a cache that cannot be written keeps nothing."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        with suppress(OSError):
            place = home() / FOLDER
            place.mkdir(parents=True, exist_ok=True)
            write_atomically(place / digest, str(folder.resolve()).encode())


def origin_of(artefact: str | Path, how: str = "with --reference") -> str:
    """Returns the model that an artefact was made from: `demo`, a hub id or a folder.

    `how` says where a user names another one.
    Raises QuantryError if the artefact does not say, or if its model is not here any more.
    """
    folder = local_folder(artefact)
    folder = folder if folder.is_dir() else folder.parent
    if not (folder / ARTEFACT_FILE).is_file():
        if inside := sorted(file.parent for file in folder.glob(f"*/{ARTEFACT_FILE}")):
            raise QuantryError(f"{artefact} is no artefact", fix=f"give the one in it: {inside[0]}")
        raise QuantryError(f"{artefact} does not say which model it was made from", fix=f"name the 16-bit model {how}")
    note = read_artefact_file(folder)
    name, digest = str(note.get("source", "")), str(note.get("source_identity", ""))
    if name == DEMO or name.count("/") == 1:
        return name
    for place in (_remembered(digest), folder.parent / name, Path(name)):
        if place is not None and place.is_dir() and place.resolve() != folder.resolve() and _is(place, digest):
            return str(place) if _is_trained(place) else origin_of(place, how)
    raise QuantryError(f"the model {name!r} that {artefact} was made from is not found", fix=f"name its folder {how}")


def _remembered(digest: str) -> Path | None:
    with suppress(OSError, ValueError):
        if digest.isalnum():
            return Path((home() / FOLDER / digest).read_text(encoding="utf-8"))
    return None


def _is_trained(folder: Path) -> bool:
    """Says if a folder is a model of its own: nothing of Quantry's, or an adapter merged into its base."""
    return not (folder / ARTEFACT_FILE).is_file() or read_artefact_file(folder).get("preset") == MERGED


def _is(folder: Path, digest: str) -> bool:
    try:
        return identity(open_checkpoint(folder)) == digest
    except (QuantryError, OSError):
        return False

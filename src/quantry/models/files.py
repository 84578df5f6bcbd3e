"""The bytes of a checkpoint: one small protocol for a folder and for a hub repository."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from quantry.errors import CheckpointError

SMALL_FILE_LIMIT = 64 << 20  # config.json, index and tokenizer files; the largest tokenizer.json known is 33 MB


class CheckpointFiles(Protocol):
    """Named byte ranges: `sizes` lists the files; `read` returns exactly the bytes requested, or raises."""

    label: str

    @property
    def sizes(self) -> Mapping[str, int]: ...

    def read(self, name: str, start: int, length: int) -> bytes: ...


class LocalFiles:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.label = str(folder)
        self._folder = folder
        try:
            self.sizes: Mapping[str, int] = {
                file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()
            }
        except OSError as error:
            raise CheckpointError(f"cannot list {folder}: {error.strerror}", fix="check its permissions") from error

    def read(self, name: str, start: int, length: int) -> bytes:
        try:
            with (self._folder / name).open("rb") as file:
                file.seek(start)
                data = file.read(length)
        except OSError as error:
            raise CheckpointError(
                f"cannot read {self._folder / name}: {error.strerror}", fix="check that the file exists and is readable"
            ) from error
        return whole(data, name, start, length)


def whole(data: bytes, name: str, start: int, length: int) -> bytes:
    """Returns the data. Raises CheckpointError if it is shorter than `length`."""
    if len(data) != length:
        raise CheckpointError(
            f"{name} ends at byte {start + len(data)} but {start + length} are needed",
            fix="the file is truncated: download or copy it again",
        )
    return data


def read_small(files: CheckpointFiles, name: str) -> bytes:
    """Returns the content of a small file. Raises CheckpointError, before reading, if it is too large."""
    size = files.sizes[name]
    if size > SMALL_FILE_LIMIT:
        raise CheckpointError(
            f"{name} has {size} bytes, more than the {SMALL_FILE_LIMIT} such a file can have",
            fix="replace it with the original file",
        )
    return files.read(name, 0, size)

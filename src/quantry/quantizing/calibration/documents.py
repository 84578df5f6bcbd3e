"""Opens the documents that calibration text is drawn from; each is read when it is asked for."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from quantry.errors import QuantryError
from quantry.models.reader import DEMO, demo_folder

LINES = (".jsonl", ".ndjson")
BUILT_IN = "calibration.txt"
BLANK = re.compile(r"\n[ \t\r]*\n\s*")
SHAPES = '"text", "messages", "conversations", or "prompt" and "completion"'

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Documents:
    """Documents by number."""

    name: str
    kind: str  # text, jsonl, parquet, datasets
    count: int
    read: Callable[[int], str | Record]


def open_documents(data: str | Path | None) -> Documents:
    """Opens a text file, JSON lines, a parquet file or a folder of one of these; None is the text of the package.

    Raises QuantryError if it cannot be read.
    """
    if data is None or str(data) == DEMO:
        return _open_text(demo_folder() / BUILT_IN)
    path = Path(data).expanduser()
    if not path.exists():
        raise QuantryError(f"there is no {path}", fix="give a text file, JSON lines, parquet or a folder of datasets")
    if path.is_dir():
        return _open_folder(path)
    if path.suffix in LINES:
        return _open_lines(path)
    if path.suffix == ".parquet":
        return _open_parquet([path], path.name)
    if path.suffix == ".json":
        return _open_json(path)
    return _open_text(path)


def _open_text(path: Path) -> Documents:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error, "give a text file in UTF-8") from error
    documents = [part for part in BLANK.split(text) if part.strip()]
    return Documents(path.name, "text", len(documents), documents.__getitem__)


def _open_lines(path: Path) -> Documents:
    """Opens JSON lines; only the drawn ones are parsed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error, "check the file") from error
    lines = [(number, line) for number, line in enumerate(data.splitlines()) if line.strip()]

    def read(index: int) -> Record:
        number, line = lines[index]
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _unreadable(path, error, f"line {number + 1} must be one JSON object") from error
        if not isinstance(record, dict):
            raise QuantryError(
                f"{path.name}, line {number + 1} is a JSON {type(record).__name__}", fix=f"records need {SHAPES}"
            )
        return record

    return Documents(path.name, "jsonl", len(lines), read)


def _open_json(path: Path) -> Documents:
    """Opens a JSON list of records, or JSON lines under that name."""
    try:
        records = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return _open_lines(path)
    except OSError as error:
        raise _unreadable(path, error, "check the file") from error
    many = [records] if isinstance(records, dict) else records
    if not isinstance(many, list) or not all(isinstance(record, dict) for record in many):
        raise QuantryError(f"{path.name} is no list of records", fix=f"records need {SHAPES}")
    return Documents(path.name, "jsonl", len(many), many.__getitem__)


def _open_folder(path: Path) -> Documents:
    saved = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
    tables = sorted(path.glob("**/*.parquet"))
    if saved:
        return _open_saved(path)
    if tables:
        return _open_parquet(tables, path.name)
    raise QuantryError(
        f"{path} holds no data set", fix="give a folder written by save_to_disk, one with parquet files, or a file"
    )


def _open_saved(path: Path) -> Documents:
    datasets = _library("datasets", str(path))
    try:
        saved: Any = datasets.load_from_disk(str(path))
    except Exception as error:  # of many libraries
        raise _unreadable(path, error, "save the data set again with save_to_disk") from error
    if isinstance(saved, datasets.DatasetDict):
        saved = saved["train"] if "train" in saved else saved[sorted(saved)[0]]
    return Documents(path.name, "datasets", len(saved), saved.__getitem__)


def _open_parquet(tables: Sequence[Path], name: str) -> Documents:
    arrow, parquet = _library("pyarrow", name), _library("pyarrow.parquet", name)
    try:
        table: Any = arrow.concat_tables([parquet.read_table(path) for path in tables])
    except Exception as error:  # of many libraries
        raise _unreadable(tables[0], error, "write the file again") from error
    return Documents(name, "parquet", table.num_rows, lambda row: table.slice(row, 1).to_pylist()[0])


def _library(module: str, wanted_by: str) -> Any:
    name = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        raise QuantryError(
            f"{wanted_by} needs the {name} library, which is not installed",
            fix=f"pip install {name}, or give JSON lines",
        ) from error


def _unreadable(path: Path, error: Exception, fix: str) -> QuantryError:
    reason = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    return QuantryError(f"{path.name} cannot be read: {str(reason)[:120]}", fix=fix)

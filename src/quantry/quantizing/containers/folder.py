"""The container of most formats: a Hugging Face folder of safetensors shards, with config, index and tokenizer."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from quantry.models.safetensors import INDEX_FILE
from quantry.models.writer import Entry, safetensors_header
from quantry.quantizing.tensor_plan import entry_bytes
from quantry.storage import ARTEFACT_FILE
from quantry.types import Checkpoint

SHARD_BYTES = 4 << 30
NAMED = 256  # bytes of a tensor's name in headers, in the index and in quantry.json
COPIED = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.py", "merges.txt", "vocab.txt", "LICENSE*", "NOTICE*")
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}


def files_beside(checkpoint: Checkpoint) -> int:
    """Returns the bytes beside the weights: copied files, and headers, index and quantry.json, which name tensors."""
    copied = (size for name, size in checkpoint.files.items() if any(fnmatch(name, pattern) for pattern in COPIED))
    return sum(copied) + NAMED * len(checkpoint.tensors)


def small_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Reads what is copied from a checkpoint: tokenizer, chat template, generation config, processor, licence."""
    for pattern in COPIED:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and file.name not in ("config.json", ARTEFACT_FILE, INDEX_FILE):
                yield file.name, file.read_bytes()


class SafetensorsFolder:
    """Shards with a config and `small` files; `settings` becomes config.json's quantization_config."""

    alignment = 1
    shard_bytes = SHARD_BYTES

    def __init__(
        self,
        small: Iterable[tuple[str, bytes]],
        config: Mapping[str, Any],
        dtype: str,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._small, self._config, self._dtype, self._settings = small, config, dtype, settings

    def shard_name(self, number: int, count: int) -> str:
        return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def header(self, number: int, cut: Sequence[Sequence[Entry]]) -> bytes:
        return safetensors_header(cut[number], {"format": "pt"})

    def companions(self, cut: Sequence[Sequence[Entry]]) -> Iterator[tuple[str, bytes]]:
        """Yields the files beside the shards."""
        yield from self._small
        if len(cut) > 1:
            yield INDEX_FILE, json.dumps(self._index(cut), indent=2).encode()
        yield "config.json", json.dumps(self._new_config(), indent=2).encode()

    def _index(self, cut: Sequence[Sequence[Entry]]) -> dict[str, Any]:
        places = {
            name: self.shard_name(number, len(cut)) for number, entries in enumerate(cut) for name, _, _ in entries
        }
        return {"metadata": {"total_size": sum(map(entry_bytes, cut))}, "weight_map": places}

    def _new_config(self) -> dict[str, Any]:
        config = {key: value for key, value in self._config.items() if key != "quantization_config"}
        for key in [name for name in ("dtype", "torch_dtype") if name in config] or ["dtype"]:  # the name before 2025
            config[key] = DTYPES[self._dtype]
        if self._settings is not None:
            config["quantization_config"] = dict(self._settings)
        return config

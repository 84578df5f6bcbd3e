"""A GGUF file written again with other key-values, by the format's own library."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf


def changed_gguf(source: Path, out: Path, changes: Mapping[str, Any]) -> Path:
    """Writes `out` from `source`, with these values of keys; None leaves a key out."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or (name in changes and changes[name] is None):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, changes.get(name, field.contents()), kind, inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out

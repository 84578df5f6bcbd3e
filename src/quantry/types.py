"""The shared nouns. Plain frozen data: every package may import this file, and it imports none of them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any, Literal

LayerKind = Literal["full", "sliding", "mla", "recurrent"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor as its file's header describes it; no data is read."""

    name: str
    dtype: str  # as the format spells it: "BF16", "F8_E4M3", "Q4_K", ...
    shape: tuple[int, ...]  # outermost dimension first, in GGUF too
    file: str
    start: int  # byte offset in the file
    nbytes: int

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk or on a hub, by its headers and small files.

    `config` speaks the language of Hugging Face's config.json whatever the format; `metadata` is what the format itself
    carries (GGUF key-values). `read(file, start, length)` gives bytes of any of its `files`.
    """

    source: str
    format: Literal["safetensors", "gguf"]
    files: Mapping[str, int]  # name -> size in bytes
    tensors: tuple[TensorInfo, ...]
    config: Mapping[str, Any]
    tokenizer: str | None
    chat_template: bool
    read: Callable[[str, int, int], bytes] = field(repr=False, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint is already quantized; `bits` is the nominal width of a quantized weight."""

    method: str
    bits: float
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of thing in a model: all embeddings, all attention projections, all norms, ..."""

    name: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]  # stored dtype -> bytes


@dataclass(frozen=True, slots=True)
class KVLayers:
    """The layers that keep their past in the same way, and what a 16-bit cache costs them together."""

    kind: LayerKind
    layers: int
    bytes_per_token: int
    window: int | None = None  # tokens kept by a sliding layer
    state_bytes: int | None = None  # constant size of a recurrent layer's state; None when unknown or not recurrent


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What `quantry inspect` knows of a model. Field names are the JSON names."""

    source: str
    format: str
    architecture: str
    parameters: int  # tied weights once; packed weights by what they stand for; scales and buffers not at all
    bytes: int
    bits_per_weight: float
    tensors: int
    blocks: int
    context_length: int | None
    kv_bytes_per_token: int
    kv_layers: tuple[KVLayers, ...]
    parts: tuple[Part, ...]
    tied_head: bool
    quantization: Quantization | None
    tokenizer: str | None
    chat_template: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

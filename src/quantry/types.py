"""The shared nouns: plain frozen data that every room may import; this file imports none of them."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[int, int, str], None]  # done, in all, what is in hand; the unit is the caller's
LayerKind = Literal["full", "sliding", "mla", "recurrent"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor, as the header of its file describes it."""

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

    `config` has the keys of Hugging Face's config.json whatever the format; `metadata` holds the format's own (GGUF
    key-values). `read(file, start, length)` returns bytes of any of its `files`.
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
    """How a checkpoint is quantized; `bits` is the nominal width of a quantized weight."""

    method: str
    bits: float
    group_size: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """All tensors of one kind in a model: embeddings, attention projections, norms, ..."""

    name: str
    tensors: int
    parameters: int
    bytes: int
    dtypes: Mapping[str, int]  # stored dtype -> bytes


@dataclass(frozen=True, slots=True)
class KVLayers:
    """Layers with the same kind of cache, and what a 16-bit cache costs them together."""

    kind: LayerKind
    layers: int
    bytes_per_token: int
    window: int | None = None  # tokens kept by a sliding layer
    state_bytes: int | None = None  # constant size of a recurrent layer's state; None when unknown or not recurrent


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What `quantry inspect` reports of a model. Field names are the JSON names."""

    source: str
    format: str
    architecture: str
    parameters: int  # tied weights count once, packed weights by what they stand for, scales and buffers not at all
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


GridKind = Literal[
    "int", "e4m3", "e5m2", "e2m1", "nf4", "fp4", "bf16", "f16",
    "q8_0", "q6_k", "q5_k", "q5_0", "q5_1", "q4_k", "q4_0", "q4_1", "q3_k", "q2_k", "iq4_nl", "iq4_xs",
]  # fmt: skip
ScaleType = Literal["f32", "f16", "bf16", "e8m0", "e4m3"]


@dataclass(frozen=True, slots=True)
class Grid:
    """The values a weight or an activation may take, and how many of them share a scale.

    `block` is the (rows, columns) that share one scale, 0 meaning all of them: (0, 0) the tensor, (1, 0) a channel or a
    token, (1, 64) a group, (128, 128) a block. `e2m1` with `e8m0` scales is MXFP4; with `e4m3` scales and one float32
    scale for the whole tensor it is NVFP4. `nf4` and `fp4` are bitsandbytes' code books over the flattened tensor;
    `nested` quantizes their scales as well. `bf16` and `f16` are plain casts without a scale. The names of ggml's block
    types stand for their whole layout, including scales of scales.
    """

    kind: GridKind
    bits: int
    block: tuple[int, int] = (1, 0)
    symmetric: bool = True
    scale: ScaleType = "bf16"
    nested: bool = False

    @property
    def is_cast(self) -> bool:
        return self.kind in ("bf16", "f16")

    @property
    def spans_tensor(self) -> bool:
        """Says if a scale covers the whole tensor; layers that an engine fuses must share it."""
        return self.block == (0, 0) or self.scale == "e4m3"


@dataclass(frozen=True, slots=True)
class Activation:
    """How an engine quantizes the input of a layer; `dynamic` means that it computes scales while it runs."""

    grid: Grid
    dynamic: bool = True


@dataclass(frozen=True, slots=True)
class Scheme:
    """The grid of a linear layer's weight, and of its input if that is quantized too."""

    weight: Grid
    activation: Activation | None = None

    @property
    def static(self) -> Activation | None:
        """How the input is quantized, if with a stored scale."""
        return None if self.activation is None or self.activation.dynamic else self.activation


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """Scales that are quantized themselves, as in bitsandbytes: value = table[code] * absmax[block] + offset."""

    codes: "Tensor"  # uint8, one a scale
    absmax: "Tensor"  # float32, one for `block` scales
    offset: float
    block: int = 256


@dataclass(frozen=True, slots=True, eq=False)
class Params:
    """A fit's result for a weight: scales in their stored dtype, zero points, outer scales.

    `scale` has the shape (rows / block rows, columns / block columns), rounded up; for nf4 and fp4 it is flat and holds
    the values that the nested codes decode to. e8m0 scales are uint8 exponents.
    """

    scale: "Tensor"
    zero: "Tensor | None" = None  # int8 like the codes, same shape as scale; None on a symmetric grid
    outer: "Tensor | None" = None  # NVFP4's float32 divisor: effective scale = scale / outer
    nested: Nested | None = None


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A quantized weight with one code per weight, not packed. Rounders make it, formats store it.

    Codes: `int` int8 in [-2**(bits-1), 2**(bits-1) - 1], weight = (code - zero) * scale; e4m3 and e5m2 the torch float8
    dtypes; e2m1 uint8 0..15 (sign in bit 3); nf4 and fp4 uint8 indices into the code book, in the shape of the weight.
    """

    grid: Grid
    codes: "Tensor"
    params: Params
    input_scale: "Tensor | None" = None  # (1,), of a layer whose input is quantized with a stored scale

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.codes.shape)


@dataclass(frozen=True, slots=True, eq=False)
class Stats:
    """Statistics of one input that some linear layers share; `gram` and the means are over its tokens."""

    tokens: int
    gram: "Tensor"  # (channels, channels) float32, the mean of x x'
    absmax: "Tensor"  # (channels,) float32, and so are the means
    mean_abs: "Tensor"
    mean_square: "Tensor"
    histogram: "Tensor | None" = None  # (2048,) int64, counts of |x| over equal steps from 0 to the largest


@dataclass(frozen=True, slots=True)
class Artefact:
    """A quantized checkpoint, planned or written. Field names are the JSON names."""

    source: str
    path: str
    preset: str
    format: str
    parameters: int
    source_bytes: int
    bytes: int  # of all stored tensors
    bits_per_weight: float
    quantized_layers: int
    kept_tensors: int
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # name -> bytes, sha256; empty until written
    notes: tuple[str, ...] = ()  # what a person should know about how it was made
    expert_tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of calibration, by block

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Proof:
    """What a quantized model lost against its 16-bit reference, and if that is acceptable. Names are the JSON names.

    The figures are of the artefact decoded from its bytes; `served` has the same figures as served by an engine, which
    decide the gate if they exist.
    """

    artefact: str
    reference: str
    gate: str
    verdict: Literal["pass", "fail"]
    kl: float  # mean over positions, in nats; KL(reference || artefact)
    kl_median: float
    kl_p99: float
    top1: float  # share of positions whose likeliest token is the reference's
    perplexity: float
    reference_perplexity: float
    noise_floor: float  # the KL of the reference against itself in 16-bit arithmetic
    served: Mapping[str, Any] | None
    intervals: Mapping[str, tuple[float, float]]  # 95 %, by bootstrap over windows
    findings: tuple[Mapping[str, Any], ...]  # everything that was compared with a limit
    text: Mapping[str, Any]  # name, windows that were measured, windows asked for, length, positions
    compact: Mapping[str, Any]  # tokens kept of each position, and the KL that this misses
    worst_tensors: tuple[Mapping[str, Any], ...]
    domains: tuple[Mapping[str, Any], ...] = ()  # the figures of each text, if there are several
    memory: Mapping[str, Any] | None = None  # predicted, and reported by the engine
    kv_cache: Mapping[str, Any] | None = None  # what types of KV cache lose as served, by position; and what fits
    prompts: Mapping[str, Any] | None = None
    tasks: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    recorded: str | None = None  # the folder that the verdict was written into

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Difference:
    """Two artefacts side by side on the same text. Names are the JSON names; KL is of B against A."""

    a: Mapping[str, Any]  # source, format, bytes, bits_per_weight, perplexity
    b: Mapping[str, Any]
    kl: float
    kl_median: float
    kl_p99: float
    top1: float
    intervals: Mapping[str, tuple[float, float]]
    text: Mapping[str, Any]
    tensors: tuple[Mapping[str, Any], ...]  # those that differ most, first
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Workload:
    """The load of a served model."""

    context: int  # tokens a sequence may reach, prompt and answer together
    concurrency: int = 1  # sequences at the same time
    prompt: int = 512  # tokens of a typical prompt
    answer: int = 256
    shared_prefix: int = 0  # tokens of each prompt that all share

    @property
    def held(self) -> int:
        """Tokens that a typical sequence has reached when it ends."""
        return min(self.context, self.prompt + self.answer)


@dataclass(frozen=True, slots=True)
class Footprint:
    """The memory of a served model, in bytes over all devices; `parts` lists every term."""

    weights: int
    kv_cache: int
    activations: int
    overhead: int
    per_device: int  # of the fullest device
    parts: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache + self.activations + self.overhead


@dataclass(frozen=True, slots=True)
class Verdict:
    """Says if an engine can serve a quantized model on a device, and with which kernel."""

    outcome: Literal["kernel", "fallback", "refusal"]
    kernel: str | None
    reason: str
    fix: str | None = None
    source: str = ""  # of the rule, with its version


@dataclass(frozen=True, slots=True)
class Speed:
    """Predicted speed: tokens per second of all sequences together, and of one prompt."""

    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    first_token_s: float
    bound: Literal["bandwidth", "compute", "overhead"]  # what limits decoding

"""The block type of each tensor of a GGUF file, as llama-quantize chooses it.

A file type such as q4_k_m is a mixture: most tensors get its main type, some get more bits by role, depth and shape of
the model (mixtures.toml). Rows that are no multiple of a type's block get another type (FALLBACKS). Falcon, for which
llama.cpp has special rules, is not covered.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from quantry.errors import RecipeError, WeightError
from quantry.registry import check, suggest
from quantry.storage import read_data

Rows = tuple[tuple[str, str], ...]  # (condition, type)

BLOCKS = {  # weights in a block
    **dict.fromkeys(("F32", "F16", "BF16"), 1),
    **dict.fromkeys(("Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "IQ4_NL"), 32),
    **dict.fromkeys(("Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K", "IQ4_XS"), 256),
}
FALLBACKS = {  # for rows that blocks of 256 do not fit; F16 where these do not fit either
    "Q6_K": "Q8_0",
    "Q5_K": "Q5_1",
    "Q4_K": "Q5_0",
    "Q3_K": "Q4_0",
    "Q2_K": "Q4_0",
    "IQ4_XS": "IQ4_NL",
}
ROLES = {  # the first whose pattern is in a tensor's name; fused projections count as values
    "output": r"^output\.weight$",
    "embedding": r"^(per_layer_)?token_embd\.weight$",
    "attn_v": r"attn_(qkv|kv_b|v)\.weight",
    "attn_k": r"attn_k\.weight",
    "attn_output": r"attn_output\.weight",
    "ffn_down": r"ffn_down",
}
# Small or sensitive tensors that llama-quantize does not quantize, besides those with fewer than two dimensions.
PLAIN = re.compile(
    r"(?<!weight)$"
    r"|_norm\.weight|ffn_gate_inp\.weight|ffn_gate_tid2eid\.weight|altup|laurel|per_layer_model_proj"
    r"|^position_embd\.weight$|^token_types\.weight$|ssm_conv1d|shortconv\.conv\.weight|indexer\.[kq]_proj\.weight"
    r"|time_mix_(first|[wva][012]|g[12]|decay_w[12]|lerp_fused)\.weight|attn_rel_b\.weight|\.position_embd"
    r"|sam\.(pos_embd|neck\.|net_)|\.rel_pos|\.patch_embd|\.patch_merger|a\.rvq\.codebook|mm\.a\.code_embd"
)
# Models that llama.cpp takes for 70B by their depth (a Llama only if heads share keys): their small attn_v gets at
# least 5 bits.
LARGE = {("llama", 80), ("qwen2", 80), ("deci", 80), ("olmo", 80), ("jais2", 68)}


@dataclass(frozen=True, slots=True)
class FileType:
    """One table of mixtures.toml."""

    number: int  # general.file_type
    main: str
    rows: Mapping[str, Rows]  # by role


@dataclass(frozen=True, slots=True)
class TypeChoice:
    """The type a tensor is stored in, and the one it would have if its rows fitted."""

    stored: str
    wanted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedModel:
    """The properties of a model that decide its mixture; heads are those of the first layer."""

    architecture: str
    layers: int
    heads: int
    kv_heads: int
    experts: int  # 0 for a dense model
    importance: bool  # there is an importance matrix

    @property
    def shared(self) -> int:
        """How many heads use the same keys and values."""
        return self.heads // self.kv_heads if self.kv_heads else 0

    @property
    def large(self) -> bool:
        alone = self.architecture == "llama" and self.heads == self.kv_heads
        return (self.architecture, self.layers) in LARGE and not alone


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor's place: the `index`-th of `count` in its role, with rows of `columns`, in a file of `main`."""

    model: MixedModel
    main: str
    columns: int
    index: int = 0
    count: int = 0

    @property
    def more_bits(self) -> bool:
        """The first and the last eighth of the layers, and every third between them."""
        start = self.count // 8
        return self.index < start or self.index >= 7 * self.count // 8 or (self.index - start) % 3 == 2


CONDITIONS: dict[str, Callable[[_Place], bool]] = {
    "always": lambda place: True,
    "more bits": lambda place: place.more_bits,
    "first two": lambda place: place.index < 2,
    "first four": lambda place: place.index < 4,
    "first sixteenth": lambda place: place.index < place.count // 16,
    "first eighth": lambda place: place.index < place.count // 8,
    "first eighth, with importance": lambda place: place.index < place.count // 8 and place.model.importance,
    "first eighth, without importance": lambda place: place.index < place.count // 8 and not place.model.importance,
    "4 heads share it": lambda place: place.model.shared >= 4,
    "8 experts": lambda place: place.model.experts == 8,
    "Q8_0, or the main type does not fit": lambda place: (
        place.main == "Q8_0" or place.columns % BLOCKS[place.main] != 0
    ),
}


def types(
    file_type: str,
    model: MixedModel,
    shapes: Mapping[str, Sequence[int]],
    *,
    keep: Collection[str] = (),
    plain: str = "BF16",
    overrides: Iterable[tuple[str, str]] = (),
) -> dict[str, TypeChoice]:
    """Returns the type of every tensor, in the order of llama.cpp's loader.

    `shapes` has the outermost dimension first. Tensors of `keep` and those with one dimension are F32; others that are
    never quantized are `plain`. `overrides` are (shell pattern, type): the first that matches wins over the mixture,
    and as in llama-quantize a tensor it names is not counted when others are placed by depth. Raises UnknownNameError
    for an unknown file type, RecipeError for an unknown type, WeightError for rows that fit no type.
    """
    check("GGUF file type", file_type, FILE_TYPES)
    chosen, rules = FILE_TYPES[file_type], _checked(overrides)
    roles = {name: _role(name, tied="output.weight" not in shapes) for name in shapes}
    counts = {"attn_v": list(roles.values()).count("attn_v"), "ffn_down": model.layers}
    seen = dict.fromkeys(counts, 0)
    choices = {}
    for name in sorted(shapes, key=lambda name: (_layer(name), name)):
        shape, role = shapes[name], roles[name]
        if name in keep or len(shape) < 2 or not _quantizable(name, shape):
            float_type = "F32" if name in keep or len(shape) < 2 else plain
            choices[name] = TypeChoice(float_type, float_type)
            continue
        wanted = next((override for pattern, override in rules if fnmatchcase(name, pattern)), None)
        if wanted is None:
            depth = _layer(name) if role == "ffn_down" and model.experts > 1 else seen.get(role, 0)
            wanted = _mixture(chosen, role, _Place(model, chosen.main, shape[-1], depth, counts.get(role, 0)))
            if role in seen:
                seen[role] += 1
        choices[name] = TypeChoice(fitting(name, wanted, shape[-1]), wanted)
    return choices


def fitting(name: str, wanted: str, columns: int) -> str:
    """Returns the type itself if rows of `columns` weights fit its blocks, else llama.cpp's fallback.

    Raises WeightError if llama.cpp has no fallback for the type.
    """
    if columns % BLOCKS[wanted] == 0:
        return wanted
    if wanted not in FALLBACKS:
        raise WeightError(
            f"{name} has rows of {columns} weights, {wanted} has blocks of {BLOCKS[wanted]}, and llama.cpp falls back "
            "to nothing from there",
            fix="choose F16 or BF16 for this tensor in a recipe",
        )
    return FALLBACKS[wanted] if columns % BLOCKS[FALLBACKS[wanted]] == 0 else "F16"


def _mixture(file_type: FileType, role: str, place: _Place) -> str:
    if BLOCKS[file_type.main] == 1:
        return file_type.main
    rows = (*EVERY.get(role, ()), *file_type.rows.get(role, ()))
    chosen = next((row_type for condition, row_type in rows if CONDITIONS[condition](place)), file_type.main)
    return "Q5_K" if role == "attn_v" and chosen in ("Q3_K", "Q4_K") and place.model.large else chosen


def _role(name: str, tied: bool) -> str:
    role = next((role for role, pattern in ROLES.items() if re.search(pattern, name)), "other")
    return "output" if tied and role == "embedding" else role


def _layer(name: str) -> int:
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _quantizable(name: str, shape: Sequence[int]) -> bool:
    """Returns False for vectors; a matrix of one row is one, since ggml drops leading dimensions of 1."""
    return any(size > 1 for size in shape[:-1]) and not PLAIN.search(name)


def _checked(overrides: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    rules = tuple((pattern, override.upper()) for pattern, override in overrides)
    for pattern, override in rules:
        if override not in BLOCKS:
            raise RecipeError(
                f"the type of {pattern} is {override}, which Quantry does not write",
                fix=suggest(override, tuple(BLOCKS)),
            )
    return rules


def _tables() -> tuple[Mapping[str, Rows], dict[str, FileType]]:
    tables = read_data("quantry.llamacpp", "mixtures.toml")
    every = tables.pop("every")
    return _rows(every), {
        name: FileType(table.pop("number"), table.pop("main"), _rows(table)) for name, table in tables.items()
    }


def _rows(table: Mapping[str, list[list[str]]]) -> Mapping[str, Rows]:
    return {role: tuple((condition, row_type) for condition, row_type in rows) for role, rows in table.items()}


EVERY: Mapping[str, Rows]  # rows of every file type, tried before its own
FILE_TYPES: Mapping[str, FileType]
EVERY, FILE_TYPES = _tables()

"""A checkpoint out of a GGUF file: its config.json, and the checkpoint tensors that each stored tensor goes back to.

The way back is the inverse of families.py and targets.py, and is proven by going forth again: the config must give the
key-values that the file has, and the checkpoint's tensors the file's own, by name and shape. What is particular to a
checkpoint is in restoring.toml. All is decided from the header and a few small tensors.
"""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from quantry.errors import CheckpointError, ConfigError, UnknownNameError
from quantry.llamacpp.families import LAYER_LIMIT, YARN_KEYS, Facts, Family, facts, family
from quantry.llamacpp.families import table as families
from quantry.llamacpp.tensor_map import BLOCK, EMBEDDING, GENERATED, HEAD, OUTSIDE, SUFFIX, Target, targets
from quantry.types import TensorInfo

Metadata = Mapping[str, Any]
Read = Callable[[str], Sequence[float]]  # the values of a small float32 tensor

AGAIN = "convert the original model to GGUF again"
OTHER = "use the original checkpoint"
TOKENS = "tokenizer.ggml.tokens"
IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
ROPE = ("rope_theta", "partial_rotary_factor")  # fields that belong to rope parameters
ORIGINAL = "original_max_position_embeddings"
SILENT = ("file_type", "pooling_type")  # key-values that config.json has no field for
DIGITS = 9  # of a layer's number: Python reads no more than 4300 as one
LARGEST = 3.4e38  # of float32, nearly
WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def config(metadata: Metadata, tensors: Sequence[TensorInfo], read: Read) -> dict[str, Any]:
    """config.json in the words of transformers 5, but for the dtype; `read` gives the values of rope factors."""
    row = _family(metadata, tensors)
    given = _given(metadata, row)
    made = _fields(metadata, tensors, given, row)
    fixed = {name: values[0] for name, values in row.fixed.items() if values and name not in ROPE}
    sizes = _facts({**made, **dict.fromkeys(fixed), **_placed(_plain_rope(given), given, row)})
    made |= {name: sizes.get(value, value) if isinstance(value, str) else value for name, value in fixed.items()}
    if ORIGINAL in row.defaults:  # the family keeps it outside the rope parameters
        made[ORIGINAL] = given.get("rope_scaling_orig_ctx_len", sizes["max_position_embeddings"])
    rotated = given.get("rope_dimension_count") or sizes["head_size"]
    factors = {name: tuple(read(f"{name}.weight")) for name in _generated(tensors, rotated)}
    made |= _placed(_rope(made, given, sizes, row, factors), given, row)
    _check(made, metadata, row)
    own = table()[row.name].get("fields", {})
    return {own.get(name, name): value for name, value in made.items()}


def originals(config: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> list[tuple[TensorInfo, Target]]:
    """Each tensor of the file with its target, whose sources say where it goes; rope factors go nowhere.

    A tensor's shape is the target's: GGUF may leave out leading dimensions of one.
    """
    row = family(config)
    sources = list(_sources(tensors, row))
    try:
        found = {target.name: target for target in targets(config, sources)[0]}
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"the tensors of the file do not fit together: {error.problem}", fix=AGAIN) from error
    odd = sorted(found.keys() ^ {tensor.name for tensor in tensors})
    if odd:
        which = "no" if odd[0] in found else "a"
        raise CheckpointError(f"the file has {which} {odd[0]}, unlike {row.name} with its metadata", fix=AGAIN)
    return [(_fitted(tensor, found[tensor.name]), found[tensor.name]) for tensor in tensors]


@cache
def table() -> dict[str, Any]:
    """The content of restoring.toml."""
    return tomllib.loads(files("quantry.llamacpp").joinpath("to_checkpoint.toml").read_text(encoding="utf-8"))


def special_id(metadata: Metadata, key: str, size: int) -> int | None:
    """The number of a special token; one that no token has counts as none, as for llama.cpp."""
    name = f"tokenizer.ggml.{key}"
    value = _typed(metadata.get(name), name, int)
    return value if value is not None and 0 <= value < size else None


def _fields(metadata: Metadata, tensors: Sequence[TensorInfo], given: Facts, row: Family) -> Facts:
    """The fields that key-values, tensor names and shapes tell, but for rope."""
    rows = _vocabulary(metadata, tensors)
    return {
        "architectures": [row.name],
        "model_type": table()[row.name]["model_type"],
        "vocab_size": rows,
        **{name: value for name, value in given.items() if not name.startswith("rope_")},
        **_layers(given, row),
        **_biases(tensors, row),
        **{name: special_id(metadata, key, rows) for name, key in IDS.items()},
        "tie_word_embeddings": all(tensor.name != HEAD for tensor in tensors),
    }


def _family(metadata: Metadata, tensors: Sequence[TensorInfo]) -> Family:
    """The table of families.toml that the file was written by: the first of the architecture with these tensors."""
    architecture = metadata.get("general.architecture")
    rows = [family({"architectures": [name]}) for name, value in table().items() if "model_type" in value]
    named = [row for row in rows if row.architecture == architecture]
    if not named:
        raise UnknownNameError(
            f"GGUF of architecture {str(architecture)[:40]!r} cannot be made a checkpoint: its config is not known",
            fix=f"known are {', '.join(sorted({row.architecture for row in rows}))}",
        )
    layer = {SUFFIX.sub("", block[2]) for tensor in tensors if (block := BLOCK.fullmatch(tensor.name))}
    return min(named, key=lambda row: len(layer ^ set(row.layer)))


@cache
def _keys(architecture: str) -> dict[str, tuple[str, type]]:
    """How GGUF names the key-values of families.toml, and what type each has, as the gguf library would write them."""
    from gguf import GGUFValueType, GGUFWriter, PoolingType, RopeScalingType

    known = [family({"architectures": [name]}) for name in families() if name[0].isupper()]
    samples = {"rope_scaling_type": RopeScalingType.NONE, "pooling_type": PoolingType.NONE}
    types = {GGUFValueType.STRING: str, GGUFValueType.BOOL: bool, GGUFValueType.FLOAT32: float}
    found = {}
    for key in dict.fromkeys(key for row in known for key in (*row.early, *row.keys)):
        writer = GGUFWriter(path=None, arch=architecture)
        getattr(writer, f"add_{key}")(samples.get(key, 1))
        name, entry = list(writer.kv_data[0].items())[-1]
        found[key] = (name, types.get(entry.type, int))
    return found


def _given(metadata: Metadata, row: Family) -> Facts:
    """The fields of config.json that the file gives, and what llama.cpp takes for those that it need not."""
    sources, kinds = families()["sources"], families()["fields"]
    needed = {*kinds["required"], *row.required, *row.defaults} - {"vocab_size", row.every.get("off")}
    given: Facts = {}
    for key in (key for key in (*row.early, *row.keys) if key not in SILENT):
        field, (name, kind) = sources.get(key, key), _keys(row.architecture)[key]
        value = _typed(metadata.get(name), name, kind)
        if value or value is False:  # a count of 0 is none at all
            given[field] = value
        elif field in needed and field not in table()["absent"]:
            raise ConfigError(f"the file has {'no ' if value is None else 'zero for '}{name}", fix=AGAIN)
    fixed = {name: values[0] for name, values in row.fixed.items() if name in table()["absent"]}
    absent = {name: given.get(value, value) for name, value in table()["absent"].items()}
    return {**absent, **fixed, **given}


def _typed(value: Any, name: str, kind: type) -> Any:
    """A value of the type it must have, or none; a float32 as the shortest number that stands for it."""
    if value is None:
        return None
    if type(value) not in ((int, float) if kind is float else (kind,)) or not _finite(value):
        raise ConfigError(f"the file has {name} {str(value)[:40]!r}, not {WORDS[kind]}", fix=AGAIN)
    return shortest(value) if kind is float else value


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def shortest(value: float) -> float:
    """1e-06 for 9.999999974752427e-07, which is what float32 makes of it."""
    from numpy import float32

    single = float32(min(max(value, -LARGEST), LARGEST))
    return float(str(single)) if type(value) is float and float(single) == value else value


def _vocabulary(metadata: Metadata, tensors: Sequence[TensorInfo]) -> int:
    """The rows of the embedding, which are as many as tokens."""
    rows = next((tensor.shape[0] for tensor in tensors if tensor.name == EMBEDDING and len(tensor.shape) == 2), None)
    if rows is None:
        raise CheckpointError(f"the file has no matrix {EMBEDDING}", fix=AGAIN)
    tokens = metadata.get(TOKENS)
    if isinstance(tokens, tuple) and len(tokens) != rows:
        raise CheckpointError(f"the file has {len(tokens)} tokens and an embedding of {rows}", fix=AGAIN)
    return rows


def _layers(given: Facts, row: Family) -> Facts:
    """The list that tells layers apart, where llama.cpp takes a pattern for granted."""
    count = given["num_hidden_layers"]
    if not row.every or not 0 < count <= LAYER_LIMIT:
        return {}
    period, last, rest = (row.every[name] for name in ("period", "last", "rest"))
    if "off" in row.every and row.every["off"] not in given:
        period = 1
    return {row.every["field"]: [rest if (index + 1) % period else last for index in range(count)]}


def _biases(tensors: Sequence[TensorInfo], row: Family) -> Facts:
    """The fields that give tensors a bias; transformers has one in all tensors of a field or in none."""
    own = table()[row.name]
    found = {
        SUFFIX.sub("", block[2])
        for tensor in tensors
        if (block := BLOCK.fullmatch(tensor.name)) and block[2].endswith(".bias")
    }
    fields = {name: set(_spelled_out(names)) for name, names in own.get("biases", {}).items()}
    made = {name: bool(names & found) for name, names in fields.items()}
    wanted = set(_spelled_out(own.get("biased", ()))).union(*(fields[name] for name, on in made.items() if on))
    for name in sorted(wanted ^ found):
        which = "no bias" if name in wanted else "a bias"
        raise CheckpointError(f"the file has {which} of {name}: transformers' {row.name} cannot be so", fix=OTHER)
    return made


def _spelled_out(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield from families()["lists"].get(name, [name])


def _facts(made: Mapping[str, Any]) -> Facts:
    try:
        return facts(made)
    except ConfigError as error:
        raise ConfigError(f"the metadata of the file does not fit together: {error.problem}", fix=AGAIN) from error


def _generated(tensors: Sequence[TensorInfo], rotated: int) -> Iterator[str]:
    """The names of the tensors of rope factors, one factor for each pair of rotated dimensions."""
    for tensor in tensors:
        name = SUFFIX.sub("", tensor.name)
        if name in GENERATED and (tensor.dtype != "F32" or tensor.shape != (rotated // 2,)):
            shape = f"{_shown(tensor.shape)} of {tensor.dtype}"
            raise CheckpointError(f"{tensor.name} is {shape}, not {rotated // 2} of F32", fix=AGAIN)
        if name in GENERATED:
            yield name


def _plain_rope(given: Facts) -> Facts:
    return {"rope_type": "default", "rope_theta": given["rope_theta"]}


def _placed(rope: Facts, given: Facts, row: Family) -> Facts:
    """Rope parameters where transformers 5 looks for them."""
    if row.layered_rope:
        local = {"rope_type": "default", "rope_theta": given["rope_local_base_freq"]}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {"rope_parameters": rope}


def _rope(made: Facts, given: Facts, sizes: Facts, row: Family, factors: Mapping[str, tuple[float, ...]]) -> Facts:
    """Rope parameters, from key-values and from tensors of factors."""
    rope = _plain_rope(given)
    if "partial_rotary_factor" in row.defaults:
        rope["partial_rotary_factor"] = given.get("rope_dimension_count", sizes["head_size"]) / sizes["head_size"]
    if "rope_freqs" in factors:
        for guess in _llama3(factors["rope_freqs"], rope["rope_theta"]):
            if _gives(factors["rope_freqs"], {**made, **_placed({**rope, **guess}, given, row)}):
                return {**rope, **guess}
        raise ConfigError("the file has rope factors that no rope of Llama 3 gives", fix=OTHER)
    if factors:
        lists = {f"{name}_factor": factors.get(f"rope_factors_{name}", ()) for name in ("short", "long")}
        return {**rope, "rope_type": "longrope"} | {name: [*map(shortest, values)] for name, values in lists.items()}
    return {**rope, **_scaled(given)} if given.get("rope_scaling_type", "none") != "none" else rope


def _scaled(given: Facts) -> Facts:
    """Rope that is scaled by what key-values say."""
    factor = given.get("rope_scaling_factor")
    made = {"rope_type": given["rope_scaling_type"], "factor": factor}
    if "rope_scaling_orig_ctx_len" in given:
        made[ORIGINAL] = given["rope_scaling_orig_ctx_len"]
    for key, names in YARN_KEYS.items():
        if key in given:  # the second name is one that transformers does not heed, as llama.cpp does not heed the value
            heeded = len(names) == 1 or (factor and _same(given[key], 0.1 * math.log(factor) + 1, 1e-3))
            made[names[0] if heeded else names[-1]] = given[key]
    return made


def _gives(factors: Sequence[float], made: Facts) -> bool:
    found = _facts(made)["rope_freqs"]
    return len(found) == len(factors) and all(map(_same, found, factors))


def _llama3(factors: Sequence[float], theta: float) -> Iterator[Facts]:
    """Parameters of Llama 3's rope that may have given these factors."""
    if factors and all(map(math.isfinite, factors)):
        for high, length in _guesses(factors, theta):
            yield {
                "rope_type": "llama3",
                "factor": shortest(max(factors)),
                "low_freq_factor": 1.0,
                "high_freq_factor": high,
                ORIGINAL: length,
            }


def _guesses(factors: Sequence[float], theta: float) -> Iterator[tuple[float, int]]:
    """High frequency factors and original contexts.

    Frequencies between the fast and the slow ones are a known blend, smooth = (context / wave - low) / (high - low):
    two of them give two of the three numbers. Only the ratios of the three count, and low is 1 in all models.
    """
    most = max(factors)
    waves = [(2 * math.pi * theta ** (index / len(factors)), factor) for index, factor in enumerate(factors)]
    blends = [(wave, (1 / factor - 1 / most) / (1 - 1 / most)) for wave, factor in waves if 1 < factor < most]
    highs = {4.0: None}
    if len(blends) > 1:
        (fast, one), (slow, other) = blends[0], blends[-1]
        slope = (one - other) / (1 / fast - 1 / slow)
        if slope / fast > one:
            highs[round(1 + 1 / (slope / fast - one), 3)] = None
    for high in highs:
        for wave, smooth in blends[:1]:
            yield high, round(wave * (smooth * (high - 1) + 1))
        if not blends:
            longest = min((wave for wave, factor in waves if factor > 1), default=8 * waves[-1][0])
            yield high, 2 ** int(math.log2(longest))
            yield high, int(longest)


def _check(made: Facts, metadata: Metadata, row: Family) -> None:
    """The config must say what the file says, in every key-value of the architecture."""
    found, keys = _facts(made), _keys(row.architecture)
    sources = {**families()["sources"], "key_length": "head_size", "value_length": "head_size"}
    for key, (name, kind) in keys.items():
        value = None if key in SILENT else _typed(metadata.get(name), name, kind)
        mine = found.get(sources.get(key, key))
        if (value or value is False) and not _same(value, "none" if mine is None and kind is str else mine):
            raise ConfigError(
                f"the file has {name} {str(value)[:40]}, and {row.name} would have {str(mine)[:40]}", fix=OTHER
            )
    known = {name for name, _ in keys.values()}
    for name in metadata:
        own = name.removeprefix(f"{row.architecture}.")
        if own != name and name not in known and table()["harmless"].get(own) != metadata[name]:
            raise ConfigError(f"the file has {name[:80]}, which config.json of {row.name} cannot say", fix=OTHER)


def _same(one: Any, other: Any, tolerance: float = 1e-6) -> bool:
    """Equal, or numbers that differ by no more than a few float32 roundings (6e-8 each)."""
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=tolerance)
    return bool(one == other)


def _sources(tensors: Sequence[TensorInfo], row: Family) -> Iterator[TensorInfo]:
    """The tensors of the checkpoint, by name and shape."""
    found: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        if not tensor.numel:
            raise CheckpointError(f"the file has nothing in {tensor.name[:80]} ({_shown(tensor.shape)})", fix=AGAIN)
        if SUFFIX.sub("", tensor.name) not in GENERATED:
            name, rank = _source(tensor.name, row)
            shape = _whole(tensor.shape, rank)
            found[name] = _stacked(found[name], shape) if name in found else shape
    for name, shape in found.items():
        if len(shape) == 3 and ".experts." in name:
            for expert in range(shape[0]):
                yield TensorInfo(name.replace(".experts.", f".experts.{expert}."), "BF16", shape[1:], "", 0, 0)
        else:
            yield TensorInfo(name, "BF16", shape, "", 0, 0)


def _source(name: str, row: Family) -> tuple[str, int]:
    """The checkpoint's name of a tensor, and how many dimensions it has."""
    block = BLOCK.fullmatch(name)
    leaf = block[2] if block else name
    base = SUFFIX.sub("", leaf)
    if base == leaf or base not in (row.layer if block else OUTSIDE) or (block and len(block[1]) > DIGITS):
        raise CheckpointError(f"the file has a tensor {name[:80]}, which no {row.name} has", fix=OTHER)
    prefix = f"model.layers.{int(block[1])}." if block else ""
    known = {**table()["names"], **table()[row.name].get("names", {})}
    return f"{prefix}{known[base]}{leaf[len(base) :]}", 1 if leaf.endswith(".bias") else len(row.shapes[base])


def _stacked(upper: tuple[int, ...], lower: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of two matrices, or stacks of them, that lie one above the other."""
    rows = max(len(upper) - 2, 0)
    return (*upper[:rows], upper[rows] + lower[rows] if rows < len(lower) else 0, *upper[rows + 1 :])


def _fitted(tensor: TensorInfo, target: Target) -> TensorInfo:
    if _whole(tensor.shape, len(target.shape)) != target.shape:
        raise CheckpointError(
            f"{tensor.name} is {_shown(tensor.shape)}, and by the metadata it would be {_shown(target.shape)}",
            fix=AGAIN,
        )
    return replace(tensor, shape=target.shape)


def _whole(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """A shape with the leading ones that GGUF writers may leave out."""
    return (1,) * (rank - len(shape)) + shape


def _shown(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a single number"

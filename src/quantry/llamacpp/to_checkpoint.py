"""From a GGUF file back to a checkpoint: its config.json, and the checkpoint's tensors that each stored tensor holds.

This is the inverse of families.py and tensor_map.py, and it is checked by going forward again: the new config must give
the key-values of the file, and the checkpoint's tensors the names and shapes of the file's. Facts about single families
are in to_checkpoint.toml. The header and a few small tensors decide everything.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from quantry.errors import CheckpointError, ConfigError, UnknownNameError
from quantry.llamacpp.families import LAYER_LIMIT, YARN_KEYS, Facts, Family, facts, family
from quantry.llamacpp.families import table as families
from quantry.llamacpp.tensor_map import BLOCK, EMBEDDING, GENERATED, HEAD, OUTSIDE, SUFFIX, Target, shown, targets
from quantry.storage import read_data
from quantry.types import TensorInfo

Metadata = Mapping[str, Any]
Read = Callable[[str], Sequence[float]]  # the values of a small float32 tensor

AGAIN = "convert the original model to GGUF again"
OTHER = "use the original checkpoint"
TOKENS = "tokenizer.ggml.tokens"
IDS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
ROPE = ("rope_theta", "partial_rotary_factor")  # fields of the rope parameters
ORIGINAL = "original_max_position_embeddings"
SILENT = ("file_type", "pooling_type")  # key-values without a field in config.json
DIGITS = 9  # of a layer's number: Python reads no more than 4300 as one
LARGEST = 3.4e38  # of float32, nearly
WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def config(metadata: Metadata, tensors: Sequence[TensorInfo], read: Read) -> dict[str, Any]:
    """Returns config.json as transformers 5 writes it, without the dtype; `read` gives the values of rope factors.

    Raises UnknownNameError for an unknown architecture, ConfigError or CheckpointError if the file is inconsistent or
    transformers has no field for one of its key-values.
    """
    row = _family(metadata, tensors)
    given = _given(metadata, row)
    fields = _fields(metadata, tensors, given, row)
    fixed = {name: values[0] for name, values in row.fixed.items() if values and name not in ROPE}
    sizes = _facts({**fields, **dict.fromkeys(fixed), **_placed(_plain_rope(given), given, row)})
    fields |= {name: sizes.get(value, value) if isinstance(value, str) else value for name, value in fixed.items()}
    if ORIGINAL in row.defaults:  # the family keeps it outside the rope parameters
        fields[ORIGINAL] = given.get("rope_scaling_orig_ctx_len", sizes["max_position_embeddings"])
    rotated = given.get("rope_dimension_count") or sizes["head_size"]
    factors = {name: tuple(read(f"{name}.weight")) for name in _generated(tensors, rotated)}
    fields |= _placed(_rope(fields, given, sizes, row, factors), given, row)
    _check(fields, metadata, row)
    names = table()[row.name].get("fields", {})
    return {names.get(name, name): value for name, value in fields.items()}


def originals(config: Mapping[str, Any], tensors: Sequence[TensorInfo]) -> list[tuple[TensorInfo, Target]]:
    """Returns each tensor of the file with its target, whose sources are the checkpoint's tensors (rope factors: none).

    Tensors get the shape of their target, since GGUF may drop leading dimensions of 1. Raises CheckpointError if names
    or shapes are not those of the config.
    """
    row = family(config)
    sources = list(_sources(tensors, row))
    try:
        by_name = {target.name: target for target in targets(config, sources)[0]}
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"the tensors of the file do not fit together: {error.problem}", fix=AGAIN) from error
    odd = sorted(by_name.keys() ^ {tensor.name for tensor in tensors})
    if odd:
        which = "no" if odd[0] in by_name else "a"
        raise CheckpointError(f"the file has {which} {odd[0]}, unlike {row.name} with its metadata", fix=AGAIN)
    return [(_fitted(tensor, by_name[tensor.name]), by_name[tensor.name]) for tensor in tensors]


@cache
def table() -> dict[str, Any]:
    """Returns the content of to_checkpoint.toml."""
    return read_data("quantry.llamacpp", "to_checkpoint.toml")


def special_id(metadata: Metadata, key: str, size: int) -> int | None:
    """Returns the number of a special token; None if no token has it, as in llama.cpp."""
    name = f"tokenizer.ggml.{key}"
    value = _typed(metadata.get(name), name, int)
    return value if value is not None and 0 <= value < size else None


def _fields(metadata: Metadata, tensors: Sequence[TensorInfo], given: Facts, row: Family) -> Facts:
    """Returns the fields that key-values, tensor names and shapes give, without those of rope."""
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
    """Returns the row of the architecture whose tensors of a layer are the file's."""
    architecture = metadata.get("general.architecture")
    rows = [family({"architectures": [name]}) for name, value in table().items() if "model_type" in value]
    named = [row for row in rows if row.architecture == architecture]
    if not named:
        raise UnknownNameError(
            f"GGUF of architecture {str(architecture)[:40]!r} cannot become a checkpoint: its config is not known",
            fix=f"known are {', '.join(sorted({row.architecture for row in rows}))}",
        )
    layer = {SUFFIX.sub("", block[2]) for tensor in tensors if (block := BLOCK.fullmatch(tensor.name))}
    return min(named, key=lambda row: len(layer ^ set(row.layer)))


@cache
def _keys(architecture: str) -> dict[str, tuple[str, type]]:
    """Returns the full name and the type of each key-value of families.toml, as the gguf library writes them."""
    from gguf import GGUFValueType, GGUFWriter, PoolingType, RopeScalingType

    known = [family({"architectures": [name]}) for name in families() if name[0].isupper()]
    samples = {"rope_scaling_type": RopeScalingType.NONE, "pooling_type": PoolingType.NONE}
    types = {GGUFValueType.STRING: str, GGUFValueType.BOOL: bool, GGUFValueType.FLOAT32: float}
    keys = {}
    for key in dict.fromkeys(key for row in known for key in (*row.early, *row.keys)):
        writer = GGUFWriter(path=None, arch=architecture)
        getattr(writer, f"add_{key}")(samples.get(key, 1))
        name, entry = list(writer.kv_data[0].items())[-1]
        keys[key] = (name, types.get(entry.type, int))
    return keys


def _given(metadata: Metadata, row: Family) -> Facts:
    """Returns the fields of config.json that the file gives, and llama.cpp's defaults for optional ones."""
    sources, required = families()["sources"], families()["fields"]["required"]
    needed = {*required, *row.required, *row.defaults} - {"vocab_size", row.every.get("off")}
    given: Facts = {}
    for key in (key for key in (*row.early, *row.keys) if key not in SILENT):
        field, (name, value_type) = sources.get(key, key), _keys(row.architecture)[key]
        value = _typed(metadata.get(name), name, value_type)
        if value or value is False:  # a count of 0 is none at all
            given[field] = value
        elif field in needed and field not in table()["absent"]:
            raise ConfigError(f"the file has {'no ' if value is None else 'zero for '}{name}", fix=AGAIN)
    fixed = {name: values[0] for name, values in row.fixed.items() if name in table()["absent"]}
    absent = {name: given.get(value, value) for name, value in table()["absent"].items()}
    return {**absent, **fixed, **given}


def _typed(value: Any, name: str, wanted: type) -> Any:
    """Returns a value of the type it must have, or None; a float32 as the shortest number that rounds to it."""
    if value is None:
        return None
    if type(value) not in ((int, float) if wanted is float else (wanted,)) or not _finite(value):
        raise ConfigError(f"the file has {name} {str(value)[:40]!r}, not {WORDS[wanted]}", fix=AGAIN)
    return shortest(value) if wanted is float else value


def _finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def shortest(value: float) -> float:
    """Returns the shortest number that float32 rounds to this one: 1e-06 for 9.999999974752427e-07."""
    from numpy import float32

    single = float32(min(max(value, -LARGEST), LARGEST))
    return float(str(single)) if type(value) is float and float(single) == value else value


def _vocabulary(metadata: Metadata, tensors: Sequence[TensorInfo]) -> int:
    """Returns the rows of the embedding; raises CheckpointError if there are not as many tokens."""
    rows = next((tensor.shape[0] for tensor in tensors if tensor.name == EMBEDDING and len(tensor.shape) == 2), None)
    if rows is None:
        raise CheckpointError(f"the file has no matrix {EMBEDDING}", fix=AGAIN)
    tokens = metadata.get(TOKENS)
    if isinstance(tokens, tuple) and len(tokens) != rows:
        raise CheckpointError(f"the file has {len(tokens)} tokens and an embedding of {rows}", fix=AGAIN)
    return rows


def _layers(given: Facts, row: Family) -> Facts:
    """Returns the list of layer types for families in which llama.cpp assumes a pattern."""
    count = given["num_hidden_layers"]
    if not row.every or not 0 < count <= LAYER_LIMIT:
        return {}
    period, last, rest = (row.every[name] for name in ("period", "last", "rest"))
    if "off" in row.every and row.every["off"] not in given:
        period = 1
    return {row.every["field"]: [rest if (index + 1) % period else last for index in range(count)]}


def _biases(tensors: Sequence[TensorInfo], row: Family) -> Facts:
    """Returns the fields that give tensors a bias; transformers has one in all tensors of a field or in none."""
    own = table()[row.name]
    biased = {
        SUFFIX.sub("", block[2])
        for tensor in tensors
        if (block := BLOCK.fullmatch(tensor.name)) and block[2].endswith(".bias")
    }
    fields = {name: set(_spelled_out(names)) for name, names in own.get("biases", {}).items()}
    made = {name: bool(names & biased) for name, names in fields.items()}
    wanted = set(_spelled_out(own.get("biased", ()))).union(*(fields[name] for name, on in made.items() if on))
    for name in sorted(wanted ^ biased):
        which = "no bias" if name in wanted else "a bias"
        raise CheckpointError(f"the file has {which} of {name}, unlike any {row.name} of transformers", fix=OTHER)
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
    """Yields the names of the tensors of rope factors; each has one factor for each pair of rotated dimensions."""
    for tensor in tensors:
        name = SUFFIX.sub("", tensor.name)
        if name in GENERATED and (tensor.dtype != "F32" or tensor.shape != (rotated // 2,)):
            shape = f"{shown(tensor.shape)} of {tensor.dtype}"
            raise CheckpointError(f"{tensor.name} is {shape}, not {rotated // 2} of F32", fix=AGAIN)
        if name in GENERATED:
            yield name


def _plain_rope(given: Facts) -> Facts:
    return {"rope_type": "default", "rope_theta": given["rope_theta"]}


def _placed(rope: Facts, given: Facts, row: Family) -> Facts:
    """Returns rope parameters where transformers 5 looks for them."""
    if row.layered_rope:
        local = {"rope_type": "default", "rope_theta": given["rope_local_base_freq"]}
        return {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return {"rope_parameters": rope}


def _rope(fields: Facts, given: Facts, sizes: Facts, row: Family, factors: Mapping[str, tuple[float, ...]]) -> Facts:
    rope = _plain_rope(given)
    if "partial_rotary_factor" in row.defaults:
        rope["partial_rotary_factor"] = given.get("rope_dimension_count", sizes["head_size"]) / sizes["head_size"]
    if "rope_freqs" in factors:
        for guess in _llama3(factors["rope_freqs"], rope["rope_theta"]):
            if _gives(factors["rope_freqs"], {**fields, **_placed({**rope, **guess}, given, row)}):
                return {**rope, **guess}
        raise ConfigError("the file has rope factors that no rope of Llama 3 gives", fix=OTHER)
    if factors:
        lists = {f"{name}_factor": factors.get(f"rope_factors_{name}", ()) for name in ("short", "long")}
        return {**rope, "rope_type": "longrope"} | {name: [*map(shortest, values)] for name, values in lists.items()}
    return {**rope, **_scaled(given)} if given.get("rope_scaling_type", "none") != "none" else rope


def _scaled(given: Facts) -> Facts:
    factor = given.get("rope_scaling_factor")
    made = {"rope_type": given["rope_scaling_type"], "factor": factor}
    if "rope_scaling_orig_ctx_len" in given:
        made[ORIGINAL] = given["rope_scaling_orig_ctx_len"]
    for key, names in YARN_KEYS.items():
        if key in given:  # transformers ignores the second name, and llama.cpp ignores the value
            heeded = len(names) == 1 or (factor and _same(given[key], 0.1 * math.log(factor) + 1, 1e-3))
            made[names[0] if heeded else names[-1]] = given[key]
    return made


def _gives(factors: Sequence[float], made: Facts) -> bool:
    computed = _facts(made)["rope_freqs"]
    return len(computed) == len(factors) and all(map(_same, computed, factors))


def _llama3(factors: Sequence[float], theta: float) -> Iterator[Facts]:
    """Yields parameters of Llama 3's rope that may have given these factors."""
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
    """Yields guesses of the high frequency factor and the original context.

    Frequencies between the fast and the slow ones are a known blend, smooth = (context / wave - low) / (high - low):
    two of them give two of the three numbers. Only the ratios of the three count, and low is 1 in all models.
    """
    most = max(factors)
    waves = [(2 * math.pi * theta ** (index / len(factors)), factor) for index, factor in enumerate(factors)]
    blends = [(wave, (1 / factor - 1 / most) / (1 - 1 / most)) for wave, factor in waves if 1 < factor < most]
    highs = {4.0: None}
    if len(blends) > 1:
        (fast, first), (slow, last) = blends[0], blends[-1]
        slope = (first - last) / (1 / fast - 1 / slow)
        if slope / fast > first:
            highs[round(1 + 1 / (slope / fast - first), 3)] = None
    for high in highs:
        for wave, smooth in blends[:1]:
            yield high, round(wave * (smooth * (high - 1) + 1))
        if not blends:
            longest = min((wave for wave, factor in waves if factor > 1), default=8 * waves[-1][0])
            yield high, 2 ** int(math.log2(longest))
            yield high, int(longest)


def _check(made: Facts, metadata: Metadata, row: Family) -> None:
    """Raises ConfigError if the config would not give every key-value of the file."""
    model, keys = _facts(made), _keys(row.architecture)
    sources = {**families()["sources"], "key_length": "head_size", "value_length": "head_size"}
    for key, (name, value_type) in keys.items():
        value = None if key in SILENT else _typed(metadata.get(name), name, value_type)
        ours = model.get(sources.get(key, key))
        if (value or value is False) and not _same(value, "none" if ours is None and value_type is str else ours):
            raise ConfigError(
                f"the file has {name} {str(value)[:40]}, and {row.name} would have {str(ours)[:40]}", fix=OTHER
            )
    known = {name for name, _ in keys.values()}
    for name in metadata:
        own = name.removeprefix(f"{row.architecture}.")
        if own != name and name not in known and table()["harmless"].get(own) != metadata[name]:
            raise ConfigError(f"the file has {name[:80]}, which config.json of {row.name} cannot say", fix=OTHER)


def _same(a: Any, b: Any, tolerance: float = 1e-6) -> bool:
    """Returns True for equal values, and for numbers that differ by a few float32 roundings (6e-8 each) at most."""
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=tolerance)
    return bool(a == b)


def _sources(tensors: Sequence[TensorInfo], row: Family) -> Iterator[TensorInfo]:
    """Yields the tensors of the checkpoint, with name and shape only."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tensor in tensors:
        if not tensor.numel:
            raise CheckpointError(f"{tensor.name[:80]} of the file is empty ({shown(tensor.shape)})", fix=AGAIN)
        if SUFFIX.sub("", tensor.name) not in GENERATED:
            name, rank = _source(tensor.name, row)
            shape = _whole(tensor.shape, rank)
            shapes[name] = _stacked(shapes[name], shape) if name in shapes else shape
    for name, shape in shapes.items():
        if len(shape) == 3 and ".experts." in name:
            for expert in range(shape[0]):
                yield TensorInfo(name.replace(".experts.", f".experts.{expert}."), "BF16", shape[1:], "", 0, 0)
        else:
            yield TensorInfo(name, "BF16", shape, "", 0, 0)


def _source(name: str, row: Family) -> tuple[str, int]:
    block = BLOCK.fullmatch(name)
    leaf = block[2] if block else name
    base = SUFFIX.sub("", leaf)
    if base == leaf or base not in (row.layer if block else OUTSIDE) or (block and len(block[1]) > DIGITS):
        raise CheckpointError(f"the file has a tensor {name[:80]}, which no {row.name} has", fix=OTHER)
    prefix = f"model.layers.{int(block[1])}." if block else ""
    known = {**table()["names"], **table()[row.name].get("names", {})}
    return f"{prefix}{known[base]}{leaf[len(base) :]}", 1 if leaf.endswith(".bias") else len(row.shapes[base])


def _stacked(upper: tuple[int, ...], lower: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of two matrices, or stacks of them, one above the other."""
    rows = max(len(upper) - 2, 0)
    return (*upper[:rows], upper[rows] + lower[rows] if rows < len(lower) else 0, *upper[rows + 1 :])


def _fitted(tensor: TensorInfo, target: Target) -> TensorInfo:
    if _whole(tensor.shape, len(target.shape)) != target.shape:
        raise CheckpointError(
            f"{tensor.name} is {shown(tensor.shape)}, and by the metadata it would be {shown(target.shape)}",
            fix=AGAIN,
        )
    return replace(tensor, shape=target.shape)


def _whole(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Returns a shape with the leading ones that GGUF writers may drop."""
    return (1,) * (rank - len(shape)) + shape

"""Adapters as peft writes them: adapter_config.json and adapter_model.safetensors, by their headers.

`changes` says what an adapter does to each tensor of its base. A LoRA adds `scale * B A` to a weight; the scale is
alpha over the rank, or over its square root (rsLoRA), and both numbers can differ by module (patterns). DoRA then gives
every row of the sum the length that was trained. Modules that were trained whole replace those of the base.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from pathlib import Path
from typing import Any

from quantry.errors import CheckpointError, ConfigError, ModelNotFoundError, RecipeError
from quantry.models.files import LocalFiles, read_small
from quantry.models.safetensors import read_header
from quantry.storage.reading import parse_object
from quantry.types import Checkpoint, TensorInfo

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX = "base_model.model."
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
KEY = re.compile(
    r"(?P<module>.+?)\."
    r"(?P<role>lora_A\.weight|lora_B\.weight|lora_B\.bias|lora_embedding_A|lora_embedding_B"
    r"|lora_magnitude_vector(?:\.weight)?|token_adapter\.trainable_tokens_delta)"
)
UNKNOWN = {  # settings that change what an adapter computes, in ways that `changes` does not
    "use_qalora": "QA-LoRA", "alora_invocation_tokens": "activated LoRA", "layer_replication": "replicated layers",
    "target_parameters": "LoRA on stacked experts", "monteclora_config": "MonteCLoRA", "arrow_config": "Arrow",
    "use_bdlora": "block-diagonal LoRA", "megatron_config": "Megatron layers",
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
AGAIN = "save the adapter again with peft's save_pretrained"
OTHER = "give the model that the adapter was trained on"


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk; tensors have the names of the base's modules."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: LocalFiles = field(repr=False, compare=False)

    @property
    def base(self) -> str | None:
        """The name of the model it was trained on, as far as the adapter says."""
        name = self.config.get("base_model_name_or_path")
        return name if isinstance(name, str) and name else None

    def same(self, one: TensorInfo, other: TensorInfo) -> bool:
        """Says if two tensors have the same bytes."""
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        step = 1 << 24
        pieces = range(0, one.nbytes, step)
        read = self.files.read
        return all(
            read(one.file, one.start + at, min(step, one.nbytes - at))
            == read(other.file, other.start + at, min(step, other.nbytes - at))
            for at in pieces
        )


@dataclass(frozen=True, slots=True)
class LowRank:
    """A product that is added to a weight: `scale * b @ a`, transposed if `flip`."""

    a: TensorInfo
    b: TensorInfo
    scale: float
    flip: bool = False
    magnitude: TensorInfo | None = None  # of DoRA: the length of each row of the sum


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of a tensor of the base, in the order of the fields."""

    instead: TensorInfo | None = None  # trained whole, or with more rows
    low_rank: LowRank | None = None
    add: tuple[TensorInfo, float] | None = None  # a trained bias, and its scale
    rows: tuple[tuple[int, ...], TensorInfo] | None = None  # tokens that were trained alone, and their values


@dataclass(frozen=True, slots=True)
class Changes:
    """All changes by tensor; `head` names the base's tensor that a head of its own begins as, if it gets one."""

    by_tensor: Mapping[str, Change]
    head: str | None = None
    vocabulary: int | None = None  # rows of the embedding, where they change


def open_adapter(folder: str | Path) -> Adapter:
    """Opens the folder of an adapter. Raises QuantryError if there is none, it is damaged or of another kind."""
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise ModelNotFoundError(f"no such adapter: {place}", fix=f"give a folder with {CONFIG}")
    files = LocalFiles(place)
    if CONFIG not in files.sizes:
        raise ModelNotFoundError(f"{place} has no {CONFIG}", fix="give the folder that peft's save_pretrained wrote")
    if WEIGHTS not in files.sizes:
        if PICKLE in files.sizes:
            raise CheckpointError(
                f"{place} holds only pickled weights ({PICKLE}), which can run code when loaded", fix=AGAIN
            )
        raise CheckpointError(f"{place} has no {WEIGHTS}", fix=AGAIN)
    config = parse_object(read_small(files, CONFIG), str(place / CONFIG), fix=AGAIN, error=ConfigError)
    _check_config(config, place)
    tensors = {}
    for tensor in read_header(files, WEIGHTS):
        name = tensor.name.removeprefix(PREFIX).replace(".base_layer.", ".").replace(".modules_to_save.", ".")
        if tensor.dtype not in FLOATS:
            raise CheckpointError(f"{tensor.name} of {place} is {tensor.dtype}, not a float", fix=AGAIN)
        if name in tensors:
            raise CheckpointError(f"{place} has {name} twice", fix=AGAIN)
        tensors[name] = replace(tensor, name=name)
    if not tensors:
        raise CheckpointError(f"{place} has no tensor", fix=AGAIN)
    return Adapter(place, config, tensors, files)


def _check_config(config: Mapping[str, Any], place: Path) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise RecipeError(f"{place} is a {kind} adapter, and only LoRA is known", fix="merge it with peft")
    for key, words in UNKNOWN.items():
        if config.get(key):
            raise RecipeError(f"{place} uses {words} ({key}), which is not known", fix="merge it with peft")
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) not in (int, float) or not config[key] > 0:
            raise ConfigError(f"{place / CONFIG} has {key} {config.get(key)!r}, not a number above 0", fix=AGAIN)
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(key) or {}
        if not isinstance(pattern, dict) or not all(type(n) in (int, float) and n > 0 for n in pattern.values()):
            raise ConfigError(f"{place / CONFIG} has a {key} that does not map modules to numbers above 0", fix=AGAIN)
    tokens = config.get("trainable_token_indices")
    lists = tokens.values() if isinstance(tokens, dict) else [tokens or []]
    if not all(isinstance(ids, list) and all(type(n) is int and n >= 0 for n in ids) for ids in lists):
        raise ConfigError(f"{place / CONFIG} has trainable_token_indices that are not lists of tokens", fix=AGAIN)


def changes(adapter: Adapter, checkpoint: Checkpoint) -> Changes:
    """Returns what an adapter does to a checkpoint. Raises CheckpointError if it does not fit it."""
    base = {tensor.name: tensor for tensor in checkpoint.tensors}
    made: dict[str, Change] = {}
    tied = bool(checkpoint.config.get("tie_word_embeddings")) and not any(name.endswith(HEAD) for name in base)
    embedding = next((name for name in base if name.endswith(EMBEDDING)), None)
    for name, change in _found(adapter):
        origin = embedding if tied and name.endswith(HEAD) else name
        if origin not in base:
            raise CheckpointError(f"the adapter changes {name}, which {checkpoint.source} does not have", fix=OTHER)
        _check_fit(base[origin], change, checkpoint)
        made[name] = change
    rows = made[embedding].instead if embedding in made else None
    grown = rows.shape[0] if rows and embedding and rows.shape[0] != base[embedding].shape[0] else None
    if not tied or embedding is None:
        return Changes(made, vocabulary=grown)
    made, head = _tied(adapter, made, embedding)
    return Changes(made, head, grown)


def _tied(adapter: Adapter, made: dict[str, Change], embedding: str) -> tuple[dict[str, Change], str | None]:
    """Decides if a tied head stays tied: only where both get the same values.

    An adapter of the embedding alone leaves the head as it was, since peft trains a copy; tokens that were trained
    alone change both.
    """
    head = next((name for name in made if name.endswith(HEAD)), None)
    one, other = made.get(embedding, Change()), made.get(head, Change()) if head else Change()
    if head and one.low_rank is None and other.low_rank is None and one.rows is None and other.rows is None:
        if one.instead and other.instead and adapter.same(one.instead, other.instead):
            return {name: change for name, change in made.items() if name != head}, None
        return made, embedding
    if head is None and (one.low_rank or (one.instead and _trained_whole(adapter, embedding))):
        return {**made, HEAD: Change(rows=one.rows)}, embedding
    if head and one.rows and not other.rows:
        made = {**made, head: replace(other, rows=one.rows)}
    return made, embedding if head else None


def _trained_whole(adapter: Adapter, tensor: str) -> bool:
    """Says if a module was trained whole, and not only stored because it has more rows."""
    module = tensor.removesuffix(".weight")
    saved = adapter.config.get("modules_to_save") or []
    is_named = any(module == name or module.endswith(f".{name}") for name in map(str, saved))
    return is_named and not adapter.config.get("ensure_weight_tying")


def _found(adapter: Adapter) -> Iterator[tuple[str, Change]]:
    """Yields every tensor that an adapter changes, and how. Raises CheckpointError for half of a pair."""
    roles: dict[str, dict[str, TensorInfo]] = {}
    whole: dict[str, TensorInfo] = {}
    for name, tensor in adapter.tensors.items():
        if match := KEY.fullmatch(name):
            roles.setdefault(match["module"], {})[match["role"].removesuffix(".weight")] = tensor
        elif "lora_" in name:
            raise CheckpointError(f"{name} of {adapter.folder} is of no kind that is known", fix="merge it with peft")
        else:
            whole[name] = tensor
    biases = {f"{module}.bias": own["lora_B.bias"] for module, own in roles.items() if "lora_B.bias" in own}
    for name in dict.fromkeys([*whole, *(f"{module}.weight" for module in roles), *biases]):
        module = name.removesuffix(".weight")
        own = roles.get(module, {}) if name.endswith(".weight") else {}
        yield (
            name,
            Change(
                whole.get(name),
                _low_rank(adapter, module, own),
                (biases[name], scale_of(adapter.config, name.removesuffix(".bias"))) if name in biases else None,
                _rows(adapter, module, own),
            ),
        )


def _low_rank(adapter: Adapter, module: str, own: Mapping[str, TensorInfo]) -> LowRank | None:
    embeds = "lora_embedding_A" in own or "lora_embedding_B" in own
    names = ("lora_embedding_A", "lora_embedding_B") if embeds else ("lora_A", "lora_B")
    pair = [own.get(name) for name in names]
    if pair == [None, None]:
        return None
    a, b = pair
    if a is None or b is None:
        missing = names[pair.index(None)]
        raise CheckpointError(f"{adapter.folder} has no {missing} of {module}", fix=AGAIN)
    rank = rank_of(adapter.config, module)
    if len(a.shape) != 2 or len(b.shape) != 2 or not a.shape[0] == b.shape[1] == rank:
        raise CheckpointError(
            f"{module} has matrices of {_shown(a)} and {_shown(b)}, and {CONFIG} gives it rank {rank:g}", fix=AGAIN
        )
    flip = embeds or bool(adapter.config.get("fan_in_fan_out"))
    return LowRank(a, b, scale_of(adapter.config, module), flip, own.get("lora_magnitude_vector"))


def _rows(adapter: Adapter, module: str, own: Mapping[str, TensorInfo]) -> tuple[tuple[int, ...], TensorInfo] | None:
    values = own.get("token_adapter.trainable_tokens_delta")
    if values is None:
        return None
    listed = adapter.config.get("trainable_token_indices") or []
    ids = _by_module(listed, module) if isinstance(listed, dict) else listed
    if not ids or values.shape[0] != len(ids):
        raise CheckpointError(
            f"{module} has {values.shape[0]} trained tokens, and {CONFIG} names {len(ids or [])}", fix=AGAIN
        )
    return tuple(ids), values


def rank_of(config: Mapping[str, Any], module: str) -> float:
    """Returns the rank of a module: that of the first pattern that fits its name, or the adapter's."""
    found = _by_module(config.get("rank_pattern") or {}, module)
    return float(config["r"] if found is None else found)


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """Returns what the product of a module is multiplied by: alpha / rank, or alpha / sqrt(rank) for rsLoRA."""
    found = _by_module(config.get("alpha_pattern") or {}, module)
    alpha = float(config["lora_alpha"] if found is None else found)
    rank = rank_of(config, module)
    return alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_module(pattern: Mapping[str, Any], module: str) -> Any:
    """Returns the value of the first pattern that ends a module's name, as peft matches them."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise ConfigError(f"{CONFIG} has a pattern {key!r} that is none: {error}", fix=AGAIN) from error
    return None


def _check_fit(tensor: TensorInfo, change: Change, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a change has another shape than the tensor of the base."""
    shape, wanted = tensor.shape, []
    if change.instead:
        embeds = tensor.name.endswith((EMBEDDING, HEAD))  # only these may get more rows
        wanted.append((change.instead, (change.instead.shape[:1] if embeds else shape[:1]) + shape[1:]))
        shape = change.instead.shape
    if (pair := change.low_rank) is not None:
        out, width = (shape[::-1] if pair.flip else shape) if len(shape) == 2 else (-1, -1)
        wanted += [(pair.a, (pair.a.shape[0], width)), (pair.b, (out, pair.b.shape[1]))]
        wanted += [(pair.magnitude, (shape[0],))] if pair.magnitude else []
    if change.add:
        wanted.append((change.add[0], shape))
    if change.rows:
        ids, values = change.rows
        wanted.append((values, (len(ids), *shape[1:])))
        if max(ids) >= shape[0]:
            raise CheckpointError(f"token {max(ids)} of the adapter is not in {checkpoint.source}", fix=OTHER)
    for found, needed in wanted:
        if found.shape != needed:
            raise CheckpointError(
                f"{found.name} is {_shown(found)} and {tensor.name} of {checkpoint.source} {_shown(tensor)}", fix=OTHER
            )


def _shown(tensor: TensorInfo) -> str:
    return " x ".join(map(str, tensor.shape)) or "a single number"

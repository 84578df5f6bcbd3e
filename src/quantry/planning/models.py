"""Opens the model that a user names: a checkpoint with weights, or only a shape.

A shape is a config.json, or a row of models.toml found by a loosely written name. Its checkpoint has the tensors of the
16-bit model that the config describes, and no bytes to read.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

from quantry.errors import CheckpointError, ConfigError, HubError, ModelNotFoundError
from quantry.models.files import LocalFiles, read_small
from quantry.models.hub import HUB_ID
from quantry.models.reader import DEMO, PICKLES, open_checkpoint
from quantry.models.shapes import complete, tensors_of
from quantry.planning.stored import QUANTIZED, config_scheme, read_name
from quantry.storage import read_data
from quantry.storage.reading import parse_object
from quantry.types import Checkpoint

WEIGHTS = (".safetensors", ".safetensors.index.json", ".gguf", *PICKLES)
TUNED, UNTUNED = frozenset({"instruct", "chat", "it"}), frozenset({"base", "pt"})
WORDS = TUNED | UNTUNED | {"hf", "meta"}  # say nothing of the shape
NO_REPOSITORY = {  # causes of a HubError that are an answer of the hub
    "GatedRepoError": "the repository is gated",
    "RepositoryNotFoundError": "the hub has no such repository, or it is private",
}


@dataclass(frozen=True, slots=True)
class KnownModel:
    """One row of models.toml: a well-known model by its shape."""

    name: str
    repo: str
    config: Mapping[str, Any]
    published: int  # parameters, as the publisher counts them
    source: str  # of the config and the count, with its date
    besides: Mapping[str, int] = field(default_factory=dict)  # that count includes these, the 16-bit model does not
    stored: str = "bf16"
    instruct: bool = False
    aliases: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()  # other repositories of this shape, stored in the same way
    exact: bool = True  # False if `published` is rounded
    grouped: Mapping[str, Any] = field(default_factory=dict)  # config of the publisher's own AWQ and GPTQ versions

    @property
    def vision(self) -> bool:
        return "vision_config" in self.config


def open_model(model: str | Path) -> Checkpoint:
    """Opens what `open_checkpoint` opens, a config.json (or a folder with nothing else), or a name of the catalogue.

    Files come before the catalogue. A hub id is looked up on the hub first; if the hub does not answer, its last part
    is looked up in the catalogue, and `metadata` keeps the id as `repo` and says what was `borrowed`. Raises
    ModelNotFoundError if nothing has that name.

    Example: `open_model("llama-3.1-8b")`.
    """
    name, path = str(model), _local(model)
    bare = _bare_config(path) if path and name != DEMO else None
    if bare:
        return from_config(_read(bare), name)
    hub = HUB_ID.fullmatch(name)
    if path or name == DEMO or (_is_path(name) and not (hub and hub["file"])):
        return open_checkpoint(model)  # raises if the path is wrong
    if hub is None:
        return _well_known(name)
    try:
        return open_checkpoint(model)
    except HubError as error:
        known = None if hub["revision"] else find_model(name)  # a revision may store the weights in another way
        named = read_name(name, known.stored if known else "bf16")
        if known is None or (hub["file"] and named.scheme is None):
            raise
        why = NO_REPOSITORY.get(type(error.__cause__).__name__, "the hub did not answer")
        borrowed = f"{why}: shape of {known.name} from the catalogue"
        if named.scheme:
            borrowed += f", weights stored as {named.scheme} by the name"
        stored = named.scheme or known.stored
        config = _merged(known.config, known.grouped if _is_padded(known, name, stored) else {})
        return from_config(config, name, shape=known.name, repo=name, stored=stored, borrowed=borrowed)


def _is_padded(known: KnownModel, name: str, stored: str) -> bool:
    """Returns True for a repository in groups by the model's own publisher, who may have padded rows for that."""
    same_owner = name.partition("/")[0].lower() == known.repo.partition("/")[0].lower()
    return same_owner and stored.startswith(("awq", "gptq"))


@cache
def known_models() -> Mapping[str, KnownModel]:
    """Returns the catalogue by name, in the order of models.toml."""
    table = read_data("quantry.planning", "models.toml")
    return {name: _model(name, table["models"], table["sources"]) for name in table["models"]}


def find_model(name: str) -> KnownModel | None:
    """Returns the model of the catalogue whose shape a name, or the last part of a hub id, means; None if unknown.

    The end of a name that says how its weights are stored does not matter, nor does the original's owner before it.
    """
    base = read_name(name).base
    owner, _, rest = base.partition("_")  # bartowski/google_gemma-3-27b-it-GGUF
    names = [name, base, *([rest] if owner.lower() in _owners() else [])]
    return next((known for name in names if (known := _names().get(_key(name)))), None)


def is_original(known: KnownModel, repo: str) -> bool:
    """Returns True if a hub id is the repository of a row, or a variant that is tuned for chat."""
    return repo == known.repo or (repo in known.variants and not UNTUNED & {*_words(repo)})


def repository(known: KnownModel, name: str) -> str:
    """Returns which repository of a shape a name means: the one named like it, of several the first unless it says."""
    words, key = _words(name), _key(name)
    repos = (known.repo, *known.variants)
    equal = [repo for repo in repos if _key(repo) == key]
    begun = [repo for repo in repos if _key(repo).startswith(key) or key.startswith(_key(repo))]
    alike = equal or begun or [known.repo]
    if not (TUNED | UNTUNED) & {*words}:
        return alike[0]
    same = [repo for repo in alike if _words(repo) == words]
    fitting = [repo for repo in alike if bool(TUNED & {*_words(repo)}) == bool(TUNED & {*words})]
    return [*same, *fitting, *alike][0]


def from_config(config: Mapping[str, Any], source: str, **facts: str) -> Checkpoint:
    """Returns a checkpoint without weights: the 16-bit model of a config, even if the config says it is quantized."""

    def read(file: str, start: int, length: int) -> NoReturn:
        raise CheckpointError(
            f"{source} is known by its shape only and has no weights",
            fix="give the folder or the hub id of the weights",
        )

    plain = complete({key: value for key, value in config.items() if key not in QUANTIZED})
    return Checkpoint(
        source=source,
        format="safetensors",
        files={},
        tensors=tensors_of(plain),
        config=plain,
        tokenizer=None,
        chat_template=False,
        read=read,
        metadata={"shape": "config", "stored": config_scheme(config), **facts},
    )


@lru_cache(16)  # what is computed for a checkpoint is kept with it
def _well_known(name: str) -> Checkpoint:
    known = find_model(name)
    if known is None:
        raise ModelNotFoundError(f"no such model: {name[:100]}", fix=_suggestion(name))
    repo, named = repository(known, name), read_name(name)
    if named.scheme not in (None, known.stored) and _words(name) != _words(repo):
        raise ModelNotFoundError(
            f"{name[:100]} is a quantized model, and many publish one",
            fix=f"write whose it is, owner/{name[:100]}, or {known.name} for the original",
        )
    return from_config(known.config, name, shape=known.name, repo=repo, stored=known.stored)


def _local(model: str | Path) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long a name; ~someone without a home
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFoundError(f"cannot look at {str(model)[:100]}: {reason}", fix="check the path") from error


def _is_path(name: str) -> bool:
    """Returns True if a name that does not exist can only mean a path."""
    return name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith((*WEIGHTS, ".json"))


def _bare_config(path: Path) -> Path | None:
    """Returns the config of a model without weights: the file itself, or config.json of such a folder."""
    if path.is_file():
        return path if path.suffix == ".json" else None
    bare = path.is_dir() and not any(name.endswith(WEIGHTS) for name in LocalFiles(path).sizes)
    return path / "config.json" if bare and (path / "config.json").is_file() else None


def _read(path: Path) -> dict[str, Any]:
    data = read_small(LocalFiles(path.parent), path.name)
    return parse_object(data, str(path), fix="give the config.json of a model", error=ConfigError)


def _suggestion(name: str) -> str:
    close = get_close_matches(_key(name), _names(), n=3, cutoff=0.6)
    names = dict.fromkeys(_names()[key].name for key in close)
    if names:
        return f"did you mean {' or '.join(names)}?"
    return "give a folder, a config.json, a .gguf file, owner/name, demo or a well-known model such as llama-3.1-8b"


def _key(name: str) -> str:
    """Returns a name without case, separators and words that say nothing of the shape."""
    parts = [part for part in _words(name) if part not in WORDS]
    return re.sub(r" (?=[a-z])|(?<=[a-z]) ", "", " ".join(parts))  # "llama3.1 70b": numbers stay apart


def _words(name: str) -> list[str]:
    last = re.sub(r"(?<![\d.])(\d)_(\d)(?!\w)", r"\1.\2", name.lower().rpartition("/")[2])  # InternVL2_5
    return re.findall(r"[a-z]+|\d+(?:\.\d+)*", last)


@cache
def _names() -> dict[str, KnownModel]:
    models = known_models().values()
    return {_key(name): model for model in models for name in (*model.variants, *model.aliases, model.repo, model.name)}


@cache
def _owners() -> frozenset[str]:
    repos = (repo for model in known_models().values() for repo in (model.repo, *model.variants))
    return frozenset(repo.partition("/")[0].lower() for repo in repos)


def _model(name: str, rows: Mapping[str, Any], sources: Mapping[str, Any]) -> KnownModel:
    row = {key: value for key, value in rows[name].items() if key not in ("like", "config", "published_about")}
    source = sources[row["source"]]
    facts = {
        "source": f"{source['about']}; {source['date']}",
        "aliases": tuple(row.get("aliases", ())),
        "variants": tuple(row.get("variants", ())),
        "published": rows[name].get("published_about") or row["published"],
        "exact": "published" in row,
    }
    return KnownModel(name=name, config=_config(name, rows), **{**row, **facts})


def _config(name: str, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the row that a row is like, with the row's own fields."""
    row = rows[name]
    return _merged(_config(row["like"], rows) if "like" in row else {}, row.get("config", {}))


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    nested = {
        key: _merged(base[key], value)
        for key, value in changes.items()
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
    }
    return {**base, **changes, **nested}

"""Plug-ins by name: `load("quantry.formats", "gptq")` imports quantry/formats/gptq.py when asked, not before.

A built-in plug-in's file name is its name, with `_` written as `-`; files that start with `_`, and `contract.py`, are
not plug-ins. There is no table to edit: adding a method, a format or an engine is adding a file.

Another package adds one through an entry point whose group is the room's name and whose value is the module:

    [project.entry-points."quantry.rounders"]
    stochastic = "my_package.stochastic"

Open rooms are `quantry.rounders`, `quantry.fits`, `quantry.transforms`, `quantry.formats` and `quantry.engines`. A
plug-in of another package is held to the same contract and cannot take the name of a built-in one.
"""

import ast
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from quantry.errors import QuantryError, UnknownNameError

OPEN = frozenset({"rounders", "fits", "transforms", "formats", "engines"})
MANY, FEW = 20, 4  # names that an error lists in full, and the closest of more
LISTED_BY = {"preset": "quantry presets"}  # the command that lists all names of a kind
CONTRACT = "contract"  # what the plug-ins of a room are held to; no plug-in itself


def choices(package: str) -> tuple[str, ...]:
    """The plug-in names of `package`, in alphabetical order, without importing any of them."""
    return tuple(sorted({**_others(package), **_built_in(package)}))


def load(package: str, name: str) -> ModuleType:
    """Imports the plug-in `name` of `package`; an unknown name is answered with the choices."""
    check(_kind(package), name, choices(package))
    module = {**_others(package), **_built_in(package)}[name]
    try:
        return import_module(module)
    except ImportError as error:
        if module.startswith("quantry."):
            raise
        raise QuantryError(
            f"the {_kind(package)} {name} of {module} cannot be imported ({error})",
            fix="install what it needs, or remove the package that adds it",
        ) from error


def location(package: str, name: str) -> Path:
    """The file of a plug-in, without importing it: what lies beside it is its data."""
    module = {**_others(package), **_built_in(package)}[name]
    spec = find_spec(module)
    if spec is None or spec.origin is None:
        raise QuantryError(f"{module} cannot be found", fix=f"remove the package that adds {name}")
    return Path(spec.origin)


@cache
def facts(package: str, name: str) -> dict[str, Any]:
    """Returns the literal constants in capitals that a plug-in declares, read from its source: nothing is imported.

    So planning learns what a rounder needs without importing torch.
    """
    declared: dict[str, Any] = {}
    for statement in ast.parse(location(package, name).read_text(encoding="utf-8")).body:
        if not isinstance(statement, ast.Assign | ast.AnnAssign) or statement.value is None:
            continue
        for target in [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets:
            if isinstance(target, ast.Name) and target.id.isupper():
                with suppress(ValueError):  # not a literal
                    declared[target.id] = ast.literal_eval(statement.value)
    return declared


def check(what: str, name: str, known: Collection[str]) -> None:
    """Raises UnknownNameError, which suggests a known name, for a name that is not known."""
    if name not in known:
        fix = suggest(name, tuple(known), listed_by=LISTED_BY.get(what, ""))
        raise UnknownNameError(f"unknown {what} {name[:60]!r}", fix=fix)


def resolve(what: str, name: str, known: Collection[str], also: Mapping[str, str] | None = None) -> str:
    """Returns the known name that somebody means: case and the signs between letters do not matter.

    `also` has more names for known ones. Raises UnknownNameError, which suggests a known name, for any other.

    >>> resolve("engine", "LlamaCPP", ["llama.cpp", "vllm"])
    'llama.cpp'
    """
    if name in known:
        return name
    plain = {_plain(each): target for each, target in (also or {}).items()} | {_plain(each): each for each in known}
    if _plain(name) not in plain:
        check(what, name, known)
    return plain[_plain(name)]


def suggest(name: str, known: tuple[str, ...], listed_by: str = "") -> str:
    """Returns a question for names that are close, else all names; of many, the closest and what lists the others."""
    close = nearest(name, known, 3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(close)}?"
    if len(known) <= MANY:
        return f"choose one of: {', '.join(known)}"
    all_of_them = f"; {listed_by} lists all" if listed_by else ""
    return f"choose one of {len(known)}, such as {', '.join(nearest(name, known))}{all_of_them}"


def nearest(name: str, known: Collection[str], count: int = FEW, cutoff: float = 0.0) -> list[str]:
    """Returns the known names that are most like a name, the closest first; case does not matter."""
    spelled = {each.lower(): each for each in known}
    return [spelled[each] for each in get_close_matches(name[:60].lower(), spelled, n=count, cutoff=cutoff)]


@cache
def _built_in(package: str) -> dict[str, str]:
    """The modules of a room by the names of their plug-ins."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    files = (file for folder in spec.submodule_search_locations for file in Path(folder).glob("[!_]*.py"))
    return {file.stem.replace("_", "-"): f"{package}.{file.stem}" for file in files if file.stem != CONTRACT}


@cache
def _others(package: str) -> dict[str, str]:
    """The modules that installed packages add to a room, by the names of their plug-ins."""
    if _room(package) not in OPEN:
        return {}
    return {point.name: point.value for point in entry_points(group=f"quantry.{_room(package)}")}


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9+]", "", name.lower())


def _room(package: str) -> str:
    return package.rpartition(".")[2]


def _kind(package: str) -> str:
    """What a plug-in of a room is called."""
    return _room(package).removesuffix("s")

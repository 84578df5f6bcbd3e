"""Plug-ins by file name: `load("quantry.cli", "inspect")` imports quantry/cli/inspect.py when asked, not before.

A plug-in's file name is its name, with `_` written as `-`; files that start with `_` are not plug-ins. There is no
table to edit: adding a method, a format or an engine is adding a file.
"""

from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from quantry.errors import UnknownNameError


def choices(package: str) -> tuple[str, ...]:
    """The plug-in names of `package`, in alphabetical order, without importing any of them."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{package} is not a package")
    files = (file for folder in spec.submodule_search_locations for file in Path(folder).glob("[!_]*.py"))
    return tuple(sorted(file.stem.replace("_", "-") for file in files))


def load(package: str, name: str) -> ModuleType:
    """Imports the plug-in `name` of `package`; an unknown name is answered with the choices."""
    known = choices(package)
    if name not in known:
        kind = package.rpartition(".")[2].removesuffix("s")
        raise UnknownNameError(f"unknown {kind} {name!r}", fix=suggest(name, known))
    return import_module(f"{package}.{name.replace('-', '_')}")


def suggest(name: str, known: tuple[str, ...]) -> str:
    """The closest of the known names, or all of them."""
    close = get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(known)}"

"""The file that a bug leaves behind: the traceback and versions, without paths, names or keys of the user."""

import os
import platform
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from getpass import getuser
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path

from quantry import __version__
from quantry.storage import home

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "gguf", "xllamacpp", "numpy")
KEYS = re.compile(
    r"\b(?:hf_|sk-|ghp_|glpat-|AKIA)[\w-]{8,}|(?i:bearer)\s+\S+|(?i:(?:api[-_]?key|token|secret|password)\s*[=:]\s*)\S+"
)
PATHS = re.compile(r"(?<![\w.~])(?:~|/[\w.@+-]+)(?:/[^\s'\":;,)\]]*)?/(?=[^\s'\":;,)\]/]*)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
SHORT = 6  # characters of a secret that could be an ordinary word


def save(error: BaseException) -> str:
    """Saves what a report needs and returns the line for the user."""
    text = redacted(_content(error))
    what = redacted(" ".join(f"{type(error).__name__}: {error}".split()))[:160]
    try:
        file = str(_write(text))
    except OSError as problem:
        return f"{what}; its traceback cannot be saved ({problem.strerror}), please report this line and the command"
    return f"{what}; please report it with {file} (it has no paths, names or keys) and the command"


def redacted(text: str) -> str:
    """Returns a text without keys, the name of the user and the folders of absolute paths."""
    for secret in _secrets():
        text = text.replace(secret, "<key>")
    text = PATHS.sub(_shortened, KEYS.sub("<key>", text))
    for name in _names():
        text = re.sub(rf"\b{re.escape(name)}\b", "<user>", text)
    return text


def _content(error: BaseException) -> str:
    words = [word.partition("=")[0] for word in sys.argv[1:] if word.startswith("-")]
    versions = [f"{name} {_version(name)}" for name in PACKAGES]
    facts = [
        f"quantry {__version__}, python {platform.python_version()}, {platform.system()} {platform.machine()}",
        ", ".join(versions),
        f"command: {' '.join([*sys.argv[1:2], *words])}",
    ]
    return "\n".join([*facts, "", *traceback.format_exception(error)])


def _write(text: str) -> Path:
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    for folder in (home() / "bugs", Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8", errors="replace")
            return folder / name
        except OSError:
            continue
    raise OSError(0, "no folder can be written")


def _shortened(match: re.Match[str]) -> str:
    """Keeps the folders inside a package, which say where it happened."""
    folders = match[0].split("/")
    known = next((at for at, part in enumerate(folders) if part in ("site-packages", "quantry")), None)
    return "<path>/" if known is None else "/".join(folders[known:])


def _secrets() -> Iterator[str]:
    yield from (value for name, value in os.environ.items() if SECRET.search(name) and len(value) > SHORT)
    for flag, value in pairwise(sys.argv[1:]):
        if flag.startswith("-") and SECRET.search(flag) and len(value) > SHORT:
            yield value


def _names() -> set[str]:
    names = {Path.home().name, os.environ.get("USER", ""), os.environ.get("LOGNAME", "")}
    with suppress(OSError, KeyError):
        names.add(getuser())
    return {name for name in names if len(name) > 1 and name not in ("root", "home", "user", "quantry")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"

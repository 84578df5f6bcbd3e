"""Where Quantry stores things: its cache folder, the names of files that several rooms use, and its TOML data.

reading.py reads back what was stored, shape.py says what is wrong with it.
"""

import os
import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

VARIABLE = "QUANTRY_CACHE"
ARTEFACT_FILE = "quantry.json"  # of an artefact: recipe, versions, hashes, fates, proof
SENSITIVITY_FILE = "sensitivity.json"  # what a mixture was chosen by


def home() -> Path:
    """Returns the cache folder: ~/.cache/quantry, or the one that QUANTRY_CACHE names."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/quantry").expanduser()


@cache
def read_data(package: str, name: str) -> dict[str, Any]:
    """Returns a TOML file of a package; it is read once, and callers must not change it."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))

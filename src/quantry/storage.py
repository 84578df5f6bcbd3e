"""Where Quantry stores things: its cache folder, and the names of files that several rooms read and write."""

import os
from pathlib import Path

VARIABLE = "QUANTRY_CACHE"
ARTEFACT_FILE = "quantry.json"  # of an artefact: recipe, versions, hashes, fates, proof
SENSITIVITY_FILE = "sensitivity.json"  # what a mixture was chosen by


def home() -> Path:
    """Returns the cache folder: ~/.cache/quantry, or the one that QUANTRY_CACHE names."""
    return Path(os.environ.get(VARIABLE) or "~/.cache/quantry").expanduser()

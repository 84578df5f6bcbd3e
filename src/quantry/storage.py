"""Where Quantry keeps what it can make again: ~/.cache/quantry, or the folder that QUANTRY_CACHE names."""

import os
from pathlib import Path

VARIABLE = "QUANTRY_CACHE"
ARTEFACT_FILE = "quantry.json"  # what an artefact says of itself: recipe, versions, hashes, fates, proof
SENSITIVITY_FILE = "sensitivity.json"  # what a mixture was chosen by


def home() -> Path:
    return Path(os.environ.get(VARIABLE) or "~/.cache/quantry").expanduser()

"""Where Quantry keeps what it can make again: ~/.cache/quantry, or the folder that QUANTRY_CACHE names."""

import os
from pathlib import Path

VARIABLE = "QUANTRY_CACHE"


def home() -> Path:
    return Path(os.environ.get(VARIABLE) or "~/.cache/quantry").expanduser()

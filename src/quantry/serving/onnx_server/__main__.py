"""Starts the server, as a module of Quantry or by the path of this file where Quantry is not installed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if not __package__:  # by its path: Quantry is the one of this file, and nothing beside it can be imported
    __package__ = "quantry.serving.onnx_server"
    _spec = spec_from_file_location("quantry", Path(__file__).parents[2] / "__init__.py")
    assert _spec is not None
    sys.modules["quantry"] = module_from_spec(_spec)

from .program import run

run()

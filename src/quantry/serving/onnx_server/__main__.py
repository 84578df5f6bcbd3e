"""Starts the server, as a module of Quantry or by the path of this file where Quantry is not installed."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

if not __package__:  # by its path: the folder becomes a package of its own
    __package__ = "onnx_server"
    _spec = spec_from_file_location(__package__, Path(__file__).with_name("__init__.py"))
    assert _spec is not None
    sys.modules[__package__] = module_from_spec(_spec)

from .program import run

run()

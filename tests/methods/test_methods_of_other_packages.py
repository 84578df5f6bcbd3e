"""A rounder, a fit and a format of another package, installed into a folder of its own, used from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from killed_jobs import contents
from quantry.models.reader import demo_folder

STOCHASTIC = '''
"""Rounds up or down with a chance in proportion to the distance."""

import torch

from quantry.methods.contract import Prepared
from quantry.numerics.grids import encode
from quantry.types import QTensor

NEEDS_STATISTICS = False
GRIDS = ("int",)


def prepare(stats):
    return Prepared(stats)


def round_weight(weight, grid, params, prepared=None):
    generator = torch.Generator().manual_seed(weight.shape[0])
    noise = torch.rand(weight.shape, generator=generator) - 0.5
    step = params.scale.float().repeat_interleave(weight.shape[1] // params.scale.shape[1], dim=1)
    return QTensor(grid, encode(weight.float() + noise * step, grid, params), params)


def round_blocks(weight, kind, prepared):
    raise NotImplementedError(kind)


def notes(reports):
    return ()
'''
HALF = '''
"""Half of the range: every outer weight is clipped."""

from dataclasses import replace

from quantry.methods.fits import absmax

NEEDS_STATISTICS = False


def fit(weight, grid, whole=None, stats=None):
    params = absmax.fit(weight, grid, whole, stats)
    return replace(params, scale=params.scale / 2)
'''
BYTES = '''
"""One code a byte, one scale a channel."""

import torch

from quantry.formats.contract import modules_with, part
from quantry.types import Grid, Params, QTensor, Scheme

NAME = "bytes"
QUANT_METHODS = ("bytes",)
CACHE_SCALES = None


def refusal(scheme):
    fits = scheme.weight.kind == "int" and scheme.weight.symmetric and scheme.weight.block[0] == 1
    return None if fits and scheme.activation is None else "bytes holds symmetric integers in groups"


def stored_grid(grid, dtype):
    from dataclasses import replace

    return replace(grid, scale="f32")


def model_dtype(dtype):
    return dtype


def layout(module, shape, grid, static=None):
    return {f"{module}.codes": ("I8", shape), f"{module}.steps": ("F32", (shape[0], shape[1] // grid.block[1]))}


def config(assignment, kept, cache=None):
    grid = next(iter(assignment.values())).weight
    return {"quant_method": "bytes", "bits": grid.bits, "group": grid.block[1]}


def schemes(settings, tensors):
    grid = Grid("int", settings["bits"], (1, settings["group"]), scale="f32")
    return dict.fromkeys(modules_with(tensors, "codes"), Scheme(grid))


def encode(module, tensor):
    return {f"{module}.codes": tensor.codes.contiguous(), f"{module}.steps": tensor.params.scale}


def decode(module, tensors, scheme, settings=None):
    return QTensor(scheme.weight, part(tensors, module, "codes"), Params(part(tensors, module, "steps")))


def shape(module, tensors, scheme):
    return tuple(part(tensors, module, "codes").shape)
'''
ENTRY_POINTS = """
[quantry.rounders]
stochastic = other_package.stochastic
[quantry.fits]
half = other_package.half
[quantry.formats]
bytes = other_package.bytes_format
broken = other_package.nowhere
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an installed package."""
    folder: Path = tmp_path_factory.mktemp("site")
    package, info = folder / "other_package", folder / "other_package-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "stochastic.py").write_text(STOCHASTIC)
    (package / "half.py").write_text(HALF)
    (package / "bytes_format.py").write_text(BYTES)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def quantry(site: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command line in a process that sees the other package."""
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "quantry", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})


def test_all_of_it_from_the_command_line(site: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('preset = "w4a16"\ngroup = 64\nfit = "half"\nrounder = "stochastic"\nformat = "bytes"\n')
    done = quantry(site, "quantize", "demo", "--recipe", recipe, "-o", tmp_path / "out", "--no-report")
    assert done.returncode == 0, done.stderr
    recorded = json.loads((tmp_path / "out" / "quantry.json").read_text())["recipe"]
    assert (recorded["preset"]["rounder"], recorded["preset"]["fit"]) == ("stochastic", "half")
    assert recorded["format"] == "bytes"
    stored = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    codes, steps = stored[f"{name}.codes"].float(), stored[f"{name}.steps"].repeat_interleave(64, dim=1)
    weight = load_file(demo_folder() / "model.safetensors")[f"{name}.weight"].float()
    inside = weight.abs() < 7 * steps
    error = (codes * steps - weight) / steps
    assert 0.5 < float(error[inside].abs().max()) <= 1.0 + 1e-3  # more than nearest would, never more than a step
    assert float((codes.abs() >= 7).float().mean()) > 0.05  # half of the range is clipped
    back = quantry(site, "convert", tmp_path / "out", "--to", "bf16", "-o", tmp_path / "back")
    assert back.returncode == 0, back.stderr
    read = load_file(tmp_path / "back" / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(read, (codes * steps).bfloat16())


def test_the_rounder_is_listed_and_its_grids_are_kept_to(site: Path, tmp_path: Path) -> None:
    shown = quantry(site, "quantize", "--help")
    assert "stochastic" in shown.stdout
    done = quantry(
        site, "quantize", "demo", "--preset", "fp8-dynamic", "--rounder", "stochastic", "-o", tmp_path / "out"
    )
    assert done.returncode == 2
    assert "stochastic cannot round onto the e4m3 of fp8-dynamic" in done.stderr
    assert not (tmp_path / "out").exists()


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    words = ("quantize", "demo", "--preset", "w4a16", "--rounder", "stochastic", "-o", tmp_path / "out")
    done = quantry(tmp_path, *words)
    assert done.returncode == 2
    assert "unknown rounder 'stochastic'" in done.stderr


def test_a_package_that_cannot_be_imported_is_named(site: Path, tmp_path: Path) -> None:
    words = ("quantize", "demo", "--preset", "w4a16", "--format", "broken", "-o", tmp_path / "out")
    done = quantry(site, *words)
    assert done.returncode == 2
    assert "other_package.nowhere" in done.stderr
    assert done.stderr.count("\n") == 1
    assert contents(tmp_path) == {}

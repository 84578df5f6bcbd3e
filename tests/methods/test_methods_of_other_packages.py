"""A rounder, a fit and a format of another package, installed into a folder of its own, used from the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command import Completed, command
from quantry.models.reader import demo_folder
from shared import recorded

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

TESTS = Path(__file__).parents[1]
COMMANDS = {
    "quantize": "quantize demo --recipe recipe.toml -o out --no-report",
    "convert": "convert out --to bf16 -o back",
    "help": "quantize --help",
    "another grid": "quantize demo --preset fp8-dynamic --rounder stochastic -o fp8",
    "broken": "quantize demo --preset w4a16 --format broken -o never",
}
SCRIPT = """
import json, sys
from command import command
done = {name: command(*words.split()) for name, words in json.loads(sys.argv[1]).items()}
print(json.dumps({name: (one.returncode, one.stdout, one.stderr) for name, one in done.items()}))
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


@pytest.fixture(scope="module")
def done(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Completed]]:
    """Commands in a folder of their own and a process that sees the other package."""

    def make(folder: Path) -> tuple[Path, dict[str, Completed]]:
        recipe = 'preset = "w4a16"\ngroup = 64\nfit = "half"\nrounder = "stochastic"\nformat = "bytes"\n'
        (folder / "recipe.toml").write_text(recipe)
        path = os.pathsep.join([str(site), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
        words = [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)]
        env = {**os.environ, "PYTHONPATH": path}
        told = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env, cwd=folder).stdout
        return folder, {name: Completed("", *answer) for name, answer in json.loads(told).items()}

    found: tuple[Path, dict[str, Completed]] = recorded(tmp_path_factory, "commands with another package", make)
    return found


def test_all_of_it_from_the_command_line(done: tuple[Path, dict[str, Completed]]) -> None:
    folder, answers = done
    assert answers["quantize"].returncode == 0, answers["quantize"].stderr
    recipe = json.loads((folder / "out" / "quantry.json").read_text())["recipe"]
    assert (recipe["preset"]["rounder"], recipe["preset"]["fit"]) == ("stochastic", "half")
    assert recipe["format"] == "bytes"
    stored = load_file(folder / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    codes, steps = stored[f"{name}.codes"].float(), stored[f"{name}.steps"].repeat_interleave(64, dim=1)
    weight = load_file(demo_folder() / "model.safetensors")[f"{name}.weight"].float()
    inside = weight.abs() < 7 * steps
    error = (codes * steps - weight) / steps
    assert 0.5 < float(error[inside].abs().max()) <= 1.0 + 1e-3  # more than nearest would, never more than a step
    assert float((codes.abs() >= 7).float().mean()) > 0.05  # half of the range is clipped
    assert answers["convert"].returncode == 0, answers["convert"].stderr
    read = load_file(folder / "back" / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(read, (codes * steps).bfloat16())


def test_the_rounder_is_listed_and_its_grids_are_kept_to(done: tuple[Path, dict[str, Completed]]) -> None:
    folder, answers = done
    assert "stochastic" in answers["help"].stdout
    assert answers["another grid"].returncode == 2
    assert "stochastic cannot round onto the e4m3 of fp8-dynamic" in answers["another grid"].stderr
    assert not (folder / "fp8").exists()


def test_without_the_package_its_names_are_unknown(tmp_path: Path) -> None:
    told = command("quantize", "demo", "--preset", "w4a16", "--rounder", "stochastic", "-o", tmp_path / "out")
    assert told.returncode == 2
    assert "unknown rounder 'stochastic'" in told.stderr


def test_a_package_that_cannot_be_imported_is_named(done: tuple[Path, dict[str, Completed]]) -> None:
    folder, answers = done
    assert answers["broken"].returncode == 2
    assert "other_package.nowhere" in answers["broken"].stderr
    assert answers["broken"].stderr.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["back", "out", "recipe.toml"]

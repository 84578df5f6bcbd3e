"""Which tensor is broken: every kind of damage is named in every format, and no sound artefact is accused."""

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import quantry
from demo_artefacts import DATA_FREE, quantized_demo
from depth import cases
from quantry.models.reader import demo_folder
from quantry.proof.tensor_errors import TensorError, errors, suspects
from quantry.quantizing.sources import open_source
from quantry.types import Grid, Scheme
from shared import shared
from tiny_models import write_model

BROKEN = ("w4a16", "fp8-dynamic", "w8a8", "nf4", "gguf-q4_k_m", "gguf-q2_k")
DOWN = ("model.layers.2.mlp.up_proj", "model.layers.5.mlp.up_proj")  # of one type in every mixture
QUERY = "model.layers.3.self_attn.q_proj"  # square
SCALES = {  # the bytes of a block that are not codes
    "Q4_K": (slice(0, 16),),
    "Q3_K": (slice(96, 110),),
    "Q2_K": (slice(0, 16), slice(80, 84)),
}
NAMES = {
    "mlp.up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q",
}


@dataclass(frozen=True)
class Memory:
    """A model of tensors at hand."""

    tensors: Mapping[str, torch.Tensor]
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    path: Path = Path("nowhere")

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.tensors)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The demo model by preset, made once; and the same of a model with its layers in another order."""

    def write_other(folder: Path) -> None:
        shutil.copytree(demo_folder(), folder, dirs_exist_ok=True)
        tensors = load_file(folder / "model.safetensors")
        turned = {name: tensors[_turned(name)] for name in tensors}
        save_file(turned, folder / "model.safetensors", {"format": "pt"})

    def made(preset: str, model: str = "demo") -> Path:
        if model == "demo":
            return quantized_demo(tmp_path_factory, preset)
        other = shared(tmp_path_factory, "demo-turned", write_other)
        name = f"turned-{preset}"
        out = shared(tmp_path_factory, name, lambda folder: quantry.quantize(other, folder / "out", preset=preset))
        return out / "out"

    return made


def _turned(name: str) -> str:
    head, _, rest = name.partition("model.layers.")
    number, _, leaf = rest.partition(".")
    return f"{head}model.layers.{7 - int(number)}.{leaf}" if rest else name


def _is_gguf(folder: Path) -> bool:
    return any(folder.glob("*.gguf"))


class GgufTensors:
    """The blocks of a GGUF file by tensor, (rows, blocks, bytes of a block), writable in place."""

    def __init__(self, folder: Path) -> None:
        (self.file,) = folder.glob("*.gguf")
        self._reader = gguf.GGUFReader(self.file, "r+")

    def blocks(self, module: str) -> tuple[np.ndarray, str]:
        _, _, layer, *leaf = module.split(".")
        name = f"blk.{layer}.{NAMES['.'.join(leaf)]}.weight"
        (tensor,) = (tensor for tensor in self._reader.tensors if tensor.name == name)
        size = gguf.GGML_QUANT_SIZES[tensor.tensor_type][1]
        return tensor.data.reshape(len(tensor.data), -1, size), tensor.tensor_type.name


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def of(tensors: Mapping[str, torch.Tensor], module: str) -> list[str]:
    """What describes a module's weight besides its codes."""
    codes = (f"{module}.weight", f"{module}.weight_packed", f"{module}.weight_shape")
    return [name for name in tensors if name.startswith(f"{module}.") and name not in codes]


def swap_scales(folder: Path, other: Path) -> set[str]:
    one, two = DOWN
    if _is_gguf(folder):
        file = GgufTensors(folder)
        (first, kind), (second, _) = file.blocks(one), file.blocks(two)
        for part in SCALES[kind]:
            kept = first[..., part].copy()
            first[..., part], second[..., part] = second[..., part].copy(), kept
        return {*DOWN}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in of(tensors, one):
            twin = name.replace(one, two)
            tensors[name], tensors[twin] = tensors[twin], tensors[name]

    edit(folder, change)
    return {*DOWN}


def other_layer(folder: Path, other: Path) -> set[str]:
    one = DOWN[0]
    if _is_gguf(folder):
        GgufTensors(folder).blocks(one)[0][:] = GgufTensors(other).blocks(one)[0]
    else:
        strange = load_file(other / "model.safetensors")
        edit(folder, lambda tensors: tensors.update({n: strange[n] for n in tensors if n.startswith(f"{one}.")}))
    return {one}


def permute(folder: Path, other: Path) -> set[str]:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    if _is_gguf(folder):
        blocks = GgufTensors(folder).blocks(QUERY)[0]
        blocks[:] = blocks[order.numpy()]
        return {QUERY}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name in (f"{QUERY}.weight", f"{QUERY}.weight_packed"))
        codes = tensors[name]
        tensors[name] = codes.t().contiguous() if codes.shape == (256, 256) else _permuted(codes, order)

    edit(folder, change)
    return {QUERY}


def _permuted(codes: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return codes.reshape(256, -1)[order].reshape(codes.shape).contiguous()


def zero_group(folder: Path, other: Path) -> set[str]:
    if _is_gguf(folder):
        file = GgufTensors(folder)
        blocks, kind = file.blocks(QUERY)
        for part in SCALES[kind]:
            blocks[100, 0, part] = 0
        return {QUERY}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        if f"{QUERY}.weight_scale" in tensors:
            tensors[f"{QUERY}.weight_scale"][100, 0] = 0
        else:
            tensors[f"{QUERY}.weight"][3200:3232] = 0x77  # two codes of nf4's zero: the 64 weights of one group

    edit(folder, change)
    return {QUERY}


DAMAGES = (swap_scales, other_layer, permute, zero_group)


@pytest.mark.parametrize(
    ("preset", "damage"),
    cases(
        [(preset, damage) for preset in BROKEN for damage in DAMAGES],
        [*(("w4a16", damage) for damage in DAMAGES), ("nf4", zero_group), ("gguf-q2_k", swap_scales)],
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_damage_is_named(
    preset: str,
    damage: Callable[[Path, Path], set[str]],
    artefacts: Callable[..., Path],
    tmp_path: Path,
) -> None:
    broken = shutil.copytree(artefacts(preset), tmp_path / "broken")
    want = damage(broken, artefacts(preset, "other"))
    found = suspects(errors(open_source("demo"), open_source(broken)))
    assert {suspect.name.removesuffix(".weight") for suspect in found} == want
    words = {
        "swap_scales": "scales of another tensor", "other_layer": "values of another tensor",
        "permute": "another order", "zero_group": "groups of weights are zero",
    }[damage.__name__]  # fmt: skip
    assert all(words in suspect.words for suspect in found), found


@pytest.mark.parametrize("preset", cases(DATA_FREE, ("w2a16", "w8a8", "nf4", "gguf-q4_k_m", "gguf-q2_k")))
def test_no_sound_artefact_is_accused(preset: str, artefacts: Callable[..., Path]) -> None:
    found = errors(open_source("demo"), open_source(artefacts(preset)))
    assert suspects(found) == ()
    assert len(found) == 74
    assert max(tensor.gain for tensor in found) < 0.08
    assert min(tensor.cosine for tensor in found) > 0.9


def test_two_artefacts_can_be_compared(artefacts: Callable[..., Path]) -> None:
    found = errors(open_source(artefacts("w8a8")), open_source(artefacts("gguf-q4_k_m")))
    assert len(found) == 74
    assert suspects(found) == ()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("preset", ["w4a16", "w8a16", "fp8-dynamic", "nf4", "w4a16-awq"])
def test_a_gpu_finds_the_same_numbers(preset: str, tmp_path: Path) -> None:
    """What is decoded there is the same to the bit; sums are taken in another order."""
    text: dict[str, Any] = {"samples": 4, "length": 128} if preset == "w4a16-awq" else {}
    quantry.quantize("demo", tmp_path / "out", preset=preset, **text)
    here, there = (open_source(tmp_path / "out", device) for device in ("cpu", "cuda"))
    for name in here.names:
        assert torch.equal(here.read(name), there.read(name).cpu()), name
    original = open_source("demo")
    for expected, found in zip(errors(original, here), errors(original, there, device="cuda"), strict=True):
        assert (found.name, found.grid, found.empty) == (expected.name, expected.grid, expected.empty)
        for key in ("error", "cosine", "gain"):
            assert getattr(found, key) == pytest.approx(getattr(expected, key), rel=1e-4, abs=1e-6), (found.name, key)


def test_the_numbers_are_those_of_a_plain_computation() -> None:
    torch.manual_seed(0)
    one = torch.randn(40, 300)
    other = one + 0.2 * torch.randn(40, 300)
    other[3, 128:256] = 0
    other[7] *= 2
    grid = Grid("int", 4, (1, 128))
    (found,) = errors(Memory({"a.weight": one}), Memory({"a.weight": other}, {"a": Scheme(grid)}))
    w, q = one.double().numpy(), other.double().numpy()
    assert found.error == pytest.approx(math.sqrt(((w - q) ** 2).sum() / (w**2).sum()), rel=1e-5)
    assert found.cosine == pytest.approx((w * q).sum() / math.sqrt((w**2).sum() * (q**2).sum()), rel=1e-5)
    away = energy = 0.0
    for row in range(40):
        for start in (0, 128, 256):
            a, b = w[row, start : start + 128], q[row, start : start + 128]
            energy += (a * a).sum()
            if (b * b).sum() > 0:
                away += (a * a).sum() * min(1, abs((a * b).sum() / (b * b).sum() - 1)) ** 2
    assert found.gain == pytest.approx(math.sqrt(away / energy), rel=1e-5)
    assert found.empty == 1
    assert found.grid == "int 4 bit"


def test_chunks_do_not_change_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    one, other = torch.randn(2, 50, 96)
    (whole,) = errors(Memory({"a.weight": one}), Memory({"a.weight": other}))
    monkeypatch.setattr("quantry.proof.tensor_errors.CHUNK", 700)
    (pieces,) = errors(Memory({"a.weight": one}), Memory({"a.weight": other}))
    assert pieces.empty == whole.empty
    assert pieces.error == pytest.approx(whole.error)
    assert pieces.gain == pytest.approx(whole.gain)


@pytest.mark.parametrize("transform", ["awq", None])
def test_factors_of_a_transform_are_fitted_out(transform: str | None, tmp_path: Path) -> None:
    """Columns after a norm, v's rows and o's columns, up's rows and down's columns, scaled as AWQ would."""
    scaled = shutil.copytree(demo_folder(), tmp_path / "scaled")
    generator = torch.Generator().manual_seed(0)
    edit(scaled, lambda tensors: scale(tensors, generator))
    quantry.quantize(scaled, tmp_path / "out", preset="w4a16")
    swap_scales(tmp_path / "out", tmp_path)
    file = tmp_path / "out" / "quantry.json"
    content = json.loads(file.read_text())
    content["recipe"]["preset"]["transform"] = transform
    file.write_text(json.dumps(content))
    found = {suspect.name for suspect in suspects(errors(open_source("demo"), open_source(tmp_path / "out")))}
    swapped = {f"{module}.weight" for module in DOWN}
    assert found == swapped if transform else found > swapped


def scale(tensors: dict[str, torch.Tensor], generator: torch.Generator) -> None:
    for layer in range(8):
        at = f"model.layers.{layer}."
        for norm, readers in (
            ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            factors = (0.7 * torch.randn(256, generator=generator)).exp()
            _multiply(tensors, f"{at}{norm}.weight", 1 / factors)
            for reader in readers:
                _multiply(tensors, f"{at}{reader}.weight", factors)
        inner = (0.7 * torch.randn(768, generator=generator)).exp()
        _multiply(tensors, f"{at}mlp.up_proj.weight", 1 / inner[:, None])
        _multiply(tensors, f"{at}mlp.down_proj.weight", inner)
        values = (0.7 * torch.randn(2, 1, 64, generator=generator)).exp()
        _multiply(tensors, f"{at}self_attn.v_proj.weight", 1 / values.reshape(128, 1))
        _multiply(tensors, f"{at}self_attn.o_proj.weight", values.expand(2, 2, 64).reshape(256))


def _multiply(tensors: dict[str, torch.Tensor], name: str, factors: torch.Tensor) -> None:
    tensors[name] = (tensors[name].float() * factors).bfloat16()


def test_experts_are_matched_fused_or_apart() -> None:
    torch.manual_seed(0)
    gate, up, down = torch.randn(4, 24, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 24)
    at = "model.layers.0.mlp.experts"
    apart = Memory({
        f"{at}.{expert}.{leaf}.weight": stack[expert]
        for expert in range(4) for leaf, stack in (("gate_proj", gate), ("up_proj", up), ("down_proj", down))
    })  # fmt: skip
    fused = {f"{at}.gate_up_proj": torch.cat([gate, up], 1), f"{at}.down_proj": down}
    flipped = {name: stack.mT.contiguous() for name, stack in fused.items()}
    for one, other in ((fused, apart), (apart, fused), (flipped, apart)):
        sides = [side if isinstance(side, Memory) else Memory(side) for side in (one, other)]
        found = errors(sides[0], sides[1])
        assert {tensor.name for tensor in found} == set(apart.tensors)
        assert all(tensor.error == 0 for tensor in found)
    wrong = {**fused, f"{at}.down_proj": down[[0, 1, 3, 2]]}
    assert {s.name for s in suspects(errors(Memory(fused), Memory(wrong)))} == {f"{at}.down_proj[{n}]" for n in (2, 3)}
    assert {s.name for s in suspects(errors(apart, Memory(wrong)))} == {f"{at}.{n}.down_proj.weight" for n in (2, 3)}


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("preset", ["w8a8", "gguf-q8_0"])
def test_other_families_are_sound(architecture: str, preset: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", architecture, seed=1)
    quantry.quantize(tmp_path / "model", tmp_path / "out", preset=preset)
    reference = open_source(tmp_path / "model")
    found = errors(reference, open_source(tmp_path / "out"))
    assert suspects(found) == ()
    assert len(found) >= len(reference.names)


def test_what_is_kept_is_held_to_16_bits() -> None:
    """An embedding or a norm that is a little off is no rounding."""
    weight, norm = torch.randn(64, 64), 1 + 0.1 * torch.randn(64)
    good = Memory({"embed.weight": weight.bfloat16(), "norm.weight": norm.bfloat16()})
    assert suspects(errors(good, Memory({"embed.weight": weight.half(), "norm.weight": norm.half()}))) == ()
    bad = Memory({"embed.weight": weight + 0.05 * torch.randn(64, 64), "norm.weight": norm * 1.05})
    assert {suspect.name for suspect in suspects(errors(good, bad))} == {"embed.weight", "norm.weight"}


def test_shapes_zeros_and_infinities() -> None:
    good = Memory({"a.weight": torch.ones(4, 8), "b.bias": torch.zeros(4), "c.weight": torch.ones(8, 8)})
    same = Memory({"a.weight": torch.ones(4, 8), "b.bias": torch.zeros(4), "c.weight": torch.ones(8, 8)})
    assert [tensor.error for tensor in errors(good, same)] == [0, 0, 0]
    bad = Memory({
        "a.weight": torch.ones(8, 4), "b.bias": torch.ones(4), "c.weight": torch.full((8, 8), torch.nan),
    })  # fmt: skip
    found = errors(good, bad)
    assert all(math.isinf(tensor.error) for tensor in found)
    assert len(suspects(found)) == 3


def test_peers_are_those_of_the_same_grid() -> None:
    """An error that 2 bits explain is too much for 8, and few bits among many are no fault."""
    eight = [TensorError(f"a{n}", (4, 4), "int 8 bit", 8, 0.007, gain=0.001) for n in range(9)]
    two = [TensorError(f"b{n}", (4, 4), "int 2 bit", 2, 0.35, 0.93, gain=0.07) for n in range(3)]
    assert suspects([*eight, *two]) == ()
    odd = replace(eight[0], name="odd", error=0.35)
    assert [suspect.name for suspect in suspects([*eight, odd, *two])] == ["odd"]
    alone = replace(odd, grid="q6_k 6 bit", bits=6)
    assert [suspect.name for suspect in suspects([*eight, alone])] == ["odd"]

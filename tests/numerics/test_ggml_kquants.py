"""The k-quant searches, in torch and as machine code, against ggml's own library: bytes and weighted errors."""

import ctypes
import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors import safe_open
from torch import Tensor

import quantry
from quantry.numerics.ggml import layout, native
from quantry.numerics.ggml.kquants import Engine, batched, compiled, fast, search
from quantry.numerics.ggml.kquants.rules import RULES, Steps
from quantry.numerics.simd import LANES, Array, Kernel

KINDS = tuple(RULES)
BLOCKS = 128
X86 = platform.machine() in ("x86_64", "AMD64")  # elsewhere compilers may have fused operations in ggml's library
needs_llvm = pytest.mark.skipif(not compiled.AVAILABLE, reason="llvmlite is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
ENGINES = [pytest.param(batched, id="batched"), pytest.param(compiled, id="compiled", marks=needs_llvm)]
CASES = (
    "normal", "heavy tails", "real", "zeros", "zero parts", "constant", "constant parts", "far apart", "sparse",
    "whole numbers", "positive", "negative", "large", "small", "tiny", "below the floor", "subnormal",
)  # fmt: skip
SCALES = {"large": 1e4, "small": 1e-6, "tiny": 1e-12, "below the floor": 2e-13, "subnormal": 1e-40}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A search belongs to one thread, as where rows are spread over threads: torch's own only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def weights(case: str) -> Tensor:
    """Super-blocks of one character."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BLOCKS, 256, generator=generator) * 0.02
    parts = x.view(BLOCKS, 16, 16)
    match case:
        case "heavy tails":  # Student's t with 2 degrees of freedom
            x = x / torch.empty_like(x).exponential_(generator=generator).sqrt()
        case "real":
            x = real()
        case "zeros":
            x = torch.zeros_like(x)
        case "zero parts":
            x[::3], parts[:, 2], parts[::2, 8:] = 0, 0, 0
        case "constant":
            x = x[:, :1].expand_as(x).contiguous()
        case "constant parts":
            x = parts[:, :, :1].expand_as(parts).reshape_as(x)
        case "far apart":
            parts *= torch.randn(BLOCKS, 16, 1, generator=generator).mul(3).exp()
        case "sparse":
            x[torch.rand(x.shape, generator=generator) > 0.02] = 0
        case "whole numbers":  # halves that must go to the even side, and largest magnitudes of both signs
            x = (x * 100).round()
        case "positive" | "negative":
            x = x.abs() if case == "positive" else -x.abs() - 0.01
        case _:
            x = x * SCALES.get(case, 1)
    return x


def real() -> Tensor:
    """Weights of the demo model."""
    with safe_open(Path(quantry.__file__).parent / "demo" / "model.safetensors", "pt") as file:
        name = next(name for name in file.keys() if name.endswith("down_proj.weight"))  # noqa: SIM118
        weight: Tensor = file.get_tensor(name)
    return weight.float().flatten()[: BLOCKS * 256].view(BLOCKS, 256).clone()


def importance(kind: str) -> Tensor | None:
    """What errors count: nothing given, or by column over orders of magnitude, or that with zeros in it."""
    values = torch.rand(256, generator=torch.Generator().manual_seed(11)) ** 4
    if kind == "zeros":
        values[::3], values[64:112] = 0, 0
    return None if kind == "none" else values


def by_ggml(weight: Tensor, kind: str, counts: Tensor | None) -> Tensor:
    function = native.library().ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    data = torch.zeros(weight.shape[0], layout.BLOCKS[kind].bytes, dtype=torch.uint8)
    at = None if counts is None else counts.data_ptr()
    number = GGMLQuantizationType[kind].value
    assert function(number, weight.data_ptr(), data.data_ptr(), 0, *weight.shape, at) == data.numel()
    return data


def by_search(weight: Tensor, kind: str, counts: Tensor | None, engine: Engine | None = None) -> Tensor:
    spread = None if counts is None else counts.expand_as(weight)
    return layout.pack(kind, search(kind, weight, spread, engine))


def agreement(data: Tensor, other: Tensor) -> float:
    """The share of super-blocks with equal bytes."""
    return float((data == other).all(dim=1).double().mean())


def error(data: Tensor, kind: str, weight: Tensor, counts: Tensor | None) -> float:
    """The sum of squared errors, times what they count."""
    value = torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind]))
    each = torch.ones(256) if counts is None else counts
    return float(((value.double() - weight.double()) ** 2 * each.double()).sum())


@pytest.mark.parametrize("counted", ["none", "some", "zeros"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ENGINES)
def test_search_is_ggmls(engine: Engine, kind: str, case: str, counted: str) -> None:
    weight, counts = weights(case), importance(counted)
    data, expected = by_search(weight, kind, counts, engine), by_ggml(weight, kind, counts)
    assert agreement(data, expected) >= (1 if engine is compiled and X86 else 0.99)
    assert error(data, kind, weight, counts) <= 1.001 * error(expected, kind, weight, counts)


@needs_llvm
@pytest.mark.parametrize("counted", ["none", "some"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_bits(kind: str, counted: str) -> None:
    weight, counts = weights("heavy tails"), importance(counted)
    assert torch.equal(by_search(weight, kind, counts, batched), by_search(weight, kind, counts, compiled))


@needs_gpu
@pytest.mark.parametrize("counted", ["none", "some", "zeros"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_gives_what_ggml_gives(kind: str, counted: str) -> None:
    for case in CASES:
        weight, counts = weights(case), importance(counted)
        on_gpu = None if counts is None else counts.cuda()
        data, expected = by_search(weight.cuda(), kind, on_gpu).cpu(), by_ggml(weight, kind, counts)
        assert agreement(data, expected) >= 0.99, case
        assert error(data, kind, weight, counts) <= 1.001 * error(expected, kind, weight, counts), case


@pytest.mark.parametrize("blocks", [1, 63, 65])
@pytest.mark.parametrize("engine", ENGINES)
def test_any_number_of_blocks(engine: Engine, blocks: int) -> None:
    for kind in KINDS:
        weight, counts = weights("real"), importance("some")
        whole = by_search(weight, kind, counts, engine)
        assert torch.equal(by_search(weight[:blocks], kind, counts, engine), whole[:blocks])


@pytest.mark.parametrize("engine", ENGINES)
def test_no_blocks_at_all(engine: Engine) -> None:
    for kind in KINDS:
        fields = search(kind, torch.empty(0, 256), None, engine)
        assert fields.codes.shape == (0, 256)
        assert fields.d.shape == (0,)


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_do_not_disturb_each_other(engine: Engine) -> None:
    work = [(kind, case) for kind in KINDS for case in ("normal", "real", "sparse", "heavy tails")]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: by_search(weights(job[1]), job[0], None, engine), work))
    for (kind, case), data in zip(work, together, strict=True):
        assert torch.equal(data, by_search(weights(case), kind, None, engine))


def test_the_weight_and_its_importance_stay_as_they_are() -> None:
    weight, counts = weights("real").clone(), torch.rand(BLOCKS, 256)
    before = weight.clone(), counts.clone()
    for kind in KINDS:
        search(kind, weight, counts)
        search(kind, weight, None)
    assert torch.equal(weight, before[0])
    assert torch.equal(counts, before[1])


def test_what_is_faster() -> None:
    assert fast(torch.device("cuda"))
    assert fast(torch.device("cpu")) == compiled.AVAILABLE


# Mistakes that the comparison must notice: a test that lets them pass would prove nothing.


def skip_a_step(patch: pytest.MonkeyPatch) -> None:
    fewer = Steps(-1.0, 0.1, 19)
    patch.setitem(RULES, "Q4_K", replace(RULES["Q4_K"], plain=fewer))


def start_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "Q5_K", replace(RULES["Q5_K"], plain=Steps(-0.4, 0.1, 15)))


def weigh_otherwise(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "Q4_K", replace(RULES["Q4_K"], spread=1.0))


def square_errors(patch: pytest.MonkeyPatch) -> None:
    plain = RULES["Q2_K"].plain
    assert plain is not None
    patch.setitem(RULES, "Q2_K", replace(RULES["Q2_K"], plain=replace(plain, absolute=False)))


def no_improvement(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "Q3_K", replace(RULES["Q3_K"], improve=False))


def other_scales(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "Q6_K", replace(RULES["Q6_K"], scale_top=127))


def round_halves_away(patch: pytest.MonkeyPatch) -> None:
    round_by(patch, lambda values: torch.sign(values) * torch.floor(values.abs() + 0.5), "round")


def round_down(patch: pytest.MonkeyPatch) -> None:
    round_by(patch, torch.floor, "floor")


def round_by(patch: pytest.MonkeyPatch, function: Callable[[Tensor], Tensor], name: str) -> None:
    patch.setattr(Tensor, "round_", lambda values: values.copy_(function(values)))
    patch.setattr(Kernel, "nearest", lambda kernel, value: kernel.call(name, value))
    for maker, kernel in vars(compiled).copy().items():
        if hasattr(kernel, "cache_info"):  # kernels are compiled once; these must not outlast the test
            patch.setattr(compiled, maker, cache(kernel.__wrapped__))


@pytest.mark.parametrize(
    ("mistake", "kind", "case", "counted"),
    [
        (skip_a_step, "Q4_K", "normal", "none"),
        (start_elsewhere, "Q5_K", "normal", "none"),
        (weigh_otherwise, "Q4_K", "normal", "some"),
        (square_errors, "Q2_K", "normal", "none"),
        (no_improvement, "Q3_K", "normal", "none"),
        (other_scales, "Q6_K", "normal", "none"),
        (round_halves_away, "Q5_K", "whole numbers", "none"),
        (round_halves_away, "Q4_K", "real", "some"),
        (round_halves_away, "Q3_K", "real", "none"),
        (round_down, "Q6_K", "normal", "some"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_mistakes_are_noticed(
    engine: Engine,
    mistake: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    case: str,
    counted: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, counts = weights(case), importance(counted)
    expected = by_ggml(weight, kind, counts)
    assert agreement(by_search(weight, kind, counts, engine), expected) >= 0.99
    mistake(monkeypatch)
    assert agreement(by_search(weight, kind, counts, engine), expected) < 0.99


@needs_llvm
def test_lanes_do_ieee_arithmetic() -> None:
    """Every operation of a kernel against numpy's, bit for bit, on numbers of all magnitudes."""

    def body(k: Kernel) -> None:
        left, right, out = k.pointers
        a, b = k.load(left, k.index(0)), k.load(right, k.index(0))
        results = [a + b, a - b, a * b, a / b, -a, abs(a), k.root(abs(a)), k.nearest(a), k.least(a, b), k.most(a, b)]
        results += [k.where(a < b, a, 1.0), k.where((a > b) & ~(a < 0.0), a, b), k.clamp(a, -2, 3)]
        for row, result in enumerate(results):
            k.store(result, out, k.at(row, LANES, 0))

    kernel, generator = Kernel(body, 3), np.random.default_rng(3)
    for _ in range(200):
        a, b = generator.standard_normal((2, LANES)) * 10.0 ** generator.integers(-30, 30, (2, 1))
        a, b = a.astype(np.float32), np.where(generator.random(LANES) < 0.1, a, b).astype(np.float32)
        found = torch.empty(13, LANES)
        kernel(torch.from_numpy(a), torch.from_numpy(b), found, 0)
        with np.errstate(all="ignore"):
            expected = [a + b, a - b, a * b, a / b, -a, abs(a), np.sqrt(abs(a)), np.rint(a), np.minimum(a, b)]
            expected += [np.maximum(a, b), np.where(a < b, a, 1), np.where((a > b) & ~(a < 0), a, b), a.clip(-2, 3)]
        np.testing.assert_array_equal(found.numpy(), np.stack(expected))


@needs_llvm
def test_rows_become_lanes_and_back() -> None:
    def body(k: Kernel) -> None:
        source, target = k.pointers
        array: Array = k.array(2 * LANES)
        k.load_rows(source, k.index(1), 40, k.index(3), array)
        k.fill(array, lambda i: array[i] * 2.0)
        k.store_rows(array, target, k.index(0), 2 * LANES, k.index(0))

    source = torch.randint(0, 128, (LANES + 1, 40)).float()
    target = torch.zeros(LANES, 2 * LANES, dtype=torch.uint8)
    Kernel(body, 2)(source, target, 0)
    assert torch.equal(target.float(), source[1:, 3:35] * 2)

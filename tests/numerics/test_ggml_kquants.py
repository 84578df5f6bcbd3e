"""The k-quant searches, in torch and as machine code, against ggml's own library: bytes and weighted errors."""

import platform
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import quantry
from depth import cases
from ggml_library import agreement, by_ggml, check_as_good
from quantry.numerics.ggml import layout
from quantry.numerics.ggml.kquants import KQuantBackend, batched, compiled, fast, search
from quantry.numerics.ggml.kquants.rules import RULES, StepSizes
from quantry.numerics.simd import AVAILABLE, LANES, Array, Kernel

TYPES = tuple(RULES)
BLOCKS = 64
X86 = platform.machine() in ("x86_64", "AMD64")  # elsewhere compilers may have fused operations in ggml's library
needs_llvm = pytest.mark.skipif(not AVAILABLE, reason="llvmlite is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BACKENDS = [pytest.param(batched, id="batched"), pytest.param(compiled, id="compiled", marks=needs_llvm)]
Mistake = Callable[[pytest.MonkeyPatch], None]
CASES = (
    "normal", "heavy tails", "real", "zeros", "zero parts", "constant", "constant parts", "far apart", "sparse",
    "whole numbers", "positive", "negative", "large", "small", "tiny", "below the floor", "subnormal",
)  # fmt: skip
SCALES = {"large": 1e4, "small": 1e-6, "tiny": 1e-12, "below the floor": 2e-13, "subnormal": 1e-40}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Runs a search on one thread, as `threads.spread` does: torch's own threads would only wait for each other."""
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


def importance(counted: str) -> Tensor | None:
    """None, or weights of errors by column over orders of magnitude, or those with zeros."""
    values = torch.rand(256, generator=torch.Generator().manual_seed(11)) ** 4
    if counted == "zeros":
        values[::3], values[64:112] = 0, 0
    return None if counted == "none" else values


def by_search(weight: Tensor, type_name: str, counts: Tensor | None, backend: KQuantBackend | None = None) -> Tensor:
    spread = None if counts is None else counts.expand_as(weight)
    return layout.pack(type_name, search(type_name, weight, spread, backend))


@cache
def all_cases() -> Tensor:
    """The super-blocks of every case, stacked: they do not depend on each other."""
    return torch.cat([weights(case) for case in CASES])


@cache
def expected(type_name: str, counted: str) -> Tensor:
    return by_ggml(all_cases(), type_name, importance(counted))


def check_every_case(data: Tensor, type_name: str, counted: str, exact: bool = False) -> None:
    """Compares each case with ggml by itself, so that a failure names it."""
    parts = (torch.split(part, BLOCKS) for part in (data, expected(type_name, counted), all_cases()))
    for mine, theirs, weight in zip(*parts, strict=True):
        check_as_good(mine, theirs, type_name, weight, importance(counted), exact)


@pytest.mark.parametrize("counted", ["none", "some", "zeros"])
@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_search_is_ggmls(backend: KQuantBackend, type_name: str, counted: str) -> None:
    data = by_search(all_cases(), type_name, importance(counted), backend)
    check_every_case(data, type_name, counted, backend is compiled and X86)


@needs_llvm
@pytest.mark.parametrize("counted", ["none", "some"])
@pytest.mark.parametrize("type_name", TYPES)
def test_both_backends_give_the_same_bits(type_name: str, counted: str) -> None:
    weight, counts = weights("heavy tails"), importance(counted)
    assert torch.equal(by_search(weight, type_name, counts, batched), by_search(weight, type_name, counts, compiled))


@needs_gpu
@pytest.mark.parametrize("counted", ["none", "some", "zeros"])
@pytest.mark.parametrize("type_name", TYPES)
def test_a_gpu_gives_what_ggml_gives(type_name: str, counted: str) -> None:
    counts = importance(counted)
    data = by_search(all_cases().cuda(), type_name, None if counts is None else counts.cuda())
    check_every_case(data.cpu(), type_name, counted)


@pytest.mark.parametrize("blocks", [1, 63, 65])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_blocks(backend: KQuantBackend, blocks: int) -> None:
    for type_name in TYPES:
        weight, counts = weights("real"), importance("some")
        whole = by_search(weight, type_name, counts, backend)
        assert torch.equal(by_search(weight[:blocks], type_name, counts, backend), whole[:blocks])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_blocks_at_all(backend: KQuantBackend) -> None:
    for type_name in TYPES:
        fields = search(type_name, torch.empty(0, 256), None, backend)
        assert fields.codes.shape == (0, 256)
        assert fields.d.shape == (0,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_do_not_disturb_each_other(backend: KQuantBackend) -> None:
    work = [(type_name, case) for type_name in TYPES for case in ("normal", "real", "sparse", "heavy tails")]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda job: by_search(weights(job[1]), job[0], None, backend), work))
    for (type_name, case), data in zip(work, together, strict=True):
        assert torch.equal(data, by_search(weights(case), type_name, None, backend))


def test_the_weight_and_its_importance_stay_unchanged() -> None:
    weight, counts = weights("real").clone(), torch.rand(BLOCKS, 256)
    before = weight.clone(), counts.clone()
    for type_name in TYPES:
        search(type_name, weight, counts)
        search(type_name, weight, None)
    assert torch.equal(weight, before[0])
    assert torch.equal(counts, before[1])


def test_what_is_faster() -> None:
    assert fast(torch.device("cuda"))
    assert fast(torch.device("cpu")) == AVAILABLE


# Mistakes that the comparison must notice: a test that lets them pass would prove nothing.


def skip_a_step(patch: pytest.MonkeyPatch) -> None:
    fewer = StepSizes(-1.0, 0.1, 19)
    patch.setitem(RULES, "Q4_K", replace(RULES["Q4_K"], plain=fewer))


def start_elsewhere(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(RULES, "Q5_K", replace(RULES["Q5_K"], plain=StepSizes(-0.4, 0.1, 15)))


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


MISTAKES = [
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
]


@pytest.mark.parametrize(("mistake", "type_name", "case", "counted"), MISTAKES)
def test_mistakes_in_torch_are_noticed(
    mistake: Mistake, type_name: str, case: str, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_noticed(batched, mistake, (type_name, case, counted), monkeypatch)


@needs_llvm
@pytest.mark.parametrize(("mistake", "type_name", "case", "counted"), cases(MISTAKES, quick=MISTAKES[:1]))
def test_mistakes_in_machine_code_are_noticed(
    mistake: Mistake, type_name: str, case: str, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_noticed(compiled, mistake, (type_name, case, counted), monkeypatch)


def check_noticed(
    backend: KQuantBackend, mistake: Mistake, where: tuple[str, str, str], patch: pytest.MonkeyPatch
) -> None:
    type_name, case, counted = where
    weight, counts = weights(case), importance(counted)
    right = by_ggml(weight, type_name, counts)
    assert agreement(by_search(weight, type_name, counts, backend), right, type_name) >= 0.99
    mistake(patch)
    assert agreement(by_search(weight, type_name, counts, backend), right, type_name) < 0.99


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
        results = torch.empty(13, LANES)
        kernel(torch.from_numpy(a), torch.from_numpy(b), results, 0)
        with np.errstate(all="ignore"):
            expected = [a + b, a - b, a * b, a / b, -a, abs(a), np.sqrt(abs(a)), np.rint(a), np.minimum(a, b)]
            expected += [np.maximum(a, b), np.where(a < b, a, 1), np.where((a > b) & ~(a < 0), a, b), a.clip(-2, 3)]
        np.testing.assert_array_equal(results.numpy(), np.stack(expected))


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

"""Budgets that a device sets: a mixture of that size fits by the planner's own figures, and 1 % more does not."""

import re
from collections.abc import Iterator
from math import prod

import pytest

from quantry.devices.catalogue import parse as machine
from quantry.errors import QuantryError
from quantry.jobs.auto.solver import Item, ItemOption, solve
from quantry.planning.budget import DeviceBudget, parse
from quantry.planning.deployment import Deployment, Settings
from quantry.planning.fits_device import allowed, fits, settled
from quantry.planning.memory.footprint import footprint
from quantry.planning.memory.weights import stored, tensor_bytes, weights_bytes
from quantry.planning.models import open_model
from quantry.quantizing.recipe import Recipe, Rule, presets
from quantry.types import Checkpoint, Workload

TYPES = {"Q2_K": 2.6, "Q3_K": 3.4, "Q4_K": 4.5, "Q5_K": 5.5, "Q6_K": 6.6, "Q8_0": 8.5, "F16": 16.0}
PARTS = {"qkv": "[qkv]_proj", "out": "o_proj", "up": "(gate|up)_proj", "down": "down_proj"}  # what vLLM fuses
GIB = 1 << 30


def recipe(name: str) -> Recipe:
    return Recipe(presets()[name], presets()[name].formats[0])


def plain(bits: float, weights: int) -> float:
    return float(weights * 4.0**-bits)


def gguf_mixture(checkpoint: Checkpoint, size: int) -> Recipe:
    """The type of each tensor that a budget of `size` allows."""
    base = recipe("gguf-q4_k_m")
    items = []
    for weight in stored(checkpoint, base):
        options = TYPES if len(weight.shape) == 2 else {weight.dtype: 32.0}
        items.append(
            Item(weight.name, tuple(ItemOption(kind, tensor_bytes(kind, weight.shape), plain(bits, prod(weight.shape)))
                                    for kind, bits in options.items()))
        )  # fmt: skip
    chosen = solve(items, size).chosen
    rules = [Rule(name, None, one.name) for name, one in chosen.items() if one.name in TYPES]
    return Recipe(base.preset, base.format, tuple(rules))


def vllm_mixture(checkpoint: Checkpoint, size: int) -> Recipe:
    """4 bit, 8 bit or none for what vLLM fuses; the size of all else is what is left of a whole recipe."""
    four = recipe("w4a16")
    items = [
        Item(name, tuple(ItemOption(kind, nbytes, plain(bits, nbytes)) for kind, bits, nbytes in options))
        for name, options in _fused(checkpoint)
    ]
    rest = weights_bytes(checkpoint, four) - sum(item.options[0].bytes for item in items)
    chosen = solve(items, size - rest).chosen
    rules = [
        Rule(name, None if one.name == "keep" else presets()[one.name])
        for key, one in chosen.items()
        for name in _members(checkpoint, key)
    ]
    return Recipe(four.preset, four.format, tuple(rules))


def _members(checkpoint: Checkpoint, key: str) -> list[str]:
    block, part = key.split(" ")
    pattern = re.compile(rf"model\.layers\.{block}\..*\.{PARTS[part]}\.weight")
    return [one.name.removesuffix(".weight") for one in checkpoint.tensors if pattern.fullmatch(one.name)]


def _fused(checkpoint: Checkpoint) -> Iterator[tuple[str, list[tuple[str, float, int]]]]:
    shapes = {one.name.removesuffix(".weight"): one.shape for one in checkpoint.tensors}
    for block in range(checkpoint.config["num_hidden_layers"]):
        for part in PARTS:
            names = _members(checkpoint, f"{block} {part}")
            weights = sum(prod(shapes[name]) for name in names)
            scales = weights // 128 * 2 + 16 * len(names)  # one of 16 bits a group, and two numbers of 64 for the shape
            yield f"{block} {part}", [
                ("w4a16", 4, weights // 2 + scales), ("w8a16", 8, weights + scales), ("keep", 16, weights * 2),
            ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "engine", "text"),
    [
        ("llama-3.1-8b", "llama.cpp", "fits RTX 3060 8GB at 8k"),  # the embedding is with the host
        ("llama-3.2-3b", "llama.cpp", "fits RTX 3060 8GB at 32k"),  # the head is the embedding
        ("llama-3.1-8b", "llama.cpp", "fits M2 8GB at 2k"),  # one memory for all
        ("llama-3.1-8b", "vllm", "fits RTX 3060 12GB at 8k"),
        ("qwen2.5-14b", "vllm", "fits 2x RTX 3060 12GB at 8k"),
    ],
)
def test_that_size_fits_and_one_percent_more_does_not(model: str, engine: str, text: str) -> None:
    checkpoint, fit = open_model(model), parse(text, parameters=0)
    assert isinstance(fit, DeviceBudget)
    make, first = (gguf_mixture, "gguf-q4_k_m") if engine == "llama.cpp" else (vllm_mixture, "w4a16")
    budget, made = settled(fit, checkpoint, engine, recipe(first), lambda budget: make(checkpoint, budget.bytes))
    more = make(checkpoint, int(budget.bytes * 1.01))
    assert budget.bytes * 0.995 <= weights_bytes(checkpoint, made) <= budget.bytes
    assert fits(fit, checkpoint, engine, made)
    assert not fits(fit, checkpoint, engine, more)
    assert budget.words.endswith(f"with {engine}")


def test_layers_over_two_devices_fit_and_fill_them() -> None:
    """Which of them is the fuller depends on the layers that got more bits."""
    checkpoint, fit = open_model("qwen2.5-14b"), DeviceBudget("2x RTX 3060 12GB", 8192)
    budget, made = settled(
        fit, checkpoint, "llama.cpp", recipe("gguf-q4_k_m"), lambda budget: gguf_mixture(checkpoint, budget.bytes)
    )
    assert fits(fit, checkpoint, "llama.cpp", made)
    assert not fits(fit, checkpoint, "llama.cpp", gguf_mixture(checkpoint, int(budget.bytes * 1.01)))


def test_what_the_host_holds_is_free_for_the_device() -> None:
    """A mixture with a larger embedding than that of the first recipe may be larger by just that."""
    checkpoint, fit, first = open_model("llama-3.1-8b"), DeviceBudget("RTX 3060 8GB", 8192), recipe("gguf-q4_k_m")
    large = Recipe(first.preset, first.format, (Rule("token_embd.weight", None, "F16"),))
    more = weights_bytes(checkpoint, large) - weights_bytes(checkpoint, first)
    assert more == 128256 * 4096 * (2 - 144 / 256)
    found = [allowed(fit, checkpoint, "llama.cpp", one).bytes for one in (first, large)]
    assert found[1] - found[0] == more


def test_a_mixture_that_never_fits_is_an_error() -> None:
    checkpoint, fit = open_model("llama-3.1-8b"), DeviceBudget("RTX 3060 8GB", 8192)
    with pytest.raises(QuantryError, match="no mixture was found that fits RTX 3060 8GB.*a shorter context"):
        settled(fit, checkpoint, "llama.cpp", recipe("gguf-q4_k_m"), lambda _: recipe("gguf-q8_0"))


def test_one_device_has_exactly_what_is_free() -> None:
    """Restated from the planner's answer: free bytes of the device and what is stored."""
    checkpoint, fit, chosen = open_model("llama-3.1-8b"), DeviceBudget("RTX 3060 12GB", 8192), recipe("gguf-q4_k_m")
    device = machine("RTX 3060 12GB").device
    needed = footprint(Deployment(checkpoint, chosen, "llama.cpp", device), Workload(8192))
    free = device.usable - GIB - needed.per_device  # llama.cpp leaves 1 GiB
    found = allowed(fit, checkpoint, "llama.cpp", chosen)
    assert found.bytes == weights_bytes(checkpoint, chosen) + free
    assert found.words == "fits RTX 3060 12GB at 8192 tokens with llama.cpp"


def test_two_equal_devices_have_twice_what_is_free() -> None:
    checkpoint, chosen, device = open_model("llama-3.1-8b"), recipe("w4a16"), machine("RTX 3090").device
    pair = Deployment(checkpoint, chosen, "vllm", device, tensor_parallel=2, settings=Settings(sequences=1))
    needed = footprint(pair, Workload(4096))
    free = int(device.usable * 0.92) - needed.per_device
    found = allowed(DeviceBudget("2x RTX 3090", 4096), checkpoint, "vllm", chosen).bytes
    assert found == pytest.approx(weights_bytes(checkpoint, chosen) + 2 * free, abs=8)


def test_a_mixture_that_is_larger_than_asked_for_still_has_to_fit() -> None:
    checkpoint, fit = open_model("llama-3.1-8b"), DeviceBudget("M2 8GB", 2048)
    _, made = settled(
        fit,
        checkpoint,
        "llama.cpp",
        recipe("gguf-q4_k_m"),
        lambda budget: gguf_mixture(checkpoint, int(budget.bytes * 1.01)),
    )
    assert fits(fit, checkpoint, "llama.cpp", made)


def test_a_full_device_is_refused_though_the_host_has_room() -> None:
    """At the longest context that is allowed, what may be stored is still more than the embedding of the host."""
    checkpoint, chosen = open_model("llama-3.1-8b"), recipe("gguf-q4_k_m")
    low, high = 8192, 131072
    while high - low > 1:
        middle = (low + high) // 2
        try:
            size = allowed(DeviceBudget("RTX 3060 8GB", middle), checkpoint, "llama.cpp", chosen).bytes
            low = middle
        except QuantryError:
            high = middle
    assert size >= 128256 * 4096 * 144 // 256


def test_longer_contexts_and_smaller_devices_leave_less() -> None:
    checkpoint, chosen = open_model("llama-3.1-8b"), recipe("gguf-q4_k_m")
    sizes = [
        allowed(DeviceBudget("RTX 3060 12GB", 1 << power), checkpoint, "llama.cpp", chosen).bytes
        for power in (11, 13, 15)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] >= (8192 - 2048) * 131072  # the cache of a token: 32 layers, 8 heads of 128, K and V
    assert allowed(DeviceBudget("RTX 3060 8GB", 2048), checkpoint, "llama.cpp", chosen).bytes < sizes[0] - 3 * GIB


@pytest.mark.parametrize(
    ("device", "context", "engine", "words"),
    [
        ("RTX 3061", 8192, "llama.cpp", "unknown device.*did you mean"),
        ("RTX 3060", 1 << 20, "llama.cpp", "1048576 is more than the 131072 tokens.*at 131072"),
        ("RTX 3060 8GB", 131072, "llama.cpp", "nothing is left for weights.*may fill 6.* GiB.*shorter context"),
        ("RTX 3060", 8192, "lama.cpp", "unknown engine.*llama.cpp"),
        ("M2 16GB", 8192, "vllm", "vllm cannot serve"),
    ],
)
def test_what_cannot_be_is_one_line_with_a_fix(device: str, context: int, engine: str, words: str) -> None:
    chosen = recipe("w4a16" if engine == "vllm" else "gguf-q4_k_m")
    with pytest.raises(QuantryError, match=words) as error:
        allowed(DeviceBudget(device, context), open_model("llama-3.1-8b"), engine, chosen)
    assert "\n" not in str(error.value)
    assert error.value.exit_code == 2

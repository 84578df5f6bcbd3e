"""Trains a small model with the traits of Gemma 3 for the other benchmarks, from a 16-bit teacher alone.

    PYTHONPATH=src python benchmarks/train_gemma.py TEACHER OUT [--text FILE] [--split FOLDER] [--device cuda]
        [--sample-seconds 100 --train-seconds 120] [--tiny]

The teacher (a Llama such as SmolLM2-135M) samples its own text from the bos token; the student learns the teacher's
distribution on windows of it (KL, and a little of the next-token loss). No other text is read: --text is scored at the
end, by both. The student has the teacher's tokenizer, a tied and scaled embedding that starts as the teacher's, 1 + w
norms, query and key norms, and five layers with a sliding window for one without. Its window is short, so that it
matters in the windows of 512 tokens that are measured.

--split also writes the folder in files of at most 15 MiB; `cat model.safetensors.* > model.safetensors` joins them.
--tiny takes seconds on a CPU: few samples, a student of width 64.
"""

import argparse
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3ForCausalLM, Gemma3TextConfig

STUDENT: dict[str, Any] = {"hidden_size": 640, "intermediate_size": 1024, "head_dim": 256, "sliding_window": 128}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "sliding_window": 16}
HEADS: dict[str, Any] = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1}
SIZES = {"batch": 4096, "length": 512, "rows": 64, "chunk": 8192, "windows": 64}
TINY_SIZES = {"batch": 8, "length": 64, "rows": 4, "chunk": 96, "windows": 4}
HARD = 0.1  # of the next-token loss, beside 1 of the KL: the sampled token says little that the distribution does not
PEAK, FINAL, WARM = 2e-3, 0.05, 0.04  # learning rate, what is left of it, and the share of the time it rises
STEPS_A_LINE = 20
START = 0.04  # deviation of the embedding at first: the teacher's own 0.14 makes each token predict itself
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN plans for each length
PART = 15 * 2**20


def main() -> None:
    options = _options()
    torch.manual_seed(options.seed)
    sizes = TINY_SIZES if options.tiny else SIZES
    began = time.perf_counter()
    tokenizer = AutoTokenizer.from_pretrained(options.teacher)
    teacher = AutoModelForCausalLM.from_pretrained(options.teacher, dtype=torch.bfloat16).to(options.device).eval()
    teacher.requires_grad_(False)
    stream, sampling = sample(teacher, sizes, options.sample_seconds)
    print("a sample:", repr(tokenizer.decode(stream[:80].tolist())), flush=True)
    student = new_student(teacher, TINY if options.tiny else STUDENT)
    training = train(student, teacher, stream, sizes, options.train_seconds)
    student.to(torch.bfloat16)
    save(student, teacher, tokenizer, options.output)
    if options.split:
        split(options.output, options.split)
    figures = {"sampling": sampling, "training": training, "seconds": round(time.perf_counter() - began, 1)}
    if options.text:
        ids = tokenizer(options.text.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        windows = _windows(ids, sizes, options.device)
        figures["perplexity"] = {
            "text": options.text.name,
            "tokens": windows.numel(),
            "teacher": perplexity(teacher, windows),
            "student": perplexity(student, windows),
        }
    print(json.dumps(_record(options, student, figures)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--text", type=Path, help="scored by both at the end")
    parser.add_argument("--split", type=Path, metavar="FOLDER", help="also the folder in files of at most 15 MiB")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sample-seconds", type=float)
    parser.add_argument("--train-seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    for name, seconds in (("sample_seconds", 100), ("train_seconds", 120)):
        if getattr(options, name) is None:
            setattr(options, name, 5 if options.tiny else seconds)
    return options


class Decoder:
    """One token at a time through a Llama, for many sequences at once, whose keys and values stay where they are.

    The queries that share a key head go through attention as if they were consecutive tokens: all of them see every key
    that is there, so that no mask is needed and keys are not repeated.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        config = model.config
        if config.model_type != "llama" or config.attention_bias or config.mlp_bias:
            sys.exit(f"the teacher is a {config.model_type}; only Llamas without biases are sampled")
        self._kv, self._dim = config.num_key_value_heads, config.head_dim
        self._heads, self._eps = config.num_attention_heads, config.rms_norm_eps
        self._embedding, self._norm, self._head = model.model.embed_tokens, model.model.norm.weight, model.lm_head
        self._layers = [_fused(layer) for layer in model.model.layers]
        weight = self._embedding.weight
        positions = torch.arange(length, device=weight.device)[None]
        self._cos, self._sin = (part[0] for part in model.model.rotary_emb(weight, positions))
        shape = (len(self._layers), 2, batch, self._kv, length, self._dim)
        self._cache = torch.empty(shape, dtype=weight.dtype, device=weight.device)

    def step(self, tokens: torch.Tensor, at: int) -> torch.Tensor:
        """The logits after the token at position `at` of each sequence."""
        x = self._embedding(tokens)
        for layer, (keys, values) in zip(self._layers, self._cache, strict=True):
            qkv = F.linear(self._normed(x, layer["before_attention"]), layer["qkv"]).view(len(x), -1, self._dim)
            turned = self._turned(qkv[:, : self._heads + self._kv], at)
            keys[:, :, at], values[:, :, at] = turned[:, self._heads :], qkv[:, self._heads + self._kv :]
            queries = turned[:, : self._heads].reshape(len(x), self._kv, -1, self._dim)
            seen = F.scaled_dot_product_attention(queries, keys[:, :, : at + 1], values[:, :, : at + 1])
            x = x + F.linear(seen.flatten(1), layer["out"])
            gate, up = F.linear(self._normed(x, layer["before_mlp"]), layer["gate_up"]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, layer["down"])
        logits: torch.Tensor = self._head(self._normed(x, self._norm))
        return logits

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)

    def _turned(self, x: torch.Tensor, at: int) -> torch.Tensor:
        low, high = x.chunk(2, -1)
        turned: torch.Tensor = x * self._cos[at] + torch.cat((-high, low), -1) * self._sin[at]
        return turned


def _fused(layer: Any) -> dict[str, torch.Tensor]:
    attention, mlp = layer.self_attn, layer.mlp
    return {
        "before_attention": layer.input_layernorm.weight,
        "qkv": torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]),
        "out": attention.o_proj.weight,
        "before_mlp": layer.post_attention_layernorm.weight,
        "gate_up": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "down": mlp.down_proj.weight,
    }


@torch.inference_mode()
def sample(teacher: Any, sizes: dict[str, int], limit: float) -> tuple[torch.Tensor, dict[str, Any]]:
    """The teacher's own text, sequence after sequence, for at most `limit` seconds; and how fast it came."""
    decoder = Decoder(teacher, sizes["batch"], sizes["length"])
    start, parts = time.perf_counter(), []
    while time.perf_counter() - start < limit:
        with sdpa_kernel(KERNELS):
            parts.append(_sequences(decoder, teacher, sizes, start + limit).flatten())
        count, seconds = sum(map(len, parts)), time.perf_counter() - start
        print(f"sampled {count:,} tokens, {count / seconds:,.0f} tokens/s", flush=True)
    stream = torch.cat(parts)
    seconds = time.perf_counter() - start
    rate = {"tokens": len(stream), "seconds": round(seconds, 1), "tokens_per_second": round(len(stream) / seconds)}
    return stream.clone(), rate


def _sequences(decoder: Decoder, teacher: Any, sizes: dict[str, int], end: float) -> torch.Tensor:
    """A batch of sequences from the bos token, shorter ones where time runs out."""
    device = teacher.device
    tokens = torch.empty(sizes["batch"], sizes["length"], dtype=torch.int32, device=device)
    tokens[:, 0] = teacher.config.bos_token_id
    for at in range(sizes["length"] - 1):
        if at % 32 == 31:
            _wait(device)  # else the clock is that of the launches
            if time.perf_counter() > end:
                return tokens[:, : at + 1]
        chances = decoder.step(tokens[:, at], at).softmax(-1, dtype=torch.float32)
        tokens[:, at + 1] = chances.div_(torch.empty_like(chances).exponential_()).argmax(-1)
    _wait(device)
    return tokens


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def new_student(teacher: Any, shape: dict[str, Any]) -> Any:
    """A Gemma 3 in float32 whose embedding begins as the teacher's."""
    given = teacher.config
    config = Gemma3TextConfig(
        vocab_size=given.vocab_size,
        **HEADS,
        **shape,
        query_pre_attn_scalar=shape["head_dim"],
        max_position_embeddings=given.max_position_embeddings,
        bos_token_id=given.bos_token_id,
        eos_token_id=given.eos_token_id,
        pad_token_id=None,  # else the embedding of that token, which is often eos, is not trained
    )
    student = Gemma3ForCausalLM(config).to(teacher.device).train()
    count = sum(weight.numel() for weight in student.parameters())
    print(f"student: {count / 1e6:.1f}M parameters, layers {config.layer_types}", flush=True)
    known = teacher.get_input_embeddings().weight.float()
    width = min(known.shape[1], config.hidden_size)
    with torch.no_grad():
        own = student.get_input_embeddings().weight
        own[:, :width] = known[:, :width] * (START / known.std())
    return student


def train(student: Any, teacher: Any, stream: torch.Tensor, sizes: dict[str, int], limit: float) -> dict[str, Any]:
    """Distils for `limit` seconds; the learning rate follows the clock."""
    device = stream.device
    optimizer = _optimizer(student, fused=device.type == "cuda")
    start, steps, losses = time.perf_counter(), 0, []
    while (elapsed := time.perf_counter() - start) < limit:
        for group in optimizer.param_groups:
            group["lr"] = PEAK * _rate(elapsed / limit)
        report = steps % STEPS_A_LINE == 0
        loss = _step(student, teacher, _batch(stream, sizes), sizes["chunk"], report)
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps += 1
        if report:
            losses.append(loss.tolist())  # waits for the device
            kl, hard = losses[-1]
            rate = steps * sizes["rows"] * sizes["length"] / (time.perf_counter() - start)
            print(f"step {steps}, {elapsed:.0f} s: KL {kl:.3f}, loss {hard:.3f}, {rate:,.0f} tokens/s", flush=True)
    _wait(device)
    seconds, tokens = time.perf_counter() - start, steps * sizes["rows"] * sizes["length"]
    last = losses[-5:]
    return {
        "steps": steps,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(tokens / seconds),
        "kl": round(sum(kl for kl, _ in last) / len(last), 4),
        "loss": round(sum(hard for _, hard in last) / len(last), 4),
    }


def _optimizer(student: Any, *, fused: bool) -> torch.optim.Optimizer:
    matrices = [weight for weight in student.parameters() if weight.ndim > 1]
    vectors = [weight for weight in student.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK, betas=(0.9, 0.95), fused=fused)


def _rate(share: float) -> float:
    if share < WARM:
        return max(share / WARM, 0.01)
    return FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * (share - WARM) / (1 - WARM)))


def _batch(stream: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
    """Windows that begin anywhere, as those of a text do, with the token after each."""
    starts = torch.randint(len(stream) - sizes["length"], (sizes["rows"], 1), device=stream.device)
    return stream[starts + torch.arange(sizes["length"] + 1, device=stream.device)].long()


def _step(student: Any, teacher: Any, tokens: torch.Tensor, chunk: int, report: bool) -> torch.Tensor:
    """Adds the gradients of a batch; the KL and the next-token loss of its first chunk, where they are asked for.

    The logits of all tokens are never there at once, and their gradient is written down: q - p for the KL, q - 1 at the
    next token for the other.
    """
    inputs, following = tokens[:, :-1], tokens[:, 1:].flatten()
    with torch.no_grad():
        known = teacher.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    with torch.autocast(tokens.device.type, torch.bfloat16):
        hidden = student.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
    leaf = hidden.detach().to(torch.bfloat16).requires_grad_()
    losses = torch.zeros(2, device=tokens.device)
    for first in range(0, len(leaf), chunk):
        part = slice(first, first + chunk)
        logits = F.linear(leaf[part], student.lm_head.weight.to(torch.bfloat16))
        with torch.no_grad():
            wanted = teacher.lm_head(known[part])
            if report and first == 0:
                losses = _losses(logits.detach(), wanted, following[part])
            slope = _slope(logits.detach(), wanted, following[part], len(leaf))
        torch.autograd.backward(logits, slope)
    torch.autograd.backward(hidden, leaf.grad.to(hidden.dtype))
    return losses


def _slope(logits: torch.Tensor, wanted: torch.Tensor, following: torch.Tensor, count: int) -> torch.Tensor:
    """The gradient of (KL + HARD * next-token loss) / count by the logits."""
    slope = logits.softmax(-1, dtype=torch.float32).mul_(1 + HARD)
    slope -= wanted.softmax(-1, dtype=torch.float32)
    slope.scatter_add_(1, following[:, None], torch.full_like(slope[:, :1], -HARD))
    return slope.div_(count).to(logits.dtype)


def _losses(logits: torch.Tensor, wanted: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    own, known = logits.float().log_softmax(-1), wanted.float().log_softmax(-1)
    kl = F.kl_div(own, known, log_target=True, reduction="batchmean")
    return torch.stack([kl, F.nll_loss(own, following)])


def _windows(ids: list[int], sizes: dict[str, int], device: str) -> torch.Tensor:
    count = min(sizes["windows"], len(ids) // sizes["length"])
    return torch.tensor(ids[: count * sizes["length"]], device=device).view(count, sizes["length"])


@torch.inference_mode()
def perplexity(model: Any, windows: torch.Tensor) -> float:
    """Of all tokens but the first of each window, in the model's own precision."""
    model.eval()
    total = 0.0
    for rows in torch.split(windows, 8):
        logits = model(input_ids=rows, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum").item()
    return round(math.exp(total / (windows.numel() - len(windows))), 3)


def save(student: Any, teacher: Any, tokenizer: Any, folder: Path) -> None:
    """A plain checkpoint; it does not chat, so the template stays behind."""
    student.config.pad_token_id = teacher.config.pad_token_id
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(student.generation_config, name, getattr(teacher.config, name))
    student.save_pretrained(folder)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    kept = {name: value for name, value in json.loads(settings.read_text()).items() if name != "chat_template"}
    settings.write_text(json.dumps(kept, indent=2) + "\n")
    print(f"wrote {folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}", flush=True)


def split(source: Path, target: Path) -> None:
    """The files of a folder, the weights in plain parts."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sorted(source.iterdir()):
        if file.stat().st_size <= PART:
            shutil.copy(file, target)
            continue
        for number, part in enumerate(_parts(file)):
            (target / f"{file.name}.{number:02}").write_bytes(part)
        print(f"join: cat {file.name}.?? > {file.name}", flush=True)


def _parts(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        while part := opened.read(PART):
            yield part


def _record(options: argparse.Namespace, student: Any, figures: dict[str, Any]) -> dict[str, Any]:
    cuda = options.device.startswith("cuda")
    return {
        "benchmark": "train_gemma",
        "teacher": options.teacher.name,
        "parameters": sum(weight.numel() for weight in student.parameters()),
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **figures,
    }


if __name__ == "__main__":
    main()

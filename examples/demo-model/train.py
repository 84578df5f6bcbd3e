"""Train the demo model, a Llama of about 7.3 million parameters, and save it as ordinary Hugging Face files.

The network is transformers' LlamaForCausalLM. It trains in bfloat16 with float32 master weights on windows of packed
documents; the learning rate follows the share of `--minutes` that has passed, so a run takes as long as it is told to.

    python train.py text --out model --minutes 0.8

reads text/train.jsonl, text/held-out.txt and the tokenizer in model/, and writes the weights and training.json there.
The text is small for a fast GPU: watch the held-out perplexity, which rises again once the model learns it by heart.
"""

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

BOS, EOS, PAD = 0, 1, 2
STARTS = ["Once upon a time", "One day, Lily the rabbit", "Tom was a kind boy."]
REQUESTS = [
    "Tell me a short story about a dog.",
    "What color is the sky?",
    "What is the capital of France?",
    "Who are you?",
    "What sound does a cow make?",
    "What is 2 plus 3?",
    "Where do fish live?",
    "What is a cat?",
    "What is the opposite of hot?",
    "Which is bigger, an elephant or a mouse?",
]


def make_config(vocab: int) -> LlamaConfig:
    """Return the shape of the demo model."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def encode(tokenizer: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all documents in one row, and where each document starts."""
    codes = [code.ids for code in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]
    lengths = np.array([len(ids) for ids in codes])
    return np.concatenate([np.array(ids, dtype=np.int16) for ids in codes]), np.cumsum(lengths) - lengths


def training_documents(path: Path) -> list[str]:
    """Return the training documents as the exact text that the chat template makes of them."""
    documents = []
    for line in path.read_text(encoding="utf-8").splitlines():
        d = json.loads(line)
        if d["user"]:
            documents.append(f"<|bos|><|user|>\n{d['user']}<|eos|>\n<|assistant|>\n{d['text']}<|eos|>\n")
        else:
            documents.append(f"<|bos|>{d['text']}<|eos|>")
    return documents


def held_out_documents(path: Path) -> list[str]:
    """Return the documents of a text file, each framed by <|bos|> and <|eos|>."""
    documents = path.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
    return [f"<|bos|>{d}" + ("" if d.endswith("<|eos|>") else "<|eos|>") for d in documents]


@torch.inference_mode()
def perplexity(model: torch.nn.Module, stream: Tensor, window: int, rows: int = 16) -> float:
    """Return the perplexity per token over consecutive windows of the packed stream."""
    windows = stream[: len(stream) // window * window].view(-1, window).long()
    total = 0.0
    for chunk in torch.split(windows, rows):
        logits = model(input_ids=chunk, use_cache=False).logits[:, :-1].float()
        total += F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum").item()
    return math.exp(total / (len(windows) * (window - 1)))


def shuffle_weights(model: torch.nn.Module, seed: int) -> None:
    """Permute the elements of every weight: the same numbers, without what was learned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            order = torch.randperm(weight.numel(), generator=generator).to(weight.device)
            weight.copy_(weight.flatten()[order].view_as(weight))


def samples(folder: Path, device: str) -> list[dict[str, str]]:
    """Return greedy continuations and answers of the saved model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.to(device).eval()
    found = []
    for text in STARTS + REQUESTS:
        if text in STARTS:
            tokens = tokenizer(text, return_tensors="pt")["input_ids"]
        else:
            chat = [{"role": "user", "content": text}]
            text_in = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            tokens = tokenizer(text_in, return_tensors="pt", add_special_tokens=False)["input_ids"]
        out = model.generate(tokens.to(device), do_sample=False, max_new_tokens=300)[0, tokens.shape[1] :]
        found.append({"prompt": text, "output": str(tokenizer.decode(out, skip_special_tokens=True)).strip()})
    return found


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="folder that prepare.py wrote")
    parser.add_argument("--out", default="model", help="folder with the tokenizer; the model is saved there")
    parser.add_argument("--minutes", type=float, default=0.8, help="training time, compilation not counted")
    parser.add_argument("--window", type=int, default=1024, help="tokens per sequence")
    parser.add_argument("--rows", type=int, default=128, help="sequences per step")
    parser.add_argument("--rate", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warm-up")
    parser.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    out, source = Path(options.out), Path(options.text)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    train_ids, train_starts = encode(tokenizer, training_documents(source / "train.jsonl"))
    held_ids, _ = encode(tokenizer, held_out_documents(source / "held-out.txt"))
    stream = torch.from_numpy(train_ids).to(device)
    held = torch.from_numpy(held_ids).to(device)
    begins = torch.from_numpy(train_starts[train_starts < len(train_ids) - options.window - 1]).to(device)
    print(
        f"{len(train_ids):,} training tokens in {len(train_starts):,} documents, {len(held_ids):,} held-out tokens",
        flush=True,
    )

    model: Any = LlamaForCausalLM(make_config(tokenizer.get_vocab_size()))
    model.to(device)
    parameters = sum(weight.numel() for weight in model.parameters())
    print(f"{parameters:,} parameters", flush=True)
    matrices = [w for w in model.parameters() if w.ndim > 1]
    vectors = [w for w in model.parameters() if w.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.rate, betas=(0.9, 0.95), fused=True)

    def loss_of(batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())

    compiled = loss_of if options.no_compile else torch.compile(loss_of)
    offsets = torch.arange(options.window + 1, device=device)

    def step(rate: float) -> Tensor:
        # Half of the windows begin with a document, as prompts do; the others begin anywhere.
        half = options.rows // 2
        first = begins[torch.randint(len(begins), (half,), device=device)]
        other = torch.randint(len(stream) - options.window - 1, (options.rows - half,), device=device)
        batch = stream[torch.cat([first, other])[:, None] + offsets].long()
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = compiled(batch)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    began = time.monotonic()
    for _ in range(2):  # compiles; a rate of 0 changes nothing
        loss = step(0.0)
    print(f"first steps: {time.monotonic() - began:.1f} s, loss {loss.item():.3f}", flush=True)

    began, steps, share, next_score = time.monotonic(), 0, 0.0, 0.2
    while share < 1:
        rate = options.rate * min(1.0, (steps + 1) / options.warmup) * (1 - share)
        loss = step(rate)
        steps += 1
        if steps % 5 == 0 or device == "cpu":
            if device == "cuda":
                torch.cuda.synchronize()
            share = (time.monotonic() - began) / (60 * options.minutes)
        if steps % 250 == 0 or device == "cpu":
            speed = steps * options.rows * options.window / (time.monotonic() - began)
            print(
                f"step {steps}  {share:4.0%}  loss {loss.item():.3f}  rate {rate:.1e}  {speed:,.0f} tokens/s",
                flush=True,
            )
        if share >= next_score:
            next_score += 0.2
            with torch.autocast(device, torch.bfloat16):
                print(f"held-out perplexity {perplexity(model, held, options.window):.3f}", flush=True)
    seconds = time.monotonic() - began

    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(out)
    saved: Any = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    saved.to(device).eval()
    score = perplexity(saved, held, options.window)
    shuffle_weights(saved, options.seed)
    figures = {
        "parameters": parameters,
        "training documents": len(train_starts),
        "training tokens, distinct text": len(train_ids),
        "training tokens, seen": steps * options.rows * options.window,
        "steps": steps,
        "seconds": round(seconds, 1),
        "final training loss": round(loss.item(), 4),
        "held-out tokens": len(held_ids),
        "held-out perplexity, bfloat16": round(score, 4),
        "held-out perplexity, shuffled weights": round(perplexity(saved, held, options.window), 1),
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
    }  # fmt: skip
    figures["samples"] = samples(out, device)
    (out / "training.json").write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(figures, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()

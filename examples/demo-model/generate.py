"""Let SmolLM2-135M-Instruct write the demo model's training text: short stories and answers to simple questions.

The demo model needs a large amount of very simple English under a free licence. This script samples it from a small
teacher with a compact batched decode loop: every sequence of a batch starts at position 0 and all stand at the same
position in each step; prompt tokens are forced while the position is inside a sequence's prompt. So there is no padding
and no attention mask, and one GPU reaches a few hundred thousand tokens a second. The prefix that all prompts of a
batch share is computed once, for one sequence, and copied to the others.

    python generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out raw.jsonl --minutes 4
    python generate.py --model HuggingFaceTB/SmolLM2-135M-Instruct --check
"""

import argparse
import itertools
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from prompts import Prompt, questions, stories
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase


class Decoder:
    """A Llama decoder for one token per sequence and step, on weights taken from a transformers model."""

    def __init__(self, model: Any, batch: int, length: int, device: str, dtype: torch.dtype) -> None:
        """Copy the weights of `model` and set aside a key-value cache for `batch` sequences of `length` tokens."""
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        weights = {name: value.to(device, dtype) for name, value in model.state_dict().items()}
        self.embed = weights["model.embed_tokens.weight"]
        self.head = weights.get("lm_head.weight", self.embed)
        self.norm = weights["model.norm.weight"]
        self.layers = []
        for i in range(config.num_hidden_layers):
            part = {n.split(f"layers.{i}.")[1]: w for n, w in weights.items() if f"layers.{i}." in n}
            self.layers.append(
                (
                    part["input_layernorm.weight"],
                    torch.cat([part[f"self_attn.{p}_proj.weight"] for p in "qkv"]),
                    part["self_attn.o_proj.weight"],
                    part["post_attention_layernorm.weight"],
                    torch.cat([part["mlp.gate_proj.weight"], part["mlp.up_proj.weight"]]),
                    part["mlp.down_proj.weight"],
                )
            )
        theta = config.rope_parameters["rope_theta"]
        inverse = theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse).repeat(1, 2).to(device)
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        shape = (len(self.layers), 2, batch, self.kv_heads, length, self.dim)
        self.cache = torch.empty(shape, device=device, dtype=dtype)

    def step(self, tokens: Tensor, t: int) -> Tensor:
        """Run one token of each sequence, all at position `t`, and return the logits."""
        rows = tokens.shape[0]
        cos, sin = self.cos[t], self.sin[t]
        x = F.embedding(tokens, self.embed)
        for layer, (norm1, qkv_weight, out_weight, norm2, gate_up_weight, down_weight) in enumerate(self.layers):
            h = F.rms_norm(x, (x.shape[-1],), norm1, self.eps)
            qkv = F.linear(h, qkv_weight).view(rows, -1, self.dim)
            qk, value = qkv[:, : self.heads + self.kv_heads], qkv[:, self.heads + self.kv_heads :]
            low, high = qk.chunk(2, dim=-1)
            qk = qk * cos + torch.cat((-high, low), dim=-1) * sin
            keys, values = self.cache[layer, 0, :rows], self.cache[layer, 1, :rows]
            keys[:, :, t] = qk[:, self.heads :]
            values[:, :, t] = value
            # The heads that share a key-value head stand in the place of query positions: no copy, no mask.
            query = qk[:, : self.heads].reshape(rows, self.kv_heads, -1, self.dim)
            mixed = F.scaled_dot_product_attention(query, keys[:, :, : t + 1], values[:, :, : t + 1])
            x = x + F.linear(mixed.reshape(rows, -1), out_weight)
            gate, up = F.linear(F.rms_norm(x, (x.shape[-1],), norm2, self.eps), gate_up_weight).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down_weight)
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.norm, self.eps), self.head)

    def spread(self, rows: int, t: int) -> None:
        """Copy the first sequence's cache up to position `t` to the first `rows` sequences."""
        self.cache[:, :, 1:rows, :, :t] = self.cache[:, :, :1, :, :t]


class Sampling(NamedTuple):
    """How to draw tokens."""

    temperature: float
    min_p: float  # least likelihood of a token against the likeliest
    penalty: float  # divides the positive logits of tokens that the answer already holds (1: no penalty)
    ngram: int  # no run of this many tokens occurs twice in an answer (0: no such rule)
    new: int  # most new tokens
    soft: int  # after about so many new tokens the forced ending may begin


class Marks(NamedTuple):
    """What the tokens of the teacher's vocabulary mean for the end of a text."""

    stop: int  # the token that ends an answer
    closes: Tensor  # does the token end a sentence?
    quotes: Tensor  # does the token open or close a quotation?

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, device: str) -> "Marks":
        """Look at every token's text."""
        texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
        closes = [t.rstrip('"\u201d').endswith((".", "!", "?")) for t in texts]
        quotes = [sum(t.count(q) for q in '"\u201c\u201d') % 2 == 1 for t in texts]
        return cls(tokenizer.eos_token_id, torch.tensor(closes, device=device), torch.tensor(quotes, device=device))


def curb(logits: Tensor, history: Tensor, first: Tensor, t: int, how: Sampling) -> Tensor:
    """Make tokens that an answer holds already less likely, and forbid repeated n-grams, in place."""
    past = history[:, : t + 1]
    inside = torch.arange(t + 1, device=past.device) >= first[:, None]
    score = logits.gather(1, past)
    score = torch.where(inside, torch.where(score > 0, score / how.penalty, score * how.penalty), score)
    if how.ngram and t + 1 >= how.ngram:
        back = how.ngram - 1
        same = inside[:, : t + 1 - back].clone()
        for i in range(back):
            same &= past[:, i : t + 1 - back + i] == past[:, t + 1 - back + i, None]
        score[:, back:].masked_fill_(same, -math.inf)
    return logits.scatter_reduce_(1, past, score, "amin")


def sample(logits: Tensor, how: Sampling) -> Tensor:
    """Draw one token per row with temperature and min-p (by the exponential trick: no sort)."""
    if how.temperature == 0:
        return logits.argmax(-1)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).div_(how.temperature)
    noise = torch.empty_like(weights).exponential_().clamp_min_(1e-10)
    weights.masked_fill_(weights < math.log(how.min_p), -math.inf)
    return weights.exp_().div_(noise).argmax(-1)


@torch.inference_mode()
def complete(
    decoder: Decoder,
    marks: Marks,
    prompts: list[list[int]],
    starts: list[int],
    endings: list[list[int]],
    how: Sampling,
) -> list[tuple[list[int], float] | None]:
    """Continue each prompt and return the new tokens with their mean log-likelihood; None where none came to an end.

    `starts` says where in each prompt the answer begins. Once an answer is `how.soft` tokens long and a sentence ends
    outside of quotation marks, the row's ending is forced, and the answer is over with the sentence it opens.
    """
    rows, device = len(prompts), decoder.embed.device
    lengths, longest = [len(p) for p in prompts], max(len(p) for p in prompts)
    end = min(longest + how.new, decoder.cache.shape[4] - 1)
    forced = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    length, first = torch.tensor(lengths, device=device), torch.tensor(starts, device=device)
    stop, closes, quotes = marks
    width = max((len(e) for e in endings), default=0)
    tails = torch.tensor([e + [-1] * (width - len(e) + 1) for e in endings], device=device)
    place = torch.full((rows,), -1, device=device)  # how many tokens of the ending are written; -1: not begun

    differs = (forced != forced[:1]).any(0).nonzero()
    shared = min(min(lengths) - 1, int(differs[0]) if len(differs) else longest)
    for t in range(shared):
        decoder.step(forced[:1, t], t)
    decoder.spread(rows, shared)
    history = torch.empty(rows, end + 1, dtype=torch.long, device=device)
    history[:, : shared + 1] = forced[:, : shared + 1]
    done = torch.zeros(rows, dtype=torch.bool, device=device)
    quoted = torch.zeros_like(done)
    likelihood, counted = torch.zeros(rows, device=device), torch.zeros(rows, device=device)
    for t in range(shared, end):
        logits = decoder.step(history[:, t], t).float()
        total = logits.logsumexp(-1)
        plain = logits
        if how.penalty != 1 or how.ngram:
            plain, logits = logits, curb(logits.clone(), history, first, t, how)
        else:
            logits = logits.clone()
        token = sample(logits, how)
        own = (length <= t + 1) & ~done
        if width:
            full = closes[history[:, t]] & ~quoted & own
            begin = full & (place < 0) & (t + 1 - length >= how.soft)
            over = full & (place > 0)
            place = torch.where(begin, 0, place)
            ending = tails.gather(1, place.clamp(0, width)[:, None])[:, 0]
            writing = (place >= 0) & (ending >= 0) & own
            token = torch.where(over & ~writing, stop, torch.where(writing, ending, token))
            place = place + writing
            own = own & ~writing
        if t + 1 < longest:
            token = torch.where(length > t + 1, forced[:, t + 1], token)
        token = torch.where(done, stop, token)
        history[:, t + 1] = token
        likelihood += torch.where(own, plain.gather(1, token[:, None])[:, 0] - total, 0)
        counted += own
        quoted ^= quotes[token] & (first <= t + 1)
        done |= (length <= t + 1) & ((token == stop) | (token == 0))
        if t % 8 == 0 and bool(done.all()):
            end = t + 1
            break
    result: list[tuple[list[int], float] | None] = []
    scores = (likelihood / counted.clamp_min(1)).tolist()
    for tokens, size, score in zip(history[:, : end + 1].tolist(), lengths, scores, strict=True):
        tail = tokens[size:]
        last = next((i for i, token in enumerate(tail) if token in (0, stop)), None)
        result.append(None if last is None else (tail[:last], score))
    return result


def encode(batch: list[Prompt], tokenizer: PreTrainedTokenizerBase) -> tuple[list[list[int]], list[int]]:
    """Return the teacher's tokens for each prompt, its forced opening included, and where the answers begin."""
    texts = []
    for p in batch:
        chat = [{"role": role, "content": content} for role, content in p.messages]
        texts.append(str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)))
    heads = tokenizer(texts, add_special_tokens=False)["input_ids"]
    whole = tokenizer([t + p.opening for t, p in zip(texts, batch, strict=True)], add_special_tokens=False)["input_ids"]
    return whole, [len(head) for head in heads]


def documents(
    batch: list[Prompt], decoder: Decoder, tokenizer: PreTrainedTokenizerBase, marks: Marks, how: Sampling
) -> list[dict[str, object]]:
    """Generate the answers to one batch of prompts and return those that came to an end."""
    whole, starts = encode(batch, tokenizer)
    endings = [tokenizer.encode(p.ending, add_special_tokens=False) for p in batch if p.ending]
    answers = complete(decoder, marks, whole, starts, endings, how)
    kept = [(p, *answer) for p, answer in zip(batch, answers, strict=True) if answer is not None]
    texts = tokenizer.batch_decode([tokens for _, tokens, _ in kept], skip_special_tokens=True)
    return [
        {
            "kind": p.kind,
            "user": p.user,
            "text": (p.opening + text).strip(),
            "expect": p.expect,
            "score": round(score, 3),
        }
        for (p, _, score), text in zip(kept, texts, strict=True)
    ]


@torch.inference_mode()
def check(options: argparse.Namespace) -> None:
    """Compare the decode loop with transformers' own forward pass, in float32 on the CPU."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    prompts, starts = encode(list(itertools.islice(questions(options.seed), 6)), tokenizer)
    decoder = Decoder(model, len(prompts), 256, "cpu", torch.float32)
    how = Sampling(0, options.min_p, 1, 0, options.answer_tokens, 0)
    answers = complete(decoder, Marks.of(tokenizer, "cpu"), prompts, starts, [], how)
    worst = 0.0
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=options.answer_tokens)
        expected = expected[0, len(prompt) :].tolist()
        tokens = answer[0] if answer else []
        print(str(tokenizer.decode(prompt))[-60:].replace("\n", " "), "->", tokenizer.decode(tokens))
        if expected[: len(tokens)] != tokens:
            raise SystemExit(f"row {row}: greedy tokens differ: {tokens} and {expected}")
        logits = model(torch.tensor([prompt])).logits[0]
        for t, token in enumerate(prompt):
            ours = decoder.step(torch.tensor([token]), t)[0]
            worst = max(worst, float((ours - logits[t]).abs().max()))
    print(f"greedy answers agree; largest difference of a logit: {worst:.2e}")
    if worst > 1e-2:
        raise SystemExit("the logits differ")


def generate(options: argparse.Namespace) -> None:
    """Write documents to `options.out` until the time is up."""
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    decoder = Decoder(model, options.batch, options.length, device, dtype)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan anew for each length of the cache
    sources = {"story": stories(options.seed), "qa": questions(options.seed)}
    ways = {
        "story": Sampling(
            options.story_temperature, options.min_p, 1.1, 4, options.story_tokens, options.story_tokens // 2
        ),
        "qa": Sampling(options.answer_temperature, options.min_p, 1, 0, options.answer_tokens, 0),
    }
    marks = Marks.of(tokenizer, device)
    counts: Counter[str] = Counter()
    seconds = {"story": 0.0, "qa": 0.0}
    start, batches = time.monotonic(), 0
    with Path(options.out).open("w", encoding="utf-8") as out:
        while (elapsed := time.monotonic() - start) < 60 * options.minutes:
            name = "qa" if seconds["qa"] <= options.qa_share * elapsed else "story"
            began = time.monotonic()
            batch = list(itertools.islice(sources[name], options.batch))
            found = documents(batch, decoder, tokenizer, marks, ways[name])
            seconds[name] += time.monotonic() - began
            counts.update(str(document["kind"]) for document in found)
            counts["asked"] += options.batch
            out.writelines(json.dumps(document, ensure_ascii=False) + "\n" for document in found)
            batches += 1
            print(
                f"{time.monotonic() - start:6.1f} s  {name}: {len(found)} of {options.batch}  {dict(counts)}",
                flush=True,
            )
            if len(found) < options.batch // 4:
                raise SystemExit("fewer than a quarter of a batch came to an end: something is wrong")


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="folder or hub id of the teacher"
    )
    parser.add_argument("--out", default="raw.jsonl", help="file to write, one document per line")
    parser.add_argument("--minutes", type=float, default=4.0, help="time to generate for")
    parser.add_argument("--batch", type=int, default=4096, help="sequences per batch")
    parser.add_argument("--length", type=int, default=400, help="longest sequence, prompt included")
    parser.add_argument("--story-tokens", type=int, default=230, help="most new tokens of a story")
    parser.add_argument("--answer-tokens", type=int, default=36, help="most new tokens of an answer")
    parser.add_argument("--story-temperature", type=float, default=0.65)
    parser.add_argument("--answer-temperature", type=float, default=0.7)
    parser.add_argument("--min-p", type=float, default=0.1, help="least likelihood of a token against the likeliest")
    parser.add_argument("--qa-share", type=float, default=0.2, help="share of the time spent on questions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="compare with transformers on the CPU and stop")
    options = parser.parse_args()
    check(options) if options.check else generate(options)


if __name__ == "__main__":
    main()

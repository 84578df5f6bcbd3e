"""Writes gguf_mixtures.json: which type the real llama-quantize gives each tensor, for models of many shapes.

    python tests/goldens/make_gguf_mixtures.py PATH_OF_llama-quantize b10605

The second word is the llama.cpp version the tool was built from. Models are made here with two rows a tensor; types
come from the log of `--dry-run`. In the tables `blk.{0-3,7}.x` stands for one tensor a layer, `keep` stays F32, `plain`
as it was (BF16), `rest` is the type of all other tensors not listed, `Q4_K > Q5_0` is a fallback, and runs with the same
result share an entry.
"""

import json
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

FILE_TYPES = (
    *("f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q4_0", "q4_1", "q5_0", "q5_1"),
    *("q3_k_s", "q3_k_m", "q3_k_l", "q2_k", "iq4_nl", "iq4_xs"),
)
ROWS, VOCABULARY, HEAD = 2, 2, 32
SEPARATE = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")
GATED = ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")
EXPERTS = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
NORMS = ("attn_norm.weight", "ffn_norm.weight")
POST = ("post_attention_norm.weight", "post_ffw_norm.weight")
HEAD_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
LAYERS = {
    "llama": (*SEPARATE, *GATED, *NORMS),
    "qwen2": (*SEPARATE, "attn_q.bias", "attn_k.bias", "attn_v.bias", *GATED, *NORMS),
    "qwen3": (*SEPARATE, *HEAD_NORMS, *GATED, *NORMS),
    "qwen3moe": (*SEPARATE, *HEAD_NORMS, *EXPERTS, *NORMS),
    "gemma2": (*SEPARATE, *GATED, *NORMS, *POST),
    "gemma3": (*SEPARATE, *HEAD_NORMS, *GATED, *NORMS, *POST),
    "phi3": ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight", *NORMS),
    "smollm3": (*SEPARATE, *GATED, *NORMS),
    "olmo2": (*SEPARATE, *HEAD_NORMS, *GATED, *POST),
    "granite": (*SEPARATE, *GATED, *NORMS),
}
ODD = (
    *(f"blk.{layer}.ffn_down_b.weight" for layer in range(0, 16, 3)),  # more ffn_down than layers
    *(f"blk.{layer}.cross_attn_v.weight" for layer in range(0, 16, 5)),
    *(f"blk.{layer}.attn_kv_b.weight" for layer in (2, 3)),
    "per_layer_token_embd.weight", "output_other.weight", "mm.0.weight", "a_norm.weight", "blk.0.attn_q.scale",
    "position_embd.weight", "token_types.weight", "v.position_embd.weight", "blk.0.attn_rel_b.weight",
    "blk.0.altup_router.weight", "blk.0.laurel_l.weight", "per_layer_model_proj.weight", "blk.0.ssm_conv1d.weight",
    "blk.0.shortconv.conv.weight", "blk.0.indexer.k_proj.weight", "blk.0.indexer.q_proj.weight",
    "blk.0.indexer.proj.weight", "blk.0.ffn_gate_tid2eid.weight", "blk.0.ffn_gate_inp_shexp.weight",
    *(f"blk.0.time_mix_{part}.weight" for part in (
        "first", "w0", "w1", "w2", "v0", "v1", "v2", "a0", "a1", "a2", "g1", "g2", "g0", "decay_w1", "decay_w2",
        "decay_w3", "lerp_fused", "key",
    )),
    "sam.pos_embd.weight", "sam.neck.0.weight", "sam.net_2.weight", "sam.blk.0.weight", "v.rel_pos_h.weight",
    "v.patch_embd.weight", "v.patch_merger.weight", "a.rvq.codebook.weight", "mm.a.code_embd.weight",
)  # fmt: skip
ODD_EXPERTS = tuple(
    f"blk.{layer}.{role}" for layer in range(16) for role in ("ffn_down_shexp.weight", "ffn_up_shexp.weight")
)


@dataclass(frozen=True, slots=True)
class Case:
    architecture: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int = 256
    inner: int = 512
    experts: int = 0
    tied: bool = False
    overrides: tuple[tuple[str, str, str], ...] = ()  # regex for llama-quantize, the same as a shell pattern, type
    extra: tuple[str, ...] = ()  # more tensors, with rows of `hidden`

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found: dict[str, tuple[int, ...]] = {
            "token_embd.weight": (VOCABULARY, self.hidden),
            "output_norm.weight": (self.hidden,),
        }
        if not self.tied:
            found["output.weight"] = (VOCABULARY, self.hidden)
        if self.architecture == "phi3":
            found["rope_factors_long.weight"] = found["rope_factors_short.weight"] = (HEAD // 2,)
        roles = LAYERS[self.architecture]
        if self.experts:
            roles = (*(role for role in roles if role not in GATED), *EXPERTS)
        for layer in range(self.layers):
            found.update((f"blk.{layer}.{role}", self._shape(role)) for role in roles)
        return {**found, **dict.fromkeys(self.extra, (ROWS, self.hidden)), **self.single}

    @property
    def single(self) -> dict[str, tuple[int, ...]]:
        """In a model with extra tensors: matrices of one row, which are vectors to ggml, and a stack of them."""
        if not self.extra:
            return {}
        return {
            "blk.1.attn_v.weight": (1, self.hidden),
            "blk.2.ffn_down.weight": (1, self.inner),
            "blk.3.ffn_up.weight": (3, 1, self.hidden),
        }

    def _shape(self, role: str) -> tuple[int, ...]:
        columns = self.inner if "down" in role else self.heads * HEAD if "attn_output" in role else self.hidden
        if "norm" in role or role.endswith("bias"):
            return (columns,)
        if role.endswith("_exps.weight"):
            return (self.experts, ROWS, columns)
        return (max(ROWS, self.experts) if "inp" in role else ROWS, columns)


CASES = {
    "Llama 2 7B": Case("llama", 32, 8, 8),
    "Llama 3 8B": Case("llama", 32, 8, 2),
    "Llama 3.2 1B": Case("llama", 16, 8, 2, tied=True),
    "Llama 65B": Case("llama", 80, 8, 8),
    "Llama 3 70B": Case("llama", 80, 8, 1),
    "TinyLlama": Case("llama", 22, 8, 1),
    "SmolLM2 135M": Case("llama", 30, 9, 3, hidden=288, inner=768, tied=True),
    "Mistral 7B": Case("llama", 32, 8, 2, inner=3584),
    "Mixtral 8x7B": Case("llama", 32, 8, 2, experts=8),
    "Mixtral of 12 layers, tied": Case("llama", 12, 8, 8, experts=8, tied=True),
    "Llama with 4 experts": Case("llama", 16, 8, 2, experts=4),
    "two layers": Case("llama", 2, 8, 8),
    "seven layers, no eighth": Case("llama", 7, 8, 4, tied=True),
    "rows for blocks of 32": Case("llama", 12, 3, 1, hidden=96, inner=352),
    "rows for no block in ffn_down": Case("llama", 12, 8, 2, inner=500),
    "rows for no block at all": Case("llama", 2, 8, 2, hidden=144, inner=500),
    "rows for no block at all, tied": Case("llama", 2, 8, 2, hidden=144, inner=500, tied=True),
    "Qwen2 0.5B": Case("qwen2", 24, 7, 1, hidden=224, inner=1216, tied=True),
    "Qwen2 7B": Case("qwen2", 28, 7, 1),
    "Qwen2 72B": Case("qwen2", 80, 8, 1),
    "Qwen 72B, a head a key": Case("qwen2", 80, 8, 8),
    "Qwen3 0.6B": Case("qwen3", 28, 16, 8, tied=True),
    "Qwen3 8B": Case("qwen3", 36, 8, 2),
    "Qwen3 30B-A3B": Case("qwen3moe", 48, 8, 1, inner=768, experts=16),
    "Qwen3 of 8 experts": Case("qwen3moe", 12, 8, 1, experts=8),
    "Gemma 2 2B": Case("gemma2", 26, 8, 4, tied=True),
    "Gemma 3 1B": Case("gemma3", 26, 4, 1, hidden=288, inner=1728, tied=True),
    "Gemma 3 27B": Case("gemma3", 62, 32, 16, tied=True),
    "Phi-3 mini": Case("phi3", 32, 8, 8),
    "Phi-3 medium": Case("phi3", 40, 8, 2),
    "SmolLM3 3B": Case("smollm3", 36, 8, 2, tied=True),
    "OLMo 2 1B": Case("olmo2", 16, 8, 8),
    "OLMo 2 32B": Case("olmo2", 64, 8, 1),
    "Granite 3 2B": Case("granite", 40, 8, 2, tied=True),
    "Granite 80 layers": Case("granite", 80, 8, 1),
    "odd tensors": Case("llama", 16, 8, 2, extra=ODD),
    "odd tensors, tied, of blocks of 32": Case("llama", 16, 9, 3, hidden=288, tied=True, extra=ODD),
    "odd tensors with one expert": Case("llama", 16, 8, 2, experts=1, extra=ODD),
    "odd tensors with experts": Case("llama", 16, 8, 2, experts=16, extra=ODD_EXPERTS),
    "overrides": Case("llama", 16, 8, 2, overrides=(
        (r"blk\.[0-4]\.attn_v", "blk.[0-4].attn_v*", "Q8_0"),
        (r"blk\.1\.attn_", "blk.1.attn_*", "Q4_0"),
        ("output.weight", "*output.weight", "Q5_K"),
        ("token_embd", "token_embd*", "F16"),
    )),
    "overrides with fallback": Case("llama", 16, 9, 3, hidden=288, inner=500, tied=True, overrides=(
        ("ffn_down", "*ffn_down*", "Q6_K"),
        ("attn_k", "*attn_k*", "IQ4_XS"),
        ("ffn_up", "*ffn_up*", "BF16"),
        ("token_embd", "token_embd*", "Q3_K"),
    )),
    "overrides of experts": Case("qwen3moe", 16, 8, 1, experts=16, overrides=(
        (r"blk\.[0-3]\.ffn_down_exps", "blk.[0-3].ffn_down_exps*", "Q5_1"),
        ("ffn_gate", "*ffn_gate*", "Q3_K"),
        ("norm", "*norm*", "Q8_0"),
    )),
}  # fmt: skip


def main(tool: str, version: str) -> None:
    cases = {name: _table(tool, case) for name, case in CASES.items()}
    _check(cases)
    record = {"tool": f"llama-quantize of llama.cpp {version}", "cases": cases}
    Path(__file__).with_name("gguf_mixtures.json").write_text(_lines(record, depth=4) + "\n")


def _table(tool: str, case: Case) -> dict[str, Any]:
    shapes = case.shapes()
    kept = {name for name, shape in shapes.items() if len(shape) == 1 or name.endswith("ffn_gate_inp.weight")}
    results: dict[str, list[str]] = {}
    fixed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        model, importance = Path(folder, "model.gguf"), Path(folder, "importance.dat")
        _write_model(model, case, shapes, kept)
        _write_importance(importance, shapes)
        whole = _run([tool, "--dry-run", str(model), "f16"])
        fixed = {name: kind for name, kind in whole.items() if kind != "F16"}  # never touched
        for file_type in FILE_TYPES:
            options = [part for regex, _, kind in case.overrides for part in ("--tensor-type", f"{regex}={kind}")]
            for run, more in ((file_type, []), (f"{file_type}+imatrix", ["--imatrix", str(importance)])):
                found = _run([tool, "--dry-run", *options, *more, str(model), file_type])
                results.setdefault(json.dumps(_compact(found, shapes, fixed)), []).append(run)
    return {
        "architecture": case.architecture, "layers": case.layers, "heads": case.heads, "kv_heads": case.kv_heads,
        "experts": case.experts, "overrides": [[shell, kind] for _, shell, kind in case.overrides],
        "shapes": _by_shape(shapes), "keep": _patterns(kept),
        "plain": _patterns(fixed.keys() - kept),
        "types": {" ".join(runs): json.loads(result) for result, runs in results.items()},
    }  # fmt: skip


def _write_model(path: Path, case: Case, shapes: dict[str, tuple[int, ...]], kept: set[str]) -> None:
    writer = gguf.GGUFWriter(path, case.architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(case.hidden)
    writer.add_block_count(case.layers)
    writer.add_feed_forward_length(case.inner)
    writer.add_head_count(case.heads)
    writer.add_head_count_kv(case.kv_heads)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_logit_scale(1.0)
    if case.experts:
        writer.add_expert_count(case.experts)
        writer.add_expert_used_count(1)
    writer.add_tokenizer_model("none")
    for name, shape in shapes.items():
        if name in kept:
            writer.add_tensor(name, np.zeros(shape, np.float32))
        else:
            data = np.zeros((*shape[:-1], 2 * shape[-1]), np.uint8)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_importance(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """The older format of llama-imatrix: count, then name, calls and one value a column (and expert)."""
    matrices = {name: shape for name, shape in shapes.items() if len(shape) > 1}
    with path.open("wb") as file:
        file.write(struct.pack("<i", len(matrices)))
        for name, shape in matrices.items():
            columns = shape[-1] * (shape[0] if len(shape) == 3 else 1)
            file.write(struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, columns))
            file.write(np.ones(columns, np.float32).tobytes())


def _run(command: list[str]) -> dict[str, str]:
    """Type (or "wanted > type") by tensor as the log has it; {"refused": ...} if the tool gave up."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wanted = dict(re.findall(r"warning: (\S+) +- ncols .*?required for type +(\w+)\)", done.stdout))
    if "no tensor type fallback" in done.stdout:
        name, kind = list(wanted.items())[-1]
        return {"refused": f"{name} as {kind.upper()}"}
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"\[ *\d+/ *\d+\] (\S+) .*type = +(\w+), size =.*?(?:\((\w+)\))?$", line):
            name, before, after = match.groups()
            kind = (after or before).upper()
            found[name] = f"{wanted[name].upper()} > {kind}" if name in wanted else kind
    return found


def _compact(found: dict[str, str], shapes: dict[str, tuple[int, ...]], fixed: dict[str, str]) -> dict[str, Any]:
    if "refused" in found:
        return found
    if found.keys() != shapes.keys() or any(found[name] != kind for name, kind in fixed.items()):
        sys.exit(f"the log has {len(found)} tensors of {len(shapes)}, or one that is never touched has another type")
    quantized = {name: kind for name, kind in found.items() if name not in fixed}
    rest = Counter(quantized.values()).most_common(1)[0][0]
    others = {kind: [name for name in quantized if quantized[name] == kind] for kind in sorted(set(quantized.values()))}
    return {"rest": rest, **{kind: _patterns(names) for kind, names in others.items() if kind != rest}}


def _by_shape(shapes: dict[str, tuple[int, ...]]) -> list[list[Any]]:
    sizes = sorted(set(shapes.values()))
    return [[list(size), _patterns(name for name in shapes if shapes[name] == size)] for size in sizes]


def _patterns(names: Iterable[str]) -> list[str]:
    """blk.0.x, blk.1.x, blk.4.x -> blk.{0-1,4}.x"""
    layers: dict[str, list[int]] = {}
    plain = []
    for name in names:
        if match := re.fullmatch(r"blk\.(\d+)\.(.+)", name):
            layers.setdefault(match[2], []).append(int(match[1]))
        else:
            plain.append(name)
    return [*sorted(plain), *(f"blk.{{{_ranges(layers[role])}}}.{role}" for role in sorted(layers))]


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line for each entry, down to a depth."""
    if not isinstance(value, dict) or not depth:
        return json.dumps(value)
    inner = ",\n".join(
        f"{indent} {json.dumps(key)}: {_lines(each, depth - 1, indent + ' ')}" for key, each in value.items()
    )
    return f"{{\n{inner}\n{indent}}}"


def _check(cases: dict[str, Any]) -> None:
    runs = 2 * len(FILE_TYPES)
    for name, case in cases.items():
        count = sum(len(key.split()) for key in case["types"])
        if count != runs:
            sys.exit(f"{name} has {count} runs, not {runs}")


if __name__ == "__main__":
    main(*sys.argv[1:3])

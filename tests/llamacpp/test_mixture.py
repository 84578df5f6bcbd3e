"""The type of every tensor against what the real llama-quantize chose (goldens/gguf_mixtures.json, version noted there)."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest

from depth import cases
from quantry.errors import RecipeError, UnknownNameError, WeightError
from quantry.llamacpp.mixture import (
    BLOCKS,
    CONDITIONS,
    EVERY,
    FILE_TYPES,
    ROLES,
    MixedModel,
    TypeChoice,
    fitting,
    types,
)

GOLDENS = json.loads(Path(__file__).with_name("gguf_mixtures.json").read_text())
CASES: dict[str, dict[str, Any]] = GOLDENS["cases"]
FLOATS = ("f16", "bf16")
PROPERTIES = ("architecture", "layers", "heads", "kv_heads", "experts")


def expand(patterns: Iterable[str]) -> Iterator[str]:
    """blk.{0-1,4}.x -> blk.0.x, blk.1.x, blk.4.x"""
    for pattern in patterns:
        match = re.fullmatch(r"blk\.\{(.+)\}\.(.+)", pattern)
        if match is None:
            yield pattern
            continue
        for part in match[1].split(","):
            first, _, last = part.partition("-")
            yield from (f"blk.{layer}.{match[2]}" for layer in range(int(first), int(last or first) + 1))


def shapes(case: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for shape, patterns in case["shapes"] for name in expand(patterns)}


def chosen(case: dict[str, Any], run: str) -> dict[str, TypeChoice]:
    file_type, _, importance = run.partition("+")
    return types(
        file_type,
        MixedModel(importance=bool(importance), **{name: case[name] for name in PROPERTIES}),
        dict(sorted(shapes(case).items(), reverse=True)),  # the order given must not matter
        keep=set(expand(case["keep"])),
        overrides=[] if file_type in FLOATS else case["overrides"],  # llama-quantize has none there; we do, see below
    )


def expected(case: dict[str, Any], table: dict[str, Any]) -> dict[str, TypeChoice]:
    found = dict.fromkeys(shapes(case), table["rest"])
    found.update((name, "F32") for name in expand(case["keep"]))
    found.update((name, "BF16") for name in expand(case["plain"]))
    found.update((name, kind) for kind, patterns in table.items() if kind != "rest" for name in expand(patterns))
    return {name: TypeChoice(kind.split(" > ")[-1], kind.split(" > ")[0]) for name, kind in found.items()}


@pytest.mark.parametrize("name", cases(CASES, list(CASES)[::4]))
def test_every_tensor_gets_the_type_llama_quantize_gives_it(name: str) -> None:
    case, runs = CASES[name], 0
    for key, table in case["types"].items():
        for run in key.split():
            runs += 1
            if "refused" in table:
                tensor, _, kind = table["refused"].partition(" as ")
                with pytest.raises(WeightError, match=f"^{re.escape(tensor)} has rows of .* {kind} has blocks of 32"):
                    chosen(case, run)
                continue
            found, want = chosen(case, run), expected(case, table)
            wrong = {tensor: (found[tensor], want[tensor]) for tensor in want if found[tensor] != want[tensor]}
            assert not wrong, (name, run, wrong)
            assert found.keys() == want.keys()
    assert runs == 2 * len(FILE_TYPES)


def test_goldens_cover_every_row_and_every_architecture() -> None:
    """Each (role, condition, type) of mixtures.toml decided at least one tensor of some golden."""
    assert {case["architecture"] for case in CASES.values()} >= {
        *("llama", "qwen2", "qwen3", "qwen3moe", "gemma2", "gemma3", "phi3", "smollm3", "olmo2", "granite"),
    }
    used = {condition for rows in EVERY.values() for condition, _ in rows}
    for file_type, table in FILE_TYPES.items():
        for role, rows in table.rows.items():
            used |= {condition for condition, _ in rows}
            wanted = {
                choice.wanted
                for case in CASES.values()
                for run in (file_type, f"{file_type}+imatrix")
                for key, golden in case["types"].items()
                if run in key.split() and "refused" not in golden
                for tensor, choice in expected(case, golden).items()
                if re.search(ROLES[role], tensor)
            }
            assert wanted >= {kind for _, kind in rows}, (file_type, role)
    assert used == CONDITIONS.keys()


def test_order_is_that_of_llama_cpp() -> None:
    names = list(chosen(CASES["Llama 3 8B"], "q4_k_m"))
    assert names[:4] == ["output.weight", "output_norm.weight", "token_embd.weight", "blk.0.attn_k.weight"]
    assert names.index("blk.2.ffn_up.weight") < names.index("blk.10.attn_k.weight")


def test_numbers_and_blocks_are_those_of_the_gguf_library() -> None:
    for name, file_type in FILE_TYPES.items():
        assert file_type.number == gguf.LlamaFileType[f"MOSTLY_{name.upper()}"]
        assert file_type.main in BLOCKS
    for kind, block in BLOCKS.items():
        assert block == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def small(file_type: str, **options: Any) -> dict[str, TypeChoice]:
    matrices = {
        "token_embd.weight": (8, 256),
        "blk.0.ffn_down.weight": (256, 100),
        "blk.0.ffn_gate_inp.weight": (8, 256),
    }
    model = MixedModel(architecture="llama", layers=1, heads=1, kv_heads=1, experts=0, importance=False)
    return types(file_type, model, matrices, **options)


def test_untouched_tensors_keep_the_plain_type() -> None:
    for plain in ("BF16", "F16"):
        assert small("q4_k_m", plain=plain)["blk.0.ffn_gate_inp.weight"] == TypeChoice(plain, plain)
    assert small("q4_k_m", keep={"blk.0.ffn_gate_inp.weight"})["blk.0.ffn_gate_inp.weight"] == TypeChoice("F32", "F32")


def test_overrides_hold_in_16_bit_files_too() -> None:
    found = small("bf16", overrides=[("token_embd*", "q8_0"), ("*", "f16")])
    assert found["token_embd.weight"] == TypeChoice("Q8_0", "Q8_0")
    assert found["blk.0.ffn_down.weight"] == TypeChoice("F16", "F16")


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(WeightError, match=r"blk.0.ffn_down.weight has rows of 100 .* Q8_0 .*; choose F16 or BF16"):
        small("q8_0")
    assert small("q8_0", overrides=[("*ffn_down*", "F16")])["blk.0.ffn_down.weight"].stored == "F16"
    with pytest.raises(UnknownNameError, match=r"file type 'q4_k'; did you mean q4_k_s or q4_k_m"):
        small("q4_k")
    with pytest.raises(RecipeError, match=r"\*ffn_down\* is Q9_0.*; did you mean"):
        small("q4_k_m", overrides=[("*ffn_down*", "q9_0")])
    assert fitting("x", "Q4_K", 64) == "Q5_0"

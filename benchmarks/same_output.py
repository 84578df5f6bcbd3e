"""Does a change alter any byte of an artefact or any figure of a plan?

Writes every preset in every format, and the jobs that take other paths (sequential, importance, KV scales, budgets,
mixtures of experts, conversions), hashes each file, and hashes the JSON of the golden plans.

    python benchmarks/same_output.py --write before.json      # on the old commit
    python benchmarks/same_output.py --compare before.json    # on the new one: exit code 1 where something differs

Hashes depend on the machine (its arithmetic decides the last bits of statistics), so both runs belong on one machine.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

FEW = {"samples": 24, "length": 128}  # enough for every path; a test of sameness needs no quality
MODELS = {"llama": "LlamaForCausalLM", "experts": "Qwen3MoeForCausalLM", "gemma": "Gemma2ForCausalLM"}
RULES = """
preset = "w4a16"
group = 32
[[rules]]
match = "*.layers.0.*"
preset = "w8a16"
[[rules]]
match = "*.layers.1.*"
keep = true
"""
GGUF_RULES = """
preset = "gguf-q4_k_m"
[[rules]]
match = "blk.*.ffn_down.weight"
type = "Q6_K"
"""
CONVERSIONS = {
    "demo w4a16 compressed-tensors": "gptq",
    "demo w4a16-awq awq": "compressed-tensors",
    "demo nf4 bitsandbytes": "bf16",
    "demo w4a16-gptq gptq": "compressed-tensors",
    "demo gguf-q4_k_m gguf": "bf16",
    "experts q4_k_m": "fp16",
    "demo fp8-static compressed-tensors": "bf16",
}
Job = Callable[[Path], Any]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    options.add_argument("--write", type=Path, help="where to keep the hashes")
    options.add_argument("--compare", type=Path, help="hashes of the other commit")
    options.add_argument("--only", default="", help="jobs whose name contains this")
    asked = options.parse_args()
    before = json.loads(asked.compare.read_text()) if asked.compare else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QUANTRY_CACHE"] = str(Path(folder) / "cache")
        found = {**artefacts(Path(folder), asked.only), **plans(before, asked.only)}
    if asked.write:
        asked.write.write_text(json.dumps(found, indent=1) + "\n")
    differing = sorted(name for name in found if before and found[name] != before.get(name))
    lost = sorted(name for name in before if asked.only in name and name not in found)
    for name in [*differing, *lost]:
        what = "differs" if name in differing else "is missing"
        print(f"{what}: {name} {_difference(before.get(name), found.get(name))}")
    print(json.dumps({"compared": len(found), "differing": len(differing), "missing": len(lost)}))
    sys.exit(bool(differing or lost))


def artefacts(folder: Path, only: str) -> dict[str, dict[str, str]]:
    """The hashes of the files of every job, by the name of the job."""
    found = {}
    for name, job in jobs(folder):
        if only not in name and not name.startswith("source "):
            continue
        out, start = folder / name.replace("/", "-").replace(" ", "_"), time.perf_counter()
        job(out)
        found[name] = {
            str(file.relative_to(out)): sha256(file.read_bytes()).hexdigest()
            for file in sorted(out.rglob("*"))
            if file.is_file()
        }
        print(f"{time.perf_counter() - start:6.1f} s  {name}", flush=True)
    return found


def jobs(folder: Path) -> Iterator[tuple[str, Job]]:
    """Every job, later ones on what earlier ones wrote; `source` jobs write the models."""
    import quantry

    def made(model: str | Path, **options: Any) -> Job:
        return lambda out: quantry.quantize(model, out, **options)

    for name, preset in quantry.presets().items():
        for form in preset.formats:
            yield f"demo {name} {form}", made("demo", preset=name, format=form, **_text(preset))
    yield from _special_jobs(folder, made)
    for name, architecture in MODELS.items():
        source = folder / f"source_{name}"
        yield f"source {name}", partial(_model, architecture)
        yield from _model_jobs(name, source, made)
    for source_name, to in CONVERSIONS.items():
        source = folder / source_name.replace(" ", "_")
        yield f"convert {source_name} to {to}", partial(_convert, source, to=to)
    source = folder / "demo_w8a16_compressed-tensors"
    yield "convert, rounded again", partial(_convert, source, to="gptq", requantize="w4a16")


def _convert(source: Path, out: Path, **options: Any) -> None:
    import quantry

    quantry.convert(source, out, **options)


def _special_jobs(folder: Path, made: Callable[..., Job]) -> Iterator[tuple[str, Job]]:
    recipe, gguf_recipe = folder / "recipe.toml", folder / "gguf.toml"
    recipe.write_text(RULES)
    gguf_recipe.write_text(GGUF_RULES)
    gguf, w4 = "gguf-q4_k_m", "w4a16-gptq"
    rows: dict[str, dict[str, Any]] = {
        "sequential gptq": {"preset": w4, "sequential": True, **FEW},
        "sequential smoothquant": {"preset": "w8a8-smoothquant", "sequential": True, **FEW},
        "sequential gguf": {"preset": gguf, "rounder": "gptq", "sequential": True, **FEW},
        "gguf gptq": {"preset": gguf, "rounder": "gptq", **FEW},
        "gguf awq gptq": {"preset": "gguf-q3_k_m", "rounder": "gptq", "transform": "awq", **FEW},
        "gguf importance": {"preset": "gguf-q2_k", "imatrix": "auto", **FEW},
        "low memory": {"preset": w4, "low_memory": True, **FEW},
        "kv fp8": {"preset": "fp8-dynamic", "kv": "fp8", **FEW},
        "kv by head": {"preset": "w4a16-awq", "format": "compressed-tensors", "kv": "fp8-head", **FEW},
        "kv int8": {"preset": "w4a16", "kv": "int8"},
        "group 32": {"preset": "w4a16", "group": 32},
        "recipe": {"recipe": recipe},
        "recipe for gguf": {"recipe": gguf_recipe},
        "small shards": {"preset": "fp8-dynamic", "shard_bytes": 2 << 20},
        "small gguf shards": {"preset": gguf, "shard_bytes": 1 << 20},
        "small shards, calibrated": {"preset": w4, "shard_bytes": 1 << 20, **FEW},
        "percentile": {"preset": "fp8-static", "input_scales": "percentile", **FEW},
        "auto gguf": {"preset": "auto", "budget": "4.5bpw", **FEW},
        "auto gguf bytes": {"preset": "auto", "budget": "3.4MB", **FEW},
        "auto folder": {"preset": "auto", "budget": "8bpw", "format": "compressed-tensors", **FEW},
        "w8a8 gptq": {"preset": "w8a8", "rounder": "gptq", **FEW},
        "gptq on mxfp4": {"preset": "mxfp4", "rounder": "gptq", **FEW},
        "gptq on nvfp4": {"preset": "nvfp4", "rounder": "gptq", **FEW},
    }
    for name, options in rows.items():
        yield f"special {name}", made("demo", **options)


def _model_jobs(name: str, source: Path, made: Callable[..., Job]) -> Iterator[tuple[str, Job]]:
    few = {"samples": 8, "length": 64}
    rows: dict[str, dict[str, Any]] = {
        "w4a16": {"preset": "w4a16", "group": 32},
        "awq+gptq": {"preset": "w4a16-awq+gptq", "group": 32, **few},
        "sequential": {"preset": "w4a16-gptq", "group": 32, "sequential": True, **few},
        "fp8-static": {"preset": "fp8-static", **few},
        "zeroquant": {"preset": "w8a8-zeroquant", **few},
        "nvfp4": {"preset": "nvfp4"},
        "nf4": {"preset": "nf4"},
        "q4_k_m": {"preset": "gguf-q4_k_m"},
        "q4_k_m awq gptq": {"preset": "gguf-q4_k_m", "rounder": "gptq", "transform": "awq", **few},
        "q4_k_m importance": {"preset": "gguf-q4_k_m", "imatrix": "auto", **few},
        "sequential q4_k_m": {"preset": "gguf-q4_k_m", "rounder": "gptq", "sequential": True, **few},
        "auto": {"preset": "auto", "budget": "9bpw", **few},
        "auto folder": {"preset": "auto", "budget": "13bpw", "format": "compressed-tensors", **few},
    }
    for kind, options in rows.items():
        yield f"{name} {kind}", made(source, **options)


def _text(preset: Any) -> Mapping[str, int]:
    return FEW if preset.calibrated else {}


def _model(architecture: str, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny_models import write_model

    folder.mkdir()
    write_model(folder, architecture)


def plans(before: Mapping[str, Any], only: str) -> dict[str, dict[str, Any]]:
    """The plans of the golden requests; those of the other commit where there is one."""
    import quantry

    found = {}
    asked = {name: row["ask"] for name, row in before.items() if name.startswith("plan ")} or _requests()
    for name, ask in asked.items():
        if only in name:
            found[name] = {"ask": ask, "sha256": _digest(quantry.plan(**ask).to_dict())}
    return found


def _requests() -> dict[str, dict[str, Any]]:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from planning.make_plan import SHOWN
    from quantry.planning.matrices import cases

    shown = {f"plan {name}": ask for name, ask in SHOWN.items()}
    return {**shown, **{f"plan {case['id']}": case["ask"] for case in cases()}}


def _digest(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _difference(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    if before is None or after is None:
        return ""
    return ", ".join(sorted(key for key in {*before, *after} if before.get(key) != after.get(key)))


if __name__ == "__main__":
    main()

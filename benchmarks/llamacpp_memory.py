"""The memory model against llama.cpp's own log: shapes of well-known models, contexts, cache types, a real model.

    python benchmarks/llamacpp_memory.py WORK_FOLDER [REFERENCE_MODEL]

A model of the catalogue becomes a GGUF file that is a header and a hole, and llama.cpp lays out its buffers without
allocating them. REFERENCE_MODEL is a real checkpoint folder; its files are made and loaded.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tests")]

from gguf import GGUFWriter  # noqa: E402

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from planning.llamacpp_buffers import ask  # noqa: E402
from quantry.devices.catalogue import parse  # noqa: E402
from quantry.llamacpp import metadata, mixture  # noqa: E402
from quantry.llamacpp.tensor_map import family  # noqa: E402
from quantry.models.attention import text_config  # noqa: E402
from quantry.models.reader import open_checkpoint  # noqa: E402
from quantry.models.writer import nbytes  # noqa: E402
from quantry.planning.deployment import Deployment, Settings  # noqa: E402
from quantry.planning.memory.footprint import footprint  # noqa: E402
from quantry.planning.models import from_config, open_model  # noqa: E402
from quantry.quantizing.containers import gguf_file  # noqa: E402
from quantry.quantizing.recipe import Recipe, presets  # noqa: E402
from quantry.types import Checkpoint, Workload  # noqa: E402

MIB = 1 << 20
MODELS = (
    "llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.1-70b", "qwen2.5-7b", "qwen3-0.6b", "qwen3-8b",
    "mistral-7b-v0.1", "mistral-nemo-12b", "mixtral-8x7b", "gemma-2-9b", "gemma-3-1b", "gemma-3-12b", "phi-3-mini",
    "phi-4", "smollm2-135m", "smollm3-3b", "olmo-2-7b", "granite-3.3-2b", "qwen3-30b-a3b",
)  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {"qwen3-30b-a3b": {"norm_topk_prob": True}}  # as the published model has it
LOADS = [(4096, 1, "f16"), (16384, 1, "q8_0"), (2048, 4, "f16")]  # context, sequences, cache type
REAL = [(512, 1, "f16"), (2048, 2, "q8_0")]


def hollow(checkpoint: Checkpoint, recipe: Recipe, file: Path) -> None:
    """A GGUF file with the header that Quantry would write, and no data."""
    plan = gguf_file.plan_gguf(checkpoint, recipe)
    writer = GGUFWriter(path=None, arch=family(checkpoint.config).architecture)
    found = [piece.target for piece in plan.gguf_tensors()]
    with tempfile.TemporaryDirectory() as empty:
        number = mixture.FILE_TYPES[str(recipe.preset.file_type)].number
        metadata.describe(writer, Path(empty), checkpoint.config, found, "hollow", number)
    writer.add_tokenizer_model("none")
    if not any(key.endswith(".vocab_size") for key in writer.kv_data[0]):
        writer.add_vocab_size(text_config(checkpoint.config)["vocab_size"])
    entries = [entry for piece in plan.pieces for entry in piece.entries]
    header = gguf_file.GgufFile("hollow", writer.kv_data[0], {}).header(0, [entries])
    data = sum(-(-nbytes(kind, shape) // 32) * 32 for _, kind, shape in entries)
    with file.open("wb") as target:
        target.write(header)
        target.truncate(len(header) + data)


def row(
    name: str, checkpoint: Checkpoint, recipe: Recipe, file: Path, load: tuple[int, int, str], dry: bool
) -> dict[str, Any]:
    """What was predicted and what llama.cpp says, in MiB."""
    context, sequences, kv = load
    wish = {"context": context * sequences, "sequences": sequences, "outputs": sequences, "kv": kv}
    [logged] = ask(file, wish, dry=dry)
    settings = Settings(sequences=sequences)
    deployment = Deployment(checkpoint, recipe, "llama.cpp", parse("cpu").device, kv=kv, settings=settings)
    found = footprint(deployment, Workload(context, sequences))
    compute = next(size for part, size in found.parts.items() if part.startswith("activations: a batch"))
    pairs = {
        "compute": (compute / MIB, logged["compute"]["CPU"]),
        "cache": (found.kv_cache / MIB, sum(size for size, _, _ in logged["caches"])),
        "weights": (found.weights / MIB, logged["weights"] / MIB),
    }
    sizes = {part: {"predicted": round(mine, 2), "logged": round(said, 2)} for part, (mine, said) in pairs.items()}
    return {"model": name, "preset": recipe.preset.name, "context": context, "sequences": sequences, "kv": kv, **sizes}


def shapes(work: Path) -> Iterator[dict[str, Any]]:
    preset = presets()["gguf-q4_k_m"]
    recipe = Recipe(preset, "gguf")
    for name in MODELS:
        checkpoint = from_config({**open_model(name).config, **CHANGES.get(name, {})}, name)
        file = work / "hollow.gguf"
        hollow(checkpoint, recipe, file)
        for load in LOADS:
            yield row(name, checkpoint, recipe, file, load, dry=True)


def real(work: Path, folder: Path) -> Iterator[dict[str, Any]]:
    for name in ("gguf-f16", "gguf-q8_0", "gguf-q4_k_m"):
        quantry.quantize(folder, work / name, preset=name)
        file, recipe = next((work / name).glob("*.gguf")), Recipe(presets()[name], "gguf")
        for load in REAL:
            yield row("reference", open_checkpoint(folder), recipe, file, load, dry=False)


def main(work: Path, reference: Path | None) -> None:
    work.mkdir(parents=True, exist_ok=True)
    rows = []
    for found in (*shapes(work), *(real(work, reference) if reference else ())):
        off = {part: found[part]["predicted"] / found[part]["logged"] - 1 for part in ("compute", "cache", "weights")}
        print(
            found["model"],
            found["context"],
            found["kv"],
            {part: f"{value:+.2%}" for part, value in off.items()},
            flush=True,
        )
        rows.append(found)
    keep("llamacpp_memory", {"xllamacpp": "2026.10.11549", "unit": "MiB", "rows": rows})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)

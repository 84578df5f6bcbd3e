"""Every scheme of the demo model in a real vLLM on a GPU: does it load, and does it compute what its bytes say?

    PYTHONPATH=src:... python benchmarks/gpu_engines.py WORK_FOLDER      # needs a GPU and vLLM in this environment

Also holds the artefacts made with `device="cuda"` against those made on the CPU, byte for byte.
"""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

import quantry  # noqa: E402
from measure import keep  # noqa: E402
from quantry.errors import QuantryError  # noqa: E402
from quantry.proof.measure import Measurements, Part, decode  # noqa: E402
from quantry.proof.reference import Reference, reference  # noqa: E402
from quantry.proof.served.engines import scoring_engine  # noqa: E402
from quantry.proof.text import default_text, windows  # noqa: E402
from quantry.quantizing.sources import open_source, tokenizer  # noqa: E402

CASES = [
    ("bf16", "safetensors", None), ("w4a16", "compressed-tensors", 128), ("w4a16-asym", "compressed-tensors", 64),
    ("w8a16", "compressed-tensors", 128), ("w3a16", "compressed-tensors", 128), ("w2a16", "compressed-tensors", 32),
    ("w8a8", "compressed-tensors", None), ("fp8-dynamic", "compressed-tensors", None),
    ("fp8-block", "compressed-tensors", None), ("fp8-tensor", "compressed-tensors", None),
    ("nvfp4", "compressed-tensors", None), ("mxfp4", "compressed-tensors", None), ("w4a16", "gptq", 128),
    ("w8a16", "gptq", 128), ("w4a16-asym", "gptq", 128), ("w3a16", "gptq", 128), ("w4a16-asym", "awq", 128),
    ("nf4", "bitsandbytes", None),
]  # fmt: skip
AT_A_TIME = 3  # with five, memory that one gives back upsets what another measures
OPTIONS = {"gpu_memory_utilization": 0.1, "skip_tokenizer_init": True}


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def score(folder: Path, kept: Reference) -> dict[str, Any]:
    """What vLLM says of one artefact against its bytes and the 16-bit model, or the error it ended with."""
    ids = [kept.top_k(index).ids for index in range(len(kept.windows))]
    start = time.perf_counter()
    try:
        served = scoring_engine("vllm", Path(sys.executable), options=OPTIONS, patience=150.0).score(
            folder, kept.windows, ids
        )
    except QuantryError as error:
        return {"refused": error.problem[:400], "seconds": round(time.perf_counter() - start, 1)}
    seconds = round(time.perf_counter() - start, 1)
    measured = Measurements((Part(kept, decode(open_source(folder), kept), served, len(kept.windows)),))
    assert measured.gap is not None
    assert measured.served_figures is not None
    return {
        "seconds": seconds,
        "kernels": [note for note in served.notes if "ernel" in note],
        "memory": dict(served.memory),
        "kl_to_decoded": measured.gap.kl,
        "kl_to_16_bit": measured.served_figures.kl.value,
        "decoded_kl_to_16_bit": measured.decoded_figures.kl.value,
    }


def main(work: Path) -> None:
    work.mkdir(parents=True, exist_ok=True)
    os.environ |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "QUANTRY_CACHE": str(work / "cache")}
    demo = open_source("demo")
    kept = reference(demo, windows(default_text(), tokenizer(demo), 200, 4))
    folders, same = [], {}
    for preset, form, group in CASES:
        folder = work / f"{preset}-{form}"
        quantry.quantize("demo", folder, preset=preset, format=form, group=group, device="cuda")
        quantry.quantize("demo", work / "cpu" / folder.name, preset=preset, format=form, group=group)
        same[folder.name] = contents(folder) == contents(work / "cpu" / folder.name)
        folders.append(folder)
    figures: dict[str, Any] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for folder, row in zip(folders, pool.map(lambda folder: score(folder, kept), folders), strict=True):
            figures[folder.name] = {"cuda_equals_cpu": same[folder.name], **row}
            print(folder.name, figures[folder.name], flush=True)
    keep("gpu_engines", {"noise": dict(kept.noise), "schemes": figures})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

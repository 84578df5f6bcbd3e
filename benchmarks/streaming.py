"""Peak memory must not grow with the number of layers: 70B widths with 4 and with 8 layers, to FP8 and W4A16.

python benchmarks/streaming.py WORK_FOLDER        # needs about 35 GB of disk
"""

import shutil
import sys
from pathlib import Path

from measure import disk_speed, keep, run
from shapes import write

BLOCK_BYTES = 2 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
LIMIT = (4 << 30) + 2 * BLOCK_BYTES


def main(work: Path) -> None:
    figures: dict[str, object] = {"block_bytes": BLOCK_BYTES, "limit_bytes": LIMIT}
    for layers in (4, 8):
        model = write(f"70b-{layers}", work / f"70b-{layers}")
        size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
        for preset in ("fp8-dynamic", "w4a16"):
            out = work / "out"
            shutil.rmtree(out, ignore_errors=True)
            found = run([sys.executable, "-m", "quantry", "quantize", model, "-o", out, "--preset", preset])
            found["source_bytes_per_second"] = round(size / found["seconds"])
            figures[f"{preset}, {layers} layers"] = found
            print(
                f"{preset}, {layers} layers: {found['seconds']} s, peak {found['peak_anonymous_bytes'] / 2**30:.2f} GiB"
            )
            shutil.rmtree(out)
        shutil.rmtree(model)
    figures["disk_bytes_per_second"] = round(disk_speed(work))
    keep("streaming", figures)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

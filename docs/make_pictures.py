"""Runs the commands whose output README and docs show, on the demo model, and writes docs/pictures.

    python docs/make_pictures.py                  (make pictures; about two minutes, needs chromium)
    python docs/make_pictures.py SmolLM2-135M     (also the run of this folder with the real SmolLM2-135M)

Outputs carry times of the machine, so no test makes them again. `inputs.json` keeps a hash of the sources that decide
how they look, and a test says when those have changed since.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs/pictures"
INPUTS = PICTURES / "inputs.json"
SOURCES = (
    "docs/make_pictures.py", "src/quantry/report/*", "src/quantry/demo/config.json",
    *(f"src/quantry/cli/{name}.py" for name in ("_output", "run", "quantize", "verify", "diff", "sweep", "plan")),
)  # fmt: skip
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDTH = 1000
TERMINAL = {"COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
COMMANDS = {  # in this order, in an empty folder
    "run-demo": "quantry run demo --yes --no-serve",
    "quantize": "quantry quantize demo -o build/demo-q4_k_m --preset gguf-q4_k_m",
    "verify": "quantry verify build/demo-q4_k_m --reference demo",
    "gate": "quantry verify build/demo-q4_k_m --reference demo --gate accuracy-critical --no-record",
    "quantize-w4a16": "quantry quantize demo -o build/demo-w4a16 --preset w4a16-gptq",
    "diff": "quantry diff build/demo-q4_k_m build/demo-w4a16",
    "sweep": "quantry sweep demo --presets gguf-q3_k_m,gguf-q4_k_m,gguf-q5_k_m,gguf-q8_0,w4a16-gptq -o build/sweep",
}
PLAN = 'quantry plan llama-3.1-8b --gpu "RTX 3060 8GB" --context 8192'
PAGE = """<style>body {{ margin: 0; padding: 4px 20px; background: {background}; color: {foreground}; }}
pre {{ font: 14px/18px "DejaVu Sans Mono", monospace; }}</style><pre>{code}</pre>"""


def inputs_hash() -> str:
    """Returns the hash of the sources that decide how the pictures look."""
    files = sorted({file for pattern in SOURCES for file in ROOT.glob(pattern) if file.is_file()})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        for name, command in COMMANDS.items():
            record(name, command, folder)
        shoot(folder / "build/sweep/report.html", "report", 640)
        page = folder / "plan.html"
        shown = f"$ {PLAN}\n" + printed(PLAN, folder, FORCE_COLOR="1").partition("\nguessing ahead")[0]
        page.write_text(terminal_page(shown), encoding="utf-8")
        shoot(page, "plan", 18 * len(shown.splitlines()) + 36)
        (PICTURES / "plan.txt").write_text(printed(PLAN, folder), encoding="utf-8")
        for model in sys.argv[1:]:
            shutil.copytree(model, folder / Path(model).name)
            record("run-SmolLM2-135M", f"quantry run {Path(model).name} --yes --no-serve", folder)
    kept = {"sha256": inputs_hash(), "date": date.today().isoformat(), "sources": SOURCES}
    INPUTS.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def record(name: str, command: str, folder: Path) -> None:
    """Keeps what a command prints."""
    print(command, flush=True)
    (PICTURES / f"{name}.txt").write_text(f"$ {command}\n{printed(command, folder)}", encoding="utf-8")


def terminal_page(output: str) -> str:
    """Returns a page that shows an output with its colours."""
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(Text.from_ansi(output), soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=PAGE, theme=MONOKAI)


def printed(command: str, folder: Path, **environment: str) -> str:
    """Returns what a command prints, without colours unless the environment asks for them."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **TERMINAL, **environment, "PATH": path}, check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):
        sys.exit(f"{command}: {done.stdout}")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines()) + "\n"


def shoot(page: Path, name: str, height: int) -> None:
    """Takes a picture of a page."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    picture = PICTURES / f"{name}.png"
    options = ["--headless", "--no-sandbox", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
    subprocess.run(
        [browser, *options, f"--window-size={WIDTH},{height}", f"--screenshot={picture}", page.as_uri()],
        check=True, capture_output=True,
    )  # fmt: skip
    Image.open(picture).convert("P", palette=Image.Palette.ADAPTIVE, colors=64).save(picture, optimize=True)


if __name__ == "__main__":
    main()

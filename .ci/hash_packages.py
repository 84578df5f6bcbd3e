"""Writes hashes.txt: for every version of constraints.txt the SHA-256 of each file that the package index has of it.

The same is done in docs/, for what builds the site.

    python .ci/hash_packages.py

pip then installs those bytes and no others (--require-hashes), on every platform that Quantry runs on. torch is left to
constraints.txt: its builds for CPU, CUDA and ROCm have one version, several indexes and other dependencies each.
"""

import re
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
INDEX = "https://pypi.org/simple"
LINK = re.compile(r'#sha256=([0-9a-f]{64})"[^>]*>\s*([^<\s]+)\s*</a>')
LEFT_OUT = ("torch",)
OTHERS = re.compile(  # of systems and interpreters that Quantry does not run on
    r"-(?:pp|graalpy)\d|-cp(?:2\d|3\d|310)-(?!abi3|none)|-cp3\d{2}t?-cp3\d{2}t|win32|win_|musllinux|_(?:i686|armv\dl|ppc64le|ppc64|s390x|riscv64)"
    r"|-(?:android|ios|emscripten|pyodide)|wasm32|universal-?arm"
)
HEAD = "# Made by .ci/hash_packages.py from constraints.txt (make hashes): what set-up installs, byte for byte.\n"


def main() -> None:
    for folder in (ROOT, ROOT / "docs"):
        _write(folder)


def _write(folder: Path) -> None:
    lines = (folder / "constraints.txt").read_text(encoding="utf-8").splitlines()
    wanted = [line.split("==") for line in lines if "==" in line and line.split("==")[0] not in LEFT_OUT]
    with ThreadPoolExecutor(8) as several:
        found = list(several.map(lambda pair: sorted(_hashes(*pair)), wanted))
    missing = [name for (name, _), hashes in zip(wanted, found, strict=True) if not hashes]
    if missing:
        sys.exit(f"the index has no files of {', '.join(missing)}")
    (folder / "hashes.txt").write_text(HEAD + "".join(map(_entry, wanted, found)), encoding="utf-8")


def _hashes(name: str, version: str) -> Iterator[str]:
    with urllib.request.urlopen(f"{INDEX}/{_plain(name)}/", timeout=60) as answer:
        page = answer.read().decode()
    for digest, file in LINK.findall(page):
        if _version(file) == version and not OTHERS.search(file):
            yield digest


def _version(filename: str) -> str:
    """Returns the version in the name of a wheel or a source archive."""
    if filename.endswith(".whl"):
        return filename.split("-")[1]
    match = re.fullmatch(r".+-([^-]+)\.(?:tar\.gz|zip)", filename)
    return match[1] if match else ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _entry(pair: list[str], hashes: list[str]) -> str:
    return f"{'=='.join(pair)} \\\n" + " \\\n".join(f"    --hash=sha256:{value}" for value in hashes) + "\n"


if __name__ == "__main__":
    main()

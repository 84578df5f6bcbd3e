"""What `quantry --version -v` says: versions of Python, packages, engines and devices, for a bug report."""

import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

from quantry import __version__

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "guidellm", "lm-eval")


def versions() -> str:
    """Returns a line for each part; no path, name of the machine or key is in it."""
    from quantry.devices.detect import detect

    device = detect(0).device
    rows = [
        ("quantry", __version__),
        ("python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("device", device.name),
        *((name, _installed(name) or "not installed") for name in PACKAGES),
        *(("engine " + name, found) for name, found in _engines().items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{words}" for name, words in rows)


def _engines() -> dict[str, str]:
    from quantry.engines.contract.catalogue import ranked

    found = {}
    for engine in ranked():
        facts = engine.installation
        packages = [f"{name} {number}" for name in facts.distributions if (number := _installed(name))]
        program = [facts.program] if facts.program and shutil.which(str(facts.program)) else []
        found[engine.name] = ", ".join(packages + program) or "not in this environment"
    return found


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

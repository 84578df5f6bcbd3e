"""What a server says of itself, and the machine it runs on where that is this one."""

import re
from typing import Any
from urllib.parse import urlsplit

from quantry.engines.contract.options import is_loopback
from quantry.jobs.load.endpoint import Endpoint, fetched

PATHS = {"vllm": ("/version", "version"), "llama.cpp": ("/props", "build_info"), "ollama": ("/api/version", "version")}


def server_facts(server: Endpoint) -> dict[str, str]:
    """Returns engine, version and hardware; what cannot be found out is left out."""
    facts: dict[str, str] = {}
    for engine, (path, name) in PATHS.items():
        content: Any = fetched(server.root, server.key, path)
        if isinstance(content, dict) and isinstance(content.get(name), str):
            facts = {"engine": engine, **_version(content[name])}
            break
    if is_loopback(urlsplit(server.root).hostname or ""):
        facts["hardware"] = this_machine()
    return facts


def _version(text: str) -> dict[str, str]:
    """Returns a version in a form that says something; a build of llama.cpp without one is called b0-unknown."""
    plain = re.sub(r"[^\w.+-]", "", text)[:40]
    return {} if "unknown" in plain or not plain else {"version": plain}


def this_machine() -> str:
    """Names the processor or accelerator of this machine, its cores and its memory."""
    from quantry.devices.detect import detect
    from quantry.report.sizes import counted, human

    machine = detect(0)
    cores = f", {counted(machine.cores, 'core')}" if machine.cores else ""
    return f"{machine.device.name}{cores}, {human(machine.host_memory or 0)}"

"""Watches every socket of a Python process and of those that it starts: all but this machine's own are noted and refused.

The watch is an audit hook in a `sitecustomize` that each interpreter loads first. It sees what Python asks for, also
libraries in C that go through the socket module; a library that calls the system itself is not seen.
"""

import os
from pathlib import Path

GUARD = """
import ipaddress, os, sys

NOTES = os.environ["SOCKET_NOTES"]

def is_local(host):
    if host is None or host in ("", b"", "localhost", b"localhost"):
        return True
    text = host.decode() if isinstance(host, bytes) else str(host)
    try:
        return ipaddress.ip_address(text.partition("%")[0].strip("[]")).is_loopback
    except ValueError:
        return False

def host_of(event, arguments):
    if event in ("socket.getaddrinfo", "socket.gethostbyname"):
        return arguments[0]
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.bind"):
        address = arguments[1]
        return address[0] if isinstance(address, tuple) and isinstance(address[0], (str, bytes)) else None
    return None

def hook(event, arguments):
    if event.startswith("socket.") and not is_local(host := host_of(event, arguments)):
        with open(NOTES, "a") as file:
            file.write(f"{event} {host!r} by {' '.join(sys.argv)[:200]}\\n")
        raise PermissionError(13, f"no socket to {host}")

sys.addaudithook(hook)
"""


def guarded(folder: Path) -> tuple[dict[str, str], Path]:
    """Returns an environment for a process that is watched, and the file that gets a line for each other socket."""
    place, notes = folder / "guard", folder / "sockets.txt"
    place.mkdir()
    notes.touch()
    (place / "sitecustomize.py").write_text(GUARD)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    paths = os.pathsep.join(filter(None, (str(place), kept.get("PYTHONPATH", ""))))
    return {**kept, "PYTHONPATH": paths, "SOCKET_NOTES": str(notes), "QUANTRY_CACHE": str(folder / "cache")}, notes

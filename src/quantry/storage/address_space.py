"""What a limit on address space (`ulimit -v`) leaves to this process.

Python and torch raise an error where they get no memory. Libraries in Rust end the whole process: a tokenizer must
not be loaded where there is hardly room for it.
"""

import sys
from contextlib import suppress
from pathlib import Path

from quantry.errors import QuantryError

FLOOR = 512 << 20  # bytes; tokenizers of 262,000 tokens take 300 MB, and every thread reserves its stack


def check_address_space(needed: int = FLOOR) -> None:
    """Raises QuantryError if a limit leaves less than `needed` bytes; where there is no limit all is well."""
    limit, mapped = _limit(), mapped_bytes()
    if limit is not None and limit - mapped < needed:
        raise QuantryError(
            f"ulimit -v leaves {max(limit - mapped, 0) >> 20} MiB of memory, and at least {needed >> 20} are needed",
            fix=f"ulimit -v {(mapped + 4 * needed) >> 10}, or unlimited",
        )


def _limit() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def mapped_bytes() -> int:
    """Returns the bytes this process maps; 0 where the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        import resource

        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    return 0

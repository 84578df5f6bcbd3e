"""A file in memory, for what reads headers."""


class MemoryFile:
    """A file that lives in memory and counts what is read of it."""

    label = "memory"

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data = data
        self.sizes = {"f": len(data) if size is None else size}
        self.total = 0

    def read(self, name: str, start: int, length: int) -> bytes:
        self.total += length
        assert start + length <= self.sizes[name]
        return self.data[start : start + length].ljust(length, b"\0")

"""A limit on address space is told in a line, before a library that it would end is called."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quantry
from quantry.errors import QuantryError
from quantry.models.tokenizer import load_tokenizer
from quantry.storage.address_space import FLOOR, check_address_space, mapped_bytes

DEMO = Path(quantry.__file__).parent / "demo"


@contextmanager
def left(room: int) -> Iterator[None]:
    """Leaves this process `room` bytes of address space."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped_bytes() + room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_a_tokenizer_is_not_loaded_without_room_for_it() -> None:
    with (
        left(FLOOR // 4),
        pytest.raises(QuantryError, match=r"ulimit -v leaves 1[0-2]\d MiB .* at least 512 .*; ulimit"),
    ):
        load_tokenizer(DEMO)


def test_room_is_counted_beyond_what_is_mapped() -> None:
    with left(2 * FLOOR):
        check_address_space()
        with pytest.raises(QuantryError, match="2048 are needed"):
            check_address_space(4 * FLOOR)

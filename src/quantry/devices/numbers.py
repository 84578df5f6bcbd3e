"""A GPU in numbers ("24GB 1008GB/s sm89"): what they leave open is that of the nearest device of its capability."""

import math
from collections.abc import Sequence
from dataclasses import replace

from quantry.devices import GIB, Device


def from_numbers(
    memory: float, bandwidth: float, capability: str, alike: Sequence[Device]
) -> tuple[Device, tuple[str, ...]]:
    """Returns the device with so many GiB and GB/s, and a note on what is assumed of it.

    `alike` are the catalogue's devices of that capability. The one nearest in bandwidth lends its rates, in proportion
    to bandwidth, and its link; of memory as little is usable as on any of them.
    """
    like = min(alike, key=lambda row: (_apart(row.bandwidth, bandwidth * 1e9), _apart(row.memory, memory * GIB)))
    times = bandwidth * 1e9 / like.bandwidth
    share = min(row.usable / row.memory for row in alike)
    size = int(memory * GIB)
    name = f"{memory:g}GB {bandwidth:g}GB/s sm{capability.replace('.', '')}"
    note = (
        f"rates and link of {name} are assumed: those of the {like.name}, the rates times {times:.3g} in proportion to "
        f"bandwidth; {share:.0%} of its memory is assumed to be usable"
    )
    device = replace(
        like,
        name=name,
        memory=size,
        usable=int(size * share),
        bandwidth=bandwidth * 1e9,
        tflops={dtype: round(rate * times, 3) for dtype, rate in like.tflops.items()},
        price=None,
        price_source=None,
        source=f"described; rates in proportion to {like.name}",
        date="",
        aliases=(),
    )
    return device, (note,)


def _apart(one: float, other: float) -> float:
    return abs(math.log(one / other))

"""The words of a description: its nodes, its parts, and the figures that stand for a device or a host.

Nothing here knows a device. "2 nodes of 8x H100" are nodes and one part, "RTX 4090 + 64GB RAM" two parts, of which the
second is figures alone; "24GB 1008GB/s sm89" is a device in figures.
"""

import re
from dataclasses import dataclass, fields

from quantry.errors import QuantryError

NODES = r"(?:nodes?|hosts?|machines?|servers?|boxes)"
NODES_FIRST = rf"(?P<nodes>[+-]?\d+) ?{NODES} ?(?:x|×|\*|of|with|:)? ?(?P<rest>.+?)(?: (?:each|per node))?"
NODES_LAST = rf"(?P<rest>.+?) ?(?:x|×|\*|on each of) ?(?P<nodes>\d+) ?{NODES}"
SEPARATOR = r"[,;&]|(?<!max)\+|\b(?:and|with|plus)\b"  # not the plus of a Ryzen AI Max+
SIZE = r"(?<![a-z0-9.])(\d{1,6}(?:\.\d{1,3})?) ?(tb|tib|gb|gib|g)\b"
RAM = rf"{SIZE}(?: of)?(?: (?:system|host|main|ddr[345]))* (?:ram|memory|dram)\b"
CORES = r"(?<![\w.])(\d{1,9}) ?(?:physical )?(cores?|vcpus?|threads?|cpus?)\b"
BANDWIDTH = r"(?<![\w.])(\d{1,6}(?:\.\d{1,3})?) ?([gt])i?b ?(?:/ ?s|ps)\b"
CAPABILITY = r"\bsm ?(\d{1,4})\b"
FILLER = r"\b(?:cpu|gpu|ram|vram|memory|dram|of|only|system|host|main|per node|each)\b"
KINDS = r"\b(?:xeon|epyc|ryzen|intel|amd|x86|vps|vm|server|desktop|laptop|pc|machine|ddr[345])\b"  # beside cores
COUNTS = (
    r"(?P<count>[+-]?\d+) ?(?:x(?!tx?\b)|[×*]) ?(?P<name>.+)",  # 2x RTX 3090, not 7900 XTX
    r"(?P<count>\d{1,2}) (?P<name>[a-z].+)",  # 2 RTX 3090s
    r"(?P<name>.+?)(?: [x×*] ?| ?[×*] ?|(?<=\d)x)(?P<count>\d+)",  # RTX 3090 x2, H100x8
)
LIMITS = {  # what is neither a slip of the pen nor an empty machine
    "cores": (1, 1024, "cores", "4 cores 8GB"),
    "memory": (0.5, 32768, "GB of memory", "4 cores 8GB"),
    "bandwidth": (1, 20000, "GB/s", "24GB 1008GB/s sm89"),
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a part that names nothing: of a host, or with a compute capability of a device. GiB and GB/s."""

    cores: int | None = None
    threads: int | None = None
    memory: float | None = None
    bandwidth: float | None = None
    capability: str | None = None  # "8.9"
    is_host: bool = False  # it says cpu, cores or RAM

    @property
    def is_device(self) -> bool:
        return self.bandwidth is not None or self.capability is not None

    def joined(self, other: "Figures") -> "Figures":
        """Returns both; raises QuantryError if they say the same thing twice."""
        both: dict[str, object] = {"is_host": self.is_host or other.is_host}
        for name in (field.name for field in fields(self) if field.name != "is_host"):
            here, there = getattr(self, name), getattr(other, name)
            if here is not None and there is not None and here != there:
                raise QuantryError(f"the {name} of the host is given as {here:g} and {there:g}", fix="give it once")
            both[name] = there if here is None else here
        return Figures(**both)  # type: ignore[arg-type]


def split(text: str) -> tuple[int | None, list[str]]:
    """Returns the nodes that a description counts, None without any, and its parts in small letters."""
    spaced = re.sub(r"\s+", " ", text.lower()).strip()
    found = re.fullmatch(NODES_FIRST, spaced) or re.fullmatch(NODES_LAST, spaced)
    rest = found["rest"] if found else spaced
    parts = [part.strip() for part in re.split(SEPARATOR, rest) if part.strip()]
    return (int(found["nodes"][:9]) if found else None), parts


def counted(part: str) -> tuple[int, str]:
    """Returns the count of a part and the name that it counts."""
    minus = "-" if part.startswith("-") else ""  # a sign, not a hyphen: -2x H100
    spaced = minus + re.sub(r"[\s_-]+", " ", part).strip()
    found = next(filter(None, (re.fullmatch(pattern, spaced) for pattern in COUNTS)), None)
    return (1, spaced) if found is None else (int(found["count"][:9]), found["name"])


def figures(part: str) -> Figures | None:
    """Returns the figures of a part that has nothing else, None for a name.

    Raises QuantryError for figures out of range.
    """
    spaced = re.sub(r"[\s_-]+", " ", part).strip()
    cores, widths, sms = (re.findall(pattern, spaced) for pattern in (CORES, BANDWIDTH, CAPABILITY))
    rest = re.sub(CAPABILITY, " ", re.sub(BANDWIDTH, " ", re.sub(CORES, " ", spaced)))
    memories = sizes(rest)
    rest = re.sub(FILLER, " ", re.sub(SIZE, " ", rest))
    if cores or re.search(RAM, spaced):
        rest = re.sub(KINDS, " ", rest)
    if (
        rest.strip(" .:/()")
        or max(map(len, (cores, widths, sms, memories))) > 1
        or not (cores or widths or sms or memories)
    ):
        return None
    found = Figures(
        cores=_cores(cores[0]) if cores else None,
        threads=int(cores[0][0]) if cores else None,
        memory=memories[0] if memories else None,
        bandwidth=float(widths[0][0]) * (1000 if widths[0][1] == "t" else 1) if widths else None,
        capability=f"{sms[0][:-1] or '0'}.{sms[0][-1]}" if sms else None,
        is_host=bool(cores or re.search(r"\b(?:cpu|ram|dram|memory|host|ddr[345])\b", spaced)),
    )
    _check(found)
    return found


def sizes(text: str) -> list[float]:
    """Returns the memory sizes in a text, in GiB."""
    return [float(number) * (1024 if unit[0] == "t" else 1) for number, unit in re.findall(SIZE, text)]


def host_memory(part: str) -> tuple[str, float | None]:
    """Returns a part without the RAM that it gives beside a name ("RTX 4090 64GB RAM"), and that RAM in GiB."""
    found = re.search(RAM, part)
    if found is None:
        return part, None
    (size,) = sizes(found[0])
    _check(Figures(memory=size))
    return (part[: found.start()] + part[found.end() :]).strip(), size


def _cores(found: tuple[str, str]) -> int:
    """Returns the physical cores; two vCPUs or threads share one on most hosts."""
    number, unit = int(found[0]), found[1]
    return number if unit.startswith(("core", "cpu")) else (number + 1) // 2


def _check(found: Figures) -> None:
    for name, (least, most, unit, example) in LIMITS.items():
        value = getattr(found, name)
        if value is not None and not least <= value <= most:
            raise QuantryError(
                f"{value:g} {unit} are not between {least:g} and {most:g}", fix=f"write for example {example}"
            )

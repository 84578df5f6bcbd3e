"""The facts that conditions name, so that tests can tell if each of them exists."""

from collections.abc import Iterator, Mapping

from quantry.engines.contract.catalogue import Conditions
from quantry.planning.conditions import COMPARE


def named_facts(conditions: Conditions) -> Iterator[str]:
    """Yields the names of facts in a table of conditions, those of limits too."""
    for name, wanted in conditions.items():
        if name == "any":
            for table in wanted:
                yield from named_facts(table)
        elif name != "is":
            yield name
            limits = wanted.items() if isinstance(wanted, Mapping) else ()
            yield from (limit for how, limit in limits if how in COMPARE and isinstance(limit, str))

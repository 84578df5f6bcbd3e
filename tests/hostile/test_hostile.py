"""A seeded sample of damaged files: every command does its work or says in one line why not.

The same cases by the thousand are benchmarks/campaign.
"""

from pathlib import Path

import pytest

from depth import deep
from hostile_inputs import KINDS, MEMORY_USED, make_intact, run
from shared import shared


@deep
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files(name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    intact = shared(tmp_path_factory, "hostile-intact", make_intact)
    for number in range(6):
        ending = run(KINDS[name], number, intact, tmp_path / "case")
        assert not ending.fault, (number, ending.words, ending.fault)
        assert ending.memory < MEMORY_USED, (number, ending.words)

"""The grammar of conditions, entry by entry, and how needs and facts are spelled."""

from typing import Any

import pytest

from quantry.planning.conditions import agrees, fill, spell_need

FACTS: dict[str, Any] = {
    "bits": 4, "group": 128, "columns": 4096, "part_rows": (256, 192), "capability": 89, "format": "awq",
    "packages": frozenset({"conch"}), "heads": None, "expert": False,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {"wna16": {"bits": [4, 8]}, "wide": {"columns": {"at_least": 8192}}}


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({}, True),
        ({"bits": 4}, True),
        ({"bits": 8}, False),
        ({"bits": [4, 8]}, True),
        ({"capability": {"at_least": 89, "below": 90}}, True),
        ({"capability": {"above": 89}}, False),
        ({"capability": {"at_most": 88}}, False),
        ({"columns": {"multiple_of": "group"}}, True),
        ({"columns": {"not_multiple_of": "group"}}, False),
        ({"columns": {"multiple_of": 0}}, False),
        ({"part_rows": {"multiple_of": 64}}, True),
        ({"part_rows": {"multiple_of": 128}}, False),  # all parts of a fused layer must be
        ({"part_rows": {"not_multiple_of": 128}}, True),  # one part that is not is enough
        ({"format": {"not": "awq"}}, False),
        ({"format": {"not": ["gptq", "gguf"]}}, True),
        ({"packages": {"has": "conch"}}, True),
        ({"packages": {"lacks": "conch"}}, False),
        ({"heads": 32}, False),  # an unknown fact agrees with nothing
        ({"heads": {"not": 32}}, False),
        ({"columns": {"multiple_of": "heads"}}, False),
        ({"is": "wna16"}, True),
        ({"is": ["wna16", "wide"]}, False),
        ({"any": [{"bits": 8}, {"format": "awq"}]}, True),
        ({"any": [{"bits": 8}, {"format": "awq", "expert": True}]}, False),
    ],
)  # fmt: skip
def test_conditions(conditions: dict[str, Any], holds: bool) -> None:
    assert agrees(conditions, FACTS, CASES) == holds


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"bits": [2, 3, 8]}, "bits 2, 3 or 8, not 4"),
        ({"capability": {"at_least": 90}}, "compute capability of at least 9.0, not 8.9"),
        ({"columns": {"multiple_of": "group"}}, "inputs a multiple of the group size, not 4096"),
        ({"packages": {"has": "humming"}}, "package humming"),
        ({"any": [{"bits": 8}, {"expert": True}]}, "bits 8 or expert yes"),
    ],
)
def test_needs_in_words(needs: dict[str, Any], words: str) -> None:
    assert spell_need(needs, next(iter(needs)), FACTS) == words


def test_sentences_are_filled_in() -> None:
    text = "{columns} inputs on {capability} in groups of {group}, parts of {part_rows}, expert: {expert}"
    assert fill(text, FACTS) == "4096 inputs on 8.9 in groups of 128, parts of 256, 192, expert: no"
    assert fill("group {group}", {"group": -1}) == "group -1 (none)"

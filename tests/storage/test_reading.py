"""Files that are read back: the right ones come as they are, damaged ones are refused in one line that says where."""

import json
import random
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Required, TypedDict

import pytest

import quantry
from demo_artefacts import quantized_demo
from depth import rounds, sampled
from mutations import damaged_json
from quantry.errors import CheckpointError, OutputError, QuantryError, RecipeError
from quantry.jobs.artefact_report import content_of
from quantry.jobs.load.trials import read_proof
from quantry.jobs.output_folder import OutputFolder, read_artefact
from quantry.models.workspace import DONE, Workspace
from quantry.proof.checks import check_files
from quantry.quantizing.card import proven_files
from quantry.quantizing.recipe_file import from_card, read_plan, read_recipe
from quantry.storage.reading import read_json, read_toml
from quantry.storage.shape import fault, plain_fault


@dataclass
class Part:
    size: int
    share: float = 0.0


class Shape(TypedDict, total=False):
    name: Required[str]
    parts: dict[str, Part]
    pair: tuple[int, int]
    kind: Literal["a", "b"]
    notes: list[str] | None


GOOD: dict[str, Any] = {
    "name": "x",
    "parts": {"p": {"size": 3, "share": 1}},
    "pair": [1, 2],
    "kind": "a",
    "notes": None,
    "more": [1],
}


def test_what_has_the_shape_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    assert read_json(tmp_path / "a.json", Shape, fix="no") == GOOD


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "name is 3, not text"),
        ({"name": None}, "name is None, not text"),
        ({"parts": []}, "parts is a list, not an object"),
        ({"parts": {"p": {}}}, "parts.p.size is missing"),
        ({"parts": {"p": {"size": True}}}, "parts.p.size is True, not a whole number"),
        ({"parts": {"p": {"size": 1.5}}}, "parts.p.size is 1.5, not a whole number"),
        ({"parts": {"p": {"size": 1, "share": "x"}}}, "parts.p.share is 'x', not a number"),
        ({"pair": [1]}, "pair has 1 items, not 2"),
        ({"pair": "ab"}, "pair is 'ab', not a list"),
        ({"kind": "c"}, "kind is 'c', not a or b"),
        ({"notes": [1]}, "notes.0 is 1, not text"),
        ({"more": 10**20}, "more is a number of 21 digits"),
        ({"more": ["\ud800"]}, "more.0 has characters that are none"),
        ({"\ud800": 1}, "a key has characters that are none"),
    ],
)
def test_another_shape_is_refused_by_its_place(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(GOOD | change))
    with pytest.raises(OutputError) as error:
        read_json(tmp_path / "a.json", Shape, fix="write it again")
    assert str(error.value) == f"{tmp_path / 'a.json'} is damaged: {words}; write it again"


DAMAGED = {
    b"": "not JSON",
    b"{": "not JSON",
    b'{"a": 1}\xff': "byte 8 is not UTF-8",
    b"[]": "holds a list, not an object",
    b"null": "holds a NoneType",
    b"[" * 100_000: "nested too deeply",
    b'{"a":' * 100 + b"1" + b"}" * 100: "nested deeper than 64",
    b'{"a": ' + b"9" * 5000 + b"}": "not JSON",
    b'{"a": 1}' + b" " * 2000: "more than 1,000 bytes",
}


@pytest.mark.parametrize("data", DAMAGED, ids=DAMAGED.values())
def test_what_is_no_object_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(RecipeError, match=DAMAGED[data]) as error:
        read_json(
            tmp_path / "a.json", fix="write it again", error=RecipeError, limit=1000 if data[-1:] == b" " else 10**6
        )
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_toml_is_refused_for_the_same_reasons(tmp_path: Path) -> None:
    for data, words in (
        (b"a = ", "not TOML"),
        (b"\xff", "not UTF-8"),
        (b"a = " + b"[" * 10_000, "nested too deeply|not TOML"),
    ):
        (tmp_path / "a.toml").write_bytes(data)
        with pytest.raises(OutputError, match=words):
            read_toml(tmp_path / "a.toml", fix="correct it")
    with pytest.raises(OutputError, match="cannot read .*No such file"):
        read_toml(tmp_path / "b.toml", fix="correct it")


def test_a_union_is_told_by_its_deepest_fault() -> None:
    assert fault({"parts": {"p": {"size": "x"}}}, Mapping[str, Any] | None) == ""
    assert fault({"p": {"size": "x"}}, dict[str, Part] | None) == "p.size is 'x', not a whole number"


# ---- every file that is read back ----


def read_card(file: Path) -> None:
    from_card(read_artefact(file.parent))


def record(file: Path) -> None:
    proven_files(file.parent, {"verdict": "pass"})


READERS: tuple[Callable[[Path], object], ...] = (
    lambda file: content_of(file.parent),
    lambda file: read_proof(file.parent),
    lambda file: check_files(file.parent),
    read_card,
    record,
)


@sampled
def test_a_damaged_quantry_json_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    """300 of them, each by one reader: what is not refused in one line is read."""
    artefact = quantized_demo(tmp_path_factory, "gguf-q8_0")
    for file in artefact.iterdir():
        (tmp_path / file.name).symlink_to(file)
    note = tmp_path / "quantry.json"
    whole = note.read_bytes()
    proof = {
        "verdict": "pass",
        "gate": "general",
        "kl": 0.1,
        "intervals": {"kl": [0.1, 0.2]},
        "findings": [{"ok": True, "words": "x"}],
        "notes": ["n"],
    }
    content = json.dumps({**json.loads(whole), "proof": proof, "fates": {"kept": ["a"]}}).encode()
    refused = 0
    for number in range(rounds(300)):
        chance = random.Random(number)
        note.unlink()
        note.write_bytes(damaged_json(content, chance))
        try:
            chance.choice(READERS)(note)
        except QuantryError as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > rounds(300) // 10


@pytest.mark.parametrize(
    "change",
    [{"files": 3}, {"files": {"a": 3}}, {"notes": {}}, {"recipe": []}, {"proof": 3}, {"proof": {"findings": [3]}}, {"bytes": "x"}],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_type_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, change: dict[str, Any]
) -> None:
    artefact = quantized_demo(tmp_path_factory, "gguf-q8_0")
    for file in artefact.iterdir():
        (tmp_path / file.name).symlink_to(file)
    note = tmp_path / "quantry.json"
    content = json.loads(note.read_text())
    note.unlink()
    note.write_text(json.dumps({**content, **change}))
    for reader in READERS:
        with suppress(QuantryError):  # or it says what it finds
            reader(note)
    for refusing in (READERS[0], read_card, record):
        with pytest.raises(QuantryError, match="quantry.json is damaged"):
            refusing(note)


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"jobs": 3, "identity": "x"}', '{"jobs": {"a": 3}, "identity": "x"}', "\x00"]
)
def test_a_damaged_note_of_a_job_is_refused(tmp_path: Path, text: str) -> None:
    from quantry.jobs.sweep.state import SweepNote

    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(OutputError, match="sweep.json is damaged"):
        OutputFolder(tmp_path, "sweep").read_note(SweepNote)


@pytest.mark.parametrize("text", ["{", "3", '{"bytes": "x", "sha256": "y"}', '{"sha256": "y"}'])
def test_a_damaged_note_of_a_shard_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x")
    (tmp_path / f"a.safetensors{DONE}").write_text(text)
    with pytest.raises(OutputError, match="is damaged"):
        Workspace(tmp_path).finished("a.safetensors")


def test_a_large_recipe_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with file.open("wb") as opened:
        opened.truncate(20 << 20)
    with pytest.raises(RecipeError, match="more than 16,777,216 bytes"):
        read_plan(file, quantry.inspect("demo"))
    with pytest.raises(RecipeError, match="more than 16,777,216 bytes"):
        read_recipe(file)


def test_a_card_without_a_recipe_says_so() -> None:
    recipes: tuple[dict[str, Any], ...] = (
        {},
        {"preset": {}},
        {"preset": {"name": "w4a16", "scheme": {"weight": {"block": []}}}, "format": "x", "rules": []},
    )
    for recipe in recipes:
        with pytest.raises((CheckpointError, QuantryError)):
            from_card({"recipe": recipe})


def test_a_tokenizer_without_a_limit_is_not_damaged() -> None:
    """Transformers writes 10^30 where a model has no greatest length; most models of the hub have it."""
    assert plain_fault({"model_max_length": int(1e30)}) == ""
    assert "31 digits" in plain_fault({"vocab_size": int(1e30)})

"""The 16-bit model of an artefact is found again, and no other is taken for it."""

import shutil
from pathlib import Path

import pytest

import quantry
from quantry.errors import QuantryError
from quantry.quantizing.origin import origin_of
from quantry.storage import VARIABLE
from tiny_models import write_model


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and an artefact of it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (tmp_path / "tiny").mkdir()
    write_model(tmp_path / "tiny", "LlamaForCausalLM")
    quantry.quantize(tmp_path / "tiny", tmp_path / "elsewhere" / "art", preset="w8a8")
    return tmp_path


def test_verify_and_diff_find_the_model_by_themselves(made: Path) -> None:
    artefact = made / "elsewhere" / "art"
    assert Path(origin_of(artefact)) == made / "tiny"
    difference = quantry.diff(artefact, windows=1, length=32)
    assert difference.a["source"] == str(made / "tiny")
    assert 0 < difference.kl < 0.1
    assert quantry.verify(artefact, windows=1, length=32, record=False).reference == str(made / "tiny")


def test_no_path_of_the_machine_is_in_the_artefact(made: Path) -> None:
    assert str(made) not in (made / "elsewhere" / "art" / "quantry.json").read_text()


def test_a_model_beside_the_artefact_is_found_without_a_cache(made: Path) -> None:
    shutil.rmtree(made / "cache")
    with pytest.raises(QuantryError, match="the model 'tiny' .* is not found; name its folder with --reference"):
        origin_of(made / "elsewhere" / "art")
    shutil.move(made / "tiny", made / "elsewhere" / "tiny")
    assert Path(origin_of(made / "elsewhere" / "art")) == made / "elsewhere" / "tiny"


def test_another_model_of_the_same_name_is_not_taken(made: Path) -> None:
    write_model(made / "tiny", "LlamaForCausalLM", seed=1)
    with pytest.raises(QuantryError, match="is not found"):
        origin_of(made / "elsewhere" / "art")


def test_an_artefact_of_another_tool_needs_a_reference(made: Path) -> None:
    with pytest.raises(QuantryError, match="does not say which model it was made from"):
        origin_of(made / "tiny")

"""What is looked at first, without torch: a wrong word of a command line is answered within a second.

The jobs check the same, and more; they take seconds to import.
"""

from pathlib import Path
from typing import Any

DEMO = "demo"  # the text that comes with the package


def check_models(*models: str | Path | None) -> None:
    """Raises QuantryError for a model that is not there, or whose headers are damaged; a hub is not asked yet."""
    from quantry.models.reader import is_on_hub, open_checkpoint

    for model in models:
        if model is not None and not is_on_hub(model):
            open_checkpoint(model)


def check_present(*models: str | Path | None) -> None:
    """Raises QuantryError for a model or artefact that is not there."""
    from quantry.models.reader import is_on_hub, local_folder
    from quantry.models.workspace import check_finished

    for model in models:
        if model is not None:
            check_finished(Path(model).expanduser())
            if not is_on_hub(model):
                local_folder(model)


def check_plannable(model: str) -> None:
    """Raises QuantryError for a model that is neither there nor well known; a hub is not asked yet."""
    from quantry.models.reader import is_on_hub
    from quantry.planning.models import open_model

    if not is_on_hub(model):
        open_model(model)


def check_origin(artefact: str | Path, reference: str | Path | None, how: str) -> None:
    """Raises QuantryError for an artefact whose 16-bit model is neither given nor known; a hub is not asked yet."""
    from quantry.models.reader import is_on_hub
    from quantry.quantizing.origin import origin_of

    if reference is None and not is_on_hub(artefact):
        origin_of(artefact, how)


def check_given(*files: Path | None) -> None:
    """Raises QuantryError for a file to read that is not there."""
    from quantry.errors import QuantryError

    for file in files:
        if file is not None and str(file) != DEMO and not file.expanduser().exists():
            raise QuantryError(f"{file} does not exist", fix="check the path")


def check_data(data: str | None) -> None:
    """Raises QuantryError for a weight that is no number, or for a text to calibrate on that is not there."""
    from quantry.quantizing.calibration.data import texts_of

    check_given(*(text.path for text in texts_of(data)))


def check_texts(texts: str | None) -> None:
    """Raises QuantryError for a text to measure on that is not there."""
    from quantry.quantizing.calibration.data import exists, listed

    check_given(*(Path(name) for name in listed(texts, exists)) if texts is not None else ())


def check_at_least(least: int, **numbers: float | None) -> None:
    """Raises QuantryError for the number of an option that is below `least`, or no finite number."""
    from math import isfinite

    from quantry.errors import QuantryError

    for name, value in numbers.items():
        if value is not None and not (isfinite(value) and value >= least):
            raise QuantryError(f"--{name.replace('_', '-')} is {value:g}", fix=f"give {least} or more")


def check_windows(windows: int, **length: int) -> None:
    """Raises QuantryError for windows to measure on that are less than none, or too short to score a token."""
    check_at_least(0, windows=windows)
    check_at_least(2, **length)


def check_calibration(samples: int | None, length: int | None) -> None:
    """Raises QuantryError for windows to calibrate on that are none or too short."""
    check_at_least(1, samples=samples)
    check_at_least(2, length=length)


def check_gate(name: str) -> None:
    """Raises UnknownNameError for a gate that does not exist."""
    from quantry.proof.gate import check_use

    check_use(name)


def check_use(name: str | None) -> None:
    """Raises UnknownNameError for a use that does not exist."""
    from quantry.planning.rules import find_use

    find_use(name)


def check_engine(name: str | None) -> None:
    """Raises UnknownNameError for an engine that does not exist."""
    from quantry.engines.contract.catalogue import engine_name

    if name is not None:
        engine_name(name)


def check_scoring_engine(name: str | None) -> None:
    """Raises UnknownNameError for an engine that `verify` cannot score in."""
    from quantry.engines.contract.catalogue import scoring_name

    scoring_name(name)


def check_cache(artefact: str | Path, engine: str | None, kv: str | None, context: int | None) -> None:
    """Raises QuantryError for a KV cache or a length that the artefact cannot be measured with; a hub is not asked."""
    from quantry.models.reader import is_on_hub, open_checkpoint
    from quantry.planning.cache_choice import cache_choice

    asked = kv is not None or context is not None
    if asked and not is_on_hub(artefact):
        cache_choice(open_checkpoint(artefact), engine, kv, context)


def check_recipe(**settings: Any) -> None:
    """Raises RecipeError or UnknownNameError for a preset, or for options that it cannot be carried out with."""
    from quantry.quantizing.recipe import AUTO, build, preset_name

    if settings["preset"] is not None and preset_name(settings["preset"]) != AUTO:
        build(settings)


def check_preset(name: str | None) -> None:
    """Raises UnknownNameError for a preset that does not exist."""
    from quantry.quantizing.recipe import preset_name

    if name is not None:
        preset_name(name)


def check_presets(text: str) -> None:
    """Raises UnknownNameError for a name in a list of presets with options (`w4a16:group=64,Q4_K_M`)."""
    for piece in text.split(","):
        name = piece.partition(":")[0].strip()
        if name and "=" not in name:
            check_preset(name)

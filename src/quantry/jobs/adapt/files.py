"""What an adapter's folder holds: weights and config as peft reads them, the record of the job, and a card."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save

from quantry import __version__
from quantry.errors import OutputError
from quantry.jobs.adapt.base import AdaptedModel
from quantry.jobs.adapt.result import Adapter
from quantry.jobs.adapt.training import Losses
from quantry.models.hub import HUB_ID
from quantry.models.reader import DEMO, is_on_hub
from quantry.models.workspace import Workspace
from quantry.quantizing.card import FINISHED
from quantry.storage.reading import read_json

RECORD = "quantry-adapt.json"
WEIGHTS, CONFIG, CARD = "adapter_model.safetensors", "adapter_config.json", "README.md"
LIBRARIES = {"lora": ("torch", "transformers", "peft"), "qlora": ("torch", "transformers", "peft", "bitsandbytes")}
METHODS = {"lora": "LoRA", "qlora": "QLoRA"}


@dataclass(frozen=True, slots=True)
class Base:
    """The model that an adapter is for, without a path of this machine."""

    name: str  # a hub id, the name of a folder, or demo
    revision: str | None
    identity: str


def base_of(model: str | Path, identity: str) -> Base:
    """Returns the name of a model as it was given."""
    found = HUB_ID.fullmatch(str(model)) if is_on_hub(model) else None
    if found is not None:
        return Base(found["repo"], found["revision"], identity)
    name = DEMO if str(model) == DEMO else Path(model).expanduser().resolve().name
    return Base(name, None, identity)


def identity_of_job(planned: Adapter, base: Base, device: str) -> dict[str, Any]:
    """Returns what makes two jobs the same; JSON, so that it can be compared with a stored one."""
    same: dict[str, Any] = json.loads(
        json.dumps(
            {
                "quantry": __version__,
                "base": {"name": base.name, "revision": base.revision, "identity": base.identity},
                "data": planned.data,
                "method": planned.method,
                "settings": planned.settings,
                "steps": planned.steps,
                "device": device,
                "versions": {name: version(name) for name in LIBRARIES[planned.method]},
            }
        )
    )
    return same


def write_adapter(space: Workspace, model: AdaptedModel, losses: Losses, planned: Adapter, job: dict[str, Any]) -> None:
    """Writes all files; the record comes last, and says that the others are whole."""
    base = job["base"]
    files = {WEIGHTS: bytes(save(model.weights(), {"format": "pt"})), CONFIG: model.config(**_named(base))}
    loss = {"training": losses.training, "held_back": {"before": losses.before, "after": losses.after}}
    record = {
        **job,
        "parameters": sum(value.numel() for value in model.trained.values()),
        "loss": loss,
        "files": {name: {"bytes": len(data), "sha256": sha256(data).hexdigest()} for name, data in files.items()},
        "notes": list(planned.notes),
    }
    files[CARD] = _card(record).encode()
    files[RECORD] = (json.dumps(record, indent=2) + "\n").encode()
    for name, data in files.items():
        space.write(name, data)


def _named(base: Mapping[str, Any]) -> dict[str, Any]:
    return {"base": base["name"], "revision": base["revision"]}


def read_adapter(folder: Path, planned: Adapter) -> Adapter:
    """Returns what was planned with what the record of a folder says of it."""
    record = read_json(folder / RECORD, fix=f"remove {folder} to train it again")
    try:
        return replace(
            planned,
            parameters=record["parameters"],
            loss=record["loss"],
            files=record["files"],
            notes=tuple(record["notes"]),
        )
    except (KeyError, TypeError) as error:
        raise OutputError(f"{folder / RECORD} is damaged", fix="--overwrite makes it anew") from error


def finished(folder: Path, planned: Adapter, job: Mapping[str, Any]) -> Adapter:
    """Returns the adapter that an earlier run has trained. Raises OutputError if it is that of another job."""
    found = read_adapter(folder, planned)
    record = read_json(folder / RECORD, fix=f"remove {folder} to train it again")
    if other := next((name for name in job if record.get(name) != job[name]), None):
        raise OutputError(
            f"{folder} holds an adapter with another {other}", fix="choose another output, or --overwrite it"
        )
    if any(not _is_whole(folder / name, facts) for name, facts in found.files.items()):
        raise OutputError(f"{folder} exists and is damaged", fix="choose another output, or --overwrite it")
    return replace(found, notes=(*found.notes, FINISHED))


def _is_whole(file: Path, facts: Mapping[str, Any]) -> bool:
    return file.is_file() and sha256(file.read_bytes()).hexdigest() == facts["sha256"]


def _card(record: Mapping[str, Any]) -> str:
    base, data, loss = record["base"], record["data"], record["loss"]["held_back"]
    settings, name = record["settings"], METHODS[record["method"]]
    head = [f"base_model: {base['name']}"] if "/" in base["name"] else []
    lines = [
        "---",
        *head,
        "library_name: peft",
        "tags: [lora, quantry]",
        "---",
        "",
        f"# {name} adapter of {base['name']}",
        "",
        f"Trained by Quantry {record['quantry']} on {data['rows']:,} rows of {data['name']}: {record['steps']:,} steps "
        f"of {settings['batch']} rows, rank {settings['rank']}, alpha {settings['alpha']}, rate {settings['rate']:g}. "
        f"The loss of {data['held_back']:,} held-back rows went from {loss['before']:.4f} to {loss['after']:.4f} nats "
        "per token.",
        "",
        "```python",
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{base["name"]}")  # or the folder that it is in',
        'model = PeftModel.from_pretrained(model, "PATH_OF_THIS_FOLDER")',
        "```",
        "",
        f"`{RECORD}` has every setting, the digests of model and data, the versions and the loss of every step.",
        "",
    ]
    return "\n".join(lines)

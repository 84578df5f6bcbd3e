"""The model that stays as it is, and the adapter that peft puts on it."""

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from quantry.errors import STOPS, CheckpointError, RecipeError
from quantry.jobs.adapt.memory import computing_type, is_expert
from quantry.jobs.adapt.settings import ALL_LINEAR, Settings
from quantry.models.linears import Linear


def adapted(layers: Sequence[Linear], settings: Settings) -> list[Linear]:
    """Returns the layers that get an adapter. Raises RecipeError for a name that no layer has."""
    usable = [layer for layer in layers if not is_expert(layer)]
    names = {layer.module.rpartition(".")[2] for layer in usable}
    wanted = names if settings.targets == (ALL_LINEAR,) else set(settings.targets)
    if unknown := sorted(wanted - names):
        raise RecipeError(
            f"--target {unknown[0]} names no linear layer of the blocks", fix=f"choose of {', '.join(sorted(names))}"
        )
    if not wanted:
        raise RecipeError("the model has no linear layers to adapt", fix="use a model of another family")
    return [layer for layer in usable if layer.module.rpartition(".")[2] in wanted]


def adapter_size(layers: Sequence[Linear], rank: int) -> int:
    """Returns the parameters of an adapter: two thin matrices a layer."""
    return rank * sum(sum(layer.shape) for layer in layers)


class AdaptedModel:
    """A frozen model with an adapter that is trained."""

    def __init__(self, folder: Path, settings: Settings, device: torch.device) -> None:
        with _quiet():
            from peft import LoraConfig, TaskType, get_peft_model

        config = LoraConfig(
            task_type=TaskType.CAUSAL_LM,
            r=settings.rank,
            lora_alpha=settings.alpha or settings.alpha_of_scale,
            use_rslora=settings.rslora,
            target_modules=ALL_LINEAR if settings.targets == (ALL_LINEAR,) else list(settings.targets),
        )
        base = _load(folder, settings, device)
        with torch.random.fork_rng(), _quiet():
            torch.manual_seed(settings.seed)  # peft draws the first of each two matrices
            self._model: Any = get_peft_model(base, config).to(device)
        self._model.eval()  # without the model's own dropout, which would make a continued job differ
        for module in self._model.modules():
            if type(module).__name__ == "Linear4bit":
                # in evaluation bitsandbytes 0.50 multiplies on a CPU by a kernel that hands no gradient back
                module.training = True

    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Returns the logits."""
        logits: Tensor = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters."""
        return {name: value for name, value in self._model.named_parameters() if value.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Returns the adapter under the names that peft stores."""
        from peft import get_peft_model_state_dict

        found = get_peft_model_state_dict(self._model, save_embedding_layers=False)
        return {name: value.detach().cpu().contiguous() for name, value in sorted(found.items())}

    def config(self, base: str, revision: str | None) -> bytes:
        """Returns adapter_config.json; sets are sorted, so that equal jobs write equal bytes."""
        config = self._model.peft_config["default"]
        facts = {**config.to_dict(), "base_model_name_or_path": base, "revision": revision, "inference_mode": True}
        facts = {name: sorted(value) if isinstance(value, set) else value for name, value in facts.items()}
        return (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()


def _load(folder: Path, settings: Settings, device: torch.device) -> Any:
    dtype = computing_type(device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": False, "local_files_only": True}
    if settings.method == "qlora":
        options["device_map"] = {"": device}
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
    try:
        with _quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    except BaseException as error:  # transformers has no error class for it
        if isinstance(error, (*STOPS, MemoryError, torch.cuda.OutOfMemoryError)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot load {folder.name}: {reason}",
            fix="restore its files, or use a model of another family",
        ) from error
    return model if settings.method == "qlora" else model.to(device)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences bars and advice of libraries; progress and errors are shown by the caller."""
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)

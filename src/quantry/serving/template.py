"""Finds out if a running server chats in a form that its model does not know."""

from pathlib import Path

import httpx

from quantry.errors import QuantryError
from quantry.models.reader import open_checkpoint
from quantry.serving.client import address

CHATML = "<|im_start|>"  # in the template that llama.cpp takes for a model without one
PATIENCE = 5.0  # seconds


def template_warning(url: str, key: str | None) -> str:
    """Returns a warning if the GGUF file that llama.cpp serves on this machine has no chat template; else nothing."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        told = httpx.get(f"{address(url)}/props", headers=headers, timeout=PATIENCE).json()
        file = Path(told["model_path"])
        if CHATML not in told["chat_template"] or not file.is_file() or open_checkpoint(file).chat_template:
            return ""
    except (httpx.HTTPError, httpx.InvalidURL, QuantryError, OSError, ValueError, KeyError, TypeError):
        return ""  # another engine, or another machine
    return f"{file.name} has no chat template: llama.cpp puts the chat into ChatML, which the model may never have seen"

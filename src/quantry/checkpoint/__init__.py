"""Reading models: a folder of safetensors, a GGUF file, a hub id or the word `demo`, by headers alone."""

from quantry.checkpoint.reader import open_checkpoint

__all__ = ["open_checkpoint"]

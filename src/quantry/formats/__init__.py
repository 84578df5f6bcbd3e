"""Formats: how a quantized layer is stored in a checkpoint; one file each, named as users name the format."""

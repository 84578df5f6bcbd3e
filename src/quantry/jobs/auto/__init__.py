"""Preset auto: the grid of every tensor, chosen for a size."""

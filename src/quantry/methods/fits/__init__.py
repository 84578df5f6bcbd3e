"""Fits: from a weight and a grid to the grid's parameters."""

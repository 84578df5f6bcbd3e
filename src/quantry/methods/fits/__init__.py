"""Fits: from a weight and a grid to the grid's parameters. One file is one way to choose them."""

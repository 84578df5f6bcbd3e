"""Rounders: from a weight and a grid's parameters to codes. One file is one way to choose them."""

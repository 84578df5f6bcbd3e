"""Transforms: the same function of a block in other numbers, so that less is lost when they are rounded."""

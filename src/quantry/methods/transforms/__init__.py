"""Transforms: the same function of a block in other numbers, chosen so that rounding them loses less."""

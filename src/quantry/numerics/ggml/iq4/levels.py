"""The scales that IQ4's search tries."""

from quantry.numerics.ggml.layout import IQ4

SUB = 32  # weights that are searched together
FIRST = -IQ4[0]  # the largest weight is first scaled to this,
TRIED = tuple(IQ4[0] + step for step in range(-7, 8))  # then on and around the lowest level

"""Trains the scales of a stored model against the 16-bit one; codes and the layout of the file stay."""

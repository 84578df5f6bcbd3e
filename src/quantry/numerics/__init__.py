"""The arithmetic of grids: codes from weights, weights from codes, scales from ranges, and nothing about files."""

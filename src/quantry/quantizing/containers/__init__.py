"""Containers: how stored tensors lie in files."""

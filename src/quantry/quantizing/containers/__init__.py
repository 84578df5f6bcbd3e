"""Containers: how stored tensors are laid out in files, and which files go beside them."""

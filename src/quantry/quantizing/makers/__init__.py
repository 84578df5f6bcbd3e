"""Makers: from pieces of a tensor plan to stored tensors."""

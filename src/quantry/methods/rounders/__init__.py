"""Rounders: from a weight and fitted parameters to codes."""

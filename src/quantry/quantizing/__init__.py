"""Quantizing: from a recipe to a written artefact."""

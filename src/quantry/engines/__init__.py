"""Engines: one engine is a Python file and a TOML file of one name; `contract/` says what both must hold."""

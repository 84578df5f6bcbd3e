"""Artefacts as served: the probabilities that an engine gives to the reference's tokens, and its answers.

llama.cpp is embedded and runs in this process (llama_cpp.py). Other engines run in a process of their own (process.py),
in the python they are installed in; inside/script.py runs there, with the scorer that the engine names in its TOML
file. `scoring_engine` of engines.py returns either.
"""

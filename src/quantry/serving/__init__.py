"""Serving: the right engine for a model, with the right flags for its version, as its own process.

| module | does |
|---|---|
| select.py | which engine serves a model, and where that engine is installed |
| fit.py | whether the model and its load fit into memory |
| prepare.py | decides everything without starting anything; `serve` starts it and waits until it answers |
| process.py, container.py | the running engine: start, health, log, end |
| embedded.py | llama.cpp's server in Quantry's own python |
| onnx_server/ | a server for ONNX Runtime, which has none of its own |
| client.py | talks to any server with OpenAI's API |
"""

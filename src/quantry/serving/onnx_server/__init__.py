"""An OpenAI-compatible server for ONNX Runtime GenAI, which has none of its own.

    python -m quantry.serving.onnx_server --model FOLDER --host 127.0.0.1 --port 8000 [--served-model-name NAME]
                                          [--threads N] [--context N]          (the key, if any, in QUANTRY_API_KEY)

It runs with the engine's own python, where Quantry may not be installed: nothing else of Quantry is imported, and
`__main__.py` can be run by its path as well. Beside the standard library it needs onnxruntime_genai, and numpy, which
comes with that.

Sequences are computed one at a time, in the order in which they came: the library batches only what starts together.
A client that leaves is noticed before every token, whether it waits or is being answered; then the next has its turn.
"""

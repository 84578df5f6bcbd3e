"""An OpenAI-compatible server for ONNX Runtime GenAI, which has none of its own.

    python -m quantry.serving.onnx_server --model FOLDER --host 127.0.0.1 --port 8000 [--served-model-name NAME]
                                          [--threads N] [--context N]          (the key, if any, in QUANTRY_API_KEY)

It runs with the engine's own python, where Quantry may not be installed: `__main__.py` can be run by its path as well,
and of Quantry only modules are imported that need nothing but the standard library. Beside that it needs
onnxruntime_genai, and numpy, which comes with it.

Sequences are computed one at a time, in the order in which they came: the library batches only what starts together.
A client that leaves is noticed before every token, whether it waits or is being answered; then the next has its turn.
"""

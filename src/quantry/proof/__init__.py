"""Proof: what a quantized model lost, measured on its bytes and in the engine that serves it."""

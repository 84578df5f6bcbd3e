"""What llama.cpp expects of a GGUF file, the way back to a checkpoint, and llama.cpp itself through its C API."""

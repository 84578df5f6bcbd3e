"""What llama.cpp expects of a GGUF file, and a loaded model through its C API."""

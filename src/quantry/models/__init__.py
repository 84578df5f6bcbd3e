"""Models: checkpoints, families, anatomy and tokenizers. Headers are read without torch."""

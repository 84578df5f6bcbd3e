"""Models: checkpoints, families, anatomy, tokenizers; by headers alone, without torch."""

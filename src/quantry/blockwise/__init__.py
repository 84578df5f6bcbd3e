"""Any causal language model, run block by block with the weights of one block in memory."""

"""What a model does with typical text: the data, what each linear layer sees of it, and a store of the latter."""

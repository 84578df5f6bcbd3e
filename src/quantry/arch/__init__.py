"""What is known of model families, as data: which tensor belongs to which part, and how each layer keeps its past."""

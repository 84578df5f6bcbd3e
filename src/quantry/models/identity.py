"""A digest that identifies a model, from a sample of its bytes."""

import json
from hashlib import sha256

from quantry.types import Checkpoint

SAMPLED, SAMPLES = 4096, 8  # bytes of a sample, and samples of a tensor


def identity(checkpoint: Checkpoint) -> str:
    """Returns a digest of config, headers and samples of every tensor; its cost does not depend on the model's size."""
    digest = sha256(json.dumps(checkpoint.config, sort_keys=True, default=str).encode())
    for tensor in sorted(checkpoint.tensors, key=lambda tensor: tensor.name):
        digest.update(f"{tensor.name} {tensor.dtype} {list(tensor.shape)}".encode())
        for start in places(tensor.nbytes):
            digest.update(checkpoint.read(tensor.file, tensor.start + start, min(SAMPLED, tensor.nbytes - start)))
    return digest.hexdigest()


def places(size: int) -> range:
    """Returns the offsets of the samples of a tensor of `size` bytes."""
    return range(0, size, max(SAMPLED, size // SAMPLES))

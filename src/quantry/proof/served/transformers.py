"""transformers with the quantizer of the format, in the python both are installed in."""

from quantry.proof.served import _process

ENGINE = _process.Engine(
    "transformers",
    "transformers",
    "pip install transformers accelerate, and what the format needs, as compressed-tensors or bitsandbytes",
)
score, generate = ENGINE.score, ENGINE.generate

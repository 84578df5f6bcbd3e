"""Runs inside vLLM's environment: what its own functions say of layers on devices that are not there.

    python ask_vllm.py QUESTIONS.json ANSWERS.json

vLLM's code for all platforms is in every build, and decides in Python; so a platform that claims to be a GPU of some
compute capability is put in the place of the CPU. What only compiled code knows is filled in as its sources have it:
CUTLASS has FP8 from 8.9, FP8 blocks from 9.0 and FP4 from 10.0, and FlashInfer is taken to be installed.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs  # type: ignore[import-untyped, unused-ignore]
from vllm import _custom_ops as ops  # type: ignore[import-not-found, unused-ignore]
from vllm import distributed
from vllm.distributed.utils import verify_group_size_divides_partition  # type: ignore[import-not-found, unused-ignore]
from vllm.model_executor.kernels import linear  # type: ignore[import-not-found, unused-ignore]
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import (  # type: ignore[import-not-found, unused-ignore]
    MPLinearLayerConfig,
)
from vllm.model_executor.kernels.linear.mxfp4 import (  # type: ignore[import-not-found, unused-ignore]
    flashinfer as mxfp4_flashinfer,
)
from vllm.model_executor.kernels.linear.nvfp4 import (  # type: ignore[import-not-found, unused-ignore]
    flashinfer as nvfp4_flashinfer,
)
from vllm.model_executor.kernels.linear.scaled_mm import (  # type: ignore[import-not-found, unused-ignore]
    flashinfer as fp8_flashinfer,
)
from vllm.model_executor.layers.quantization import (  # type: ignore[import-not-found, unused-ignore]
    auto_awq,
    auto_gptq,
)
from vllm.model_executor.layers.quantization.compressed_tensors import (  # type: ignore[import-not-found, unused-ignore]
    compressed_tensors,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (  # type: ignore[import-not-found, unused-ignore]
    compressed_tensors_w8a8_fp8,
    compressed_tensors_w8a16_fp8,
    compressed_tensors_wNa16,
)
from vllm.model_executor.layers.quantization.utils import (  # type: ignore[import-not-found, unused-ignore]
    fp8_utils,
    marlin_utils,
    nvfp4_utils,
)
from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]
from vllm.platforms.interface import (  # type: ignore[import-not-found, unused-ignore]
    DeviceCapability,
    PlatformEnum,
)

Answer = dict[str, Any]
CPU = type(current_platform)
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def pretend(capability: int | None) -> None:
    """Makes vLLM believe in a GPU of this compute capability, or in the CPU."""
    if capability is None:
        current_platform.__class__ = CPU
        return
    found, native = DeviceCapability(*divmod(capability, 10)), capability >= 89

    class Pretended(CPU):  # type: ignore[misc, valid-type]
        _enum = PlatformEnum.CUDA

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return found

        @classmethod
        def supports_fp8(cls) -> bool:
            return native

    current_platform.__class__ = Pretended


def compiled() -> None:
    """What compiled code would answer."""
    ops.cutlass_scaled_mm_supports_fp8 = lambda capability: capability >= 89
    ops.cutlass_scaled_mm_supports_block_fp8 = lambda capability: capability >= 90
    nvfp4_utils.cutlass_scaled_mm_supports_fp4 = lambda capability: capability >= 100
    for module in (nvfp4_flashinfer, mxfp4_flashinfer, fp8_flashinfer):
        for name in ("has_flashinfer", "has_flashinfer_cutedsl", "has_flashinfer_bf16_fp4"):
            if hasattr(module, name):
                setattr(module, name, lambda: True)
    distributed.get_tensor_model_parallel_world_size = lambda: 1
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    for module in (compressed_tensors_w8a8_fp8, compressed_tensors_w8a16_fp8):
        if hasattr(module, "get_current_vllm_config"):
            module.get_current_vllm_config = lambda: config


def attempt(ask: Any) -> Any:
    try:
        return ask()
    except Exception as error:  # a refusal
        return f"refused: {type(error).__name__}: {error}"


def layer_config(case: Answer) -> Any:
    types = compressed_tensors_wNa16
    table = types.WNA16_ZP_SUPPORTED_TYPES_MAP if case["zero_points"] else types.WNA16_SUPPORTED_TYPES_MAP
    old = case["capability"] is not None and case["capability"] < 80  # computes in float16
    return MPLinearLayerConfig(
        full_weight_shape=(case["columns"], case["rows"]),
        partition_weight_shape=(case["device_columns"], case["device_rows"]),
        weight_type=table[case["bits"]],
        act_type=torch.float16 if old else DTYPES[case["dtype"]],
        group_size=case["group"],
        zero_points=case["zero_points"],
    )


def weights_only(case: Answer) -> Answer:
    """Which kernels take a layer of compressed-tensors, kernel by kernel, and which is chosen."""
    pretend(case["capability"])
    config = layer_config(case)
    least = case["capability"] if case["capability"] is not None else 1 << 30
    taken = [
        kernel.__name__
        for kernel in linear._POSSIBLE_KERNELS[current_platform._enum]
        if kernel.get_min_capability() <= least and kernel.can_implement(config)[0]
    ]
    return {"taken": taken, "chosen": attempt(lambda: chosen(case, config))}


def chosen(case: Answer, config: Any) -> str:
    kernel = linear.choose_mp_linear_kernel(config, case["capability"])
    if case["group"] != -1 and case["columns"] != case["device_columns"]:
        verify_group_size_divides_partition(case["device_columns"], case["group"])
    return str(kernel.__name__)


def loaders(case: Answer) -> Answer:
    """What the loaders of GPTQ and AWQ say of the same weights."""
    pretend(case["capability"])
    return {"gptq": attempt(lambda: gptq(case)), "awq": attempt(lambda: awq(case))}


def gptq(case: Answer) -> str:
    config = auto_gptq.AutoGPTQConfig(case["bits"], case["group"], False, not case["zero_points"], False, {}, {})
    auto_gptq.AutoGPTQLinearMethod(config)
    return chosen(case, layer_config(case))


def awq(case: Answer) -> str:
    """As AutoAWQConfig.get_quant_method decides."""
    config = auto_awq.AutoAWQConfig(case["bits"], case["group"], True, False)
    layer = SimpleNamespace(
        output_size_per_partition=case["device_rows"],
        input_size_per_partition=case["device_columns"],
        input_size=case["columns"],
    )
    if case["capability"] is not None and not (
        marlin_utils.check_marlin_supported(config.quant_type, case["group"], True)
        and marlin_utils.check_marlin_supports_layer(layer, case["group"], allow_tile_padding=True)
    ):
        if case["device_columns"] % case["group"] or case["device_rows"] % 8:
            raise ValueError("not aligned")
        return "AutoAWQLinearMethod"
    auto_awq.AutoAWQMarlinLinearMethod(config)
    return chosen({**case, "zero_points": True}, layer_config({**case, "zero_points": True}))


def scheme(case: Answer) -> Any:
    """The scheme that vLLM finds for quantization_config's words, with the kernel it takes where that is known."""
    pretend(case["capability"])
    group = next(iter(case["config"]["config_groups"].values()))
    weights = QuantizationArgs.model_validate(group["weights"])
    inputs = group.get("input_activations") and QuantizationArgs.model_validate(group["input_activations"])
    form = group.get("format") or case["config"]["format"]
    config = compressed_tensors.CompressedTensorsConfig({}, [], form)

    def find() -> list[str | None]:
        found = config._get_scheme_from_parts(weights, inputs, format=form)
        config._check_scheme_supported(found.get_min_capability())
        kernel = getattr(found, "kernel", None)
        return [type(found).__name__, type(kernel).__name__ if kernel else None]

    return attempt(find)


def blocks(case: Answer) -> Any:
    """Whether FP8 blocks fit the parts of a layer."""
    layer = SimpleNamespace(tp_size=case["tensor_parallel"])
    parts = case["parts"]
    return attempt(
        lambda: fp8_utils.validate_fp8_block_shape(
            layer, case["columns"], case["rows"], case["device_columns"], parts, [128, 128]
        )
    )


def experts(case: Answer) -> bool:
    """Whether Marlin takes the experts of a layer."""
    pretend(case["capability"])
    config = SimpleNamespace(hidden_dim=case["hidden"], intermediate_size_per_partition_unpadded=case["inner"])
    return bool(marlin_utils.check_moe_marlin_supports_config(config, case["group"], allow_tile_padding=True))


def flags() -> dict[str, str]:
    """The options of the server, with their defaults."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # type: ignore[import-not-found, unused-ignore]
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # type: ignore[import-not-found, unused-ignore]

    pretend(None)
    parser = make_arg_parser(FlexibleArgumentParser())
    return {option: str(action.default) for action in parser._actions for option in action.option_strings}


if __name__ == "__main__":
    questions = json.loads(Path(sys.argv[1]).read_text())
    compiled()
    answers = {
        "weights_only": [weights_only(case) for case in questions["weights_only"]],
        "loaders": [loaders(case) for case in questions["loaders"]],
        "schemes": [scheme(case) for case in questions["schemes"]],
        "blocks": [blocks(case) for case in questions["blocks"]],
        "experts": [experts(case) for case in questions["experts"]],
        "flags": flags(),
    }
    Path(sys.argv[2]).write_text(json.dumps(answers))

"""No config.json, however odd, may end in anything but an anatomy or one clear error."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from depth import examples
from quantry import registry
from quantry.errors import QuantryError
from quantry.models.anatomy import dissect
from quantry.models.gguf import config_of
from quantry.types import Checkpoint, TensorInfo
from tiny_files import LLAMA, SHAPES

KEYS = [
    *LLAMA, "head_dim", "v_head_dim", "sliding_window", "sliding_window_pattern", "layer_types", "layers_block_type",
    "hybrid_override_pattern", "kv_lora_rank", "qk_rope_head_dim", "full_attention_interval", "attn_layer_period",
    "attn_layer_offset", "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads", "use_sliding_window",
    "max_window_layers", "text_config", "n_layer", "n_head", "n_embd", "quantization_config", "compression_config",
    "state_size", "conv_kernel", "linear_num_key_heads", "attention_chunk_size", "num_nextn_predict_layers",
]  # fmt: skip
FAMILIES = ["llama", "gemma2", "gemma3_text", "qwen2", "mistral", "mamba", "gpt_oss", "unheard-of"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 5)
    | st.integers()
    | st.integers(10**6, 1 << 31)
    | st.floats()
    | st.text(max_size=6)
)
QUANTIZED = ["quant_method", "bits", "w_bit", "group_size", "config_groups", "sym", "dynamic", "checkpoint_format", "format", "zero_point", "version", "load_in_4bit", "load_in_8bit", "ignore", "desc_act"]  # fmt: skip
METHODS = st.sampled_from(["gptq", "awq", "compressed-tensors", "bitsandbytes", "fp8"])
JSON = st.recursive(
    SCALARS | st.sampled_from(["full_attention", "sliding_attention", "mamba"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*KEYS, *QUANTIZED]) | st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
GROUPS = st.dictionaries(st.text(max_size=2), st.fixed_dictionaries({}, optional={
    "targets": st.lists(st.sampled_from(["Linear", "re:.*q_proj", "re:[", "model.layers.0.mlp.up_proj"]), max_size=2) | JSON,
    "weights": st.fixed_dictionaries({}, optional={"num_bits": st.sampled_from([2, 3, 4, 8]) | JSON, "group_size": JSON, "strategy": JSON, "type": st.sampled_from(["int", "float"]) | JSON, "symmetric": JSON}) | JSON,
    "input_activations": JSON,
}) | JSON, max_size=2)  # fmt: skip
SETTINGS = st.fixed_dictionaries(
    {"quant_method": METHODS | JSON},
    optional={
        **dict.fromkeys(QUANTIZED[1:], JSON),
        "config_groups": GROUPS | JSON,
        "bits": st.sampled_from([2, 3, 4, 8]) | JSON,
    },
)

PLAIN = tuple(
    TensorInfo(name, "F16", shape, "f", 0, 2 * shape[0] * (shape[1] if len(shape) > 1 else 1))
    for name, shape in SHAPES.items()
)
PACKED = tuple(
    TensorInfo(f"model.layers.0.mlp.up_proj.{name}", dtype, shape, "f", 0, 16)
    for name, dtype, shape in (
        ("qweight", "I32", (8, 128)), ("qzeros", "I32", (1, 16)), ("scales", "F16", (1, 128)), ("g_idx", "I32", (64,)),
        ("weight_packed", "I32", (128, 8)), ("weight_scale", "BF16", (128, 1)), ("weight_shape", "I64", (2,)),
        ("weight", "U8", (4096, 1)), ("weight.absmax", "F32", (128,)), ("weight.quant_state.bitsandbytes__nf4", "U8", (90,)),
    )
)  # fmt: skip


def checkpoint(config: dict[str, Any], tensors: tuple[TensorInfo, ...] = PLAIN) -> Checkpoint:
    return Checkpoint("fuzz", "safetensors", {}, tensors, config, None, False, lambda *_: bytes(16))


@examples(1000)
@given(
    st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    st.sampled_from(FAMILIES),
    st.sets(st.sampled_from(list(LLAMA))),
)
def test_odd_configs(changes: dict[str, Any], family: str, dropped: set[str]) -> None:
    config = {key: value for key, value in {**LLAMA, "model_type": family, **changes}.items() if key not in dropped}
    try:
        anatomy = dissect(checkpoint(config))
    except QuantryError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1000
    else:
        assert anatomy.kv_bytes_per_token >= 0
        assert anatomy.parameters >= 0


@examples(1000)
@given(SETTINGS)
def test_odd_quantization_configs(found: dict[str, Any]) -> None:
    try:
        dissect(checkpoint({**LLAMA, "quantization_config": found}, PLAIN[:3] + PACKED))
        method = found["quant_method"]
        if method in registry.choices("quantry.formats"):
            registry.load("quantry.formats", method).schemes(found, PACKED)
    except QuantryError as error:
        assert "\n" not in str(error)


@examples(1000)
@given(
    st.dictionaries(
        st.sampled_from(
            [
                "block_count",
                "attention.head_count",
                "attention.head_count_kv",
                "attention.key_length",
                "embedding_length",
                "attention.sliding_window",
                "nextn_predict_layers",
                "attention.sliding_window_pattern",
            ]
        ),
        SCALARS | st.lists(SCALARS, max_size=3).map(tuple),
    ),
    JSON,
)
def test_odd_gguf_metadata(values: dict[str, Any], name: Any) -> None:
    metadata = {
        "general.architecture": "gemma3",
        "general.file_type": name,
        **{f"gemma3.{key}": value for key, value in values.items()},
    }
    try:
        tensors = (TensorInfo("token_embd.weight", "Q8_0", (32, 64), "f", 0, 2176),)
        dissect(Checkpoint("fuzz", "gguf", {}, tensors, config_of(metadata), None, False, lambda *_: b"", metadata))
    except QuantryError as error:
        assert "\n" not in str(error)

"""Which model a name means: what the user said is kept, what is borrowed from the catalogue is stated."""

from dataclasses import replace
from typing import Any

import pytest

from quantry.errors import ModelNotFoundError, QuantryError
from quantry.llamacpp import families
from quantry.models.anatomy import dissect
from quantry.planning.models import KnownModel, find_model, known_models, open_model, repository
from quantry.planning.stored import config_scheme, read_name

MODELS = known_models()


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


IDS = {
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Qwen/Qwen2.5-7B": "qwen2.5-7b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3.1": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1-0528": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "llama-3.1-70b",
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": "deepseek-r1-distill-qwen-32b",
    "unsloth/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}


@pytest.mark.parametrize("name", IDS)
def test_an_id_is_kept(name: str) -> None:
    checkpoint = open_model(name)
    assert checkpoint.source == name
    assert checkpoint.metadata == {
        "shape": IDS[name],
        "repo": name,
        "stored": MODELS[IDS[name]].stored,
        "borrowed": f"the hub did not answer: shape of {IDS[name]} from the catalogue",
    }
    assert dissect(checkpoint) == replace(dissect(open_model(IDS[name])), source=name)


def test_a_distilled_model_has_the_shape_of_its_student() -> None:
    distilled, student = MODELS["deepseek-r1-distill-qwen-32b"].config, MODELS["qwen2.5-32b"].config
    assert {**distilled, "max_position_embeddings": 32768} == student


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-70B-Instruct", "Qwen/Qwen2.5-7B-Instruct-AWQ"])
def test_a_hub_that_refuses_the_connection(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert str(open_model(name).metadata["borrowed"]).startswith("the hub did not answer: shape of")


LLAMA = "llama-3.1-8b"
SCHEMES = {
    "x/Llama-3.1-8B-Instruct-AWQ": "awq",
    "hugging-quants/Meta-Llama-3.1-8B-Instruct-AWQ-INT4": "awq",
    "x/Llama-3.1-8B-GPTQ": "gptq-int4",
    "x/Llama-3.1-8B-Instruct-GPTQ-Int4": "gptq-int4",
    "x/Llama-3.1-8B-Instruct-GPTQ-Int8": "gptq-int8",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "fp8",
    "RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic": "fp8",
    "x/Llama-3.1-8B-FP8-Dynamic": "fp8",
    "amd/Llama-3.1-8B-Instruct-FP8-KV": "fp8",
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w4a16": "w4a16",
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-quantized.w8a8": "w8a8",
    "x/Llama-3.1-8B-w4a16": "w4a16",
    "x/Llama-3.1-8B-W8A8": "w8a8",
    "nvidia/Llama-3.1-8B-Instruct-FP4": "nvfp4",
    "nvidia/Llama-3.1-8B-Instruct-NVFP4": "nvfp4",
    "x/Llama-3.1-8B-MXFP4": "mxfp4",
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": "bnb-4bit",
    "unsloth/Llama-3.1-8B-unsloth-bnb-4bit": "bnb-4bit",
    "x/Llama-3.1-8B-bnb-8bit": "bnb-8bit",
    "x/Llama-3.1-8B-BF16": "bf16",
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": "gguf:Q4_K_M",
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Meta-Llama-3.1-8B-Instruct-Q4_K_M.gguf": "gguf:Q4_K_M",
    "x/Llama-3.1-8B-GGUF:llama-3.1-8b-q8_0.gguf": "gguf:Q8_0",
    "x/Llama-3.1-8B-GGUF:llama-3.1-8b-IQ4_XS.gguf": "gguf:IQ4_XS",
    "x/Llama-3.1-8B-i1-GGUF:Llama-3.1-8B.i1-Q5_K_S.gguf": "gguf:Q5_K_S",
    "x/Llama-3.1-8B-GGUF:BF16/Llama-3.1-8B-BF16-00001-of-00002.gguf": "gguf:BF16",
    "x/Llama-3.1-8B-Q6_K-GGUF": "gguf:Q6_K",
    "x/Llama-3.1-8B:Llama-3.1-8B-Q4_0.gguf": "gguf:Q4_0",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_end_of_a_name_says_how_weights_are_stored(name: str) -> None:
    scheme = SCHEMES[name]
    assert open_model(name).metadata == {
        "shape": LLAMA,
        "repo": name,
        "stored": scheme,
        "borrowed": f"the hub did not answer: shape of {LLAMA} from the catalogue, weights stored as {scheme} by the name",
    }


NATIVE = {
    "openai/gpt-oss-20b": "mxfp4",
    "unsloth/gpt-oss-20b-BF16": "bf16",
    "ggml-org/gpt-oss-20b-GGUF": "gguf:MXFP4",
    "ggml-org/gpt-oss-20b-GGUF:gpt-oss-20b-mxfp4.gguf": "gguf:MXFP4",
    "deepseek-ai/DeepSeek-R1-0528": "fp8-block",
    "nvidia/DeepSeek-R1-FP4": "nvfp4",
    "moonshotai/Kimi-K2-Instruct": "fp8-block",
    "MiniMaxAI/MiniMax-M2": "fp8-block",
    "mistralai/Ministral-3-8B-Instruct-2512": "fp8",
    "Qwen/Qwen3-235B-A22B-Instruct-2507-FP8": "fp8-block",
    "RedHatAI/Qwen3-8B-FP8-dynamic": "fp8",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8": "fp8",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "bf16",
    "google/gemma-3-27b-it-qat-q4_0-gguf": "gguf:Q4_0",
    "bartowski/Qwen_Qwen3-8B-GGUF": "gguf:Q4_K_M",
}


@pytest.mark.parametrize("name", NATIVE)
def test_how_the_publisher_stores_weights(name: str) -> None:
    metadata = open_model(name).metadata
    assert (metadata["repo"], metadata["stored"]) == (name, NATIVE[name])


UNKNOWN = [
    "someone/something",
    "someone/something-AWQ",
    "meta-llama/Llama-3.1-70B@main",
    "TheBloke/Llama-2-7B-GPTQ@gptq-8bit-128g",  # each of its branches stores them in another way
    "meta-llama/Llama-3.1-70B:file.gguf",  # of no known type
    "Qwen/Qwen2.5-7B-Instruct-1M",  # another context
    "someone/Llama-3.1-8B-AWQ-something-else",
    "mlx-community/Llama-3.1-8B-4bit",  # of no known scheme
    "deepseek-ai/DeepSeek-V3.2-Exp",  # another attention
    "moonshotai/Kimi-K2-Thinking",  # another scheme
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_id_is_not_guessed(name: str) -> None:
    with pytest.raises(QuantryError, match="the hub did not answer"):
        open_model(name)


REPOSITORIES = {
    "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama 3.1 8b instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-7b-base": "Qwen/Qwen2.5-7B",
    "qwen2.5-coder-32b": "Qwen/Qwen2.5-Coder-32B-Instruct",
    "qwen3-8b-base": "Qwen/Qwen3-8B-Base",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "deepseek-r1:671b": "deepseek-ai/DeepSeek-R1",
    "DeepSeek V3.1": "deepseek-ai/DeepSeek-V3.1",
    "deepseek-r1-distill-llama-8b": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "mistral-small-3.1": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "phi-3-mini-128k": "microsoft/Phi-3-mini-128k-instruct",
    "gemma-3-27b": "google/gemma-3-27b-it",
    "gemma-3-27b-pt": "google/gemma-3-27b-pt",
    "nemotron-3-nano-30b-a3b-bf16": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_a_name_without_an_owner_means_a_repository(name: str) -> None:
    metadata = open_model(name).metadata
    assert metadata["repo"] == REPOSITORIES[name]
    assert "borrowed" not in metadata


@pytest.mark.parametrize("model", MODELS.values(), ids=list(MODELS))
def test_no_name_means_the_repository_of_another_row(model: KnownModel) -> None:
    own = (model.repo, *model.variants)
    assert repository(model, model.name) == model.repo
    for name in (*own, *model.aliases):
        assert repository(model, name.partition("/")[2] or name) in own, name


@pytest.mark.parametrize("name", ["llama-3.1-8b-awq", "qwen3-8b-fp8", "gpt-oss-20b-gguf"])
def test_a_quantized_name_needs_its_owner(name: str) -> None:
    known = find_model(name)
    assert known is not None
    with pytest.raises(ModelNotFoundError, match=f"write whose it is, owner/{name}, or {known.name} for the original"):
        open_model(name)


WEIGHTS = {"num_bits": 4, "type": "int"}
CONFIGS: dict[str, dict[str, Any]] = {
    "gptq-int8": {"quant_method": "gptq", "bits": 8},
    "awq": {"quant_method": "awq", "bits": 4},
    "fp8": {"quant_method": "fp8"},
    "fp8-block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "bnb-4bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bnb-8bit": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "w4a16": {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": {"weights": WEIGHTS}}},
    "w8a8": {
        "quant_method": "compressed-tensors", "format": "int-quantized",
        "config_groups": {"0": {"weights": {**WEIGHTS, "num_bits": 8}, "input_activations": {"num_bits": 8}}},
    },
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "unknown": {},
}  # fmt: skip


@pytest.mark.parametrize("scheme", CONFIGS)
def test_the_scheme_that_a_config_states(scheme: str) -> None:
    assert config_scheme({"quantization_config": CONFIGS[scheme]}) == scheme


def test_schemes_of_compressed_tensors() -> None:
    groups = {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "block"}}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert config_scheme({"quantization_config": settings}) == "fp8-block"
    assert config_scheme({"quantization_config": {**settings, "format": "nvfp4-pack-quantized"}}) == "nvfp4"
    assert config_scheme({}) == "bf16"


def test_every_stored_scheme_of_the_catalogue_is_a_scheme() -> None:
    assert {model.stored for model in MODELS.values()} == {"bf16", "fp8", "fp8-block", "mxfp4"}
    assert read_name("a/b") == ("b", None)


WRITABLE = [name for name in MODELS if MODELS[name].config["architectures"][0] in families.known()]


@pytest.mark.parametrize("name", WRITABLE)
def test_rows_have_the_fields_that_gguf_needs(name: str) -> None:
    assert families.facts(open_model(name).config)["vocab_size"] > 0

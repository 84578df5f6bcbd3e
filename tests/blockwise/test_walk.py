"""The model run block by block against transformers' run of the whole model."""

import gc
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from depth import cases
from plain_models import LENGTHS, loaded, logits, plain_int8, quantizing_experts, windows
from quantry.blockwise import walk
from quantry.blockwise.taps import LinearInputs
from quantry.errors import CheckpointError, ConfigError, QuantryError, WeightError
from quantry.quantizing.sources import open_source
from quantry.types import Activation, Grid
from shared import TinyModel
from tiny_models import ARCHITECTURES, SMALL, draw

INT8 = Activation(Grid("int", 8))


@dataclass
class Held:
    """A source in memory."""

    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    activations: Mapping[str, Activation] = field(default_factory=dict)

    @property
    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def held(folder: Path) -> Held:
    source = open_source(folder)
    return Held(dict(source.config), {name: source.read(name) for name in source.names})


def assert_same_run(folder: Path, dtype: torch.dtype = torch.float32, lengths: Sequence[int] = LENGTHS) -> None:
    model = loaded(folder, dtype)
    texts = windows(model.get_input_embeddings().weight.shape[0], lengths)
    results = list(walk.run(open_source(folder), texts, dtype=dtype, batch=2))
    assert [index for index, _ in results] == list(range(len(texts)))
    for index, made in results:
        expected = logits(model, texts[index])
        assert made.shape == expected.shape
        assert made.dtype == torch.float32
        torch.testing.assert_close(made, expected, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=2e-5)


@pytest.fixture
def llama(tiny: TinyModel) -> Path:
    return tiny("LlamaForCausalLM", num_hidden_layers=3)


@pytest.fixture
def moe(tiny: TinyModel) -> Path:
    return tiny("Qwen3MoeForCausalLM")


QUICK = (  # grouped queries, sliding windows, fused and stacked experts, fused projections, layers without rotation
    "LlamaForCausalLM", "Gemma3ForConditionalGeneration", "Qwen3MoeForCausalLM", "GraniteMoeSharedForCausalLM",
    "Phi3ForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, QUICK))
def test_logits_are_those_of_the_whole_model(architecture: str, tiny: TinyModel) -> None:
    assert_same_run(tiny(architecture))


GEMMA4 = {  # blocks reuse each other's keys, and get inputs that depend on the tokens
    "head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256,
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 2},  # positions are embedded, weights transposed
    "falcon": {},  # blocks give tuples
    "gemma4_text": GEMMA4,
    "gemma4_text without inputs by token": {**GEMMA4, "hidden_size_per_layer_input": 0},
    "nemotron_h": {},  # layers of Mamba, and an infinite number in config.json
    "deepseek_v3": {
        "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    },
}  # fmt: skip


def write_other(folder: Path, model_type: str, **settings: Any) -> Any:
    common = {**SMALL, "vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(model_type, **{**common, **settings})
    )
    draw(model, 0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", cases(OTHERS, ("gpt2", "falcon", "gemma4_text")))
def test_other_families(family: str, tmp_path: Path) -> None:
    write_other(tmp_path, family.split()[0], **OTHERS[family])
    assert_same_run(tmp_path, lengths=(60, 33, 60, 60, 60))


def test_a_lower_precision_is_that_of_transformers(llama: Path) -> None:
    assert_same_run(llama, torch.bfloat16)


def test_batches_do_not_matter(moe: Path) -> None:
    source = open_source(moe)
    texts = windows(200)
    alone, together = (dict(walk.run(source, texts, batch=batch)) for batch in (1, 8))
    for index in range(len(texts)):
        torch.testing.assert_close(alone[index], together[index], rtol=1e-5, atol=2e-5)


def test_a_separate_head_despite_a_tied_config(tiny: TinyModel) -> None:
    """Both tensors are stored and differ: transformers does not tie them then."""
    folder = tiny("Qwen2ForCausalLM")
    source = held(folder)
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].flip(0)
    model = loaded(folder)
    model.lm_head.weight = nn.Parameter(source.tensors["lm_head.weight"].float())
    texts = windows(200, (20,))
    torch.testing.assert_close(dict(walk.run(source, texts))[0], logits(model, texts[0]), rtol=1e-5, atol=2e-5)


def test_progress_reports_each_block(llama: Path) -> None:
    reports: list[tuple[int, int, str]] = []
    list(walk.run(open_source(llama), windows(100, (4,)), progress=lambda *words: reports.append(words)))
    assert reports == [(index, 3, f"model.layers.{index}") for index in range(3)]


def test_blocks_give_outputs_without_keeping_them_and_advance_once(llama: Path) -> None:
    texts = windows(200, (20, 20, 20, 9))
    plain = dict(walk.run(open_source(llama), texts))
    hidden = loaded(llama)(torch.tensor([texts[3]]), output_hidden_states=True).hidden_states
    path = walk.Walk(open_source(llama), batch=2)
    for block in path.blocks(texts):
        outputs = list(block.outputs())
        assert [tuple(output.shape) for output in outputs] == [(2, 20, 64), (1, 20, 64), (1, 9, 64)]
        if block.index < 2:  # the last one of transformers has gone through the norm
            torch.testing.assert_close(outputs[-1], hidden[block.index + 1], rtol=1e-5, atol=1e-5)
        assert all(map(torch.equal, outputs, block.outputs()))
        if block.index == 1:
            block.advance()
    for index, made in path.logits():
        assert torch.equal(made, plain[index])


def test_one_block_is_in_memory_at_a_time(llama: Path) -> None:
    path = walk.Walk(open_source(llama))
    earlier: list[weakref.ref[Tensor]] = []
    gc.freeze()  # collect only what the walk makes
    for block in path.blocks(windows(200, (8, 8))):
        gc.collect()
        assert not any(weight() is not None for weight in earlier)
        there = {name for name, weight in path.skeleton.model.named_parameters() if not weight.is_meta}
        assert there == {f"{block.name}.{name}" for name, _ in block.module.named_parameters()}
        earlier = [weakref.ref(weight) for weight in block.module.parameters()]
    gc.unfreeze()
    rows = path.logits()
    next(rows)
    there = {name for name, weight in path.skeleton.model.named_parameters() if not weight.is_meta}
    assert there == {"model.norm.weight", "lm_head.weight"}
    rows.close()  # type: ignore[attr-defined]
    assert all(weight.is_meta for weight in path.skeleton.model.parameters())


def test_a_source_is_asked_for_one_tensor_at_a_time_and_for_each_once(llama: Path) -> None:
    source = held(llama)
    source.tensors = Counted(source.tensors)
    list(walk.run(source, windows(100, (4,))))
    assert source.tensors.most == 1
    assert dict.fromkeys(source.tensors, 1) | {"model.norm.weight": 2} == source.tensors.reads


class Counted(dict[str, Tensor]):
    """Counts how often each tensor is taken, and by how many at once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__(tensors)
        self.reads: dict[str, int] = {}
        self.now = self.most = 0

    def __getitem__(self, name: str) -> Tensor:
        self.now += 1
        self.most = max(self.most, self.now)
        self.reads[name] = self.reads.get(name, 0) + 1
        made = super().__getitem__(name).clone()
        self.now -= 1
        return made


def test_the_whole_model_gives_the_same_and_generates(moe: Path) -> None:
    source = held(moe)
    source.activations = {name.removesuffix(".weight"): INT8 for name in source.names if "_proj" in name}
    model: Any = walk.whole(source)
    texts = windows(200, (20, 7))
    for index, made in walk.run(source, texts):
        torch.testing.assert_close(made, logits(model, texts[index]), rtol=1e-5, atol=2e-5)
    answer = model.generate(torch.tensor([texts[1]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)[0].tolist()
    assert answer[:7] == texts[1]
    assert len(answer) == 11
    assert answer[7] == int(logits(model, texts[1])[-1, : model.config.vocab_size].argmax())


@pytest.mark.parametrize("which", ["attention", "experts"])
def test_quantized_inputs_are_simulated(which: str, moe: Path) -> None:
    """Against modules whose forward is restated; the rest stays unquantized."""
    source, model = held(moe), loaded(moe)
    chosen = ".self_attn." if which == "attention" else ".experts."
    source.activations = {
        name.removesuffix(".weight"): INT8 for name in source.names if chosen in name and "_proj" in name
    }
    for name, module in model.named_modules():
        if which == "attention" and name.endswith(("q_proj", "k_proj", "v_proj", "o_proj")):
            module.register_forward_pre_hook(lambda _, inputs: plain_int8(inputs[0]))
        if which == "experts" and name.endswith(".experts"):
            module.forward = quantizing_experts(module)
    texts = windows(200, (30,))
    made, expected = dict(walk.run(source, texts))[0], logits(model, texts[0])
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=2e-5)
    assert (made - logits(loaded(moe), texts[0])).abs().max() > 1e-2


def test_experts_are_distinguished(moe: Path) -> None:
    source = held(moe)
    names = [f"model.layers.1.mlp.experts.2.{name}_proj" for name in ("gate", "up", "down")]
    source.activations = dict.fromkeys(names, INT8)
    seen: set[tuple[str, int | None]] = set()
    path = walk.Walk(source)
    for block in path.blocks(windows(200, (40,))):
        with LinearInputs(block.module, block.name, lambda name, expert, _: seen.add((name, expert))):
            list(block.outputs())
    assert set(path.skeleton.activations) == {
        ("model.layers.1.mlp.experts.gate_up_proj", 2),
        ("model.layers.1.mlp.experts.down_proj", 2),
    }
    assert {name for name, _ in seen if name.startswith("model.layers.1.mlp")} == {
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
    }
    assert {expert for name, expert in seen if name.endswith("gate_up_proj")} == {0, 1, 2, 3}


def test_parts_of_a_fused_layer_must_agree(moe: Path) -> None:
    source = held(moe)
    source.activations = {"model.layers.1.mlp.experts.2.gate_proj": INT8}
    with pytest.raises(CheckpointError, match=r"parts of model\.layers\.1\.mlp\.experts\.gate_up_proj .* 2 ways"):
        walk.Walk(source)


def test_an_input_that_cannot_be_simulated_is_refused(tmp_path: Path) -> None:
    """Experts of GPT-OSS multiply matrices in another way."""
    write_other(tmp_path, "gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=16)
    source = held(tmp_path)
    source.activations = {"model.layers.0.mlp.experts.gate_up_proj": INT8}
    with pytest.raises(
        QuantryError, match=r"input of model\.layers\.0\.mlp\.experts\.gate_up_proj cannot be simulated"
    ):
        list(walk.run(source, [[5, 6, 7]]))


def test_inputs_of_linear_layers_are_shown_and_replaced() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    inputs = torch.randn(5, 4)
    seen: dict[str, Tensor] = {}

    def double(name: str, expert: int | None, value: Tensor) -> Tensor | None:
        seen[name] = value
        return value * 2 if name == "top.2" else None

    with LinearInputs(module, "top", double):
        made = module(inputs)
        torch.nn.functional.linear(input=inputs, weight=module[0].weight, bias=None)  # type: ignore[arg-type]
    assert list(seen) == ["top.0", "top.2"]
    assert torch.equal(seen["top.0"], inputs)
    assert torch.equal(seen["top.2"], module[:2](inputs))
    torch.testing.assert_close(made, module(inputs) * 2)


@pytest.mark.parametrize(
    ("architecture", "lost"),
    [
        ("LlamaForCausalLM", "model.layers.1.mlp.up_proj.weight"),
        ("LlamaForCausalLM", "model.norm.weight"),
        ("LlamaForCausalLM", "lm_head.weight"),
        ("Qwen2ForCausalLM", "model.embed_tokens.weight"),
    ],
)
def test_a_missing_tensor_is_named(architecture: str, lost: str, tiny: TinyModel) -> None:
    source = held(tiny(architecture))
    del source.tensors[lost]
    with pytest.raises(CheckpointError) as error:
        walk.Walk(source)
    assert lost in error.value.problem


def test_a_missing_expert_is_refused(moe: Path) -> None:
    source = held(moe)
    del source.tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        list(walk.run(source, [[5, 6]]))


def test_an_unexpected_tensor_is_named(llama: Path) -> None:
    source = held(llama)
    source.tensors["model.layers.1.mlp.side_proj.weight"] = torch.ones(2, 2)
    source.tensors["model.layers.7.mlp.up_proj.weight"] = torch.ones(2, 2)
    with pytest.raises(CheckpointError, match=r"has model\.layers\.1\.mlp\.side_proj\.weight and 1 more"):
        walk.Walk(source)


def test_a_buffer_that_transformers_leaves_out_is_no_error(llama: Path) -> None:
    source = held(llama)
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    walk.Walk(source)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"])
def test_a_tensor_of_another_shape_is_named(name: str, llama: Path) -> None:
    source = held(llama)
    source.tensors[name] = source.tensors[name][:-1]
    with pytest.raises(CheckpointError) as error:
        list(walk.run(source, [[5, 6]]))
    assert f"{name} has shape {list(source.tensors[name].shape)}" in error.value.problem


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("model.layers.1.mlp.up_proj.weight", "model.layers.1 "),
        ("lm_head.weight", "the head "),
        ("model.norm.weight", "the head "),
    ],
)
def test_values_that_are_not_finite_are_refused(name: str, named: str, llama: Path) -> None:
    source = held(llama)
    source.tensors[name] = source.tensors[name].clone()
    source.tensors[name][0] = float("nan")
    with pytest.raises(WeightError) as error:
        list(walk.run(source, [[5, 6]]))
    assert error.value.problem == f"{named}gives values that are not finite in float32"


def test_an_overflow_names_its_type(llama: Path) -> None:
    source = held(llama)
    source.tensors["model.layers.2.mlp.down_proj.weight"] = source.tensors["model.layers.2.mlp.down_proj.weight"] * 1e5
    list(walk.run(source, [[5, 6]]))
    with pytest.raises(WeightError, match=r"model\.layers\.2 gives values that are not finite in float16"):
        list(walk.run(source, [[5, 6]], dtype=torch.float16))


def test_an_error_of_the_source_comes_through(llama: Path) -> None:
    source = held(llama)
    source.tensors = Broken(source.tensors)
    with pytest.raises(CheckpointError, match=r"broken\.safetensors ends"):
        list(walk.run(source, [[5, 6]]))


class Broken(dict[str, Tensor]):
    def __getitem__(self, name: str) -> Tensor:
        if "layers.1.mlp.up_proj" in name:
            raise CheckpointError("broken.safetensors ends within it", fix="download it again")
        return super().__getitem__(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "quokka"}, "has no model 'quokka'"),
        ({"model_type": "quokka", "auto_map": {"AutoConfig": "x.Y"}}, "code that comes with a model is not run"),
        ({"model_type": None}, "has no model 'None'"),
        ({"hidden_size": "wide"}, "cannot build a llama from the config"),
        ({"model_type": "bert"}, "cannot build a bert from the config|has no stack|lacks"),
        ({"num_attention_heads": 5}, "cannot build a llama from the config"),
    ],
)
def test_an_unusable_config_is_refused(change: dict[str, Any], words: str, llama: Path) -> None:
    source = held(llama)
    source.config = {**source.config, **change}
    with pytest.raises((ConfigError, CheckpointError), match=words):
        walk.Walk(source)


def test_code_of_a_known_model_is_not_run(llama: Path) -> None:
    source = held(llama)
    source.config = {**source.config, "auto_map": {"AutoModelForCausalLM": "evil--modeling.Evil"}}
    assert len(list(walk.run(source, [[5, 6]]))) == 1


def test_a_model_that_is_no_plain_stack_is_refused(tmp_path: Path) -> None:
    """Gemma 3n runs several streams of hidden states."""
    settings = {"head_dim": 16, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256, "laurel_rank": 8}
    lists = {"layer_types": ["full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 2}
    write_other(tmp_path, "gemma3n_text", num_kv_shared_layers=0, intermediate_size=[96] * 2, **settings, **lists)
    with pytest.raises(QuantryError, match="Gemma3nForCausalLM does more than run one block after the other"):
        list(walk.run(open_source(tmp_path), [[5, 6]]))


@pytest.mark.parametrize("tokens", [[], [3, 100000], [3, -1]])
def test_windows_that_do_not_suit_the_model_are_refused(tokens: list[int], llama: Path) -> None:
    with pytest.raises(QuantryError, match="window 1 has"):
        list(walk.run(open_source(llama), [[5, 6], tokens]))


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def test_models_made_at_once_leave_transformers_unchanged(tiny: TinyModel) -> None:
    """Building a model without tying its weights patches transformers for all threads."""
    folder = tiny("Qwen2ForCausalLM")
    before = transformers.PreTrainedModel.tie_weights
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda _: walk.Walk(open_source(folder)), range(12)))
    assert transformers.PreTrainedModel.tie_weights is before


def test_hidden_states_lie_in_a_file_where_the_system_cannot_allocate_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "posix_fallocate")  # as on macOS
    values = walk.mapped(6, torch.float32, tmp_path)
    values.copy_(torch.arange(6.0))
    assert values.tolist() == [0, 1, 2, 3, 4, 5]
    assert not list(tmp_path.iterdir())

"""Checkpoints out of GGUF files: what transformers loads and computes, and the tokenizer, against the originals.

Tiny models of every architecture become GGUF and come back: the same config, the same weights bit for bit, the same
logits, the same token ids, the same chat template.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Gemma3ForConditionalGeneration

import quantry
from depth import cases, examples
from gguf_tokenizers import CORPUS as CUTTING
from gguf_tokenizers import cross_cutting
from gguf_tokenizers import loaded as served
from quantry.errors import CheckpointError, ConfigError, QuantryError, UnknownNameError
from quantry.formats.gguf import restored
from quantry.llamacpp import pretokenizers, vocabulary
from quantry.llamacpp.families import facts, known, table
from quantry.llamacpp.pretokenizers import rows_of_table
from quantry.llamacpp.to_checkpoint import config, originals
from quantry.llamacpp.to_checkpoint import table as own_table
from quantry.llamacpp.to_tokenizer import tokenizer
from quantry.models.files import LocalFiles
from quantry.models.gguf import Header, read_header
from quantry.models.reader import demo_folder
from quantry.types import TensorInfo
from tiny_models import ARCHITECTURES, LAYERED, LINEAR, LLAMA3, YARN, longrope, write_model
from tiny_tokenizers import KINDS, TEXT, write_tokenizer

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
CORPUS = (
    *TEXT,
    *("", " ", "  ", "Hello world", " Hello", "Hello   world  ", "a" * 50, "x  y   z    w", "don't DON'T I'M we'Ve"),
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass  # 1234567 0x1F\r\n\r\n e \n",
    "1 22 333 4444 55555 1,000,000.50 3.14159 ½ ² Ⅳ 4５６ ١٢٣",
    "😀🚀👩‍👩‍👧 ✅ 🇩🇪 ❤️ 🤷🏽‍♀️ 你好world世界123abc 日本語テキスト 한국어 문장 𠀀𠀁 𝒳",
    "ÉCOLE école ÄpfelBaum camelCase HTTPServer ПриВет cafe\u0301 foo\u0301bar \u0301x",
    "\u00a0nbsp\u2003em\u200bzw\u3000ideo \x01\x7f ...!!!???---==='''' https://example.com/a?b=c#d",
)
CHAT = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A fox."}]


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ARCHITECTURES},
    "llama3 rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3}),
    "llama3 rope, 3.2": ("LlamaForCausalLM", {"head_dim": 64, "rope_parameters": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192}}),
    "llama linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR}),
    "llama biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 8, "head_dim": 32, "rope_parameters": LLAMA3}),
    "qwen2 yarn": ("Qwen2ForCausalLM", {"rope_parameters": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}}),
    "qwen2 yarn, attention": ("Qwen2ForCausalLM", {"rope_parameters": {**YARN, "attention_factor": 1.1386294}, "tie_word_embeddings": False}),
    "qwen2moe without biases": ("Qwen2MoeForCausalLM", {"qkv_bias": False}),
    "qwen3moe tied": ("Qwen3MoeForCausalLM", {"tie_word_embeddings": True}),
    "gemma2 caps": ("Gemma2ForCausalLM", {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 20.0, "sliding_window": 16}),
    "gemma3 linear": ("Gemma3ForCausalLM", {"rope_parameters": LAYERED, "final_logit_softcapping": 30.0}),
    "gemma3 full": ("Gemma3ForCausalLM", {"layer_types": ["full_attention"] * 6}),
    "gemma3 untied": ("Gemma3ForCausalLM", {"tie_word_embeddings": False, "num_hidden_layers": 7}),
    "phi3 long": ("Phi3ForCausalLM", {"rope_parameters": longrope(8), "original_max_position_embeddings": 256}),
    "phi3 partial": ("Phi3ForCausalLM", {"rope_parameters": {**longrope(6), "partial_rotary_factor": 0.75}, "original_max_position_embeddings": 256, "tie_word_embeddings": True, "sliding_window": None}),
    "smollm3 yarn": ("SmolLM3ForCausalLM", {"num_hidden_layers": 9, "tie_word_embeddings": False, "rope_parameters": YARN}),
    "granite biases": ("GraniteForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "granitemoe biases": ("GraniteMoeForCausalLM", {"attention_bias": True, "tie_word_embeddings": False}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models are too small to gain from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def written(model: Path, out: Path, kind: str) -> Path:
    quantry.quantize(model, out, preset=f"gguf-{kind}")
    (file,) = out.glob("*.gguf")
    return file


def opened(file: Path) -> tuple[Header, Callable[[str], Tensor]]:
    """The whole header of a file, and its tensors in float32."""
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    return (
        read_header(LocalFiles(file.parent), file.name, whole=True),
        lambda name: torch.from_numpy(gguf.dequantize(stored[name].data, stored[name].tensor_type).copy()),
    )


def restore(file: Path, out: Path, kind: str = "bf16") -> Path:
    """The checkpoint of a file, put together plainly."""
    header, values = opened(file)
    made = config(header.metadata, header.tensors, lambda name: values(name).tolist())
    parts: dict[str, list[tuple[int, int, Tensor]]] = defaultdict(list)
    stacks = set()
    for tensor, target in originals(made, header.tensors):
        value = restored(values(tensor.name).reshape(tensor.shape), target)
        for source, part in zip(
            target.sources, value if len(target.sources) > 1 else [value], strict=len(target.sources) > 0
        ):
            parts[source.name].append((source.expert or 0, source.rows[0] if source.rows else 0, part))
            stacks |= {source.name} if source.expert is not None else set()
    weights = {}
    for name, found in parts.items():
        rows: dict[int, list[Tensor]] = defaultdict(list)
        for expert, _, part in sorted(found, key=lambda one: one[:2]):
            rows[expert].append(part)
        experts = [torch.cat(one).to(TYPES[kind]) for one in rows.values()]
        weights[name] = torch.stack(experts) if name in stacks else experts[0]
    out.mkdir()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps({**made, "dtype": str(TYPES[kind]).removeprefix("torch.")}))
    for name, content in tokenizer(header.metadata).items():
        (out / name).write_bytes(content)
    return out


def loaded(folder: Path) -> Any:
    sees = "ForConditional" in (folder / "config.json").read_text()
    kind: Any = Gemma3ForConditionalGeneration if sees else AutoModelForCausalLM
    model, told = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


def language(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the language model by their names in a model that is all language."""
    towers = ("vision_tower", "multi_modal")
    return {name.replace("language_model.", ""): one for name, one in weights.items() if not name.startswith(towers)}


def comparable(folder: Path) -> dict[str, Any]:
    """A config as transformers reads it, without what decides nothing."""
    made = AutoConfig.from_pretrained(folder).get_text_config().to_dict()
    silent = ("architectures", "dtype", "transformers_version", "_name_or_path", "pretraining_tp")
    return {name: value for name, value in made.items() if name not in silent and value not in (None, False)}


# of the quick run: permuted, fused and stacked tensors, shifted norms, and every type of rope
QUICK = (
    "LlamaForCausalLM", "Qwen2MoeForCausalLM", "Gemma3ForConditionalGeneration", "GraniteMoeSharedForCausalLM",
    "llama3 rope", "llama biases", "qwen2 yarn", "gemma3 linear", "phi3 partial",
)  # fmt: skip


@pytest.mark.parametrize("name", cases(VARIANTS, QUICK))
def test_the_model_comes_back(name: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[name]
    write_model(tmp_path / "model", architecture, **overrides)
    made = restore(written(tmp_path / "model", tmp_path / "out", "bf16"), tmp_path / "made")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", made))
    assert set(language(before)) == set(after)
    for key, weight in language(before).items():
        assert torch.equal(weight.view(torch.int16), after[key].view(torch.int16)), key
    tokens = torch.tensor([AutoTokenizer.from_pretrained(made)("".join(TEXT))["input_ids"][:300]])
    with torch.no_grad():
        assert torch.equal(loaded(tmp_path / "model")(tokens).logits, loaded(made)(tokens).logits)
    want, found = comparable(tmp_path / "model"), comparable(made)
    if architecture == "MistralForCausalLM":  # as Llama, since GGUF says nothing of a window that llama.cpp has not
        want["model_type"] = "llama"
    if architecture == "MistralForCausalLM" or name == "gemma3 full":  # no layer looks through it
        found["sliding_window"] = want["sliding_window"]
    assert found == want


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ("LlamaForCausalLM", "Gemma2ForCausalLM")))
def test_float16_comes_back(architecture: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model", architecture)
    made = restore(written(tmp_path / "model", tmp_path / "out", "f16"), tmp_path / "made", "f16")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "model", made))
    for key, weight in language(before).items():
        assert torch.equal(weight.to(torch.float16), after[key]), key
    loaded(made)


KIND_OF = {tiny.tokenizer: name for name, tiny in reversed(ARCHITECTURES.items())}
ARCHITECTURE_OF = {"bpe-phi-4": "Phi3ForCausalLM", "spm-gemma-fast": "Gemma2ForCausalLM", **KIND_OF}


def described(folder: Path, architecture: str, **fields: Any) -> dict[str, Any]:
    """The key-values of a tokenizer's GGUF file, written and read back."""
    writer = gguf.GGUFWriter(folder / "tokenizer.gguf", table()[architecture].get("architecture", "llama"))
    vocabulary.describe(writer, folder, {"architectures": [architecture], **fields})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return dict(read_header(LocalFiles(folder), "tokenizer.gguf", whole=True).metadata)


def texts_with_tokens(tokenizer: Tokenizer) -> list[str]:
    """Texts in which added tokens stand at the beginning, between words, side by side."""
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    return [
        "".join(f"{token}word " for token in added),
        " ".join(added),
        "\n".join(added),
        "".join(added),
        f"a{added[-1]} b",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_comes_back(kind: str, tmp_path: Path) -> None:
    """Token ids with and without those around a text, texts of ids, and the chat template."""
    size = write_tokenizer(tmp_path, kind)
    made = tokenizer(described(tmp_path, ARCHITECTURE_OF.get(kind, "LlamaForCausalLM"), vocab_size=size + 7))
    before, after = (
        Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        Tokenizer.from_str(made["tokenizer.json"].decode()),
    )
    texts = list(CORPUS)
    if kind == "spm-llama-metaspace":  # GGUF does not say that a space goes in front once and only where there is none
        texts = [text for text in texts if not text.startswith(" ")]
    else:
        texts += texts_with_tokens(before)
    for text in texts:
        found = after.encode(text).ids
        assert found == before.encode(text).ids, text
        assert after.encode(text, add_special_tokens=False).ids == before.encode(text, add_special_tokens=False).ids
        assert after.decode(found, skip_special_tokens=False) == before.decode(found, skip_special_tokens=False)
    assert {number: token.content for number, token in after.get_added_tokens_decoder().items()} == {
        number: token.content for number, token in before.get_added_tokens_decoder().items()
    }
    assert after.get_vocab() == before.get_vocab()


@pytest.mark.parametrize("kind", ["bpe-llama-bpe", "bpe-qwen2"])
def test_words_that_no_merge_makes(kind: str, tmp_path: Path) -> None:
    """Llama 3 takes a word of the vocabulary whole, Qwen goes by merges alone."""
    write_tokenizer(tmp_path, kind)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["merges"] = content["model"]["merges"][:20]
    path.write_text(json.dumps(content), encoding="utf-8")
    before = Tokenizer.from_file(str(path))
    made = tokenizer(described(tmp_path, ARCHITECTURE_OF[kind]))
    after = Tokenizer.from_str(made["tokenizer.json"].decode())
    assert [after.encode(text).ids for text in TEXT] == [before.encode(text).ids for text in TEXT]
    before.model.ignore_merges = not before.model.ignore_merges
    assert [after.encode(text).ids for text in TEXT] != [before.encode(text).ids for text in TEXT]


@pytest.mark.parametrize(
    "architecture", cases(ARCHITECTURES, ("LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM"))
)
def test_transformers_reads_the_tokenizer(architecture: str, tmp_path: Path) -> None:
    """With the model's config beside it, by which transformers may choose a class of its own."""
    write_model(tmp_path / "model", architecture)
    file = written(tmp_path / "model", tmp_path / "out", "bf16")
    before, after = (
        AutoTokenizer.from_pretrained(folder) for folder in (tmp_path / "model", restore(file, tmp_path / "made"))
    )
    for text in (*CORPUS, *texts_with_tokens(before.backend_tokenizer)):
        assert after(text)["input_ids"] == before(text)["input_ids"], text
    for name in ("bos", "eos", "pad", "unk"):
        assert getattr(after, f"{name}_token_id") == getattr(before, f"{name}_token_id"), name
    assert after.apply_chat_template(CHAT, tokenize=False) == before.apply_chat_template(CHAT, tokenize=False)
    assert after.chat_template == before.chat_template


@pytest.mark.parametrize("name", cases(own_table()["tokenizer"]["same"], ["llama-bpe", "qwen2"]))
def test_pre_tokenizers_that_llama_cpp_takes_for_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With merges that know no cuts, llama.cpp gives the same token ids by all names; and so does what comes back."""
    row = next(row for row in rows_of_table() if row.name == name)
    size = cross_cutting(row, tmp_path).get_vocab_size()
    found = {}
    for other in (name, *own_table()["tokenizer"]["same"][name]):
        monkeypatch.setattr(pretokenizers, "by_cuts", lambda _, other=other: replace(row, name=other))
        with served(tmp_path / "model.gguf", tmp_path, {"architectures": ["Any"], "vocab_size": size}) as model:
            ids = [model.tokenize(text) for text in CUTTING]
        header = read_header(LocalFiles(tmp_path), "model.gguf", whole=True)
        assert header.metadata["tokenizer.ggml.pre"] == other
        made = json.loads(tokenizer(header.metadata)["tokenizer.json"])
        found[other] = (ids, {key: made[key] for key in ("model", "pre_tokenizer")})
    assert len(found) > 1
    assert all(one == found[name] for one in found.values())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GraniteMoeSharedForCausalLM", "Gemma3ForCausalLM"])
def test_what_comes_back_gives_the_same_file(architecture: str, tmp_path: Path) -> None:
    """Forth again: the same tensors and key-values, but for scores that have the same order, and names."""
    write_model(tmp_path / "model", architecture)
    file = written(tmp_path / "model", tmp_path / "out", "bf16")
    again = written(restore(file, tmp_path / "made"), tmp_path / "again", "bf16")
    one, other = gguf.GGUFReader(file), gguf.GGUFReader(again)
    for first, second in zip(one.tensors, other.tensors, strict=True):
        assert (first.name, first.tensor_type) == (second.name, second.tensor_type)
        assert first.data.tobytes() == second.data.tobytes(), first.name
    silent = ("GGUF.", "general.", "tokenizer.ggml.scores")
    fields = [{n: f.contents() for n, f in r.fields.items() if not n.startswith(silent)} for r in (one, other)]
    assert fields[0] == fields[1]


def test_the_demo_model_comes_back(tmp_path: Path) -> None:
    made = restore(written(demo_folder(), tmp_path / "out", "bf16"), tmp_path / "made")
    before, after = (load_file(folder / "model.safetensors") for folder in (demo_folder(), made))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert comparable(made) == comparable(demo_folder())
    text = (demo_folder() / "held-out.txt").read_text(encoding="utf-8")
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (demo_folder(), made))
    assert one(text)["input_ids"] == other(text)["input_ids"]
    assert one.apply_chat_template(CHAT, tokenize=False) == other.apply_chat_template(CHAT, tokenize=False)


def test_every_family_comes_back_as_its_own_or_one_like_it() -> None:
    """Families without a row share tensors with one that has; and rows are of families."""
    rows = {name for name, row in own_table().items() if "model_type" in row}
    assert rows <= set(known())
    assert set(known()) - rows == {"MistralForCausalLM", "Gemma3ForConditionalGeneration"}


def test_sampling_and_ends_come_back(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe-llama-bpe")
    found = described(tmp_path, "LlamaForCausalLM")
    found |= {
        "general.sampling.temp": 0.6000000238418579,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.eot_token_id": 641,
    }
    made = json.loads(tokenizer(found)["generation_config.json"])
    assert made == {"bos_token_id": 640, "eos_token_id": [644, 641], "temperature": 0.6, "top_k": 20, "do_sample": True}
    found |= {"tokenizer.ggml.eos_token_id": 1 << 31, "tokenizer.ggml.bos_token_id": 1 << 31}
    settings = json.loads(tokenizer(found)["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"], settings["add_bos_token"]) == (None, None, False)


def test_several_chat_templates_come_back(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bpe-smollm")
    found = described(tmp_path, "LlamaForCausalLM")
    found |= {"tokenizer.chat_templates": ("tool_use",), "tokenizer.chat_template.tool_use": "tools: {{ tools }}"}
    for name, content in tokenizer(found).items():
        (tmp_path / "made").mkdir(exist_ok=True)
        (tmp_path / "made" / name).write_bytes(content)
    made = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert made.get_chat_template() == found["tokenizer.chat_template"]
    assert made.get_chat_template("tool_use") == "tools: {{ tools }}"


@examples(60)
@given(
    theta=st.sampled_from([1e4, 5e5, 1e6, 8e6]),
    size=st.sampled_from([16, 64, 80, 128]),
    factor=st.sampled_from([1.5, 2.0, 8.0, 16.0, 32.0]),
    high=st.sampled_from([2.0, 4.0, 5.5, 32.0]),
    length=st.sampled_from([64, 500, 4096, 8192, 32768]),
)
def test_llama_3_rope_comes_back(theta: float, size: int, factor: float, high: float, length: int) -> None:
    """The numbers come back, or others that give the same factors where these are too few to tell them from.

    With no frequency that is slowed in full, or with one between and an unusual `high`, they may be refused.
    """
    rope = {
        **LLAMA3,
        "rope_theta": theta,
        "factor": factor,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    metadata, tensors = made_up(size, theta)
    shape = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 8,
        "hidden_size": size,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "num_key_value_heads": 1,
    }
    factors = facts({**shape, "rope_parameters": rope})["rope_freqs"]
    freqs = TensorInfo("rope_freqs.weight", "F32", (size // 2,), "", 0, 0)
    told = factor in factors and sum(1 < one < factor for one in factors) > 1
    try:
        made = config(metadata, [*tensors, freqs], lambda name: torch.tensor(factors).tolist())
    except ConfigError:
        assert not told
        assert factor not in factors or high != 4
        return
    torch.testing.assert_close(torch.tensor(facts(made)["rope_freqs"]), torch.tensor(factors), rtol=1e-6, atol=0)
    if told:
        assert made["rope_parameters"] == rope


def test_llama_cpp_has_defaults() -> None:
    """Older files leave out what llama.cpp does not need, and have key-values that say nothing new."""
    metadata, tensors = made_up(64, 10000.0)
    metadata |= {"llama.attention.head_count": 4, "llama.expert_count": 0, "llama.rope.scaling.finetuned": True}
    del metadata["llama.rope.freq_base"]
    made = config(metadata, tensors, lambda name: ())
    assert made["num_key_value_heads"] == 4
    assert made["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert "num_experts" not in made


def test_leading_ones_may_be_missing(headers: Mapping[str, Header]) -> None:
    """llama-quantize writes the gate of Qwen's shared expert as a vector."""
    header = headers["Qwen2MoeForCausalLM"]
    tensors = reshaped("blk.0.ffn_gate_inp_shexp.weight", 64)(header.tensors)
    assert tensors != list(header.tensors)
    made = config(header.metadata, tensors, lambda name: ())
    shapes = {target.name: (tensor.shape, target.shape) for tensor, target in originals(made, tensors)}
    assert shapes["blk.0.ffn_gate_inp_shexp.weight"] == ((1, 64), (1, 64))


def made_up(size: int, theta: float) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Key-values and embedding of a small Llama."""
    llama = {
        "block_count": 1, "context_length": 512, "embedding_length": size, "feed_forward_length": 8,
        "attention.head_count": 1, "rope.freq_base": theta, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    metadata = {"general.architecture": "llama", **{f"llama.{name}": value for name, value in llama.items()}}
    return metadata, [TensorInfo("token_embd.weight", "F32", (8, size), "", 0, 0)]


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Header]:
    found = {}
    for name in (
        "LlamaForCausalLM",
        "Qwen2MoeForCausalLM",
        "Gemma2ForCausalLM",
        "MixtralForCausalLM",
        "GraniteForCausalLM",
        "Gemma3ForCausalLM",
        "llama3 rope",
        "phi3 long",
    ):
        folder = tmp_path_factory.mktemp("header")
        write_model(folder / "model", VARIANTS[name][0], **VARIANTS[name][1])
        found[name] = opened(written(folder / "model", folder / "out", "bf16"))[0]
    return found


FACTORS = [1.0, 1.9, 8.0, 8.0, 8.0, 8.0, 8.0, 8.0]


def come_back(metadata: Mapping[str, Any], tensors: Any) -> None:
    made = config(metadata, tensors, lambda name: FACTORS)
    originals(made, tensors)
    tokenizer(metadata)


def extra(name: str, *shape: int) -> Callable[[Any], Any]:
    return lambda tensors: [*tensors, TensorInfo(name, "F32", shape, "", 0, 0)]


def without(name: str) -> Callable[[Any], Any]:
    return lambda tensors: [tensor for tensor in tensors if tensor.name != name]


def reshaped(name: str, *shape: int) -> Callable[[Any], Any]:
    return lambda tensors: [replace(tensor, shape=shape) if tensor.name == name else tensor for tensor in tensors]


DROP = object()
TYPES_SHORT = tuple([1] * 600)
BAD: dict[str, tuple[str, Mapping[str, Any], Callable[[Any], Any], type[QuantryError], str]] = {
    "architecture": ("LlamaForCausalLM", {"general.architecture": "mamba"}, list, UnknownNameError, "'mamba'.*known are gemma2"),
    "no architecture": ("LlamaForCausalLM", {"general.architecture": DROP}, list, UnknownNameError, "None"),
    "missing key": ("LlamaForCausalLM", {"llama.block_count": DROP}, list, ConfigError, "no llama.block_count"),
    "zero": ("LlamaForCausalLM", {"llama.embedding_length": 0}, list, ConfigError, "zero for llama.embedding_length"),
    "text for a number": ("LlamaForCausalLM", {"llama.block_count": "2"}, list, ConfigError, "llama.block_count '2', not a whole number"),
    "a list of heads": ("LlamaForCausalLM", {"llama.attention.head_count_kv": (2, 2)}, list, ConfigError, r"\(2, 2\)', not a whole number"),
    "number for text": ("LlamaForCausalLM", {"llama.rope.scaling.type": 3}, list, ConfigError, "not text"),
    "unknown rope": ("LlamaForCausalLM", {"llama.rope.scaling.type": "warp"}, list, ConfigError, "rope type 'warp'"),
    "yarn without factor": ("LlamaForCausalLM", {"llama.rope.scaling.type": "yarn"}, list, ConfigError, "rope factor"),
    "infinite": ("LlamaForCausalLM", {"llama.rope.freq_base": float("inf")}, list, ConfigError, "freq_base 'inf'"),
    "too many layers": ("LlamaForCausalLM", {"llama.block_count": 20000}, list, ConfigError, "20000 is over 10000"),
    "heads": ("LlamaForCausalLM", {"llama.attention.head_count": 3}, list, ConfigError, "do.* not fit together"),
    "partial rotation": ("LlamaForCausalLM", {"llama.rope.dimension_count": 8}, list, ConfigError, "rope.dimension_count 8, and LlamaForCausalLM would have 16"),
    "key of no field": ("LlamaForCausalLM", {"llama.attention.sinks": 4}, list, ConfigError, "llama.attention.sinks, which config.json of"),
    "no rope": ("GraniteForCausalLM", {"granite.rope.scaling.finetuned": False}, list, ConfigError, "finetuned, which"),
    "other window pattern": ("Gemma3ForCausalLM", {"gemma3.attention.sliding_window_pattern": 4}, list, ConfigError, "sliding_window_pattern, which"),
    "scores": ("Gemma3ForCausalLM", {"tokenizer.ggml.scores": tuple([-1000.0] * 800)}, list, CheckpointError, "one score for all"),
    "no experts": ("MixtralForCausalLM", {"llama.expert_used_count": DROP}, list, ConfigError, "no llama.expert_used_count"),
    "fewer experts": ("MixtralForCausalLM", {"llama.expert_count": 3}, list, CheckpointError, "made of 4 tensors"),
    "no embedding": ("LlamaForCausalLM", {}, without("token_embd.weight"), CheckpointError, "no matrix token_embd.weight"),
    "rows": ("LlamaForCausalLM", {}, reshaped("token_embd.weight", 600, 64), CheckpointError, "672 tokens and an embedding of 600"),
    "unknown tensor": ("LlamaForCausalLM", {}, extra("blk.1.attn_sinks.weight", 4), CheckpointError, "blk.1.attn_sinks.weight, which no"),
    "tensor outside": ("LlamaForCausalLM", {}, extra("v.patch_embd.weight", 4, 4), CheckpointError, "v.patch_embd.weight, which no"),
    "endless number": ("LlamaForCausalLM", {}, extra(f"blk.{'9' * 5000}.attn_norm.weight", 64), CheckpointError, "which no"),
    "head of its own": ("Gemma2ForCausalLM", {}, extra("output.weight", 800, 64), CheckpointError, "gemma2 has none"),
    "too deep": ("LlamaForCausalLM", {}, extra("blk.9.attn_norm.weight", 64), CheckpointError, "layer 9"),
    "missing tensor": ("LlamaForCausalLM", {}, without("blk.1.attn_k.weight"), CheckpointError, "nothing for blk.1.attn_k.weight"),
    "other shape": ("LlamaForCausalLM", {}, reshaped("blk.0.attn_k.weight", 64, 64), CheckpointError, "k_proj.weight is 64 x 64"),
    "turned shape": ("LlamaForCausalLM", {}, reshaped("blk.0.ffn_up.weight", 64, 96), CheckpointError, "up_proj.weight is 64 x 96"),
    "empty tensor": ("MixtralForCausalLM", {}, reshaped("blk.0.ffn_up_exps.weight", 1 << 40, 0, 64), CheckpointError, "blk.0.ffn_up_exps.weight of the file is empty"),
    "one bias": ("LlamaForCausalLM", {}, extra("blk.0.attn_q.bias", 64), CheckpointError, "no bias of attn_k"),
    "bias": ("Gemma3ForCausalLM", {}, extra("blk.0.attn_q.bias", 128), CheckpointError, "a bias of attn_q"),
    "rope factors": ("llama3 rope", {}, list, ConfigError, "no rope of Llama 3"),
    "rope factors missing": ("llama3 rope", {}, reshaped("rope_freqs.weight", 4), CheckpointError, "4 of F32, not 8"),
    "one longrope": ("phi3 long", {}, without("rope_factors_long.weight"), ConfigError, "longrope has 0 long factors"),
    "no tokenizer": ("LlamaForCausalLM", {"tokenizer.ggml.model": DROP}, list, CheckpointError, "type 'None'"),
    "other tokenizer": ("LlamaForCausalLM", {"tokenizer.ggml.model": "bert"}, list, CheckpointError, "type 'bert'"),
    "no tokens": ("LlamaForCausalLM", {"tokenizer.ggml.tokens": DROP}, list, CheckpointError, "no tokenizer.ggml.tokens"),
    "types": ("LlamaForCausalLM", {"tokenizer.ggml.token_type": TYPES_SHORT}, list, CheckpointError, "672 tokens and 600 items in tokenizer.ggml.token_type"),
    "type": ("LlamaForCausalLM", {"tokenizer.ggml.token_type": tuple([9] * 672)}, list, CheckpointError, "type 9"),
    "twice": ("LlamaForCausalLM", {"tokenizer.ggml.tokens": tuple(["a"] * 672)}, list, CheckpointError, "tokens 0 and 1 are both 'a'"),
    "numbers as tokens": ("LlamaForCausalLM", {"tokenizer.ggml.tokens": tuple([1] * 672)}, list, CheckpointError, "a list of str"),
    "merge": ("LlamaForCausalLM", {"tokenizer.ggml.merges": ("ab",)}, list, CheckpointError, "merge 'ab'"),
    "merge of none": ("LlamaForCausalLM", {"tokenizer.ggml.merges": ("qqq zzz",)}, list, CheckpointError, "cannot be built"),
    "no merges": ("LlamaForCausalLM", {"tokenizer.ggml.merges": DROP}, list, CheckpointError, "no tokenizer.ggml.merges"),
    "no cuts": ("LlamaForCausalLM", {"tokenizer.ggml.pre": DROP}, list, CheckpointError, "does not say how it cuts"),
    "other cuts": ("LlamaForCausalLM", {"tokenizer.ggml.pre": "kimi-k2"}, list, CheckpointError, "'kimi-k2'"),
    "flag": ("LlamaForCausalLM", {"tokenizer.ggml.add_bos_token": 1}, list, CheckpointError, "not true or false"),
    "id": ("LlamaForCausalLM", {"tokenizer.ggml.eos_token_id": "2"}, list, ConfigError, "not a whole number"),
    "no scores": ("MixtralForCausalLM", {"tokenizer.ggml.scores": DROP}, list, CheckpointError, "no tokenizer.ggml.scores"),
}  # fmt: skip


def changed(header: Header, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**header.metadata, **values}.items() if value is not DROP}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_come_back_is_refused(name: str, headers: Mapping[str, Header]) -> None:
    source, values, change, kind, told = BAD[name]
    with pytest.raises(kind, match=told) as raised:
        come_back(changed(headers[source], values), change(headers[source].tensors))
    assert "\n" not in str(raised.value)
    assert raised.value.fix


ODD = st.one_of(
    st.just(DROP),
    st.integers(-(1 << 63), 1 << 63),
    st.integers(0, 9),
    st.floats(),
    st.text(max_size=4),
    st.booleans(),
    st.lists(st.one_of(st.integers(0, 9), st.floats(), st.text(max_size=3)), max_size=4).map(tuple),
)


@examples(300)
@given(st.data())
def test_odd_metadata_ends_in_no_traceback(headers: Mapping[str, Header], data: st.DataObject) -> None:
    header = headers[data.draw(st.sampled_from(sorted(headers)))]
    more = [
        "tokenizer.chat_templates",
        "general.sampling.temp",
        "tokenizer.ggml.eot_token_id",
        "llama.rope.scaling.type",
    ]
    names = data.draw(st.lists(st.sampled_from(sorted({*header.metadata, *more})), min_size=1, max_size=3))
    metadata = changed(header, {name: data.draw(ODD) for name in names})
    try:
        come_back(metadata, header.tensors)
    except QuantryError as error:
        assert "\n" not in str(error)

"""Sequential jobs: every block is calibrated on what the stored blocks before it give, however often the job is killed.

The oracle is transformers' own model, loaded from a checkpoint in which the blocks before are as they were stored.
"""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from depth import DEEP, cases, sampled
from linear_inputs import inputs_of
from quantizing.block_jobs import LAYERS, BlockJob, far
from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError
from quantry.models.linears import Linear
from quantry.models.parts import decoder_block
from quantry.models.reader import open_checkpoint
from quantry.models.weights import PlainWeights
from quantry.numerics.activations import simulate
from quantry.quantizing.calibration import calibrator, resumable_walk
from quantry.quantizing.calibration.block_inputs import StoredBlock
from quantry.quantizing.calibration.distillation import distil
from quantry.quantizing.calibration.observe import collect
from quantry.quantizing.sources import open_source
from quantry.types import Activation, Stats
from stacked_experts import stacked
from tiny_models import write_model

GPTQ: dict[str, Any] = {"preset": "w4a16-gptq", "group": 32}


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Statistics of these tests, apart from the user's, and in float32 as the oracle."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QUANTRY_CACHE", str(folder))
    monkeypatch.setattr(calibrator, "arithmetic", lambda device: torch.float32)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=LAYERS)
    return folder


def oracle(job: BlockJob, tensors: dict[str, Tensor], block: int, folder: Path) -> dict[str, Tensor]:
    """The inputs of a block's layers in transformers' model when the blocks before it are these."""
    copytree(job.folder, folder)
    original = {name: tensor.float() for name, tensor in load_file(job.folder / "model.safetensors").items()}
    before = {
        name: tensor
        for name, tensor in tensors.items()
        if (place := decoder_block(name, job.plan.block_count)) is not None and place < block
    }
    save_file(
        {name: t.contiguous() for name, t in {**original, **before}.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    return inputs_of(model, job.windows)


def check_gram(stats: Stats, rows: Tensor, limit: float = 2e-4) -> None:
    flat = rows.reshape(-1, rows.shape[-1]).double()
    wanted = flat.T @ flat / len(flat)
    assert stats.tokens == len(flat)
    assert float((stats.gram.double() - wanted).norm() / wanted.norm()) < limit


def gram_of(rows: Tensor) -> Tensor:
    return (rows.T @ rows / len(rows)).float()


def test_a_block_sees_what_the_stored_ones_before_it_give(llama: Path, tmp_path: Path) -> None:
    job = BlockJob(llama, tmp_path / "out", **GPTQ)
    job.run()
    tensors = job.stored()
    plain = BlockJob(llama, tmp_path / "plain", sequential=False, **GPTQ)
    plain.run()
    for block in range(LAYERS):
        seen = oracle(job, tensors, block, tmp_path / str(block))
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{block}.{leaf}"
            check_gram(job.spy.stats[name], seen[name])
            off = far(job.spy.stats[name].gram, plain.spy.stats[name].gram)
            assert off == 0 if block == 0 else off > 5e-3, name
    assert job.walked == job.spy.entered == list(range(LAYERS))


def test_a_sequential_job_neither_writes_nor_reads_the_store(llama: Path, tmp_path: Path, store: Path) -> None:
    BlockJob(llama, tmp_path / "out", **GPTQ).killed_after(12)
    assert list(store.iterdir()) == []
    BlockJob(llama, tmp_path / "plain", sequential=False, **GPTQ).run()
    assert list(store.iterdir()) != []
    job = BlockJob(llama, tmp_path / "again", **GPTQ)
    job.run()
    assert job.walked == list(range(LAYERS))


@pytest.mark.parametrize("fused", [False, True])
def test_experts(fused: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Qwen2MoeForCausalLM")
    if fused:
        path = tmp_path / "model" / "model.safetensors"
        save_file(stacked(load_file(path), flip=False), path, {"format": "pt"})
    job = BlockJob(tmp_path / "model", tmp_path / "out", preset="w4a16-gptq", group=16)
    job.run()
    name = "model.layers.1.self_attn.v_proj"
    seen = oracle(job, job.stored(), 1, tmp_path / "oracle")
    check_gram(job.spy.stats[name], seen[name])
    gate = "model.layers.1.mlp.shared_expert.gate_proj"
    check_gram(job.spy.stats[gate], seen[gate])
    assert far(job.spy.stats[name].gram, gram_of(oracle(job, {}, 1, tmp_path / "plain")[name])) > 5e-3


ARCHITECTURES = ("LlamaForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize("architecture", cases(ARCHITECTURES, ARCHITECTURES[:2]))
def test_gguf(architecture: str, tmp_path: Path) -> None:
    """Rows in llama.cpp's order, layers cut out of one tensor, and experts are put back in place."""
    write_model(tmp_path / "model", architecture)
    job = BlockJob(tmp_path / "model", tmp_path / "out", preset="gguf-q4_0", rounder="gptq")
    job.run()
    assert job.walked == [0, 1]
    name = "model.layers.1.self_attn." + ("qkv_proj" if architecture.startswith("Phi3") else "q_proj")
    seen = oracle(job, job.stored(), 1, tmp_path / "oracle")
    check_gram(job.spy.stats[name], seen[name])
    assert far(job.spy.stats[name].gram, gram_of(oracle(job, {}, 1, tmp_path / "plain")[name])) > 5e-3


def test_slices_of_stacks_are_put_back_where_they_were() -> None:
    whole = torch.randn(3, 6, 8)
    stored = StoredBlock(lambda _: whole, torch.float32, None)
    slices = [(expert, rows) for expert in range(3) for rows in ((0, 4), (4, 8))]
    for number, (expert, rows) in enumerate(slices):
        stored.add(Linear("m", "layers.0.x", (4, 6), "", "", expert, rows, True), torch.full((4, 6), float(number)))
    for expert in range(3):
        wanted = torch.tensor([2.0 * expert] * 4 + [2.0 * expert + 1] * 4).repeat(6, 1)
        assert torch.equal(stored.tensors["layers.0.x"][expert], wanted)
    stored.add(Linear("m", "layers.0.y", (4, 6), "", "", None, None, True), torch.arange(24.0).view(4, 6))
    assert torch.equal(stored.tensors["layers.0.y"], torch.arange(24.0).view(4, 6).T)


def hidden_states(job: BlockJob, block: int, folder: Path, kind: Activation | None = None) -> Tensor:
    """The hidden states before a block of transformers' model with all blocks as stored, quantized inputs included."""
    tensors, places = job.stored(), dict[int, str]()
    original = torch.nn.functional.linear

    def rounded(inputs: Tensor, weight: Tensor, *others: Any) -> Tensor:
        if kind and (decoder_block(places[weight.data_ptr()], job.plan.block_count) or 0) < block:
            inputs = simulate(inputs, kind).to(inputs.dtype)
        return original(inputs, weight, *others)

    copytree(job.folder, folder)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    places = {weight.data_ptr(): name for name, weight in model.named_parameters()}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "linear", rounded)
        tokens = torch.tensor(job.windows)
        states: Tensor = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states[block]
    return states


def kept(job: BlockJob, block: int) -> Tensor:
    """The hidden states that a job has kept, which is killed in its last block."""
    twin = job.out.with_name(f"{job.out.name}-killed.partial")
    states = resumable_walk.load(twin / f"hidden-{block:05d}.partial", [len(window) for window in job.windows])
    assert states is not None
    return torch.stack(states)


def finished_and_killed(llama: Path, out: Path, **settings: Any) -> BlockJob:
    """A finished job, and beside it the same one killed in its last block, where hidden states still are kept."""
    job = BlockJob(llama, out, **settings)
    job.run()
    BlockJob(llama, out.with_name(f"{out.name}-killed"), **settings).killed_after(job.first_pieces()[LAYERS - 1] + 1)
    return job


def test_scaled_norms_are_part_of_what_is_stored(llama: Path, tmp_path: Path) -> None:
    """AWQ moves scales into norms and other layers: forgetting one of them would give another model."""
    job = finished_and_killed(llama, tmp_path / "out", preset="w4a16-awq", group=32)
    wanted = hidden_states(job, 3, tmp_path / "oracle")
    assert far(kept(job, 3), wanted) < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(torch.tensor(job.windows), output_hidden_states=True).hidden_states[3]
    assert far(before, wanted) > 1e-2


def test_inputs_are_quantized_too_where_an_engine_does_it(llama: Path, tmp_path: Path) -> None:
    job = finished_and_killed(llama, tmp_path / "out", preset="w8a8", rounder="gptq")
    kind = next(iter(job.schemes.values())).activation
    wanted = hidden_states(job, 3, tmp_path / "oracle", kind)
    without = hidden_states(job, 3, tmp_path / "without")
    assert far(kept(job, 3), wanted) < 2e-3  # a sum in another order may fall on another code
    assert far(without, wanted) > 5e-3


def test_layers_that_are_not_calibrated_run_as_they_are_stored(llama: Path, tmp_path: Path) -> None:
    """The first two blocks are rounded without statistics; the third is kept in 16 bit."""
    recipe = tmp_path / "recipe.toml"
    rules = {"*.layers.[01].*": 'preset = "w8a16"\ngroup = 32', "*.layers.2.*": "keep = true"}
    recipe.write_text(
        'preset = "w4a16-gptq"\ngroup = 32\n'
        + "".join(f'[[rules]]\nmatch = "{match}"\n{what}\n' for match, what in rules.items())
    )
    job = finished_and_killed(llama, tmp_path / "out", recipe=recipe)
    assert far(kept(job, 3), hidden_states(job, 3, tmp_path / "oracle")) < 1e-5


@sampled
@pytest.mark.parametrize(("preset", "step"), [("w4a16-gptq", 7), ("w4a16-awq", 13)])
def test_a_killed_job_makes_the_same_bytes(llama: Path, tmp_path: Path, preset: str, step: int) -> None:
    """Killed after some pieces, with one more made but not on the disk yet."""
    whole = BlockJob(llama, tmp_path / "whole", preset=preset, group=32)
    expected = whole.run()
    for cut in range(0, len(whole.plan.pieces), step if DEEP else 2 * step):
        out = tmp_path / f"{cut}"
        first = BlockJob(llama, out, preset=preset, group=32)
        first.killed_after(cut)
        assert len(list(first.partial.glob("hidden-*"))) <= 2
        again = BlockJob(llama, out, preset=preset, group=32)
        assert again.run() == expected
        block = whole.plan.block_of(whole.plan.pieces[cut])
        if block is not None:
            assert again.spy.entered == list(range(block, LAYERS)), cut  # made again from its first piece


@pytest.fixture(scope="module")
def finished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[BlockJob, dict[str, bytes]]:
    """An undisturbed job, and what it wrote."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrator, "arithmetic", lambda device: torch.float32)
        job = BlockJob(llama, tmp_path_factory.mktemp("finished") / "out", **GPTQ)
        return job, job.run()


@pytest.fixture(scope="module")
def killed(
    llama: Path, finished: tuple[BlockJob, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> BlockJob:
    """The same job, killed in its last block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrator, "arithmetic", lambda device: torch.float32)
        job = BlockJob(llama, tmp_path_factory.mktemp("killed") / "out", **GPTQ)
        job.killed_after(finished[0].first_pieces()[3] + 2)
        return job


@pytest.mark.parametrize("harm", ["none", "last", "both", "cut", "flip", "empty", "torn"])
def test_hidden_states_that_are_gone_or_damaged(
    llama: Path, tmp_path: Path, harm: str, finished: tuple[BlockJob, dict[str, bytes]], killed: BlockJob
) -> None:
    whole, expected = finished
    files = sorted(copytree(killed.partial, tmp_path / "out.partial").glob("hidden-*"))
    assert [file.name for file in files] == ["hidden-00002.partial", "hidden-00003.partial"]
    content = files[1].read_bytes()
    assert whole.kept_bytes == sum(file.stat().st_size - resumable_walk.HEADER for file in files)
    changed = bytearray(content)
    changed[-5] ^= 4
    damage = {"cut": content[:-64], "flip": bytes(changed), "empty": b"", "torn": bytes(4096) + content[4096:]}
    if harm in damage:
        files[1].write_bytes(damage[harm])
    for file in {"last": files[1:], "both": files}.get(harm, []):
        file.unlink()
    again = BlockJob(llama, tmp_path / "out", **GPTQ)
    assert again.run() == expected
    start = {"none": 3, "both": 0}.get(harm, 2)
    assert again.walked == again.spy.entered == list(range(start, LAYERS))


def test_a_job_that_cannot_keep_hidden_states_goes_on(
    llama: Path, tmp_path: Path, finished: tuple[BlockJob, dict[str, bytes]]
) -> None:
    first = BlockJob(llama, tmp_path / "out", **GPTQ)
    first.killed_after(0)
    for block in range(LAYERS):
        (first.partial / f"hidden-{block:05d}.new.partial").mkdir()  # in the way of the file
    job = BlockJob(llama, tmp_path / "out", **GPTQ)
    job.killed_after(len(job.plan.pieces) - 1)
    assert not list(job.partial.glob("hidden-?????.partial"))
    for block in range(LAYERS):
        (first.partial / f"hidden-{block:05d}.new.partial").rmdir()
    assert BlockJob(llama, tmp_path / "out", **GPTQ).run() == finished[1]


def test_a_walk_can_begin_at_any_block(llama: Path) -> None:
    windows = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 8, 7], [4, 4, 4, 4]]
    source = open_source(llama)
    whole = Walk(source, batch=2)
    before = []
    for block in whole.blocks(windows):
        assert whole.reached == block.index
        before.append([state.clone() for state in whole.hidden()])
        block.advance()
        assert whole.reached == block.index + 1
    expected = dict(whole.logits())
    assert [len(state) for state in before[0]] == [4, 4, 3, 4]
    for start in range(LAYERS):
        later = Walk(source, batch=2)
        assert [block.index for block in later.blocks(windows, start, before[start])] == list(range(start, LAYERS))
        found = dict(later.logits())
        assert all(torch.equal(found[window], expected[window]) for window in expected)


def test_replaced_tensors_are_those_that_run(llama: Path, tmp_path: Path) -> None:
    windows = [[1, 2, 3, 4], [5, 6, 7, 8]]
    tensors = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    copytree(llama, tmp_path / "other")
    save_file({**tensors, name: tensors[name] * 2}, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    expected = Walk(open_source(tmp_path / "other"))
    list(expected.blocks(windows))
    walk = Walk(open_source(llama))
    for block in walk.blocks(windows):
        if block.index == 1:
            block.replace({name: tensors[name] * 2})
    assert all(torch.equal(*pair) for pair in zip(walk.hidden(), expected.hidden(), strict=True))


def test_a_distilled_job_takes_the_tensors_that_were_trained(llama: Path, tmp_path: Path, store: Path) -> None:
    """On what the 16-bit blocks give, without statistics, and with the gain in the notes."""
    job = BlockJob(llama, tmp_path / "out", preset="w8a8-zeroquant", sequential=False, samples=6)
    job.run()
    assert job.walked == list(range(LAYERS))
    assert job.spy.stats == {}
    assert [file.name for file in store.iterdir()] == ["origins"]
    (note,) = job.notes
    assert note.startswith("Distillation lowered the squared error of a block's output on held-out text from ")
    assert note.endswith(f"(medians of {LAYERS} blocks).")
    walk = Walk(PlainWeights(open_checkpoint(llama), llama), batch=1)
    for block in walk.blocks(job.windows):
        inside = {name: scheme for name, scheme in job.schemes.items() if name.startswith(f"{block.name}.")}
        wanted = distil(block, inside, seed=0)
        assert wanted.after < wanted.before
        assert wanted.tensors
        assert all(torch.equal(job.spy.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    assert "model.norm.weight" not in job.spy.tensors


def test_a_distilled_job_gives_heads_without_statistics(llama: Path, tmp_path: Path) -> None:
    job = BlockJob(llama, tmp_path / "out", preset="w8a8-zeroquant", sequential=False, kv="fp8", samples=2)
    job.run()
    for block in Walk(PlainWeights(open_checkpoint(llama), llama), batch=1).blocks(job.windows):
        heads, wanted = job.spy.heads[block.index], collect(block).heads
        assert heads is not None
        assert wanted is not None
        assert torch.equal(heads.keys, wanted.keys)
        assert torch.equal(heads.values, wanted.values)


def test_what_cannot_be_distilled_is_refused_before(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="1 sample is too few to train on"):
        BlockJob(llama, tmp_path / "out", preset="w8a8-zeroquant", sequential=False, samples=1)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('preset = "w8a8-zeroquant"\n[[rules]]\nmatch = "*.layers.0.*"\npreset = "w8a8-smoothquant"\n')
    with pytest.raises(QuantryError, match="both distils blocks and transforms them with smoothquant"):
        BlockJob(llama, tmp_path / "out", sequential=False, recipe=recipe)

"""Sequential jobs: every block is calibrated on what the stored blocks before it give, however often the job is killed.

The oracle is transformers' own model, loaded from a checkpoint in which the blocks before are as they were stored.
"""

from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from quantry import registry
from quantry.blockwise.walk import Walk
from quantry.errors import QuantryError
from quantry.llamacpp.tensor_map import TensorSlice
from quantry.models.anatomy import dissect
from quantry.models.linears import Linear
from quantry.models.parts import decoder_block
from quantry.models.reader import open_checkpoint
from quantry.models.weights import MappedWeights, PlainWeights, as_bytes
from quantry.models.workspace import Workspace
from quantry.numerics.activations import simulate
from quantry.proof.sources import open_source
from quantry.quantizing.calibration import calibrator as calibrated
from quantry.quantizing.calibration import per_block as inputs_module
from quantry.quantizing.calibration import resumable_walk as passage
from quantry.quantizing.calibration.distillation import distil
from quantry.quantizing.calibration.observe import collect
from quantry.quantizing.containers import gguf_file
from quantry.quantizing.makers import BlockMaker, Quantizer, Reader
from quantry.quantizing.recipe import from_options
from quantry.quantizing.tensor_plan import Keep, block_of, by_block, divide
from quantry.types import Activation, Stats
from test_observe import inputs_of
from test_smoothing_pairs import stacked
from tiny_models import write_model

CPU = torch.device("cpu")
TEXT: dict[str, Any] = {"samples": 12, "length": 32}
LAYERS = 4


@pytest.fixture(autouse=True)
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Statistics of these tests, apart from the user's, and in float32 as what they are held against."""
    folder: Path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QUANTRY_CACHE", str(folder))
    monkeypatch.setattr(calibrated, "arithmetic", lambda device: torch.float32)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    write_model(folder, "LlamaForCausalLM", num_hidden_layers=LAYERS)
    return folder


class Spy(inputs_module.Inputs):
    """Inputs that take note of what they tell and of what they are told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: dict[str, Stats] = {}
        self.heard: dict[tuple[str, int | None, tuple[int, int] | None], tuple[bool, Tensor]] = {}

    def stats(self, name: str, expert: int | None = None) -> Stats | None:
        found = super().stats(name, expert)
        if found is not None:
            self.told[name if expert is None else f"{name}.{expert}"] = found
        return found

    def made(self, layer: Linear | TensorSlice, weight: Tensor) -> None:
        name = layer.source if isinstance(layer, Linear) else layer.name
        self.heard[name, layer.expert, layer.rows] = (layer.flip, weight.clone())
        super().made(layer, weight)


class Job:
    """A small job: all its pieces, block after block, without the files of a real one."""

    def __init__(self, folder: Path, work: Path, preset: str | None, *, sequential: bool = True, **how: Any) -> None:
        group, rounder, file = (how.pop(name, None) for name in ("group", "rounder", "recipe"))
        recipe = replace(from_options(preset, file, None, None, group, rounder), sequential=sequential)
        checkpoint = open_checkpoint(folder)
        anatomy = dissect(checkpoint)
        self.folder, self.blocks = folder, anatomy.blocks
        form = None if recipe.format == "gguf" else registry.load("quantry.formats", recipe.format)
        division = (
            by_block(divide(checkpoint, recipe, anatomy.blocks, form, False), anatomy.blocks)
            if form
            else gguf_file.divide(checkpoint, recipe)
        )
        begun = calibrated.begin(
            checkpoint, recipe, anatomy, division, CPU, data=how.pop("data", None), **{**TEXT, **how}
        )
        self.kept_bytes = begun.kept_bytes
        reader = Reader(checkpoint, MappedWeights(folder), CPU)
        self.walked: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(calibrated, "Inputs", Spy)
            made = begun.inputs(folder, reader.whole, lambda done, *_: self.walked.append(done))
        assert isinstance(made, Spy)
        self.inputs, self.pieces = made, division.pieces
        settings = form.config(division.assignment, division.kept) if form else {}
        rounding = registry.load("quantry.methods.rounders", recipe.preset.rounder)
        self.maker = Quantizer(reader, form, settings, made) if form else BlockMaker(reader, {}, (), rounding, made)
        self.made_again: list[int] = []
        work.mkdir(exist_ok=True)
        self.inputs.resume(Workspace(work), self.remake)

    def remake(self, block: int) -> None:
        self.made_again.append(block)
        for piece in self.pieces:
            if block_of(piece, self.blocks) == block:
                list(self.maker.make(piece))

    def run(self, start: int = 0, stop: int | None = None) -> dict[str, list[bytes]]:
        """Makes some pieces: the stored bytes by piece."""
        return {
            piece.name: [name.encode() + bytes(as_bytes(tensor)) for name, tensor in self.maker.make(piece)]
            for piece in self.pieces[start:stop]
        }

    def stored(self) -> dict[str, Tensor]:
        """The tensors of the checkpoint as they are stored, put together from what the makers have said and kept."""
        tensors = {name: tensor.float() for name, tensor in load_file(self.folder / "model.safetensors").items()}
        for piece in self.pieces:
            if isinstance(piece, Keep) and piece.linear is None:
                tensors |= {name: tensor.float() for name, tensor in self.maker.make(piece)}
        for (name, expert, rows), (flip, weight) in self.inputs.heard.items():
            whole = tensors[name] if expert is None else tensors[name][expert]
            if flip:
                whole = whole.transpose(0, 1)
            whole[slice(*(rows or (0, len(whole))))] = weight
        return tensors


def oracle(job: Job, tensors: dict[str, Tensor], block: int, folder: Path) -> dict[str, Tensor]:
    """What the layers of a block are given by transformers' model when the blocks before it are these."""
    copytree(job.folder, folder)
    original = {name: tensor.float() for name, tensor in load_file(job.folder / "model.safetensors").items()}
    before = {
        name: tensor
        for name, tensor in tensors.items()
        if (place := decoder_block(name, job.blocks)) is not None and place < block
    }
    save_file(
        {name: t.contiguous() for name, t in {**original, **before}.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    return inputs_of(model, [list(window) for window in job.inputs._statistics.data.tokens])


def check_gram(found: Stats, rows: Tensor, limit: float = 2e-4) -> None:
    rows = rows.reshape(-1, rows.shape[-1]).double()
    wanted = rows.T @ rows / len(rows)
    assert found.tokens == len(rows)
    assert float((found.gram.double() - wanted).norm() / wanted.norm()) < limit


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_a_block_sees_what_the_stored_ones_before_it_give(llama: Path, tmp_path: Path) -> None:
    job = Job(llama, tmp_path / "work", "w4a16-gptq", group=32)
    job.run()
    tensors = job.stored()
    plain = Job(llama, tmp_path / "plain", "w4a16-gptq", group=32, sequential=False)
    plain.run()
    for block in range(LAYERS):
        seen = oracle(job, tensors, block, tmp_path / str(block))
        for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            name = f"model.layers.{block}.{leaf}"
            check_gram(job.inputs.told[name], seen[name])
            off = far(job.inputs.told[name].gram, plain.inputs.told[name].gram)
            assert off == 0 if block == 0 else off > 5e-3, name
    assert job.walked == list(range(LAYERS))
    assert job.made_again == []


def test_nothing_goes_into_the_store_or_comes_from_it(llama: Path, tmp_path: Path, store: Path) -> None:
    Job(llama, tmp_path / "work", "w4a16-gptq", group=32).run(stop=12)
    assert list(store.iterdir()) == []
    Job(llama, tmp_path / "plain", "w4a16-gptq", group=32, sequential=False).run()
    assert list(store.iterdir()) != []
    job = Job(llama, tmp_path / "again", "w4a16-gptq", group=32)
    job.run()
    assert job.walked == list(range(LAYERS))


@pytest.mark.parametrize("fused", [False, True])
def test_experts(fused: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "Qwen2MoeForCausalLM")
    if fused:
        path = tmp_path / "model" / "model.safetensors"
        save_file(stacked(load_file(path), flip=False), path, {"format": "pt"})
    job = Job(tmp_path / "model", tmp_path / "work", "w4a16-gptq", group=16)
    job.run()
    name = "model.layers.1.self_attn.v_proj"
    seen = oracle(job, job.stored(), 1, tmp_path / "oracle")
    check_gram(job.inputs.told[name], seen[name])
    gate = "model.layers.1.mlp.shared_expert.gate_proj"
    check_gram(job.inputs.told[gate], seen[gate])
    assert far(job.inputs.told[name].gram, oracle_gram(oracle(job, {}, 1, tmp_path / "plain")[name])) > 5e-3


def oracle_gram(rows: Tensor) -> Tensor:
    return (rows.T @ rows / len(rows)).float()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_gguf(architecture: str, tmp_path: Path) -> None:
    """Rows in llama.cpp's order, layers that are cut out of one tensor, and experts find their way back."""
    write_model(tmp_path / "model", architecture)
    job = Job(tmp_path / "model", tmp_path / "work", "gguf-q4_0", rounder="gptq")
    job.run()
    assert job.walked == [0, 1]
    name = "model.layers.1.self_attn." + ("qkv_proj" if architecture.startswith("Phi3") else "q_proj")
    seen = oracle(job, job.stored(), 1, tmp_path / "oracle")
    check_gram(job.inputs.told[f"{name}.weight"], seen[name])
    assert far(job.inputs.told[f"{name}.weight"].gram, oracle_gram(oracle(job, {}, 1, tmp_path / "plain")[name])) > 5e-3


def test_parts_of_stacks_are_put_back_where_they_were() -> None:
    whole = torch.randn(3, 6, 8)
    flipped = [
        Linear("m", "layers.0.x", (4, 6), "", "", expert, rows, True)
        for expert in range(3)
        for rows in ((0, 4), (4, 8))
    ]
    stored = inputs_module._Stored(
        {0: frozenset({(one.source, one.expert, one.rows) for one in flipped})}, torch.float32
    )
    for number, one in enumerate(flipped):
        assert stored.lacks(0)
        stored.add(0, one, torch.full((4, 6), float(number)), lambda _: whole)
    assert not stored.lacks(0)
    made = stored.take()["layers.0.x"]
    for expert in range(3):
        assert torch.equal(made[expert], torch.tensor([2.0 * expert] * 4 + [2.0 * expert + 1] * 4).repeat(6, 1))
    assert stored.lacks(0)
    assert not stored.lacks(1)
    plain = Linear("m", "layers.1.y", (4, 6), "", "", None, None, True)
    stored.add(1, plain, torch.arange(24.0).view(4, 6), lambda _: whole)
    assert torch.equal(stored.take()["layers.1.y"], torch.arange(24.0).view(4, 6).T)


def hidden_states(job: Job, block: int, folder: Path, kind: Activation | None = None) -> Tensor:
    """What comes to a block of transformers' model if all before are as they are stored, inputs of layers included."""
    tensors, places = job.stored(), dict[int, str]()
    original = torch.nn.functional.linear

    def rounded(inputs: Tensor, weight: Tensor, *others: Any) -> Tensor:
        if kind and (decoder_block(places[weight.data_ptr()], job.blocks) or 0) < block:
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
        tokens = torch.tensor(job.inputs._statistics.data.tokens)
        found: Tensor = model(input_ids=tokens, use_cache=False, output_hidden_states=True).hidden_states[block]
    return found


def kept(job: Job, work: Path, block: int) -> Tensor:
    lengths = [len(window) for window in job.inputs._statistics.data.tokens]
    found = passage.load(work / f"hidden-{block:05d}.partial", lengths)
    assert found is not None
    return torch.stack(found)


def test_scaled_norms_are_part_of_what_is_stored(llama: Path, tmp_path: Path) -> None:
    """AWQ moves scales into norms and other layers: forgetting one of them would give another model."""
    job = Job(llama, tmp_path / "work", "w4a16-awq", group=32)
    job.run()
    wanted = hidden_states(job, 3, tmp_path / "oracle")
    assert far(kept(job, tmp_path / "work", 3), wanted) < 1e-5
    plain = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    with torch.no_grad():
        before = plain(torch.tensor(job.inputs._statistics.data.tokens), output_hidden_states=True).hidden_states[3]
    assert far(before, wanted) > 1e-2


def test_inputs_are_quantized_too_where_an_engine_does_it(llama: Path, tmp_path: Path) -> None:
    job = Job(llama, tmp_path / "work", "w8a8", rounder="gptq")
    job.run()
    kind = next(iter(job.inputs._schemes.values())).activation
    wanted = hidden_states(job, 3, tmp_path / "oracle", kind)
    without = hidden_states(job, 3, tmp_path / "without")
    assert far(kept(job, tmp_path / "work", 3), wanted) < 2e-3  # a sum in another order may fall on another code
    assert far(without, wanted) > 5e-3


def test_layers_that_are_not_calibrated_are_passed_as_they_are_stored(llama: Path, tmp_path: Path) -> None:
    """The first two blocks are rounded without statistics, so no one asks for any; the third is kept in 16 bit."""
    recipe = tmp_path / "recipe.toml"
    rules = {"*.layers.[01].*": 'preset = "w8a16"\ngroup = 32', "*.layers.2.*": "keep = true"}
    recipe.write_text(
        'preset = "w4a16-gptq"\ngroup = 32\n'
        + "".join(f'[[rules]]\nmatch = "{match}"\n{what}\n' for match, what in rules.items())
    )
    job = Job(llama, tmp_path / "work", None, recipe=recipe)
    job.run()
    assert job.inputs.told.keys() == {name for name in job.inputs.told if ".layers.3." in name} != set()
    assert job.walked == list(range(LAYERS))
    assert far(kept(job, tmp_path / "work", 3), hidden_states(job, 3, tmp_path / "oracle")) < 1e-5


def bounds(job: Job) -> dict[int, int]:
    """The first piece of each block."""
    found: dict[int, int] = {}
    for number, piece in enumerate(job.pieces):
        block = block_of(piece, job.blocks)
        if block is not None:
            found.setdefault(block, number)
    return found


@pytest.mark.parametrize(("preset", "step"), [("w4a16-gptq", 5), ("w4a16-awq", 11)])
def test_a_killed_job_makes_the_same_bytes(llama: Path, tmp_path: Path, preset: str, step: int) -> None:
    """Killed after some pieces, with one more made but not on the disk yet."""
    whole = Job(llama, tmp_path / "whole", preset, group=32)
    expected = whole.run()
    assert whole.made_again == []
    for cut in range(0, len(whole.pieces), step):
        work = tmp_path / f"{cut}"
        Job(llama, work, preset, group=32).run(stop=cut + 1)
        again = Job(llama, work, preset, group=32)
        made = again.run(start=cut)
        assert made == {name: expected[name] for name in made}
        block = block_of(whole.pieces[cut], LAYERS)
        if block is not None and again.walked:
            assert again.walked[0] >= block - 1, cut
            assert set(again.made_again) <= {block - 1, block}, cut  # the one before if no layer of this one was made
        assert len(list(work.glob("hidden-*"))) <= 2


@pytest.mark.parametrize("harm", ["none", "last", "both", "cut", "flip", "empty", "torn"])
def test_hidden_states_that_are_gone_or_damaged(llama: Path, tmp_path: Path, harm: str) -> None:
    whole = Job(llama, tmp_path / "whole", "w4a16-gptq", group=32)
    expected, first = whole.run(), bounds(whole)
    work = tmp_path / "work"
    Job(llama, work, "w4a16-gptq", group=32).run(stop=first[3] + 2)
    files = sorted(work.glob("hidden-*"))
    assert [file.name for file in files] == ["hidden-00002.partial", "hidden-00003.partial"]
    content = files[1].read_bytes()
    assert whole.kept_bytes == sum(file.stat().st_size - passage.HEADER for file in files)
    changed = bytearray(content)
    changed[-5] ^= 4
    damage = {"cut": content[:-64], "flip": bytes(changed), "empty": b"", "torn": bytes(4096) + content[4096:]}
    if harm in damage:
        files[1].write_bytes(damage[harm])
    for file in {"last": files[1:], "both": files}.get(harm, []):
        file.unlink()
    again = Job(llama, work, "w4a16-gptq", group=32)
    made = again.run(start=first[3])
    assert made == {name: expected[name] for name in made}
    start = {"none": 3, "both": 0}.get(harm, 2)
    assert again.walked == list(range(start, LAYERS))
    assert again.made_again == list(range(start, 3))


def test_a_block_before_the_last_kept_one_is_reached_too(llama: Path, tmp_path: Path) -> None:
    """A disk that lost more than the last block."""
    whole = Job(llama, tmp_path / "whole", "w4a16-gptq", group=32)
    expected, first = whole.run(), bounds(whole)
    again = Job(llama, tmp_path / "whole", "w4a16-gptq", group=32)
    made = again.run(start=first[1])
    assert made == {name: expected[name] for name in made}
    assert again.walked == list(range(LAYERS))
    assert again.made_again == [0]


def test_a_job_that_cannot_keep_hidden_states_goes_on(llama: Path, tmp_path: Path) -> None:
    whole = Job(llama, tmp_path / "whole", "w4a16-gptq", group=32)
    expected = whole.run()
    job = Job(llama, tmp_path / "work", "w4a16-gptq", group=32)
    for block in range(LAYERS):
        (tmp_path / "work" / f"hidden-{block:05d}.new.partial").mkdir()  # in the way of the file
    assert job.run() == expected
    assert not list((tmp_path / "work").glob("hidden-?????.partial"))


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
    """On what the 16-bit blocks give, without statistics, and with what was gained in the notes."""
    job = Job(llama, tmp_path / "work", "w8a8-zeroquant", sequential=False)
    job.run()
    assert job.walked == list(range(LAYERS))
    assert job.inputs.told == {}
    assert list(store.iterdir()) == []
    (note,) = job.inputs.notes()
    assert note.startswith("Distillation lowered the squared error of a block's output on held-out text from ")
    assert note.endswith(f"(medians of {LAYERS} blocks).")
    schemes = job.inputs._schemes
    walk = Walk(PlainWeights(open_checkpoint(llama), llama), batch=1)
    for block in walk.blocks(job.inputs._statistics.data.tokens):
        inside = {name: scheme for name, scheme in schemes.items() if name.startswith(f"{block.name}.")}
        wanted = distil(block, inside, seed=0)
        assert wanted.after < wanted.before
        found = job.inputs._findings[f"distilled {block.index}"]
        assert found == [wanted.before, wanted.after]
        if block.index == LAYERS - 1:  # the block in hand
            trained = {name: job.inputs.tensor(name) for name in wanted.tensors}
            assert all(
                torch.equal(tensor, wanted.tensors[name]) for name, tensor in trained.items() if tensor is not None
            )
            assert None not in trained.values()
    assert job.inputs.tensor("model.norm.weight") is None


def test_a_distilled_job_gives_heads_without_statistics(llama: Path, tmp_path: Path) -> None:
    job = Job(llama, tmp_path / "work", "w8a8-zeroquant", sequential=False)
    observed = [
        collect(block)
        for block in Walk(PlainWeights(open_checkpoint(llama), llama), batch=1).blocks(
            job.inputs._statistics.data.tokens
        )
    ]
    for index in (0, 2):
        heads, wanted = job.inputs.heads(index), observed[index].heads
        assert heads is not None
        assert wanted is not None
        assert torch.equal(heads.keys, wanted.keys)
        assert torch.equal(heads.values, wanted.values)
    plain = Job(llama, tmp_path / "plain", "w4a16-gptq", group=32, sequential=False).inputs.heads(1)
    assert plain is not None
    assert torch.equal(plain.values, observed[1].heads.values)  # type: ignore[union-attr]


def test_what_cannot_be_distilled_is_refused_before(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantryError, match="1 sample is too few to distil on"):
        Job(llama, tmp_path / "work", "w8a8-zeroquant", sequential=False, samples=1)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('preset = "w8a8-zeroquant"\n[[rules]]\nmatch = "*.layers.0.*"\npreset = "w8a8-smoothquant"\n')
    with pytest.raises(QuantryError, match="both distils blocks and transforms them with smoothquant"):
        Job(llama, tmp_path / "work", None, sequential=False, recipe=recipe)
    assert not (tmp_path / "work").exists()

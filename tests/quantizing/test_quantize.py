"""The loop: every preset writes what it announced, accounts for every tensor, resumes byte for byte, refuses clearly."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantry
from command import command as run
from depth import cases
from killed_jobs import contents, kill_and_resume, quantize, started
from quantizing.written_llama import CONFIG, decoded, llama_shapes, write_model
from quantry import registry
from quantry.errors import QuantryError
from quantry.models.linears import fused_name, shared_name
from quantry.models.reader import demo_folder, open_checkpoint
from quantry.quantizing.calibration.block_inputs import BlockInputs
from quantry.quantizing.makers.layers import LayerMaker
from quantry.quantizing.recipe import presets
from quantry.quantizing.tensor_plan import Piece

BUILT = [  # GGUF is another container: tests/test_gguf.py
    (preset.name, form)
    for preset in presets().values()
    if not preset.calibrated  # those are in tests/test_calibrated.py
    for form in preset.formats
    if form != "gguf"
]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_model(tmp_path / "llama", CONFIG, llama_shapes())


@pytest.mark.parametrize(("preset", "form"), BUILT)
def test_every_preset(llama: Path, tmp_path: Path, preset: str, form: str) -> None:
    out = tmp_path / "out"
    planned = quantry.quantize(llama, tmp_path / "dry", preset=preset, format=form, dry_run=True)
    artefact = quantry.quantize(llama, out, preset=preset, format=form)
    assert {**planned.to_dict(), "path": "", "files": {}} == {**artefact.to_dict(), "path": "", "files": {}}
    assert not (tmp_path / "dry").exists()
    assert not list(tmp_path.glob("*.partial"))
    source, written = load_file(llama / "model.safetensors"), load_file(out / "model.safetensors")
    anatomy = quantry.inspect(out)
    assert anatomy.bytes == artefact.bytes == sum(t.numel() * t.itemsize for t in written.values())
    assert (
        anatomy.parameters
        == artefact.parameters
        == sum(t.numel() for name, t in source.items() if "inv_freq" not in name)
    )
    for name in ("tokenizer.json", "chat_template.jinja", "preprocessor_config.json"):
        assert (out / name).read_bytes() == (llama / name).read_bytes()
    notes = json.loads((out / "quantry.json").read_text())
    fates = {name: fate for fate, names in notes["fates"].items() for name in names}
    assert set(fates) == set(source)
    assert fates["model.rotary_emb.inv_freq"].startswith("dropped")
    if form == "safetensors":
        assert "quantization_config" not in json.loads((out / "config.json").read_text())
        return
    quantized = {name for name, fate in fates.items() if fate == "quantized"}
    assert quantized == {name for name in source if name.endswith("proj.weight")}
    for module, weight in decoded(out).items():
        exact = source[module + ".weight"].float()
        bits = presets()[preset].scheme.weight.bits
        limit = {8: 0.04, 4: 0.16, 3: 0.25, 2: 0.6}[bits]
        assert (weight - exact).norm() / exact.norm() < limit, module
    for name, fate in fates.items():
        if fate == "kept":
            assert torch.equal(written[name], source[name])
        elif fate.startswith("cast"):
            assert torch.equal(written[name], source[name].half())


def test_fused_layers_share_scales_that_span_tensors(llama: Path, tmp_path: Path) -> None:
    for preset, scale in (("fp8-tensor", "weight_scale"), ("nvfp4", "weight_global_scale")):
        out = tmp_path / preset
        quantry.quantize(llama, out, preset=preset)
        stored = load_file(out / "model.safetensors")
        q, k, v = (stored[f"model.layers.0.self_attn.{name}_proj.{scale}"] for name in "qkv")
        gate, up, down = (stored[f"model.layers.0.mlp.{name}_proj.{scale}"] for name in ("gate", "up", "down"))
        assert torch.equal(q, k)
        assert torch.equal(q, v)
        assert torch.equal(gate, up)
        assert not torch.equal(gate, down)
        source = load_file(llama / "model.safetensors")
        largest = max(source[f"model.layers.0.self_attn.{name}_proj.weight"].abs().max().item() for name in "qkv")
        expected = torch.tensor(largest / 448).bfloat16().item() if preset == "fp8-tensor" else 448 * 6 / largest
        assert q.item() == pytest.approx(expected, rel=1e-6), "the largest of all three decides"


MOE = {
    **CONFIG, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 3,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_hidden_layers": 1,
}  # fmt: skip


@pytest.mark.parametrize("flip", [False, True], ids=["out-in", "in-out"])
def test_experts_stored_singly_or_fused_give_the_same(tmp_path: Path, flip: bool) -> None:
    shapes = {name: shape for name, shape in llama_shapes().items() if ".mlp." not in name and "layers.1." not in name}
    prefix = "model.layers.0.mlp"
    experts = {
        f"{prefix}.experts.{e}.{n}_proj.weight": (256, 128) if n == "down" else (128, 256)
        for e in range(3)
        for n in ("gate", "up", "down")
    }
    single = write_model(tmp_path / "single", MOE, {**shapes, f"{prefix}.gate.weight": (3, 256), **experts})
    tensors = load_file(single / "model.safetensors")

    def stack(name: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{prefix}.experts.{e}.{name}_proj.weight") for e in range(3)])

    gate_up, down = torch.cat([stack("gate"), stack("up")], dim=1), stack("down")
    tensors[f"{prefix}.experts.gate_up_proj"] = gate_up.transpose(1, 2).contiguous() if flip else gate_up
    tensors[f"{prefix}.experts.down_proj"] = down.transpose(1, 2).contiguous() if flip else down
    fused = tmp_path / "fused"
    fused.mkdir()
    for file in single.iterdir():
        (fused / file.name).write_bytes(file.read_bytes())
    save_file(tensors, fused / "model.safetensors")
    for preset in ("w4a16", "fp8-dynamic", "nvfp4"):
        outs = [tmp_path / f"{preset}-{source.name}" for source in (single, fused)]
        for source, out in zip((single, fused), outs, strict=True):
            quantry.quantize(source, out, preset=preset)
        one, other = (load_file(out / "model.safetensors") for out in outs)
        assert set(one) == set(other)
        assert all(torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)) for name in one)
        assert f"{prefix}.experts.2.down_proj" in decoded(outs[0])
        if preset == "nvfp4":  # engines stack the experts of a layer
            outer = {
                one[f"{prefix}.experts.{e}.{n}_proj.weight_global_scale"].item()
                for e in range(3)
                for n in ("gate", "up")
            }
            assert len(outer) == 1
        assert f"{prefix}.gate.weight" in one


def test_recipe_rules(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'preset = "w4a16"\ngroup = 64\n[[rules]]\nmatch = "*.layers.0.mlp.*"\npreset = "w8a16"\ngroup = 32\n'
        '[[rules]]\nmatch = "*.layers.1.self_attn.o_proj"\nkeep = true\n'
    )
    quantry.quantize(llama, tmp_path / "out", recipe=recipe)
    checkpoint = open_checkpoint(tmp_path / "out")
    form = registry.load("quantry.formats", "compressed-tensors")
    found = form.schemes(checkpoint.config["quantization_config"], checkpoint.tensors)
    assert found["model.layers.0.mlp.down_proj"].weight.bits == 8
    assert found["model.layers.0.mlp.down_proj"].weight.block == (1, 32)
    assert found["model.layers.1.mlp.down_proj"].weight.bits == 4
    assert found["model.layers.1.mlp.down_proj"].weight.block == (1, 64)
    assert "model.layers.1.self_attn.o_proj" not in found
    assert quantry.inspect(tmp_path / "out").parameters == quantry.inspect(llama).parameters


def test_plan_file(llama: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    known = quantry.inspect(llama)
    model = {"source": "llama", "architecture": known.architecture, "parameters": known.parameters}
    plan.write_text(
        json.dumps({"model": model, "options": [{"preset": "w4a16", "format": "gptq", "group": 64, "engine": "vllm"}]})
    )
    artefact = quantry.quantize(llama, tmp_path / "out", plan=plan)
    assert (artefact.preset, artefact.format) == ("w4a16", "gptq")


KILLED = [
    ("w4a16", "compressed-tensors"),
    ("fp8-dynamic", "compressed-tensors"),
    ("w4a16-asym", "awq"),
    ("nf4", "bitsandbytes"),
]


@pytest.mark.parametrize(("preset", "form"), cases(KILLED, KILLED[:1]))
def test_kill_9_at_random_moments(tmp_path: Path, preset: str, form: str) -> None:
    """Three moments for each of four presets, when a random share of the bytes is on the disk; then the job is resumed."""
    options = {"preset": preset, "format": form, "shard_bytes": 400_000}

    def start(out: Path) -> Any:
        return started(quantize, demo_folder(), out, tmp_path / "cache", options)

    expected, killed = kill_and_resume(start, tmp_path, preset, rounds=3, shares=(0, 0.98))
    assert sum(name.endswith(".safetensors") for name in expected) > 3
    assert killed >= 2


def test_resume_takes_over_finished_shards(llama: Path, tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop(done: int, total: int, label: str) -> None:
        if done > total / 2:
            raise StopError

    with pytest.raises(StopError):
        quantry.quantize(llama, tmp_path / "out", preset="w4a16", shard_bytes=100_000, progress=stop)
    partial = tmp_path / "out.partial"
    finished = {file.name: file.stat().st_mtime_ns for file in partial.glob("*.safetensors")}
    assert finished
    with pytest.raises(QuantryError, match="another model, recipe or version"):
        quantry.quantize(llama, tmp_path / "out", preset="w8a16", shard_bytes=100_000)
    quantry.quantize(llama, tmp_path / "out", preset="w4a16", shard_bytes=100_000)
    for name, stamp in finished.items():
        assert (tmp_path / "out" / name).stat().st_mtime_ns == stamp
    quantry.quantize(llama, tmp_path / "again", preset="w4a16", shard_bytes=100_000)
    assert contents(tmp_path / "out") == contents(tmp_path / "again")


def test_two_jobs_for_one_output(llama: Path, tmp_path: Path) -> None:
    def nested(done: int, total: int, label: str) -> None:
        quantry.quantize(llama, tmp_path / "out", preset="w4a16")

    with pytest.raises(QuantryError, match="another job is writing"):
        quantry.quantize(llama, tmp_path / "out", preset="w4a16", progress=nested)


def test_a_job_that_finds_another_finished_leaves_it_alone(llama: Path, tmp_path: Path) -> None:
    """The other job begins and ends after this one has looked at its output, and before it writes."""
    out = tmp_path / "out"

    def meanwhile(_: Any) -> None:
        quantry.quantize(llama, out, preset="w8a16")

    with pytest.raises(QuantryError, match="exists and is not an empty folder"):
        quantry.quantize(llama, out, preset="w4a16", announce=meanwhile)
    assert quantry.quantize(llama, out, preset="w8a16").preset == "w8a16"
    assert [file.name for file in tmp_path.glob("out*")] == ["out"]


def spoil_nan(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model / "model.safetensors")


def spoil_large(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, model / "model.safetensors")


def test_bad_weights_are_named(llama: Path, tmp_path: Path) -> None:
    spoil_nan(llama)
    for preset in ("w4a16", "w8a8", "fp8-dynamic", "fp8-tensor", "nf4", "mxfp4", "nvfp4", "w4a16-asym"):
        with pytest.raises(QuantryError, match=r"model.layers.1.mlp.up_proj.weight has 1 weights that are NaN"):
            quantry.quantize(llama, tmp_path / preset, preset=preset)
    assert [file.name for file in tmp_path.iterdir()] == ["llama"]


def test_float16_overflow_is_named(llama: Path, tmp_path: Path) -> None:
    spoil_large(llama)
    for preset, form in (("fp16", "safetensors"), ("w4a16-asym", "awq")):
        with pytest.raises(QuantryError, match=r"model.norm.weight has a weight of magnitude 70144"):
            quantry.quantize(llama, tmp_path / preset, preset=preset, format=form)


def test_odd_shapes(tmp_path: Path) -> None:
    shapes = llama_shapes()
    for i in range(2):
        shapes |= {
            f"model.layers.{i}.mlp.gate_proj.weight": (352, 256),
            f"model.layers.{i}.mlp.up_proj.weight": (352, 256),
            f"model.layers.{i}.mlp.down_proj.weight": (256, 352),
        }
    model = write_model(tmp_path / "odd", {**CONFIG, "intermediate_size": 352}, shapes)
    with pytest.raises(
        QuantryError, match=r"down_proj.weight \(256 x 352\) is not divided by 1 x 128 blocks; use --group 32, or leave"
    ):
        quantry.quantize(model, tmp_path / "out", preset="w4a16", group=128)
    smaller = quantry.quantize(model, tmp_path / "g32", preset="w4a16")
    assert any(note.startswith("Groups of 32 weights") for note in smaller.notes)
    artefact = quantry.quantize(model, tmp_path / "kept", preset="w4a16", keep_odd=True)
    assert artefact.quantized_layers == 12
    config = json.loads((tmp_path / "kept" / "config.json").read_text())
    assert "model.layers.1.mlp.down_proj" in config["quantization_config"]["ignore"]
    with pytest.raises(QuantryError, match="is not divided by 128 x 128 blocks; leave such layers"):
        quantry.quantize(model, tmp_path / "block", preset="fp8-block")


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown preset": ({"preset": "w4a61"}, "unknown preset 'w4a61'; did you mean w4a16"),
    "no preset": ({}, "no preset is given; give one of --preset"),
    "two": ({"preset": "w4a16", "plan": "x"}, "--preset and --plan say different things"),
    "unknown format": ({"preset": "w4a16", "format": "gtpq"}, "unknown format 'gtpq'; did you mean gptq"),
    "wrong format": ({"preset": "nf4", "format": "awq"}, "format awq cannot hold preset nf4"),
    "cast format": ({"preset": "nf4", "format": "safetensors"}, "16-bit weights only"),
    "no groups": ({"preset": "fp8-dynamic", "group": 32}, "has no groups"),
    "odd group": ({"preset": "w4a16", "group": 33}, "not a multiple of 8"),
    "no device": ({"preset": "w4a16", "device": "cuda:99"}, "cannot be used"),
    "bad device": ({"preset": "w4a16", "device": "gpu"}, "device 'gpu' cannot be used"),
    "no recipe": ({"recipe": "gone.toml"}, "cannot read gone.toml"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(llama: Path, tmp_path: Path, name: str) -> None:
    options, message = REFUSALS[name]
    with pytest.raises(QuantryError, match=message):
        quantry.quantize(llama, tmp_path / "out", **options)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["llama"]


def test_bad_recipes(llama: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    for text, message in {
        "preset = 3": "preset is '3', not a name",
        'preset = "w4a16"\nrulez = 1': "unknown key 'rulez'",
        'preset = "w4a16"\n[[rules]]\nmatch = "x"': "not have exactly one of preset, type and keep",
        'preset = "w4a16"\n[[rules]]\nmatch = "*.q_proj"\npreset = "w8a16"': "are fused by engines but get different presets",
        "nonsense": "is not TOML",
        'preset = "w4a16"\n[[rules]]\nmatch = "*"\nkeep = true': "no layer of",
    }.items():
        recipe.write_text(text)
        with pytest.raises(QuantryError, match=message):
            quantry.quantize(llama, tmp_path / "out", recipe=recipe)


def test_output_faults(llama: Path, tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine.txt").write_text("precious")
    with pytest.raises(QuantryError, match="not an empty folder"):
        quantry.quantize(llama, full, preset="w4a16")
    with pytest.raises(QuantryError, match="is a GGUF file"):
        quantry.quantize(gguf_file, tmp_path / "out", preset="w4a16")
    quantry.quantize(llama, tmp_path / "out", preset="w4a16")
    with pytest.raises(QuantryError, match="already quantized .compressed-tensors.*convert"):
        quantry.quantize(tmp_path / "out", tmp_path / "twice", preset="w4a16")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(QuantryError, match="bytes are needed in .* and 1,000 are free"):
        quantry.quantize(llama, tmp_path / "small", preset="w4a16")
    assert not list(tmp_path.glob("small*"))


def test_a_disk_that_fills_up(llama: Path, tmp_path: Path) -> None:
    """A real full disk, not a guess beforehand: the job ends with one line and can be taken up again."""
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
    limit += "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    code = limit + "from quantry.cli import main; main()"
    words = [sys.executable, "-c", code, "quantize", str(llama), "-o", str(tmp_path / "out"), "--preset", "w8a8"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert "File too large" in done.stderr
    assert not (tmp_path / "out").exists()
    quantry.quantize(llama, tmp_path / "out", preset="w8a8")


def test_unwritable_output(llama: Path) -> None:
    done = run("quantize", str(llama), "-o", "/proc/quantry", "--preset", "w4a16")
    assert done.returncode == 2
    assert "/proc" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_command(llama: Path, tmp_path: Path) -> None:
    done = run("quantize", str(llama), "-o", str(tmp_path / "out"), "--preset", "fp8-dynamic", "--json", "--no-report")
    assert done.returncode == 0, done.stderr
    artefact = json.loads(done.stdout)
    assert set(artefact) == {
        "source", "path", "preset", "format", "parameters", "source_bytes", "bytes", "bits_per_weight",
        "quantized_layers", "kept_tensors", "files", "notes", "expert_tokens",
    }  # fmt: skip
    dry = run("quantize", str(llama), "-o", str(tmp_path / "dry"), "--preset", "w4a16", "--dry-run")
    assert dry.returncode == 0
    assert "14 layers quantized" in dry.stdout
    assert "w4a16" in run("presets").stdout
    listed = json.loads(run("presets", "--json").stdout)
    assert {row["name"] for row in listed} == set(presets())


@pytest.mark.parametrize(
    ("family", "shapes", "message"),
    [
        ("gpt2", {"transformer.h.0.attn.c_attn.weight": (256, 768)}, "gpt2 keeps its linear weights transposed"),
        ("gpt_oss", {"model.layers.0.mlp.experts.gate_up_proj": (2, 256, 512)}, "gpt_oss interleaves gate and up rows"),
        ("qwen3_moe", {"model.layers.0.mlp.experts.down_proj": (2, 256, 256)}, "does not tell rows from columns"),
    ],
)
def test_layouts_that_are_not_supported(
    tmp_path: Path, family: str, shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    model = write_model(tmp_path / "model", {**CONFIG, "model_type": family}, {"model.norm.weight": (256,), **shapes})
    with pytest.raises(QuantryError, match=message):
        quantry.quantize(model, tmp_path / "out", preset="w4a16")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_what_engines_fuse() -> None:
    names = {
        "model.layers.0.self_attn.k_proj": "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.kv_a_proj_with_mqa": "model.layers.0.self_attn.q_a_proj+kv_a_proj_with_mqa",
        "model.layers.0.self_attn.o_proj": "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.experts.7.up_proj": "model.layers.0.mlp.experts.7.gate_proj+up_proj",
        "model.layers.0.block_sparse_moe.experts.7.w3": "model.layers.0.block_sparse_moe.experts.7.w1+w3",
    }
    assert {name: fused_name(name) for name in names} == names
    assert (
        shared_name(names["model.layers.0.mlp.experts.7.up_proj"]) == "model.layers.0.mlp.experts.*.gate_proj+up_proj"
    )
    assert shared_name(names["model.layers.0.self_attn.o_proj"]) == "model.layers.0.self_attn.o_proj"


def test_a_device_without_room_is_named(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, and what is written so far stays for the next run."""
    whole = LayerMaker.make
    calls: list[Piece] = []

    def short(self: LayerMaker, piece: Piece, known: BlockInputs) -> Iterator[tuple[str, torch.Tensor]]:
        calls.append(piece)
        if len(calls) == 9:
            raise torch.OutOfMemoryError("no room")
        yield from whole(self, piece, known)

    monkeypatch.setattr(LayerMaker, "make", short)
    with pytest.raises(QuantryError, match=r"the device has no room for model\..*--device cpu"):
        quantry.quantize(llama, tmp_path / "out", preset="w4a16")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(LayerMaker, "make", whole)
    quantry.quantize(llama, tmp_path / "out", preset="w4a16")
    quantry.quantize(llama, tmp_path / "again", preset="w4a16")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")

"""Reports of artefacts: what quantry.json, sensitivity.json and the headers tell, and that the page has it."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import quantry
from depth import deep
from quantry.devices.catalogue import parse
from quantry.errors import QuantryError
from quantry.jobs import artefact_report as reporting
from quantry.jobs.artefact_card import ArtefactCard
from quantry.jobs.artefact_maps import bits_map
from quantry.jobs.auto.sensitivity import LayerSensitivity, MeasuredChoice, Sensitivity
from quantry.models.reader import open_checkpoint
from quantry.report import Content, FileRow
from shared import shared

DESKTOP = parse("cpu").device
CARD = parse("RTX 3060").device
MIXED = """
preset = "gguf-q4_k_m"
[[rules]]
match = "blk.0.*"
type = "Q6_K"
[[rules]]
match = "blk.1.ffn_down.weight"
type = "Q2_K"
"""
BITS = {"Q2_K": 84 * 8 / 256, "Q4_K": 144 * 8 / 256, "Q6_K": 210 * 8 / 256, "Q8_0": 34 * 8 / 32}  # of ggml's blocks
PROOF: dict[str, Any] = {
    "reference": "demo",
    "gate": "general",
    "verdict": "fail",
    "kl": 0.016,
    "top1": 0.93,
    "perplexity": 5.9,
    "reference_perplexity": 5.8,
    "noise_floor": 0.0002,
    "intervals": {"kl": [0.014, 0.023], "top1": [0.88, 0.95], "perplexity": [5.2, 8.0]},
    "served": {
        "engine": "llama.cpp", "version": "b1", "kl": 0.0175, "top1": 0.92, "perplexity": 5.95,
        "intervals": {"kl": [0.015, 0.024], "top1": [0.87, 0.94], "perplexity": [5.3, 8.1]},
    },
    "findings": [{"name": "top1", "ok": False, "warning": False, "words": "92 % is below 99 %", "fix": "use more bits"}],
    "text": {"name": "held-out.txt", "windows": 4, "length": 512, "positions": 2044},
    "memory": {"predicted": {"weights": 4653056}, "measured": {"weights": 4540334, "compute": 12079596}},
    "notes": ["measured on simple stories"],
}  # fmt: skip


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model in four formats, none of them proved."""

    def make(home: Path) -> None:
        (home / "mixed.toml").write_text(MIXED)
        quantry.quantize("demo", home / "mixed", recipe=home / "mixed.toml")
        quantry.quantize("demo", home / "packed", preset="w4a16", group=64)
        quantry.quantize("demo", home / "nf4", preset="nf4")
        quantry.quantize("demo", home / "plain", preset="bf16")

    return shared(tmp_path_factory, "reported", make)


@pytest.fixture
def changed(artefacts: Path, tmp_path: Path) -> Path:
    """A copy of the mixed one, to change."""
    return Path(shutil.copytree(artefacts / "mixed", tmp_path / "copy"))


def card(folder: Path, **changes: Any) -> dict[str, Any]:
    """The content of quantry.json, written anew with changes."""
    content: dict[str, Any] = {**json.loads((folder / "quantry.json").read_text()), **changes}
    (folder / "quantry.json").write_text(json.dumps(content))
    return content


def a_sensitivity(folder: Path) -> Sensitivity:
    """Of every matrix of a GGUF file, with damages that can be told apart."""
    tensors = [one for one in open_checkpoint(folder).tensors if len(one.shape) == 2]
    layers = []
    for at, tensor in enumerate(tensors):
        block = int(tensor.name.split(".")[1]) if tensor.name.startswith("blk.") else None
        part = tensor.name.removesuffix(".weight").rpartition(".")[2]
        ways = tuple(
            MeasuredChoice(kind, tensor.numel, damage * (at + 1), 0.1, {"type": kind})
            for kind, damage in (("Q8_0", 1e-6), ("Q4_K", 1e-3), ("Q2_K", 1e-2))
        )
        outliers = None if block is None else 3.0 + at
        layers.append(LayerSensitivity(tensor.name, part, block, (tensor.name,), tensor.numel, outliers, ways))
    return Sensitivity(
        source="demo",
        format="gguf",
        rounder="gptq",
        transform=None,
        parameters=7344384,
        text={"name": "t"},
        layers=tuple(layers),
        kept={},
    )


def as_auto(folder: Path) -> Sensitivity:
    """Makes an artefact one that a budget has chosen."""
    found = a_sensitivity(folder)
    (folder / "sensitivity.json").write_text(json.dumps(found.to_dict()))
    content = card(folder, preset="auto")
    rules = [{"match": layer.name, "preset": None, "type": "Q4_K"} for layer in found.layers]
    card(folder, recipe={**content["recipe"], "budget": "4.5bpw", "rules": rules})
    return found


def row_of(content: dict[str, Any]) -> FileRow:
    return reporting.row(ArtefactCard(content))


def test_a_row_without_a_proof(artefacts: Path) -> None:
    content = json.loads((artefacts / "packed" / "quantry.json").read_text())
    row = row_of(content)
    assert row.name == "w4a16 g64"
    assert row.bytes == content["bytes"]  # of the tensors, as in the card and in a sweep
    assert f"{content['bytes']:,} bytes" in (artefacts / "packed" / "README.md").read_text()
    assert row.bits_per_weight == content["bits_per_weight"]
    assert row.judged is row.top1 is row.perplexity is None


def test_a_row_with_a_proof(changed: Path) -> None:
    row = row_of(card(changed, proof=PROOF))
    assert (row.kl, row.kl_interval) == (0.016, (0.014, 0.023))
    assert (row.judged, row.judged_interval) == (0.0175, (0.015, 0.024))
    assert (row.top1, row.top1_interval) == (0.92, (0.87, 0.94))  # the engine's, as the gate has them
    assert (row.perplexity, row.perplexity_interval) == (5.95, (5.3, 8.1))
    decoded = row_of(card(changed, proof={**PROOF, "served": None}))
    assert (decoded.judged, decoded.top1, decoded.perplexity) == (0.016, 0.93, 5.9)


def test_a_model_that_broke_has_a_row_all_the_same(changed: Path) -> None:
    proof = {**PROOF, "served": None, "perplexity": float("inf"), "kl": float("nan")}
    card(changed, proof=proof)
    content = reporting.content_of(changed, DESKTOP)
    assert content.verdict == "fail"
    assert (content.rows[0].kl, content.rows[0].kl_interval, content.rows[0].perplexity) == (None, None, None)
    assert content.rows[0].top1 == 0.93


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ({}, "gguf-q4_k_m with rules"),
        ({"rules": []}, "gguf-q4_k_m"),
        ({"rules": [], "imatrix": "ab" * 32}, "gguf-q4_k_m imatrix"),
        ({"rules": [], "kv": "int8"}, "gguf-q4_k_m kv int8"),
        ({"budget": "4.5bpw"}, "gguf-q4_k_m 4.5bpw"),
    ],
)
def test_rows_can_be_told_apart(changed: Path, recipe: dict[str, Any], name: str) -> None:
    content = card(changed)
    assert row_of({**content, "recipe": {**content["recipe"], **recipe}}).name == name


def test_another_rounder_or_format_is_in_the_name(artefacts: Path) -> None:
    content = json.loads((artefacts / "packed" / "quantry.json").read_text())
    preset = {**content["recipe"]["preset"], "rounder": "gptq"}
    assert row_of({**content, "recipe": {**content["recipe"], "preset": preset}}).name == "w4a16 g64 gptq"
    assert row_of({**content, "format": "gptq"}).name == "w4a16 g64 gptq"


def test_bits_of_gguf_are_those_of_its_types(artefacts: Path) -> None:
    checkpoint = open_checkpoint(artefacts / "mixed")
    found = bits_map(checkpoint)
    assert list(found) == ["ends", *map(str, range(8))]
    cells = {(block, module) for block, row in found.items() for module in row}
    matrices = [tensor for tensor in checkpoint.tensors if len(tensor.shape) == 2]
    assert len(cells) == len(matrices) == 57
    for tensor in matrices:
        *where, module, _ = tensor.name.split(".")
        assert found[where[1] if where else "ends"][module] == pytest.approx(BITS[tensor.dtype])
    assert found["0"]["attn_q"] == BITS["Q6_K"]
    assert found["1"]["ffn_down"] == BITS["Q2_K"]


def test_bits_of_folders_count_scales(artefacts: Path) -> None:
    """4 bits and a bfloat16 scale for 64 weights, and 16 bytes for the shape, as the format has it."""
    found = bits_map(open_checkpoint(artefacts / "packed"))
    assert found["ends"] == {"embed_tokens": 16.0}
    assert set(found["3"]) == {
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    assert found["3"]["mlp.down_proj"] == pytest.approx(4 + 16 / 64 + 16 * 8 / (256 * 768))
    nf4 = bits_map(open_checkpoint(artefacts / "nf4"))
    assert 4.1 < nf4["0"]["mlp.up_proj"] < 4.2
    plain = bits_map(open_checkpoint(artefacts / "plain"))
    assert {value for row in plain.values() for value in row.values()} == {16.0}


def test_all_bits_add_up_to_what_is_stored(artefacts: Path) -> None:
    """Every byte that is no norm is in some cell."""
    from math import prod

    from quantry.models.already_quantized import weights_of

    for name in ("mixed", "packed", "nf4"):
        checkpoint = open_checkpoint(artefacts / name)
        found = bits_map(checkpoint)
        sizes = {"embed_tokens": (4096, 256), "token_embd": (4096, 256), **SHAPES}
        total = sum(bits * prod(sizes[module]) / 8 for row in found.values() for module, bits in row.items())
        norms = sum(one.nbytes for one in checkpoint.tensors if "norm" in one.name)
        assert total + norms == pytest.approx(sum(one.nbytes for one in checkpoint.tensors))
        assert sum(weights_of(checkpoint, one) for one in checkpoint.tensors) == 7344384


SHAPES = {
    "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
    "ffn_gate": (768, 256), "ffn_up": (768, 256), "ffn_down": (256, 768),
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
    "self_attn.o_proj": (256, 256), "mlp.gate_proj": (768, 256), "mlp.up_proj": (768, 256), "mlp.down_proj": (256, 768),
}  # fmt: skip


def test_layers_that_are_stored_alike_are_one_cell(artefacts: Path) -> None:
    names = [(f"model.layers.2.self_attn.{one}_proj", "2", "self_attn.q+k+v") for one in "qkv"]
    found = bits_map(open_checkpoint(artefacts / "packed"), names)
    assert set(found["2"]) & {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"} == set()
    assert found["2"]["self_attn.q+k+v"] == pytest.approx(4 + 16 / 64 + 3 * 16 * 8 / (512 * 256))
    assert "self_attn.q_proj" in found["1"]


def test_a_mixture_has_its_maps(changed: Path) -> None:
    found = as_auto(changed)
    content = reporting.content_of(changed, DESKTOP)
    assert content.title == "demo, auto 4.5bpw"
    for layer in found.layers:
        block = "ends" if layer.block is None else str(layer.block)
        assert content.sensitivity[block][layer.part] == layer.candidates[1].damage  # at about 4 bits
        assert content.outliers.get(block, {}).get(layer.part) == layer.outliers
        assert layer.part in content.bits[block]
    assert "ends" not in content.outliers
    assert content.provenance["recipe"]["rules"] == {"Q4_K": "57 layers"}
    assert content.provenance["recipe"]["budget"] == "4.5bpw"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("mixed", "llama-server --model mixed/demo-Q4_K_M.gguf --host"),
        ("packed", "python -m vllm.entrypoints.openai.api_server --model packed --host"),
        ("nf4", "transformers serve nf4 --host"),
        ("plain", "--model plain --host"),
    ],
)
def test_the_command_names_what_is_there(artefacts: Path, name: str, command: str) -> None:
    content = reporting.content_of(artefacts / name, DESKTOP)
    assert command in content.engine_command
    assert content.serve.startswith(f"quantry serve {name} --engine ")
    assert str(artefacts) not in content.to_json()
    assert content.engine_command.split("--port")[0] in reporting.content_of(artefacts / name).engine_command


def test_on_a_gpu(artefacts: Path) -> None:
    assert "--n-gpu-layers 999" in reporting.content_of(artefacts / "mixed", CARD).engine_command
    content = reporting.content_of(artefacts / "packed", CARD)
    assert content.engine_command.startswith("vllm serve packed --host")
    assert content.memory is not None
    assert content.memory.device == "RTX 3060 12GB"


def test_memory_before_a_proof_is_predicted(artefacts: Path) -> None:
    from quantry.planning.deployment import Deployment
    from quantry.planning.memory.footprint import footprint
    from quantry.types import Workload

    content = reporting.content_of(artefacts / "mixed", DESKTOP)
    assert content.memory is not None
    planned = Deployment(open_checkpoint("demo"), quantry_recipe(artefacts / "mixed"), "llama.cpp", DESKTOP)
    needed = footprint(planned, Workload(1024))  # before it was made; the model takes 1024 tokens
    assert content.memory.predicted["weights"] == needed.weights
    assert content.memory.predicted["kv_cache"] == needed.kv_cache
    assert not content.memory.measured
    assert content.memory.capacity is None  # 100 MiB beside 29 GiB is nothing to draw
    assert any("28.8 GiB" in note for note in content.notes)
    small = reporting.content_of(artefacts / "mixed", replace(DESKTOP, usable=200 << 20))
    assert small.memory is not None
    assert small.memory.capacity == 200 << 20


def quantry_recipe(folder: Path) -> Any:
    from quantry.quantizing.recipe_file import from_card

    return from_card(json.loads((folder / "quantry.json").read_text()))


def test_a_proof_is_told(changed: Path) -> None:
    card(changed, proof=PROOF)
    content = reporting.content_of(changed, DESKTOP)
    assert (content.gate, content.verdict, content.noise_floor) == ("general", "fail", 0.0002)
    assert content.reference_perplexity == 5.8
    assert content.findings == tuple(PROOF["findings"])
    assert content.memory is not None
    assert content.memory.measured == PROOF["memory"]["measured"]
    assert content.versions["llama.cpp"] == "b1"
    assert "measured on simple stories" in content.notes
    assert content.provenance["proof"]["text"]["name"] == "held-out.txt"
    (told,) = content.provenance["files"].values()
    assert sha256((changed / "demo-Q4_K_M.gguf").read_bytes()).hexdigest() in told


def test_a_proof_in_vllm(artefacts: Path, tmp_path: Path) -> None:
    """A proof has the engine's name as people write it."""
    folder = Path(shutil.copytree(artefacts / "packed", tmp_path / "packed"))
    card(folder, proof={**PROOF, "served": {**PROOF["served"], "engine": "vLLM"}})
    content = reporting.content_of(folder, DESKTOP)
    assert "vllm.entrypoints.openai.api_server --model packed" in content.engine_command
    assert content.versions["vLLM"] == "b1"


def test_the_same_folder_gives_the_same_bytes_elsewhere(changed: Path, tmp_path: Path) -> None:
    as_auto(changed)
    page = reporting.write(changed, reporting.content_of(changed))
    assert page == changed / "report.html"
    assert sorted(file.name for file in changed.iterdir() if "report" in file.name) == ["report.html", "report.png"]
    other = Path(shutil.copytree(changed, tmp_path / "elsewhere" / "copy"))
    reporting.write(other, reporting.content_of(other))
    assert_same_reports(changed, other)
    text = page.read_text()
    assert str(tmp_path) not in text
    for name in ("bits", "sensitivity", "outliers", "memory"):
        assert f'<figure id="{name}">' in text


@deep
def test_another_process_gives_the_same_bytes(changed: Path, tmp_path: Path) -> None:
    as_auto(changed)
    other = Path(shutil.copytree(changed, tmp_path / "elsewhere" / "copy"))
    reporting.write(changed, reporting.content_of(changed))
    script = "import sys; from pathlib import Path; from quantry.jobs import artefact_report as r; p = Path(sys.argv[1]); r.write(p, r.content_of(p))"
    subprocess.run([sys.executable, "-c", script, str(other)], check=True)
    assert_same_reports(changed, other)


def assert_same_reports(folder: Path, other: Path) -> None:
    for name in ("report.html", "report.png"):
        assert (other / name).read_bytes() == (folder / name).read_bytes()


def test_importing_costs_little() -> None:
    script = "import sys, quantry.jobs.artefact_report; print(*(one for one in ('torch', 'matplotlib', 'transformers') if one in sys.modules))"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


def refused(folder: Path) -> str:
    with pytest.raises(QuantryError) as error:
        reporting.content_of(folder, DESKTOP)
    assert "\n" not in str(error.value)
    assert not list(folder.glob("report*"))
    return str(error.value)


def test_a_folder_of_another_tool(changed: Path) -> None:
    (changed / "quantry.json").unlink()
    assert "has no quantry.json" in refused(changed)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, '"x"', "\udcff"])
def test_a_card_that_is_none(changed: Path, text: str) -> None:
    (changed / "quantry.json").write_bytes(text.encode(errors="surrogateescape"))
    assert "quantry.json" in refused(changed)


@pytest.mark.parametrize(
    "changes",
    [
        {"preset": None}, {"preset": 4}, {"recipe": None}, {"recipe": {"preset": "w4a16"}}, {"recipe": {"preset": {}}},
        {"files": {"a": 3}}, {"files": {}, "bytes": None}, {"files": [1]}, {"parameters": "7"}, {"source": None},
        {"format": None}, {"format": "com_ressed"}, {"proof": [1]}, {"proof": {"findings": 3}}, {"proof": {"findings": [3]}},
        {"proof": {"prompts": 3}}, {"proof": {"prompts": {"agreement": 1}}}, {"proof": {"prompts": {"agreement": {"value": 1}}}},
        {"proof": {"verdict": "maybe"}}, {"proof": {"served": 3}}, {"proof": {"memory": [3]}}, {"versions": 3}, {"notes": 3},
        {"proof": {"notes": 3}}, {"proof": {"text": 3, "memory": {"measured": {"weights": 1}}}}, {"proof": {"kl": 0.1, "intervals": 3}},
        {"proof": {"kl": 0.1, "intervals": {"kl": 3}}},
        {"proof": {"memory": {"measured": 3}}}, {"proof": {"served": {"engine": "steam", "kl": 1.0}}},
    ],
    ids=str,
)  # fmt: skip
def test_a_card_with_odd_fields(changed: Path, changes: dict[str, Any]) -> None:
    card(changed, **changes)
    assert refused(changed)


@pytest.mark.parametrize("text", ["{", "{}", '{"layers": 3}', '{"layers": [{}]}', '{"layers": [3], "notes": []}'])
def test_a_sensitivity_that_is_none(changed: Path, text: str) -> None:
    (changed / "sensitivity.json").write_text(text)
    assert "sensitivity.json" in refused(changed)


def test_a_preset_that_is_not_known_here(changed: Path) -> None:
    content = card(changed)
    told = {**content["recipe"]["preset"], "name": "from-the-future"}
    card(changed, preset="from-the-future", recipe={**content["recipe"], "preset": told})
    found = reporting.content_of(changed, DESKTOP)
    assert (found.rows[0].name, found.engine_command) == ("from-the-future", "")


def test_nothing_is_half_written(changed: Path) -> None:
    (changed / "report.png").mkdir()
    with pytest.raises(QuantryError, match="cannot write .*--no-report"):
        reporting.write(changed, Content("t", bits={"0": {"q": 4.0}}))
    assert not (changed / "report.html").exists()

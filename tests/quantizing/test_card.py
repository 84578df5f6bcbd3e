"""The proof in quantry.json and in the model card: added, replaced, and nothing else changed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

import quantry
from quantry.errors import OutputError
from quantry.models.reader import demo_folder
from quantry.quantizing.card import SECTION, proven_files
from quantry.storage import write_together

PROOF: dict[str, Any] = {
    "reference": "model",
    "gate": "general",
    "verdict": "pass",
    "kl": 0.01671,
    "kl_median": 0.0061,
    "kl_p99": 0.119,
    "top1": 0.925,
    "perplexity": 7.128,
    "reference_perplexity": 7.026,
    "noise_floor": 0.00012,
    "intervals": {"kl": (0.0151, 0.0182)},
    "served": {"engine": "llama.cpp", "version": "b9000", "kl": 0.0171, "top1": 0.921, "perplexity": 7.131},
    "memory": {"predicted": {"weights": 5_000_000, "kv_cache": 1_048_576}, "measured": {"weights": 5_012_345}},
    "text": {"name": "held-out.txt", "positions": 4080},
    "findings": [{"words": "fine", "ok": True}, {"words": "agreement is low", "ok": False}],
}


def record_proof(folder: Path, proof: dict[str, Any]) -> None:
    write_together(proven_files(folder, proof))


@pytest.fixture
def artefact(tmp_path: Path) -> Path:
    quantry.quantize("demo", tmp_path / "out", preset="w8a8")
    return tmp_path / "out"


def test_proof_is_added_and_nothing_else_changes(artefact: Path) -> None:
    note, card = (artefact / "quantry.json").read_text(), (artefact / "README.md").read_text()
    record_proof(artefact, PROOF)
    content = json.loads((artefact / "quantry.json").read_text())
    proof = content.pop("proof")
    assert json.dumps(content, indent=2) + "\n" == note
    assert proof == json.loads(json.dumps(PROOF))
    text = (artefact / "README.md").read_text()
    begin, end = SECTION
    assert text.partition(begin)[0] == card.partition(begin)[0]
    assert text.partition(end)[2] == card.partition(end)[2]
    assert "Nothing yet" in card
    assert "Nothing yet" not in text


def test_what_the_card_says(artefact: Path) -> None:
    record_proof(artefact, PROOF)
    text = (artefact / "README.md").read_text()
    for line in (
        "Passes the gate *general*, compared with model on held-out.txt (4,080 positions).",
        "| | decoded | served by llama.cpp b9000 |",
        "| mean KL divergence | 0.0167 (0.0151 to 0.0182) | 0.0171 |",
        "| median KL divergence | 0.0061 | - |",
        "| same first token | 92.5% | 92.1% |",
        "| memory, bytes | predicted | measured |",
        "| weights | 5,000,000 | 5,012,345 |",
        "| kv cache | 1,048,576 | - |",
        "- agreement is low",
    ):
        assert line in text.splitlines(), line
    assert "fine" not in text


def test_without_an_engine(artefact: Path) -> None:
    record_proof(artefact, {**PROOF, "served": None, "memory": None, "verdict": "fail"})
    text = (artefact / "README.md").read_text()
    assert "**Fails** the gate" in text
    assert "| | decoded |\n|---|---|\n" in text
    assert "predicted" not in text


def test_a_second_proof_takes_the_place_of_the_first(artefact: Path) -> None:
    record_proof(artefact, PROOF)
    first = [(artefact / name).read_bytes() for name in ("quantry.json", "README.md")]
    record_proof(artefact, {**PROOF, "gate": r"draft \1", "verdict": "fail"})
    text = (artefact / "README.md").read_text()
    assert text.count("## What was measured") == 1
    assert r"*draft \1*" in text
    record_proof(artefact, PROOF)
    assert [(artefact / name).read_bytes() for name in ("quantry.json", "README.md")] == first
    assert not list(artefact.glob("*.partial"))


def test_text_after_the_section_stays(artefact: Path) -> None:
    record_proof(artefact, PROOF)
    card = artefact / "README.md"
    card.write_text(card.read_text() + "\nMy own words.\n")
    record_proof(artefact, {**PROOF, "verdict": "fail"})
    assert "<!-- end of proof -->\n\n`quantry.json` has" in card.read_text()
    assert card.read_text().endswith("\nMy own words.\n")


def test_another_tools_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("theirs")
    assert not proven_files(tmp_path, PROOF)
    assert (tmp_path / "README.md").read_text() == "theirs"
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_damaged_notes(artefact: Path) -> None:
    card = (artefact / "README.md").read_bytes()
    (artefact / "quantry.json").write_text("{")
    with pytest.raises(OutputError, match="not JSON"):
        record_proof(artefact, PROOF)
    assert (artefact / "README.md").read_bytes() == card


def test_a_card_that_is_gone_is_written_anew(artefact: Path) -> None:
    (artefact / "README.md").unlink()
    record_proof(artefact, PROOF)
    assert (artefact / "README.md").read_text().startswith("<!-- proof -->\n## What was measured")


def head(folder: Path) -> dict[str, Any]:
    """The head of a card as the hub's own library reads it."""
    return dict(ModelCard.load(folder / "README.md").data.to_dict())


def test_the_head_is_what_the_hub_reads(artefact: Path, tmp_path: Path) -> None:
    assert head(artefact) == {
        "license": "apache-2.0",  # of the demo's own card
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", "quantry", "w8a8", "compressed-tensors", "vllm"],
    }
    quantry.quantize("demo", tmp_path / "gguf", preset="gguf-q8_0")
    assert head(tmp_path / "gguf") == {
        "license": "apache-2.0",
        "library_name": "gguf",
        "pipeline_tag": "text-generation",
        "tags": ["quantized", "quantry", "gguf-q8_0", "gguf"],
    }
    text = (tmp_path / "gguf" / "README.md").read_text()
    assert "\nquantry serve .\nllama-server --model demo-Q8_0.gguf" in text
    assert "\nquantry serve .\nvllm serve . " in (artefact / "README.md").read_text()
    assert "add `base_model: OWNER/NAME`" in text


def test_a_model_of_the_hub_is_the_base_of_all_that_is_made_of_it(tmp_path: Path) -> None:
    source = tmp_path / "models--acme--Small-7B" / "snapshots" / "0123abc"
    shutil.copytree(demo_folder(), source)
    (source / "README.md").write_text(
        "---\nlicense: other\nlicense_name: acme\nlicense_link: a: b\n  c\n---\n# Small\n"
    )
    quantry.quantize(source, tmp_path / "gptq", preset="w4a16", group=64, format="gptq")
    made = head(tmp_path / "gptq")
    assert (made["base_model"], made["base_model_relation"]) == ("acme/Small-7B", "quantized")
    assert "license" not in made  # the head of the source cannot be read
    assert "add `license:` of the base model" in (tmp_path / "gptq" / "README.md").read_text()
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: acme\n---\n# Small\n")
    quantry.quantize(source, tmp_path / "q8", preset="gguf-q8_0")
    assert {"license": "other", "license_name": "acme"}.items() <= head(tmp_path / "q8").items()
    quantry.convert(tmp_path / "gptq", tmp_path / "ct", to="compressed-tensors")
    assert head(tmp_path / "ct")["base_model"] == "acme/Small-7B"
    quantry.convert(tmp_path / "gptq", tmp_path / "bf16", to="bf16")
    plain = head(tmp_path / "bf16")
    assert "base_model_relation" not in plain
    assert "quantized" not in plain["tags"]

"""What an artefact loses on each of several texts: figures as on that text alone, one warning where the gate breaks."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import quantry
from command import command
from demo_artefacts import quantized_demo
from quantry.errors import QuantryError
from quantry.models.reader import demo_folder
from quantry.proof.text import TextFile, load_texts, names_of, windows
from quantry.report import ci
from quantry.types import Proof
from shared import recorded, shared

SMALL: dict[str, Any] = {"reference": "demo", "windows": 2, "length": 48}
FIGURES = ("kl", "kl_median", "kl_p99", "top1", "perplexity")
CHATS = [
    [{"role": "user", "content": f"What is {n} and one?"}, {"role": "assistant", "content": f"{n + 1}."}]
    for n in range(80)
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """References, and the texts: chats, code and a story."""

    def write(folder: Path) -> None:
        (folder / "chat.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS))
        code = "\n\n".join(f"def add_{n}(a, b):\n    total = a + b * {n}\n    return total" for n in range(60))
        (folder / "code, own.txt").write_text(code)
        (folder / "story.txt").write_text((demo_folder() / "held-out.txt").read_text()[:4000])

    folder = shared(tmp_path_factory, "domains-cache", write)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUANTRY_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_demo(tmp_path_factory, "gguf-q4_0")


@pytest.fixture(scope="module")
def both(cache: Path, artefact: Path, tmp_path_factory: pytest.TempPathFactory) -> Proof:
    """A proof on chats and code."""
    texts = [cache / "chat.jsonl", cache / "code, own.txt"]
    proof: Proof = recorded(
        tmp_path_factory, "domains", lambda _: quantry.verify(artefact, text=texts, record=False, **SMALL)
    )
    return proof


def test_a_domain_is_what_a_proof_on_its_text_alone_finds(both: Proof, cache: Path, artefact: Path) -> None:
    assert [domain["name"] for domain in both.domains] == ["chat.jsonl", "code, own.txt"]
    for domain in both.domains:
        alone = quantry.verify(artefact, text=cache / domain["name"], record=False, **SMALL)
        assert not alone.domains
        assert {name: domain[name] for name in FIGURES} == {name: getattr(alone, name) for name in FIGURES}
        assert domain["intervals"] == alone.intervals
        assert domain["reference_perplexity"] == alone.reference_perplexity
        assert (domain["windows"], domain["positions"]) == (alone.text["windows"], alone.text["positions"])
        assert alone.served is not None
        assert domain["served"] == {name: alone.served[name] for name in (*FIGURES, "intervals")}
    assert both.text["windows"] == sum(domain["windows"] for domain in both.domains) == 4
    positions = [domain["positions"] for domain in both.domains]
    means = [domain["kl"] * count for domain, count in zip(both.domains, positions, strict=True)]
    assert both.kl == pytest.approx(sum(means) / sum(positions), rel=1e-12)


def test_json_names_are_frozen(both: Proof) -> None:
    names = {"name", "windows", "positions", "verdict", "reference_perplexity", "served", "intervals", *FIGURES}
    assert all(set(domain) == names for domain in both.domains)


def test_a_domain_worse_than_the_gate_is_one_warning(both: Proof, cache: Path, artefact: Path, tmp_path: Path) -> None:
    """The verdict is on all windows: code alone is worse, and is said to be."""
    chat, code = both.domains
    limit = both.kl * 1.01
    assert chat["served"]["kl"] < limit < code["served"]["kl"]
    out = shutil.copytree(artefact, tmp_path / "out")
    texts = f"{cache / 'chat.jsonl'},{cache / 'code, own.txt'}"
    words = ["--reference", "demo", "--text", texts, "--windows", "2", "--length", "48", "--max-kl", str(limit)]
    others = ["--min-top1", "0", "--max-perplexity-ratio", "9", "--markdown", str(tmp_path / "summary.md")]
    done = command("verify", out, *words, *others)
    assert done.returncode == 0, done.stdout
    warnings = [line for line in done.stdout.splitlines() if line.startswith("! domain")]
    assert len(warnings) == 1
    assert "code, own.txt alone is worse than the gate: " in warnings[0]
    assert "chat.jsonl" in done.stdout
    content = json.loads((out / "quantry.json").read_text())["proof"]
    assert content["verdict"] == "pass"
    assert [domain["verdict"] for domain in content["domains"]] == ["pass", "fail"]
    assert [row["ok"] for row in content["findings"] if row["name"] == "domain"] == [True, False]
    for page in ((out / "README.md").read_text(), (tmp_path / "summary.md").read_text()):
        assert "| text | mean KL | same first token | perplexity | in 16 bit | gate |" in page
        assert page.count("| worse |") == 1
    shown = (out / "report.html").read_text()
    assert "On each text" in shown
    assert "<td>worse</td>" in shown


def test_a_proof_without_domains_shows_none(both: Proof) -> None:
    assert "| gate |" not in ci.markdown(Proof(**{**both.to_dict(), "domains": ()}))
    assert "domain (code, own.txt)" in ci.junit(both).decode()


def test_little_time_still_measures_each_text(cache: Path, artefact: Path) -> None:
    texts = [cache / name for name in ("chat.jsonl", "code, own.txt", "story.txt")]
    proof = quantry.verify(artefact, text=texts, record=False, proof_time=0.001, **SMALL)
    assert [domain["windows"] for domain in proof.domains] == [1, 1, 1]


def test_texts_that_are_named(cache: Path, tmp_path: Path) -> None:
    chat, code = cache / "chat.jsonl", cache / "code, own.txt"
    lists: tuple[Any, ...] = (f"{chat},{code}", [chat, str(code)], (str(chat), code))
    for given in lists:
        assert [text.file for text in load_texts(given)] == [chat, code]
    assert [text.file for text in load_texts(str(code))] == [code]
    shutil.copy(chat, tmp_path / "chat.jsonl")
    twins = load_texts([chat, tmp_path / "chat.jsonl"])
    assert names_of(twins) == (f"{cache.name}/chat.jsonl", f"{tmp_path.name}/chat.jsonl")
    for wrong, words in ((f"{chat},{chat}", "is given twice"), ([], "no text is given"), (f"{chat},", "not a file")):
        with pytest.raises(QuantryError, match=words):
            load_texts(wrong)
    done = command("verify", tmp_path, "--text", f"{chat},{tmp_path / 'none.txt'}")
    assert (done.returncode, "none.txt does not exist" in done.stderr) == (2, True)


def test_chats_are_measured_in_the_chat_template(cache: Path) -> None:
    """Against a plain restatement: rendered chats, joined, cut."""
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    stream: list[int] = []
    for chat in CHATS:
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        stream += ids[1:] if ids[0] == tokenizer.bos_token_id else ids
    found = windows(TextFile(cache / "chat.jsonl"), tokenizer, 48, 3)
    assert [list(window.tokens) for window in found] == [
        [tokenizer.bos_token_id, *stream[47 * place : 47 * place + 47]] for place in range(3)
    ]

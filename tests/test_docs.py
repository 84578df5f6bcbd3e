"""The documentation is true: its commands run, its generated pages are current, its links lead somewhere."""

import json
import pkgutil
import re
import shlex
from pathlib import Path
from string import Template

import make_pages
import make_pictures
import pytest
import yaml

import quantry
from command import command
from depth import deep

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^quantry .+$", README, re.MULTILINE)
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/**/*.md") for page in ROOT.glob(pattern)
)
TRIED = [  # the commands of these pages that name the demo run as they stand
    page for folder in ("quickstart", "how-to") for page in sorted((ROOT / "docs" / folder).glob("*.md"))
]
WORKFLOW = ROOT / "examples/ci/quantize-and-verify.yml"
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
FEW = {"run": ["--windows", "2"], "verify": ["--windows", "2"], "diff": ["--windows", "2"], "sweep": ["--windows", "2"]}


def test_readme_commands_run(in_empty_folder: None) -> None:
    """As a user would, but for the hub, which is out of reach, and for what goes on serving (tests/jobs/test_run.py)."""
    for line in COMMANDS:
        words = shlex.split(line, comments=True)[1:]
        if "owner/name" not in words:
            done = command(*words, "--no-serve", *FEW[words[0]])
            assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.fixture
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANTRY_CACHE", str(tmp_path / "cache"))


def test_readme_has_commands() -> None:
    assert COMMANDS
    assert "make demo" in README
    assert "make test" in README


def test_generated_pages_are_current() -> None:
    assert not make_pages.stale().keys(), "run make docs"


def test_every_room_says_what_it_holds() -> None:
    """The table of rooms has a sentence for each package and module of Quantry."""
    page = (ROOT / "docs/explanation/architecture.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \d \| `(\w+)` \| (.+) \|$", page, re.MULTILINE))
    assert rows.keys() == {module.name for module in pkgutil.iter_modules(quantry.__path__)} - {"__main__"}
    assert all(text.endswith(".") for text in rows.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page names a file that exists, and every anchor a heading of it."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = target.partition("#")
        if "://" not in target:
            path = page.parent / file if file else page
            assert path.exists(), target
            assert not anchor or anchor in anchors(path), target


def anchors(page: Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_menu() -> None:
    """A page that the site does not list is found by nobody."""
    listed = re.findall(r"^(?:[\w ]+ <)?([a-z0-9/-]+)>?$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages == {*listed, "index"}


def test_pages_and_packaged_files_are_for_users() -> None:
    packaged = [file for kind in ("*.py", "*.toml", "*.css") for file in (ROOT / "src").rglob(kind)]
    assert len(packaged) > 200
    for page in (*PAGES, *packaged):
        assert "handbook" not in page.read_text(encoding="utf-8").lower(), page


def test_what_builds_the_site_is_installed_by_hash() -> None:
    docs = ROOT / "docs"
    versions = re.findall(r"^(\S+==\S+)$", (docs / "constraints.txt").read_text(), re.MULTILINE)
    assert re.findall(r"^(\S+==\S+) ", (docs / "hashes.txt").read_text(), re.MULTILINE) == versions


def test_pictures_are_current() -> None:
    """The plan is made again; outputs with times in them are only known by the sources that decide how they look."""
    kept = json.loads(make_pictures.INPUTS.read_text(encoding="utf-8"))
    assert kept["sha256"] == make_pictures.inputs_hash(), "run make pictures"
    shown = (make_pictures.PICTURES / "plan.txt").read_text(encoding="utf-8").split()
    assert command(*shlex.split(make_pictures.PLAN)[1:]).stdout.split() == shown, "run make pictures"


@pytest.mark.parametrize("picture", ["plan", "report"])
def test_pictures_are_small(picture: str) -> None:
    assert (make_pictures.PICTURES / f"{picture}.png").stat().st_size < 150_000


def test_the_workflow_for_ci_runs(in_empty_folder: None) -> None:
    """Its commands on the demo model; installing and uploading are left out."""
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    values = {**workflow["env"], "MODEL": "demo", "WINDOWS": "2"}
    lines = [step["run"] for step in workflow["jobs"]["verify"]["steps"] if "run" in step]
    for line in filter(re.compile("quantry ").match, lines):
        done = command(*shlex.split(Template(line).substitute(values))[1:])
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert "KL" in Path("summary.md").read_text(encoding="utf-8")


@deep
@pytest.mark.parametrize("page", TRIED, ids=lambda page: page.stem)
def test_commands_of_pages_run(page: Path, in_empty_folder: None) -> None:
    """In the order of the page, in a folder with the files that it speaks of."""
    write_data(page.read_text(encoding="utf-8"))
    for line in pages_commands(page):
        words = shlex.split(line, comments=True)[1:]
        done = command(*words, *(FEW.get(words[0], []) if "--windows" not in words else []), *fewer_samples(words))
        failed_gate = "--gate accuracy-critical" in line
        assert done.returncode == (1 if failed_gate else 0), f"{line}: {done.stderr}"


@deep
@pytest.mark.parametrize("page", ["reference/python.md", "quickstart/platform-team.md"])
def test_python_of_pages_runs(page: str, in_empty_folder: None) -> None:
    """On the artefact that the pages make first."""
    quantry.quantize("demo", "build/demo-q4_k_m", preset="gguf-q4_k_m")
    code = re.findall(r"```python\n(import .+?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(code[0], {})


def fewer_samples(words: list[str]) -> list[str]:
    """Options that make a calibrated job short."""
    calibrated = {"w4a16-gptq", "--imatrix", "--data"} & {*words}
    return ["--samples", "16", "--length", "128"] if calibrated and "--samples" not in words else []


def write_data(page: str) -> None:
    """Writes the recipe of a page, and texts and prompts under the names that pages use."""
    for language, block in FENCE.findall(page):
        if language == "toml":
            Path("recipe.toml").write_text(block, encoding="utf-8")
    stories = (ROOT / "src/quantry/demo/held-out.txt").read_text(encoding="utf-8")
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": stories}]}
    Path("my-chats.jsonl").write_text(f"{json.dumps(chat)}\n" * 8, encoding="utf-8")
    Path("held-out-chats.jsonl").write_text(f"{json.dumps(chat)}\n", encoding="utf-8")
    for text in ("held-out.txt", "my-code.txt"):
        Path(text).write_text(stories, encoding="utf-8")
    Path("eval").mkdir()
    Path("eval/text.txt").write_text(stories, encoding="utf-8")
    prompt = {"prompt": "What color is the sky?", "answer": "blue"}
    Path("eval/prompts.jsonl").write_text(f"{json.dumps(prompt)}\n", encoding="utf-8")


def pages_commands(page: Path) -> list[str]:
    """Returns the commands of a page that need neither the hub, nor a GPU, nor files of other tools."""
    blocks = [block for language, block in FENCE.findall(page.read_text(encoding="utf-8")) if language != "text"]
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip().startswith("quantry ")]
    return [line for line in lines if "demo" in line and "theirs" not in line and not line.startswith("quantry run")]

"""The documentation is true: its commands run, its generated pages are current, its links lead somewhere."""

import pkgutil
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import make_pages
import pytest

import quantry
from command import command
from demo_artefacts import measured_demo
from quantry.serving.process import free_port

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^quantry .+$", README, re.MULTILINE)


def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In the order of the page, in an empty folder: later ones use what earlier ones wrote, or what they serve.

    Those that go on serving are processes; the others run here, which spares the seconds of imports.
    """
    monkeypatch.chdir(tmp_path)
    cache = shutil.copytree(measured_demo(tmp_path_factory), tmp_path / "cache")  # measuring again would take long
    monkeypatch.setenv("QUANTRY_CACHE", str(cache))
    port = str(free_port("127.0.0.1"))
    with ExitStack() as serving:
        for line in COMMANDS:
            words = shlex.split(line.replace("8080", port), comments=True)[1:]
            if words[0] in ("run", "serve"):
                serving.close()
                serving.enter_context(started(words, tmp_path, port))
                continue
            done = command(*words, stdin="Hello!\n" if words[0] == "chat" else "")
            assert done.returncode == 0, f"{line}: {done.stderr}"


@contextmanager
def started(words: list[str], folder: Path, port: str) -> Iterator[None]:
    """A command that goes on serving; it is ended as from a terminal."""
    argv = [sys.executable, "-m", "quantry", *words]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    assert process.stdout
    try:
        said = ""
        while f"127.0.0.1:{port}/v1" not in said or not answers(port):
            said += (line := process.stdout.readline())
            assert line, f"{words} ended: {said}"
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            said, _ = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, said


def answers(port: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.HTTPError:
        return False


def test_readme_python_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.+?)```", README, re.DOTALL):
        exec(code, {})
        assert capsys.readouterr().out


def test_readme_has_commands() -> None:
    assert COMMANDS
    assert "make demo" in README
    assert "make test" in README


def test_generated_pages_are_current() -> None:
    assert not make_pages.stale().keys(), "run make docs"


def test_every_room_says_what_it_holds() -> None:
    """The table of rooms has a sentence for each package and module of Quantry."""
    rows = dict(re.findall(r"^\| \d \| `(\w+)` \| (.+) \|$", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE))
    assert rows.keys() == {module.name for module in pkgutil.iter_modules(quantry.__path__)} - {"__main__"}
    assert all(text.endswith(".") for text in rows.values())


@pytest.mark.parametrize(
    "page",
    [
        page
        for folder in (".", "docs", "benchmarks", "examples/demo-model")
        for page in sorted((ROOT / folder).glob("*.md"))
    ],
    ids=lambda page: page.name,
)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target

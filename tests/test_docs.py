"""The documentation is true: its commands run, its generated pages are current, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^quantry .+$", README, re.MULTILINE)


def test_readme_commands_run(tmp_path: Path) -> None:
    """In the order of the page, in an empty folder: later ones use what earlier ones wrote."""
    for command in COMMANDS:
        words = [sys.executable, "-m", *shlex.split(command)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"


def test_readme_python_runs(tmp_path: Path) -> None:
    for code in re.findall(r"```python\n(.+?)```", README, re.DOTALL):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_readme_has_commands() -> None:
    assert COMMANDS
    assert "make demo" in README
    assert "make test" in README


def test_generated_pages_are_current() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


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

"""What Quantry is installed with: a hash for every file, and a bill of materials of the environment."""

import json
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_version_has_its_hashes() -> None:
    """All but torch: its builds of one version differ by index."""
    versions = re.findall(r"^(\S+==\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    entries = re.split(r"\n(?=\S)", (ROOT / "hashes.txt").read_text().strip())[1:]
    hashed = [entry.split(" ", 1)[0] for entry in entries]
    assert hashed == [line for line in versions if not line.startswith("torch==")]
    assert all(re.fullmatch(r"\S+( \\\n    --hash=sha256:[0-9a-f]{64})+", entry) for entry in entries)


def test_the_bill_of_materials_names_every_package(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bill.json"
    subprocess.run([sys.executable, ROOT / ".ci" / "bill_of_materials.py", file], check=True)
    bill = json.loads(file.read_text())
    assert (bill["bomFormat"], bill["metadata"]["component"]["name"]) == ("CycloneDX", "quantry")
    scopes = {component["name"]: (component["version"], component["scope"]) for component in bill["components"]}
    assert {*scopes} == {each.name for each in distributions()} - {"quantry", "pip", "setuptools"}
    assert scopes["torch"] == (version("torch"), "required")
    assert scopes["pytest"] == (version("pytest"), "optional")
    known = {component["bom-ref"] for component in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    assert all({row["ref"], *row["dependsOn"]} <= known for row in bill["dependencies"])
    assert str(Path.home()) not in file.read_text()

"""Writes a software bill of materials in CycloneDX's JSON: every package of this environment, with version and licence.

    python .ci/bill_of_materials.py dist/quantry.cdx.json

It is made of the metadata that pip has installed. Packages that Quantry itself needs are `required`, those of its
extras and of its development `optional`.
"""

import json
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution, distributions
from pathlib import Path
from typing import Any
from uuid import uuid4

NAME = "quantry"


def main() -> None:
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(bill(), indent=1) + "\n", encoding="utf-8")


def bill() -> dict[str, Any]:
    """Returns the bill of the running environment."""
    found = {_plain(each.name): each for each in distributions()}
    needed = _needed(found)
    own = _component(distribution(NAME), "application")
    others = [each for name, each in sorted(found.items()) if name not in (NAME, "pip", "setuptools")]
    kept = {NAME, *(_plain(each.name) for each in others)}
    scopes = {True: "required", False: "optional"}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid4()}",
        "version": 1,
        "metadata": {"timestamp": datetime.now(UTC).isoformat(timespec="seconds"), "component": own},
        "components": [
            {**_component(each, "library"), "scope": scopes[_plain(each.name) in needed]} for each in others
        ],
        "dependencies": [
            {"ref": _ref(each), "dependsOn": sorted(_ref(found[name]) for name in _requires(each) if name in kept)}
            for each in [distribution(NAME), *others]
        ],
    }


def _component(each: Distribution, kind: str) -> dict[str, Any]:
    content: dict[str, Any] = {"type": kind, "bom-ref": _ref(each), "name": each.name, "version": each.version}
    content["purl"] = _ref(each)
    expressions = each.metadata.get_all("License-Expression") or []
    classes = each.metadata.get_all("Classifier") or []
    named = [line.rpartition(" :: ")[2] for line in classes if line.startswith("License")]
    if expressions:
        content["licenses"] = [{"expression": expressions[0]}]
    elif named:
        content["licenses"] = [{"license": {"name": name}} for name in named]
    return content


def _ref(each: Distribution) -> str:
    return f"pkg:pypi/{_plain(each.name)}@{each.version.replace('+', '%2B')}"


def _requires(each: Distribution) -> set[str]:
    """Returns what a package needs without extras, by name."""
    lines = [line for line in each.requires or [] if not re.search(r";.*\bextra\s*==", line)]
    return {_plain(re.split(r"[\s\[;(<>=!~]", line, maxsplit=1)[0]) for line in lines}


def _needed(found: dict[str, Distribution]) -> set[str]:
    names = [NAME]
    for name in names:
        names += [other for other in _requires(found[name]) if other in found and other not in names]
    return set(names)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main()

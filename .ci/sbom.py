"""What this environment is built from, as a CycloneDX document (JSON, version 1.6).

    python .ci/sbom.py [sbom.json]

A component for each package that is installed: name, version, licence as its author
wrote it, and what it asks for. Standard library alone, so that it adds nothing to what
it lists.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any


def normalise(name: str) -> str:
    """Return a name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def describe(package: Distribution) -> dict[str, Any]:
    """Return the component of a package."""
    name, about = normalise(package.metadata["Name"]), package.metadata
    url = f"pkg:pypi/{name}@{package.version}"
    licence = about.get("License-Expression") or about.get("License") or ""
    told = licence.strip().splitlines()
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": name,
        "version": package.version,
        "purl": url,
    }
    if told:
        found["licenses"] = [{"license": {"name": told[0][:100]}}]
    return found


def find_needs(package: Distribution, known: dict[str, str]) -> list[str]:
    """Return the installed packages that one asks for, extras left out."""
    lines = [x for x in package.requires or () if "extra ==" not in x]
    names = (re.match(r"[\w.-]+", x) for x in lines)
    wanted = {normalise(x[0]) for x in names if x}
    return sorted(known[name] for name in wanted if name in known)


def main() -> None:
    """Write the document."""
    packages = {normalise(x.metadata["Name"]): x for x in distributions()}
    parts = {name: describe(x) for name, x in sorted(packages.items())}
    links = {name: part["bom-ref"] for name, part in parts.items()}
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": parts["regard"]},
        "components": [part for name, part in parts.items() if name != "regard"],
        "dependencies": [
            {"ref": links[name], "dependsOn": find_needs(packages[name], links)}
            for name in parts
        ],
    }
    text = json.dumps(document, indent=1) + "\n"
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The bill of materials: the installed packages that Fleetlight runs with, as CycloneDX JSON.

`python -m release.sbom FILE [EXTRA...]` describes the environment of this interpreter. The file has
no time and no random number, so equal environments result in equal bytes.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = "fleetlight"


def bill(extras: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The bill of Fleetlight with these extras."""
    graph = resolved(ROOT, extras)
    refs = {name: f"pkg:pypi/{name}@{metadata.version(name)}" for name in graph}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(ROOT, refs[ROOT])},
        "components": [component(name, refs[name]) for name in sorted(graph) if name != ROOT],
        "dependencies": [
            {"ref": refs[name], "dependsOn": sorted(refs[needed] for needed in graph[name])}
            for name in sorted(graph)
        ],
    }


def component(name: str, ref: str) -> dict[str, Any]:
    """One package, with its license where its metadata have a short one."""
    about = metadata.metadata(name)
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": ref,
        "name": name,
        "version": about["Version"],
        "purl": ref,
    }
    if expression := about.json.get("license_expression"):
        found["licenses"] = [{"expression": expression}]
    elif (text := str(about.json.get("license", ""))) and len(text) < 80 and "\n" not in text:
        found["licenses"] = [{"license": {"name": text}}]
    return found


def resolved(root: str, extras: frozenset[str]) -> dict[str, set[str]]:
    """What each package needs in this environment, for all that `root` needs."""
    graph: dict[str, set[str]] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    todo: list[tuple[str, frozenset[str]]] = [(canonicalize_name(root), extras)]
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        needed = list(needs(name, wanted))
        graph.setdefault(name, set()).update(found for found, _ in needed if found != name)
        todo += needed
    return graph


def needs(name: str, extras: frozenset[str]) -> list[tuple[str, frozenset[str]]]:
    """The packages that this one needs here, with the extras that it asks them for."""
    parsed = [Requirement(line) for line in metadata.requires(name) or ()]
    return [
        (canonicalize_name(one.name), frozenset(one.extras))
        for one in parsed
        if one.marker is None or any(one.marker.evaluate({"extra": e}) for e in ("", *extras))
    ]


def main() -> None:
    out, *extras = sys.argv[1:]
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = bill(frozenset(extras))
    path.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
    print(f"{path}: {len(found['components'])} packages")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""The bill of materials has all that Fleetlight runs with, and equal bytes each time."""

from __future__ import annotations

import json
from importlib import metadata

import pytest

from release import sbom


def named(bill: dict[str, object]) -> dict[str, str]:
    components = json.loads(json.dumps(bill))["components"]
    return {one["name"]: one["version"] for one in components}


def test_bill_has_direct_and_indirect_packages() -> None:
    found = named(sbom.bill())
    assert {"torch", "numpy", "numba", "safetensors", "msgspec", "rich", "llvmlite"} <= set(found)
    assert found["torch"] == metadata.version("torch")
    assert "cryptography" not in found


def test_extras_add_their_packages() -> None:
    assert {"cryptography", "cffi"} <= set(named(sbom.bill(frozenset({"tls"}))))


def test_each_dependency_is_a_component() -> None:
    bill = json.loads(json.dumps(sbom.bill(frozenset({"tls"}))))
    refs = {one["bom-ref"] for one in [bill["metadata"]["component"], *bill["components"]]}
    assert {one["ref"] for one in bill["dependencies"]} == refs
    assert all(set(one["dependsOn"]) <= refs for one in bill["dependencies"])


def test_a_missing_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbom, "needs", lambda name, extras: [("no-such-package", frozenset())])
    with pytest.raises(metadata.PackageNotFoundError):
        sbom.bill()

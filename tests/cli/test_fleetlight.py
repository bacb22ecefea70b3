# SPDX-License-Identifier: Apache-2.0
"""The small tools."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

from fleetlight.cli.fleetlight import main
from fleetlight.errors import CheckpointError


def test_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["fleetlight", "torch", "python"]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def export(dirname: str, out: str) -> None:
        if dirname == "broken":
            raise CheckpointError("no manifest in broken")
        calls.append((dirname, out))

    module = types.ModuleType("fleetlight.checkpoint")
    module.export = export  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fleetlight.checkpoint", module)
    return calls


def test_export(exported: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "ckpt", "out.safetensors"]) == 0
    assert exported == [("ckpt", "out.safetensors")]
    assert main(["export", "broken", "out.safetensors"]) == 1
    assert "error: no manifest in broken" in capsys.readouterr().err


def test_cert(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "certs")
    assert main(["cert", folder, "--host", "a.b", "--host", "10.0.0.9", "--days", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines[:-1]] == [
        "ca.pem",
        "server.pem",
        "server.key",
        "client.pem",
        "client.key",
    ]
    assert lines[-1].endswith(f"fleetrun --ssl {folder} ...")
    assert main(["cert", folder]) == 1
    assert "already holds" in capsys.readouterr().err
    assert main(["cert", folder, "--replace"]) == 0


def test_a_command_is_needed() -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2

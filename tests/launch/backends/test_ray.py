# SPDX-License-Identifier: Apache-2.0
"""Ray without Ray: what its absence and a wrong setting say."""

import sys
from pathlib import Path

import pytest

from fleetlight.cli import fleetlight as tool
from fleetlight.cli.fleetrun import main


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    (tmp_path / "train.py").write_text("")


def test_missing_client_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    counts = ("--server_num", "1", "--worker_num", "2")
    assert main(["--on", "ray", *counts, "train.py"]) == 2
    assert "needs Ray's job client" in (shown := capfd.readouterr().err)
    assert "pip install 'fleetlight[ray]'" in shown
    assert tool.main(["ps", "ray:train-1"]) == 1
    assert "needs Ray's job client" in capfd.readouterr().err
    # which needs no cluster
    assert main(["--on", "ray", *counts, "--print", "train.py"]) == 0

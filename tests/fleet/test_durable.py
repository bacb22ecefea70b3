# SPDX-License-Identifier: Apache-2.0
"""Where servers and workers keep what outlives them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetlight.collective.group import Group
from fleetlight.fleet.context import Context
from fleetlight.fleet.durable import durable_of, redo_of
from fleetlight.ps import messages as m
from fleetlight.ps.worker.redo.commits import Moment
from fleetlight.roles import Kind, Role
from fleetlight.strategy import DistributedStrategy


def test_a_script_may_change_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    strategy = DistributedStrategy(durability="log", durability_configs={"folder": "kept"})
    server = Role(kind=Kind.SERVER, server_num=1, job="a job")
    context = Context(role=server, group=Group(deadline_s=20.0), strategy=strategy)
    redo = redo_of(Role(server_num=1, job="a job", max_restarts=1), strategy, 0, 5)
    assert redo is not None
    monkeypatch.chdir(tmp_path / "elsewhere")
    durable = durable_of(context)
    assert durable is not None
    assert durable.path == tmp_path / "kept" / "server-0-of-1"
    push = m.Push(1, 0, 0, 1, 0, [], [], False)
    redo.commit(Moment(0, 0, 0, b""), 0, [1], {0: [(push, [])]})
    redo.close(is_needed=True)
    assert (tmp_path / "kept" / "worker-0-of-1").is_dir()
    assert not (tmp_path / "elsewhere" / "kept").exists()

# SPDX-License-Identifier: Apache-2.0
"""A server whose tables are mostly in files recovers what it had, to the bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, opened, plan, rows_of, together

from fleetlight.kernels import TieredRowTable
from fleetlight.ps import messages as m
from fleetlight.ps.plan import EntryPlan, Plan, RulePlan
from fleetlight.ps.server.server import Server

IDS = list(range(90))
OPTIONS = [{"lr": 0.1, "eps": 1e-8, "betas": (0.9, 0.99), "weight_decay": 0.0, "lr_decay": 0.0}]


COUNT = EntryPlan("count", 2.0)


def plan_of(mode: str, memory: int, **more_of_table: Any) -> Plan:
    settings = {"entry": COUNT, "rule": RulePlan("adam", {}), "memory": memory, **more_of_table}
    tables = [msgspec.structs.replace(table, **settings) for table in plan().tables]
    more = {"k_steps": 2} if mode == "geo" else {"staleness": 3} if mode == "async" else {}
    return plan(mode, tables=tables, **more)


def train(workers: list[Worker], mode: str, step: int) -> list[Any]:
    """One step of both workers; the replies."""
    random = np.random.default_rng(step)
    some = [np.unique(random.integers(0, len(IDS), 30)).tolist() for _ in workers]
    replies: list[Any] = [worker.pull(0, ids) for worker, ids in zip(workers, some, strict=True)]
    values = [random.normal(size=len(ids)) for ids in some]
    if mode == "geo":
        for worker, ids, changes in zip(workers, some, values, strict=True):
            worker.sequence += 1
            exchange = m.GeoExchange(worker.sequence, 0, step, [0], dense=False)
            arrays = np.array(ids), rows_of(changes.tolist())
            replies.append(worker.say(exchange, *arrays, lane="push")[1][0].tolist())
        return replies
    pushes = [
        lambda w=w, i=i, v=v: w.push(step, {0: (i, v.tolist())}, options=OPTIONS)
        for w, i, v in zip(workers, some, values, strict=True)
    ]
    if mode == "sync":
        together(*pushes)
    else:
        for push in pushes:
            push()
    return replies


def is_tiered(server: Server) -> bool:
    assert server._service is not None
    table = server._service.state.tables[0]._rows
    return isinstance(table, TieredRowTable) and table._store.nbytes > 0  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "geo"])
@pytest.mark.parametrize(
    "table",
    [{"entry": None, "max_rows": 80, "evict": "age"}, {}, {"max_rows": 80, "evict": "count"}],
    ids=["by age", "all rows", "by count"],
)
def test_a_killed_server_returns_with_all_rows(
    make_cluster: Any, mode: str, table: dict[str, Any]
) -> None:
    """Crashes after steps, snapshots during training and shrinks; another server never stops."""
    cluster = make_cluster(plan_of(mode, 1, **table))
    other = opened(plan_of(mode, 0, **table))
    steady = [Worker(other, index) for index in range(2)]
    for step in range(12):
        replies = train(cluster.workers, mode, step), train(steady, mode, step)
        assert replies[0] == replies[1]
        if step % 3 == 1:
            assert cluster.durability.snapshot()
        if step % 4 == 3:
            shrinks = [
                w.say(m.Shrink(0, 3, 0.0, 0.5, step))[0] for w in (cluster.workers[0], steady[0])
            ]
            assert shrinks[0] == shrinks[1]
        if step % 2:
            cluster.restart()
        found = [w.pull(0, IDS, insert=False) for w in (cluster.workers[0], steady[0])]
        assert found[0] == found[1]
    assert is_tiered(cluster.server)
    assert cluster.server.metrics().rows == other.metrics().rows


def test_rows_are_beside_the_log_and_leave_no_files(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan_of("async", 1))
    before = set(os.listdir(tmp_path / "kept"))
    cluster.workers[0].pull(0, IDS)
    assert is_tiered(cluster.server)
    assert cluster.server._service is not None
    store = cluster.server._service.state.tables[0]._rows._store  # type: ignore[attr-defined]
    path = os.readlink(f"/proc/self/fd/{store._file}")
    assert path.startswith(f"{tmp_path}/kept/")
    assert path.endswith(" (deleted)")
    assert set(os.listdir(tmp_path / "kept")) == before
    cluster.close()


def test_a_job_resumes_with_another_limit_of_memory(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan_of("async", 0))
    train(cluster.workers, "async", 0)
    before = cluster.workers[0].pull(0, IDS, insert=False)
    for memory in (1, 0):
        changed = plan_of("async", memory)
        cluster.plan = msgspec.structs.replace(changed, table_folder=str(tmp_path / "rows"))
        cluster.restart()
        assert cluster.workers[0].pull(0, IDS, insert=False) == before
    cluster.close()


def test_the_folder_of_the_strategy(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "rows"
    server = opened(msgspec.structs.replace(plan_of("async", 1), table_folder=str(folder)))
    Worker(server, 0).pull(0, IDS)
    assert is_tiered(server)
    assert folder.is_dir()


@pytest.mark.parametrize("memory", [0, 1])
def test_rows_that_the_scores_of_another_table_admit(make_cluster: Any, memory: int) -> None:
    """Another server never stops."""
    entries = EntryPlan("show_click"), EntryPlan("score", 0.25, "users")
    tables = [
        msgspec.structs.replace(table, entry=entry, memory=memory)
        for table, entry in zip(plan().tables, entries, strict=True)
    ]
    cluster = make_cluster(plan("async", tables=tables))
    other = opened(plan("async", tables=tables))
    steady = Worker(other, 0)
    for step in range(12):
        random = np.random.default_rng(step)
        ids = np.unique(random.integers(0, len(IDS), 40))
        shows, clicks = np.ones(len(ids), np.float32), (ids % 5 == 0).astype(np.float32)
        rows = rows_of(random.normal(size=len(ids)).tolist())
        for worker in (cluster.workers[0], steady):
            worker.pull(1, ids.tolist())
            worker.sequence += 1
            push = m.Push(
                sequence=worker.sequence,
                epoch=0,
                optimizer=0,
                step=step,
                phase=0,
                options=OPTIONS,
                tables=[m.TablePush(0, counted=True), m.TablePush(1)],
                dense=False,
            )
            worker.say(push, ids, rows, shows, clicks, ids, rows, lane="push")
            if step % 4 == 3:
                worker.say(m.Shrink(0, 1, 0.15, 0.9, step))
        if step % 3 == 1:
            assert cluster.durability.snapshot()
        if step % 2:
            cluster.restart()
        for table in range(2):
            found = [w.pull(table, IDS, insert=False) for w in (cluster.workers[0], steady)]
            assert found[0] == found[1]
        assert cluster.server.metrics().rows == other.metrics().rows
    assert other._service is not None
    assert 0 < len(other._service.state.tables[1]) < len(other._service.state.tables[0])

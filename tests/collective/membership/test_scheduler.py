# SPDX-License-Identifier: Apache-2.0
"""A scheduler assigns indices, names missing members, and waits for the last departure."""

import os
import time
from typing import Any

import pytest
from tests.workers import WorkerFailedError, reserved_port, run_processes

import fleetlight as fleet
from fleetlight.collective.forming import form
from fleetlight.collective.membership.rendezvous import RendezvousDeadline, serve
from fleetlight.errors import MembershipError
from fleetlight.fleet.job import current
from fleetlight.roles import Role
from fleetlight.torch_compat.c10d import PrefixStore

pytestmark = pytest.mark.multiprocess


def member(workers: int, node_id: str | None = None, then: str = "") -> Any:
    """Process 0 is the scheduler, the others are workers; returns the exit code or the index."""
    index, master = os.environ["FLEET_INDEX"], os.environ["FLEET_MASTER"].split(":")
    deadline = os.environ["FLEET_DEADLINE_S"]
    for name in [n for n in os.environ if n.startswith("FLEET_")]:
        del os.environ[name]
    os.environ.update(
        MS_ROLE="MS_SCHED" if index == "0" else "MS_WORKER",
        MS_SCHED_HOST=master[0],
        MS_SCHED_PORT=master[1],
        MS_WORKER_NUM=str(workers),
        MS_TOPO_TIMEOUT=deadline,
    )
    if node_id is not None:
        os.environ["MS_NODE_ID"] = node_id
    try:
        fleet.init(is_collective=True)
    except SystemExit as end:
        return "exit", end.code
    if then == "vanish":
        os._exit(0)
    if then == "stay":
        # until the refused worker has its reply
        liveness = current().group.liveness
        assert liveness is not None
        while not liveness._asking.check(["worker/index/1"]):
            time.sleep(0.05)
    if then == "fail":
        current().group.fail("ValueError: on purpose")
        return "failed", fleet.worker_index()
    total, mine = fleet.all_reduce(1), fleet.worker_index()
    fleet.stop_worker()
    return mine, total


def test_the_scheduler_assigns_indices() -> None:
    replies = run_processes(member, [(3,), (3,), (3,), (3,)])
    assert replies[0] == ("exit", 0)
    assert sorted(replies[1:]) == [(0, 3), (1, 3), (2, 3)]


def test_node_ids_are_indices() -> None:
    assert run_processes(member, [(2,), (2, "1"), (2, "0")]) == [("exit", 0), (1, 2), (0, 2)]


def test_too_few_workers_is_an_error_on_all() -> None:
    with pytest.raises(WorkerFailedError, match="scheduler says: 1 of 2 workers joined") as caught:
        run_processes(member, [(2,), (2,)], deadline_s=5.0)
    assert "worker 0:" not in str(caught.value)


def test_a_surplus_worker_is_refused() -> None:
    with pytest.raises(WorkerFailedError, match=r"the job already has its 1 worker$"):
        run_processes(member, [(1,), (1, None, "stay"), (1, None, "stay")], deadline_s=8.0)


def indexed() -> Any:
    """Process 0 is the scheduler; the workers bring their indices."""
    index = int(os.environ["FLEET_INDEX"])
    os.environ.update(
        FLEET_ROLE="worker" if index else "scheduler",
        FLEET_INDEX=str(max(0, index - 1)),
        FLEET_WORKER_NUM="2",
        FLEET_SCHEDULER_NUM="1",
    )
    try:
        fleet.init(is_collective=True)
    except SystemExit as end:
        return "exit", end.code
    total, mine = fleet.all_reduce(1), fleet.worker_index()
    fleet.stop_worker()
    return mine, total


def test_workers_may_bring_their_indices() -> None:
    assert run_processes(indexed, [()] * 3) == [("exit", 0), (0, 2), (1, 2)]


def test_a_missing_reply_of_the_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.collective.membership.scheduler.LAST_READ_S", 0.1)
    holder, port = reserved_port()
    role = Role(index=None, master_keeper="it", worker_num=2, master=("127.0.0.1", port))
    with holder:
        store = PrefixStore("fleet/0", serve(("127.0.0.1", port), RendezvousDeadline(20.0)))
        with pytest.raises(MembershipError, match=r"did not say which worker this is .*2 workers"):
            form(role, "test", 0.2)
        store.set("worker/index/1", "0")

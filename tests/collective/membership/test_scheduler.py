# SPDX-License-Identifier: Apache-2.0
"""A scheduler assigns indices, names missing members, and waits for the last departure."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.workers import WorkerFailedError, reserved_port, run_processes

import fleetlight as fleet
from fleetlight.collective.forming import enrol
from fleetlight.collective.membership.rendezvous import RendezvousDeadline, serve
from fleetlight.collective.membership.scheduler import Scheduler
from fleetlight.errors import MembershipError
from fleetlight.fleet.job import current
from fleetlight.roles import Kind, Role
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
    total = fleet.all_reduce(1)
    mine = fleet.worker_index()
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
        run_processes(member, [(2,), (2,)], deadline_s=1.0)
    assert "worker 0:" not in str(caught.value)


def test_a_surplus_worker_is_refused() -> None:
    with pytest.raises(WorkerFailedError, match=r"the job already has its 1 worker$"):
        run_processes(member, [(1,), (1, None, "stay"), (1, None, "stay")], deadline_s=8.0)


def test_all_members_learn_the_server_endpoints() -> None:
    holder, port = reserved_port()
    facts = {"worker_num": 1, "server_num": 2, "master": ("127.0.0.1", port)}
    scheduler = Scheduler(Role(kind=Kind.SCHEDULER, **facts), 20.0)  # type: ignore[arg-type]

    def enrolled(kind: Kind, node_id: str | None = None, listens: int | None = None) -> Any:
        role = Role(kind=kind, index=None, node_id=node_id, master_keeper="it", **facts)  # type: ignore[arg-type]
        return enrol(role, "test", 20.0, listens)

    with holder, ThreadPoolExecutor(4) as pool:
        code = pool.submit(scheduler.run)
        # a node id is the index, whatever the order of arrival
        first, second = (
            pool.submit(enrolled, Kind.SERVER, node_id, listens)
            for node_id, listens in (("1", 7001), ("0", 7000))
        )
        worker, heartbeats = enrolled(Kind.WORKER)
        roles = [worker, first.result()[0], second.result()[0]]
        with pytest.raises(MembershipError, match="the job already has its 2 servers"):
            enrolled(Kind.SERVER, None, 7002)
        heartbeats.depart(None)
        heartbeats.release_store()
        assert code.result() == 0
    assert [role.index for role in roles] == [0, 1, 0]
    for role in roles:
        assert role.server_endpoints == (("127.0.0.1", 7000), ("127.0.0.1", 7001))
    # only workers send heartbeats
    assert first.result()[1] is second.result()[1] is None


def enrol_error(role: Role) -> str:
    """The error of a member that must be refused."""
    try:
        _, heartbeats = enrol(role, "test", 20.0, 7000)
    except MembershipError as error:
        return str(error)
    if heartbeats is not None:
        heartbeats.depart(None)
    return "was taken"


def test_a_server_that_the_workers_cannot_reach_is_refused() -> None:
    holder, port = reserved_port()
    facts: Any = {"worker_num": 1, "server_num": 1, "master": ("127.0.0.1", port)}
    scheduler = Scheduler(Role(kind=Kind.SCHEDULER, **facts), 20.0)
    roles = [
        Role(kind=kind, index=None, address=address, master_keeper="it", **facts)
        for kind, address in ((Kind.WORKER, "10.0.0.9"), (Kind.SERVER, None))
    ]
    with holder, ThreadPoolExecutor(3) as pool:
        code = pool.submit(scheduler.run)
        members = [pool.submit(enrol_error, role) for role in roles]
        replies = [member.result() for member in members]
        assert code.result() == 1
    for text in replies:
        assert "(127.0.0.1) has an address that only its own machine can reach" in text


def test_a_missing_reply_of_the_scheduler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetlight.collective.membership.scheduler.LAST_READ_S", 0.1)
    holder, port = reserved_port()
    facts: Any = {"worker_num": 2, "server_num": 1, "master": ("127.0.0.1", port)}
    role = Role(index=None, master_keeper="it", **facts)
    with holder:
        store = PrefixStore("fleet/0", serve(("127.0.0.1", port), RendezvousDeadline(20.0)))
        with pytest.raises(MembershipError, match=r"did not say which worker this is .*2 workers"):
            enrol(role, "test", 0.2)
        store.set("worker/index/1", "0")
        expected = "did not say where the servers listen within .* it waits for 1 server;"
        with pytest.raises(MembershipError, match=expected):
            enrol(role, "test", 0.2)


def test_a_failing_worker_ends_the_scheduler_with_1() -> None:
    replies = run_processes(member, [(1,), (1, None, "fail")])
    assert replies == [("exit", 1), ("failed", 0)]


def test_a_vanished_worker_ends_the_scheduler_with_1() -> None:
    with pytest.raises(WorkerFailedError, match=r"^worker 1 died without a result$"):
        run_processes(member, [(1,), (1, None, "vanish")], deadline_s=2.0)

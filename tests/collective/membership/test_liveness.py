# SPDX-License-Identifier: Apache-2.0
"""Liveness: what is reported about a late worker."""

import gc
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fleetlight.collective.membership import liveness as module
from fleetlight.collective.membership.liveness import Liveness
from fleetlight.errors import DeadlineError, PeerLostError
from fleetlight.roles.members import MemberHello

HELLOS = {
    i: MemberHello(kind="worker", index=i, address=f"10.0.0.{i}", hostname=f"h{i}", pid=100 + i)
    for i in (1,)
}
PAIR = {0: HELLOS[1], 1: HELLOS[1]}


def test_a_lost_store_is_reported_at_once() -> None:
    keeper: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", keeper.port, timeout=timedelta(seconds=60))
    del keeper
    with pytest.raises(PeerLostError, match="the rendezvous store of the job was lost"):
        Liveness(store, 1)


def test_liveness_without_heartbeats_is_freed() -> None:
    liveness = Liveness(dist.HashStore(), 0)
    seen = weakref.ref(liveness)
    gc.disable()
    try:
        del liveness
        assert seen() is None
    finally:
        gc.enable()


def test_the_store_stays_open_until_the_last_departure() -> None:
    served: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", served.port, timeout=timedelta(seconds=5))
    keeper, other = Liveness(served, 0).set_workers(PAIR), Liveness(client, 1).set_workers(PAIR)
    # torch's process group drops the store when it is destroyed
    del served, client
    keeper.depart(None)
    other.depart(None)
    assert keeper.all_gone()
    other.release_store()
    # a store replies to no `set`
    other._asking.wait(["left/1"])
    assert keeper.all_left()
    keeper.release_store()
    with pytest.raises(RuntimeError):
        other._asking.check(["left/0"])


@pytest.mark.slow
def test_explain_distinguishes_timeout_and_loss() -> None:
    store = dist.HashStore()
    liveness = Liveness(store, 0).set_workers({0: HELLOS[1], 1: HELLOS[1]})
    expired = liveness.explain(RuntimeError("Timed out waiting 1000ms for recv"), "barrier")
    assert isinstance(expired, DeadlineError)
    assert "barrier at step 0 timed out: worker 1" in str(expired)
    lost = liveness.explain(
        RuntimeError("[/a/b.cc:5] Connection closed by peer. This is typically caused"), "barrier"
    )
    assert isinstance(lost, PeerLostError)
    assert "/a/b.cc" not in str(lost)
    assert str(lost).endswith("[Connection closed by peer]")


@pytest.mark.slow
def test_a_barrier_names_the_missing_worker() -> None:
    store = dist.HashStore()
    zero = Liveness(store, 0).set_workers({0: HELLOS[1], 1: HELLOS[1]})
    text = r"save: every worker must call it.*worker 1 .*sent no heartbeat.*FLEET_DEADLINE_S"
    with pytest.raises(DeadlineError, match=text):
        zero.barrier("save/1", "save", 0.2)


@pytest.fixture
def short_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.1)


@pytest.mark.usefixtures("short_heartbeats")
def test_a_barrier_reports_live_workers_and_their_operation() -> None:
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one.step = 12
    one.start()
    try:
        with (
            one.waiting("all_gather"),
            pytest.raises(DeadlineError, match=r"is alive, at step 12 in all_gather"),
        ):
            zero.barrier("save/1", "save", 0.2)
    finally:
        one.depart(None)


@pytest.mark.slow
def test_a_working_member_may_exceed_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.3)
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one.start()
    has_come = threading.Event()

    def come() -> None:
        has_come.set()
        one.barrier("m", "save", 9.0)

    deadline_s, arrival = 0.1, threading.Timer(2.5, come)
    arrival.start()
    try:
        zero.barrier("m", "save", deadline_s, working=True)
        assert has_come.is_set()
    finally:
        arrival.join()
        one.depart(None)


def test_a_pause_of_this_worker_is_no_silence_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one._beat()
    assert zero.any_alive(2.0)
    # the machine of both was suspended
    now += 3600.0
    assert zero.any_alive(2.0)
    for _ in range(2):
        now += 2 * module.BEAT_S
        is_alive = zero.any_alive(2.0)
    assert not is_alive


@pytest.mark.usefixtures("short_heartbeats")
def test_work_of_a_silent_or_failed_worker_is_not_awaited() -> None:
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one.start()
    one._stop.set()
    with pytest.raises(PeerLostError, match=r"save: gave up waiting, worker 1 .* has been silent"):
        zero.barrier("m/1", "save", 0.1, working=True)
    one.depart("OSError: the disk is gone")
    with pytest.raises(PeerLostError, match=r"worker 1 .* failed: OSError: the disk is gone"):
        zero.barrier("m/2", "save", 60.0, working=True)


@pytest.mark.usefixtures("short_heartbeats")
def test_workers_in_different_operations_are_reported() -> None:
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one.start()
    try:
        with one.waiting("barrier_worker"):
            one._beat()
            error = zero.explain(RuntimeError("Timed out waiting 10ms"), "all_gather")
    finally:
        one.depart(None)
    text = str(error)
    assert "this worker waits in all_gather, but worker 1" in text
    assert "is alive, at step 0 in barrier_worker; every worker must make the same calls" in text
    assert "raise the deadline" in text


@pytest.mark.usefixtures("short_heartbeats")
@pytest.mark.parametrize(
    ("operation", "hint"),
    [
        ("all_reduce of the gradients", "fleet.shard(loader) evens them out"),
        ("reducing a metric", "Every worker must call it, not only some"),
    ],
)
def test_a_departed_worker_is_reported_with_a_hint(operation: str, hint: str) -> None:
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one.start()
    one.depart(None)
    text = str(zero.explain(RuntimeError("Connection closed by peer"), operation))
    assert "left after step 0" in text
    assert hint in text


@pytest.mark.usefixtures("short_heartbeats")
def test_silence_is_measured_by_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    zero, one = Liveness(store, 0).set_workers(PAIR), Liveness(store, 1).set_workers(PAIR)
    one._beat()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 172_800.0)
    with pytest.raises(DeadlineError, match=r"worker 1 .* has been silent for \d s, last seen"):
        zero.barrier("save/1", "save", 0.1)

# SPDX-License-Identifier: Apache-2.0
"""Members join, and an error reports about those that are late."""

import gc
import socket
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.workers import reserved_port

from fleetlight.collective.membership import liveness as module
from fleetlight.collective.membership import rendezvous
from fleetlight.collective.membership.diagnosis import (
    Departure,
    WorkerHeartbeat,
    describe_waits,
    diagnose,
    first_sentence,
    health_of,
)
from fleetlight.collective.membership.liveness import Liveness
from fleetlight.collective.membership.rendezvous import (
    RendezvousDeadline,
    close_tunnels,
    join,
    serve,
)
from fleetlight.errors import DeadlineError, PeerLostError
from fleetlight.roles.members import MemberHello
from fleetlight.security.certificates import make
from fleetlight.security.context import Contexts
from fleetlight.wire import listening
from fleetlight.wire.tls import TlsWire

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


# What a diagnosis reports about workers from their heartbeats.

THREE = {
    i: MemberHello(kind="worker", index=i, address=f"10.0.0.{i}", hostname=f"h{i}", pid=100 + i)
    for i in (1, 2, 3)
}
ME = WorkerHeartbeat(9, 50, 100.0)


def diagnosed(
    before: dict[int, WorkerHeartbeat],
    after: dict[int, WorkerHeartbeat],
    gone: dict[int, Departure] | None = None,
) -> list[str]:
    return diagnose(ME, before, after, gone or {}, THREE, now=103.0)


def test_healthy_workers_are_not_reported() -> None:
    before = {i: WorkerHeartbeat(5, 50, 100.0) for i in THREE}
    assert diagnosed(before, {i: WorkerHeartbeat(6, 50, 101.0) for i in THREE}) == []


def test_a_silent_worker_is_named_with_its_last_step() -> None:
    before = {
        1: WorkerHeartbeat(5, 50, 101),
        2: WorkerHeartbeat(5, 49, 93),
        3: WorkerHeartbeat(5, 50, 101),
    }
    after = {**before, 1: WorkerHeartbeat(6, 50, 102), 3: WorkerHeartbeat(6, 50, 102)}
    [text] = diagnosed(before, after)
    assert (
        text == "worker 2 (pid 102 on h2 (10.0.0.2)) has been silent for 10 s, last seen at step 49"
    )


def test_failures_come_first_in_the_order_they_happened() -> None:
    beats = {i: WorkerHeartbeat(5, 50, 100) for i in THREE}
    gone = {3: Departure(48, 99.0, "ValueError: a"), 2: Departure(49, 101.0, "PeerLostError: b")}
    texts = diagnosed(beats, beats, gone)
    assert [t.split(" (")[0] for t in texts] == ["worker 3", "worker 2", "worker 1"]
    assert "failed after step 48: ValueError: a" in texts[0]


def test_left_late_and_unseen_workers_are_reported() -> None:
    before = {1: WorkerHeartbeat(5, 40, 100), 2: WorkerHeartbeat(5, 50, 100)}
    after = {1: WorkerHeartbeat(6, 40, 101), 2: WorkerHeartbeat(6, 50, 101)}
    texts = diagnosed(before, after, {2: Departure(47, 99.0)})
    assert "worker 3" in texts[0]
    assert "sent no heartbeat" in texts[0]
    assert "left after step 47, this one is at step 50" in texts[1]
    assert "alive but still at step 40" in texts[2]


def test_a_late_worker_is_reported_with_its_operation() -> None:
    before = {i: WorkerHeartbeat(5, 50, 100) for i in THREE}
    after = {i: WorkerHeartbeat(6, 50, 101) for i in THREE} | {
        2: WorkerHeartbeat(6, 49, 101, "save_persistables")
    }
    [text] = diagnosed(before, after)
    assert text.endswith("is alive but still at step 49 in save_persistables, not 50")


def test_different_operations_are_both_named() -> None:
    beats = {
        1: WorkerHeartbeat(6, 50, 101, "all_gather"),
        2: WorkerHeartbeat(6, 50, 101),
        3: WorkerHeartbeat(6, 50, 101, "barrier"),
    }
    text = describe_waits("barrier", beats, THREE)
    assert text.startswith("this worker waits in barrier, but worker 1 (pid 101 on h1 (10.0.0.1))")
    assert (
        "worker 1 (pid 101 on h1 (10.0.0.1)) is alive, at step 50 in all_gather; worker 2" in text
    )
    assert "worker 3" not in text
    assert "every worker must make the same calls" in text


def test_equal_operations_point_to_the_network() -> None:
    assert "the network lost data" in describe_waits(
        "x", {1: WorkerHeartbeat(6, 50, 101, "x")}, THREE
    )


def test_the_health_of_a_worker_is_described() -> None:
    assert health_of(None, None, 103.0) == "sent no heartbeat"
    assert health_of(WorkerHeartbeat(5, 9, 95), WorkerHeartbeat(5, 9, 95), 103.0).startswith(
        "has been silent for 8 s"
    )
    assert (
        health_of(WorkerHeartbeat(5, 9, 95), WorkerHeartbeat(6, 12, 102), 103.0)
        == "is alive, at step 12"
    )


def test_only_the_first_sentence_of_a_torch_error_is_kept() -> None:
    error = RuntimeError(
        "[/a/b.cc:5] Connection closed by peer [127.0.0.1]:48. This is typically caused by a "
        "remote worker crashing.\nException raised from here"
    )
    assert first_sentence(error) == "Connection closed by peer [127.0.0.1]:48"
    assert first_sentence(RuntimeError("")) == "RuntimeError"


# Members join the store, also by a name that resolves to another address on its own machine.

OUTSIDE = "127.0.0.3"
#: addresses of names; 127.0.0.3 stands for an address that other hosts know
NAMES = {"debian": "127.0.1.1"}


@pytest.mark.parametrize("host", ["debian", "127.0.0.1"])
def test_members_on_the_same_machine_connect_by_name(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked_up(endpoint: tuple[str, int], timeout: float) -> socket.socket:
        name, port = endpoint
        return real_connect((NAMES.get(name, name), port), timeout=timeout)

    real_connect, real_check = socket.create_connection, listening.is_loopback
    monkeypatch.setattr(listening, "resolve", lambda host: NAMES.get(host, host))
    monkeypatch.setattr(listening, "is_loopback", lambda a: a != OUTSIDE and real_check(a))
    monkeypatch.setattr(listening, "own_addresses", lambda: (("eth", OUTSIDE),))
    monkeypatch.setattr(socket, "create_connection", looked_up)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
    served = serve((host, port), RendezvousDeadline(20.0))
    served.set("key", "value")
    assert join((host, port), RendezvousDeadline(20.0), "worker 0").get("key") == b"value"


def test_a_handshake_with_a_busy_host_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    class BusyWire(TlsWire):
        """A wire whose first handshakes take too long."""

        def handshake(self, *given: Any) -> None:
            tries.append(1)
            if len(tries) <= 2:
                raise DeadlineError("worker 0 was silent for 5.0 s during the TLS handshake")
            super().handshake(*given)

    monkeypatch.setattr(rendezvous, "TlsWire", BusyWire)
    make(tmp_path)
    tls, deadline = Contexts(tmp_path), RendezvousDeadline(20.0)
    holder, port = reserved_port()
    endpoint = ("127.0.0.1", port)
    served = serve(endpoint, deadline, tls)
    try:
        served.set("key", "value")
        assert join(endpoint, deadline, "worker 0", tls).get("key") == b"value"
    finally:
        close_tunnels()
        holder.close()
    assert len(tries) == 3

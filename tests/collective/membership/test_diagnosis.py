# SPDX-License-Identifier: Apache-2.0
"""What a diagnosis reports about workers from their heartbeats."""

from fleetlight.collective.membership.diagnosis import (
    Departure,
    WorkerHeartbeat,
    describe_waits,
    diagnose,
    first_sentence,
    health_of,
)
from fleetlight.roles.members import MemberHello

HELLOS = {
    i: MemberHello(kind="worker", index=i, address=f"10.0.0.{i}", hostname=f"h{i}", pid=100 + i)
    for i in (1, 2, 3)
}
ME = WorkerHeartbeat(9, 50, 100.0)


def diagnosed(
    before: dict[int, WorkerHeartbeat],
    after: dict[int, WorkerHeartbeat],
    gone: dict[int, Departure] | None = None,
) -> list[str]:
    return diagnose(ME, before, after, gone or {}, HELLOS, now=103.0)


def test_healthy_workers_are_not_reported() -> None:
    before = {i: WorkerHeartbeat(5, 50, 100.0) for i in HELLOS}
    assert diagnosed(before, {i: WorkerHeartbeat(6, 50, 101.0) for i in HELLOS}) == []


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
    beats = {i: WorkerHeartbeat(5, 50, 100) for i in HELLOS}
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
    before = {i: WorkerHeartbeat(5, 50, 100) for i in HELLOS}
    after = {i: WorkerHeartbeat(6, 50, 101) for i in HELLOS} | {
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
    text = describe_waits("barrier", beats, HELLOS)
    assert text.startswith("this worker waits in barrier, but worker 1 (pid 101 on h1 (10.0.0.1))")
    assert (
        "worker 1 (pid 101 on h1 (10.0.0.1)) is alive, at step 50 in all_gather; worker 2" in text
    )
    assert "worker 3" not in text
    assert "every worker must make the same calls" in text


def test_equal_operations_point_to_the_network() -> None:
    assert "the network lost data" in describe_waits(
        "x", {1: WorkerHeartbeat(6, 50, 101, "x")}, HELLOS
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

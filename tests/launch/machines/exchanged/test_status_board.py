# SPDX-License-Identifier: Apache-2.0
"""The status board: two launchers in one process agree on the end of a job."""

import time

import pytest
from tests.launch.machines.doubles import Store

from fleetlight.launch.job.layout import JobLayout, Node
from fleetlight.launch.job.spec import RendezvousSpec
from fleetlight.launch.machines.connected_machines import StatusBoard, agree
from fleetlight.launch.machines.exchanged.heartbeats import BEAT_S, SILENT_S, Heartbeats
from fleetlight.launch.machines.other_machines import NextAction
from fleetlight.launch.processes.failure import JobFailure
from fleetlight.launch.processes.watch import RemoteState

NODES = (Node(host="a"), Node(host="b"))
FIXED = RendezvousSpec(master=("a", 1), min_nodes=2, max_nodes=2)
ELASTIC = RendezvousSpec(master=("a", 1), min_nodes=1, max_nodes=2)
CAUSE = JobFailure(what="worker 0 exited with code 3", code=3)
EFFECT = JobFailure(what="worker 1 exited with code 1", code=1, consequence=True)


class Pair:
    """The status boards of two machines."""

    def __init__(self, patience_s: float = SILENT_S) -> None:
        self.now = time.monotonic()
        self.store = store = Store()
        self.heartbeats = [Heartbeats(store, node.host, self.now, patience_s) for node in NODES]
        self.boards = [
            StatusBoard(store, heartbeats, JobLayout(nodes=NODES, own=own), [1, 2])
            for own, heartbeats in enumerate(self.heartbeats)
        ]
        for heartbeats in (*self.heartbeats, *self.heartbeats):
            heartbeats._next = 0.0
            heartbeats.beat(self.now)

    def fall_silent(self, node: int) -> None:
        """Move the last heartbeat of a machine far into the past."""
        for heartbeats in self.heartbeats:
            heartbeats._beat_seen_at[node + 1] = self.now - 2 * SILENT_S
            heartbeats._next = self.now + 1000


def test_all_machines_learn_that_all_are_done() -> None:
    pair = Pair()
    first, second = pair.boards
    assert first.ask(pair.now, workers_done=True) is RemoteState.RUNNING
    assert first.ask(pair.now, workers_done=True) is RemoteState.RUNNING
    assert second.ask(pair.now, workers_done=True) is RemoteState.DONE
    assert first.ask(pair.now, workers_done=True) is RemoteState.DONE
    for board in pair.boards:
        board.report_end(None)
    for board in pair.boards:
        assert agree(board, board.wait_for_ends(0.1), FIXED, 1).next is NextAction.FINISH


def test_all_machines_choose_the_same_failure() -> None:
    pair = Pair()
    first, second = pair.boards
    first.report_end(EFFECT)
    assert second.ask(pair.now, workers_done=False) is RemoteState.STOP
    second.report_end(CAUSE)
    for board in pair.boards:
        silent = board.wait_for_ends(0.1)
        assert silent == []
        assert agree(board, silent, FIXED, 0).failure == CAUSE
        assert agree(board, silent, FIXED, 0).next is NextAction.FINISH
        assert agree(board, silent, FIXED, 1).next is NextAction.RESTART


def test_silent_machine_is_the_cause_and_ends_a_fixed_job() -> None:
    pair = Pair()
    pair.fall_silent(1)
    first = pair.boards[0]
    assert first.silent(pair.now) == {"node 1 (b)": 2 * SILENT_S}
    assert first.ask(pair.now, workers_done=False) is RemoteState.STOP
    first.report_end(CAUSE)
    silent = first.wait_for_ends(60)
    found = agree(first, silent, FIXED, 1)
    assert str(found.failure) == "node 1 (b) was lost: no heartbeat"
    assert found.next is NextAction.FINISH
    assert agree(first, silent, ELASTIC, 0).next is NextAction.REGROUP


def test_machine_that_does_not_end_in_time_is_named() -> None:
    first = Pair().boards[0]
    first.report_end(CAUSE)
    (silent,) = first.wait_for_ends(0.0)
    assert "node 1 (b) did not end its processes in time" in str(silent)


def test_wait_for_an_unreachable_machine_can_be_interrupted() -> None:
    pair = Pair(patience_s=1000)
    pair.fall_silent(1)
    first = pair.boards[0]
    assert first.ask(pair.now, workers_done=False) is RemoteState.RUNNING
    first.report_end(CAUSE)
    asked = iter([False, False, True])
    (silent,) = first.wait_for_ends(0, lambda: next(asked))
    assert "node 1 (b) was lost" in str(silent)
    assert not list(asked)


def test_done_is_reported_again_after_a_failed_write() -> None:
    pair = Pair()
    first, second = pair.boards
    pair.store.vanish()
    with pytest.raises(RuntimeError):
        first.ask(pair.now, workers_done=True)
    pair.store.vanish(is_gone=False)
    second.ask(pair.now, workers_done=True)
    # twice, as after a connection that broke after the first report
    first.ask(pair.now, workers_done=True)
    assert first.all_done()


def test_stop_without_a_failure_leads_to_a_new_rendezvous() -> None:
    pair = Pair()
    pair.boards[0].request_stop()
    assert pair.boards[1].ask(pair.now, workers_done=False) is RemoteState.STOP
    for board in pair.boards:
        board.report_end(None)
    silent = pair.boards[0].wait_for_ends(0.1)
    assert agree(pair.boards[0], silent, ELASTIC, 0).next is NextAction.REGROUP


def test_store_may_end_after_all_reports() -> None:
    for failure, following in ((None, NextAction.FINISH), (CAUSE, NextAction.RESTART)):
        pair = Pair()
        for board in (
            *pair.boards,
            pair.boards[0],
        ):  # the first board reads the second's report last
            board.ask(pair.now, workers_done=failure is None)
        pair.boards[0].report_end(None)
        pair.boards[1].report_end(failure)
        silent = [board.wait_for_ends(60) for board in pair.boards]
        pair.store.vanish()
        for board, missing in zip(pair.boards, silent, strict=True):
            found = agree(board, missing, FIXED, 1)
            assert (found.failure, found.next) == (failure, following)


def test_job_id_comes_from_node_0() -> None:
    first, second = Pair().boards
    first.publish_job_id("abc")

    class NoPatience:
        def wait(self, is_there: object, missing: object) -> None:
            assert callable(is_there)
            assert is_there()

    assert second.await_job_id(NoPatience()) == "abc"  # type: ignore[arg-type]


# -- heartbeats of launchers


def test_launchers_with_heartbeats_are_reachable() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=0)
    assert (one.number, two.number) == (1, 2)
    two.beat(0)
    one.beat(0)
    assert one.reachable_hosts(0) == ["a", "b"]


def test_silence_is_detected_with_the_local_clock_only() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", now=0), Heartbeats(store, "b", now=1e6)
    two.beat(1e6)
    for second in range(20):
        one.beat(float(second))
        assert one.is_lost(two.number, float(second)) == (second > SILENT_S)
        assert not one.is_lost(one.number, float(second))
    assert one.reachable_hosts(19) == ["a"]
    two.beat(1e6 + 1)
    one.beat(20)
    assert not one.is_lost(two.number, 20)
    assert SILENT_S + BEAT_S < 10


def test_silent_launcher_is_lost_after_the_deadline() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", 0, patience_s=60), Heartbeats(store, "b", 0)
    two.beat(0)
    for second in range(62):
        one.beat(float(second))
        assert one.is_silent(two.number, float(second)) == (second > SILENT_S)
        assert one.is_lost(two.number, float(second)) == (second > 60)
    assert one.silence_s(two.number, 61) == 61
    assert one.remaining(61) == {one.number}


def test_launcher_gets_its_full_deadline_after_an_outage() -> None:
    store = Store()
    one, two = Heartbeats(store, "a", 0, patience_s=60), Heartbeats(store, "b", 0)
    two.beat(0)
    for second in range(31):
        one.beat(float(second))
        # it could use none of its 5 s since it fell silent
        assert one.is_late(two.number, 0, second, 5) == (5 <= second <= SILENT_S)
    two.beat(1e6)
    one.beat(31)
    assert not one.is_late(two.number, 0, 35, 5)
    assert one.is_late(two.number, 0, 36, 5)
    one.beat(92)
    assert one.is_late(two.number, 90, 92, 5)


def test_beats_are_not_more_frequent_than_needed() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    for tenth in range(11):
        one.beat(tenth / 10)
    assert store.add("beat/1", 0) == 2


def test_remaining_launchers_are_those_that_have_not_left() -> None:
    store = Store()
    one, two, three = (Heartbeats(store, host, now=0) for host in "abc")
    for launcher in (three, two, one):
        launcher.beat(0)
    assert one.remaining(0) == {1, 2, 3}
    two.leave()
    assert one.remaining(0) == {1, 3}
    one.beat(2 * SILENT_S)
    assert one.remaining(2 * SILENT_S) == {1}


def test_launcher_that_has_a_number_but_no_name_yet() -> None:
    store = Store()
    one = Heartbeats(store, "a", now=0)
    store.add("launchers", 1)
    one.beat(0)
    assert one.reachable_hosts(0) == ["a"]
    assert not one.is_lost(2, 100)

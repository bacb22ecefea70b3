# SPDX-License-Identifier: Apache-2.0
"""The queue of a shard: who waits, who is admitted, and what a checkpoint cuts."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.ps.restartable import RestartableCluster
from tests.ps.serving import Worker, ask, closed_server, open_up, opened, plan, team, together

from fleetlight.errors import MembershipError, PlanError, ProtocolError
from fleetlight.ps import messages as m
from fleetlight.ps.changes import ShardQueueState
from fleetlight.ps.messages import LeaseProgress
from fleetlight.ps.server.durability.durability import Durable
from fleetlight.ps.server.shard_queue import handler
from fleetlight.ps.server.shard_queue.admissions import HOLD_S, Admissions
from fleetlight.ps.server.shard_queue.shard_queue import NOTHING, ShardQueue, described, joined

# ShardQueue: each record is trained once, whichever worker dies, leaves or asks again.


def test_ranges_are_whole_batches_in_order() -> None:
    queue = ShardQueue(2)
    assert queue.deal(1, ask()) == (0, 16)
    assert queue.deal(0, ask()) == (16, 32)
    assert queue.deal(1, ask(1)) == (32, 48)


def test_ranges_shrink_near_the_end() -> None:
    queue, sizes = ShardQueue(2), []
    while (leased := queue.deal(0, ask(len(sizes), (len(sizes), 0)))) != NOTHING:
        assert leased is not None
        sizes.append(leased[1] - leased[0])
    assert sum(sizes) == 96
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-4:]) == (16, [4] * 4)


def test_the_last_batch_may_be_short() -> None:
    queue = ShardQueue(1)
    assert queue.deal(0, ask(whole=[(0, 10)], batches=1)) == (0, 4)
    assert queue.deal(0, ask(1, whole=[(0, 10)])) == (4, 8)
    assert queue.deal(0, ask(2, whole=[(0, 10)])) == (8, 10)


def test_a_repeated_request_returns_the_same_range() -> None:
    queue = ShardQueue(2)
    assert [queue.deal(0, ask(n)) for n in (0, 1, 0, 1, 2, 1)] == [
        *[(0, 16), (16, 32)] * 2,
        (32, 48),
        (16, 32),
    ]
    for number in (5, -1, -4):
        text = rf"range {number} of loader 0, but received 3 so far; .*persistables"
        with pytest.raises(ProtocolError, match=text):
            queue.deal(0, ask(number))


def test_an_iteration_ends_when_all_records_are_done() -> None:
    queue, whole = ShardQueue(2), [(0, 8)]
    assert queue.deal(0, ask(whole=whole)) == (0, 4)
    assert queue.deal(1, ask(whole=whole)) == (4, 8)
    assert queue.deal(0, ask(1, (0, 4), whole=whole)) is None
    assert queue.deal(1, ask(1, (0, 6), whole=whole)) is None
    assert not queue.has_reply(ask())
    assert queue.remaining(0, 1) == [(6, 8)]
    assert queue.deal(1, ask(1, (0, 8), whole=whole)) == NOTHING
    assert queue.has_reply(ask())
    assert queue.deal(0, ask(1, (0, 4), whole=whole)) == NOTHING
    assert queue.remaining(0, 1) == []


def test_progress_never_goes_backward() -> None:
    queue = ShardQueue(1)
    queue.deal(0, ask())
    queue.reach(0, LeaseProgress(0, 1, (0, 8)))
    queue.deal(0, ask(1, (0, 4)))
    assert queue.remaining(0, 1) == [(8, 96)]


def test_leases_of_a_lost_worker_are_leased_again() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.deal(1, ask())
    queue.deal(0, ask(1, (0, 12)))
    assert queue.release(0) == [(0, [(12, 16), (32, 48)])]
    assert queue.release(0) == []
    assert queue.deal(1, ask(1)) == (12, 16)
    assert queue.deal(1, ask(2)) == (32, 48)


def test_a_worker_that_gives_back_may_repeat_its_requests() -> None:
    """Its next incarnation may have to repeat its last step."""
    queue = ShardQueue(2)
    for number in range(3):
        queue.deal(0, ask(number))
    queue.reach(0, LeaseProgress(0, 1, (1, 20), gives_back=True))
    assert queue.remaining(0, 1) == [(20, 96)]
    assert queue.deal(1, ask()) == (20, 36)
    assert [queue.deal(0, ask(n)) for n in range(3)] == [(0, 16), (16, 20), NOTHING]
    assert queue.remaining(0, 1) == [(20, 96)]


def test_waits_for_lists_the_holders_of_leases() -> None:
    queue, whole = ShardQueue(2), [(0, 4)]
    queue.deal(0, ask(whole=whole))
    assert queue.deal(1, ask(whole=whole)) is None
    assert queue.waits_for(1) == []
    assert queue.deal(1, ask(whole=whole, waits=True)) is None
    assert (queue.waits_for(1), queue.waits_for(0)) == ([0], [])
    queue.reach(0, LeaseProgress(0, 1, (0, 4)))
    assert queue.waits_for(1) == []


def test_iterations_that_no_worker_can_ask_for_are_forgotten() -> None:
    queue, whole = ShardQueue(2), [(0, 4)]
    for turn in (1, 2, 3):
        for worker in (0, 1):
            queue.deal(worker, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        queue.reach(0, LeaseProgress(0, turn, (0, 4)))
    assert [turn.turn for turn in queue.state().turns] == [2, 3]
    assert queue.deal(0, ask(turn=2, epoch=2, back=2, whole=whole)) == (0, 4)
    # forgotten, therefore over
    assert queue.deal(1, ask(turn=1, epoch=1, whole=whole)) == NOTHING
    queue.reach(1, LeaseProgress(0, 1, (0, 4)))
    assert queue.remaining(0, 1) == []
    assert queue.remaining(0, 4) is None
    # a lost worker will not ask
    queue.release(1)
    queue.deal(0, ask(turn=3, epoch=3, back=3, whole=whole))
    assert [turn.turn for turn in queue.state().turns] == [3]


def test_iterations_of_only_some_workers_are_forgotten() -> None:
    queue, whole = ShardQueue(3), [(0, 8)]
    for turn in range(1, 9):
        facts = {"turn": turn, "epoch": turn, "back": max(1, turn - 1), "whole": whole}
        for worker, start in ((0, 0), (1, 4)):
            assert queue.deal(worker, ask(**facts)) == (start, start + 4)
            queue.reach(worker, LeaseProgress(0, turn, (0, start + 4)))
    assert [turn.turn for turn in queue.state().turns] == [7, 8]
    # a late worker receives the same reply as before
    assert queue.deal(2, ask(epoch=1, whole=whole)) == NOTHING
    assert queue.remaining(0, 1) == []
    # free records stay free, and leases are kept while their holders may ask
    queue = ShardQueue(2)
    for turn in range(1, 9):
        queue.deal(0, ask(turn=turn, epoch=turn, back=max(1, turn - 1), whole=whole))
        queue.reach(0, LeaseProgress(0, turn, (0, 2), gives_back=turn != 3))
    turns = queue.state().turns
    assert [turn.turn for turn in turns if turn.leases] == [3, 7, 8]
    assert queue.deal(1, ask(epoch=1, whole=whole)) == (2, 6)


def test_workers_that_iterate_differently_are_refused() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    for other, text in (
        (ask(epoch=2), r"with records 0 to 95 of epoch 2, but other workers with .* of epoch 0"),
        (ask(whole=[(0, 4), (8, 12)]), r"records 0 to 3 and 8 to 11 of epoch 0, but"),
        (ask(whole=[]), r"no record of epoch 0, but other workers with records 0 to 95"),
    ):
        with pytest.raises(PlanError, match=text):
            queue.deal(1, other)


@pytest.mark.parametrize("unit", [0, -4])
def test_batches_without_records_are_refused(unit: int) -> None:
    queue = ShardQueue(1)
    with pytest.raises(ProtocolError, match=f"asked for batches of {unit} records"):
        queue.deal(0, ask(unit=unit))
    assert queue.deal(0, ask()) == (0, 16)


def test_each_loader_has_its_own_records() -> None:
    queue = ShardQueue(1)
    assert queue.deal(0, ask()) == (0, 16)
    assert queue.deal(0, ask(loader=1, whole=[(0, 4)])) == (0, 4)
    assert queue.deal(0, ask(1)) == (16, 32)


def test_an_epoch_without_records_is_over() -> None:
    assert ShardQueue(1).deal(0, ask(whole=[])) == NOTHING


def test_intervals_are_joined_and_described() -> None:
    assert joined([(8, 9), (0, 4), (4, 6), (7, 7)]) == [(0, 6), (8, 9)]
    assert described([(0, 6), (8, 9)]) == "0 to 5 and 8 to 8"


class Workers:
    """Workers that lease, train, are lost and ask again; counts how often each record is done."""

    def __init__(self, length: int, workers: int, unit: int, batches: int) -> None:
        self.queue, self.length = ShardQueue(workers), length
        self.facts = {"whole": [(0, length)], "unit": unit, "batches": batches}
        self.done = [0] * length
        #: by worker: the ranges it leased; the one it works on, and the next record
        self.leases: list[list[tuple[int, int]]] = [[] for _ in range(workers)]
        self.position = [(0, 0)] * workers
        self.lost: set[int] = set()
        self.is_over = False

    def lease(self, worker: int, data: Any) -> None:
        leases = self.leases[worker]
        number = data.draw(st.integers(0, len(leases)))
        leased = self.queue.deal(worker, ask(number, self.position[worker], **self.facts))
        if number < len(leases):
            assert leased == leases[number]
        elif leased == NOTHING:
            self.is_over = True
        elif leased is not None:
            leases.append(leased)

    def train(self, worker: int, data: Any) -> None:
        """Train some records of the current range."""
        number, position = self.position[worker]
        if number < len(self.leases[worker]):
            start, stop = self.leases[worker][number]
            first = max(start, position)
            end = data.draw(st.integers(first, stop))
            for record in range(first, end):
                self.done[record] += 1
            self.position[worker] = (number, end) if end < stop else (number + 1, 0)

    def report(self, worker: int, data: Any) -> None:
        self.queue.reach(worker, LeaseProgress(0, 1, self.position[worker]))

    def lose(self, worker: int, data: Any) -> None:
        """Lose a worker after it has reported its progress."""
        if len(self.lost) < len(self.leases) - 1:
            self.report(worker, data)
            self.queue.release(worker)
            self.lost.add(worker)

    def restart(self, worker: int, data: Any) -> None:
        """Restart the server from its saved state."""
        state = msgspec.msgpack.decode(
            msgspec.msgpack.encode(self.queue.state()), type=ShardQueueState
        )
        assert state == self.queue.state()
        self.queue = ShardQueue(len(self.leases))
        self.queue.restore(state)

    def check(self) -> None:
        """No record is leased twice, and each one is leased, free or done."""
        held = [i for hand in self._hands() for i in hand]
        free = [i for turn in self.queue.state().turns for i in turn.free]
        records = [r for start, stop in (*held, *free) for r in range(start, stop)]
        assert len(records) == len(set(records))
        assert max(self.done) <= 1
        assert all(r in records for r, times in enumerate(self.done) if not times) or self.is_over

    def _hands(self) -> list[list[tuple[int, int]]]:
        turns = self.queue._turns.values()
        return [leases.remaining() for turn in turns for leases in turn.leases.values()]

    def finish(self, data: Any) -> None:
        here = [w for w in range(len(self.leases)) if w not in self.lost]
        while not self.is_over:
            for worker in here:
                number = self.position[worker][0]
                if number == len(self.leases[worker]):
                    leased = self.queue.deal(
                        worker, ask(number, self.position[worker], **self.facts)
                    )
                    self.is_over |= leased == NOTHING
                    self.leases[worker] += [leased] if leased not in (None, NOTHING) else []  # type: ignore[list-item]
                else:
                    start, stop = self.leases[worker][number]
                    for record in range(max(start, self.position[worker][1]), stop):
                        self.done[record] += 1
                    self.position[worker] = number + 1, 0


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(1, 60), st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.data())
def test_each_record_is_done_once(
    length: int, workers: int, unit: int, batches: int, data: Any
) -> None:
    job = Workers(length, workers, unit, batches)
    names = st.sampled_from(["lease", "lease", "train", "train", "report", "lose", "restart"])
    job.lease(0, data)
    for name, worker in data.draw(st.lists(st.tuples(names, st.integers(0, workers - 1)))):
        if worker not in job.lost:
            getattr(job, name)(worker, data)
            job.check()
    job.finish(data)
    assert job.done == [1] * length


# ShardQueueHandler: leases of records, waiting workers, and recovery after a restart.


def lease(worker: Worker, *arguments: Any, **facts: Any) -> tuple[int, int] | None:
    reply, _ = worker.say(ask(*arguments, **facts))
    return (reply.start, reply.stop) if isinstance(reply, m.LeaseReply) else None


def remaining(worker: Worker) -> Any:
    return worker.say(m.RemainingRequest(0, 1))[0].ranges


def test_workers_lease_ranges() -> None:
    first, second = team(opened(plan("async")))
    assert (lease(first), lease(second), lease(first, 1)) == ((0, 16), (16, 32), (32, 48))
    assert second.say(m.LeaseProgress(0, 1, (0, 20)))[0] == m.Done()
    assert remaining(first) == [(0, 16), (20, 96)]
    assert first.say(m.RemainingRequest(0, 2))[0] == m.Remaining(None)


def test_a_waiting_worker_is_told_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAIT_S", 0.01)
    first, second = team(opened(plan("async")))
    whole = [(0, 4)]
    lease(first, whole=whole)
    assert lease(second, whole=whole) is None
    assert lease(second, whole=whole, waits=True) is None


def test_a_waiting_worker_is_woken_by_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handler, "_WAIT_S", 100.0)
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    lease(first, whole=whole)

    def finish() -> None:
        with server._changed:
            server._changed.wait_for(lambda: server._membership.shard_queue.queue.waits_for(1), 20)
        first.say(m.LeaseProgress(0, 1, (0, 4)), lane="pull")

    reply, _ = together(lambda: lease(second, whole=whole, waits=True), finish)
    assert reply is None
    assert lease(second, whole=whole, waits=True) == (0, 0)


@pytest.mark.parametrize("how", ["leaves", "is lost"])
def test_leases_of_a_worker_that_is_gone_are_leased_again(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = opened(plan("async"))
    first, second = team(server)
    lease(first)
    lease(second)
    lease(first, 1, (0, 12))
    if how == "leaves":
        first.say(m.Leave())
    else:
        with server._changed:
            server._membership.shard_queue.lose(0)
    said = "has left" if how == "leaves" else "was lost"
    assert caplog.messages == [
        f"worker 0 {said} before it finished records 12 to 15 and 32 to 47 of epoch 0; other "
        "workers get them"
    ]
    assert [lease(second, n) for n in (1, 2)] == [(12, 16), (32, 48)]


def test_a_worker_that_finished_its_leases_leaves_silently(caplog: Any) -> None:
    first, _ = team(opened(plan("async")))
    lease(first)
    first.say(m.LeaseProgress(0, 1, (0, 16)))
    first.say(m.Leave())
    assert caplog.messages == []


@pytest.mark.slow
def test_a_deadlock_of_a_barrier_and_a_lease_is_an_error() -> None:
    server = opened(plan("async"))
    first, second = team(server)
    whole = [(0, 4)]
    lease(first, whole=whole)

    def wait() -> None:
        while isinstance(second.say(ask(whole=whole, waits=True), lane="pull")[0], m.Done):
            with server._changed:
                if server._membership.barriers._broken is not None:
                    return

    met, _ = together(lambda: first.enter_barrier(0, "save_persistables"), wait)
    assert isinstance(met, MembershipError)
    assert "save_persistables of worker 0 would wait for worker 1, which has no records" in str(met)
    assert "call it after the loop" in str(met)


# -- recovery after a restart ----------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Any:
    cluster = RestartableCluster(tmp_path / "kept", plan("async"))
    yield cluster
    cluster.close()


@pytest.mark.parametrize("snapshot", [False, True])
def test_leases_survive_a_restart(cluster: RestartableCluster, snapshot: bool) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    lease(first, 1, (0, 12))
    second.say(m.LeaseProgress(0, 1, (0, 20)))
    if snapshot:
        assert cluster.durability.snapshot()
    cluster.restart()
    first, second = cluster.workers
    assert remaining(first) == [(12, 16), (20, 96)]
    # the repeat of a lost reply, and the next lease
    assert [lease(first, n) for n in (1, 2)] == [(32, 48), (48, 60)]
    assert [lease(second, n) for n in (0, 1)] == [(16, 32), (60, 72)]


@pytest.mark.parametrize("how", ["leaves", "is lost", "gives back"])
@pytest.mark.parametrize("snapshot", [False, True])
def test_released_leases_survive_a_restart(
    cluster: RestartableCluster, how: str, snapshot: bool
) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    if how == "leaves":
        first.say(m.Leave())
    elif how == "gives back":
        first.say(m.LeaseProgress(0, 1, (0, 0), gives_back=True))
    else:
        with cluster.server._changed:
            # one record says both
            cluster.server._membership._note_gone(0, lost=True)
            cluster.server._membership.shard_queue.lose(0)
        cluster.server._log.wait_on_disk()
    if snapshot:
        assert cluster.durability.snapshot()
    with cluster.server._changed:
        before = cluster.server._membership.shard_queue.queue.state()
    cluster.restart(returning=[1])
    with cluster.server._changed:
        assert cluster.server._membership.shard_queue.queue.state() == before
    assert lease(cluster.workers[0], 1) == (0, 16)


def test_a_server_that_dies_while_it_gives_up_a_worker_frees_its_leases(
    cluster: RestartableCluster,
) -> None:
    first, second = cluster.workers
    lease(first)
    lease(second)
    # the record of the loss is the last one on disk
    cluster.server._membership._note_gone(0, lost=True)
    cluster.server._log.wait_on_disk()
    cluster.restart(returning=[1])
    assert lease(cluster.workers[0], 1) == (0, 16)


@pytest.mark.parametrize("how", ["leaves", "fails", "is lost"])
def test_a_lease_during_the_loss_of_a_worker_survives_a_restart(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RestartableCluster(tmp_path / "kept", plan("async", lost_worker="go_on"))
    server, (first, second) = cluster.server, cluster.workers
    lease(second)
    lease(second, 1)
    reply: list[Any] = []
    wait_on_disk = server._log.wait_on_disk

    def lease_once() -> None:
        if not reply:
            reply.append(None)
            reply.append(lease(first))
        wait_on_disk()

    monkeypatch.setattr(server._log, "wait_on_disk", lease_once)
    if how == "is lost":
        second.disconnect()
        server._membership._look()
    else:
        second.say(m.Leave("an error" if how == "fails" else ""))
    assert reply[1] == (0, 16)
    with server._changed:
        before = server._membership.shard_queue.queue.state()
    cluster.restart(returning=[0])
    with cluster.server._changed:
        assert cluster.server._membership.shard_queue.queue.state() == before
    cluster.close()


def test_workers_of_another_job_start_from_the_first_range(tmp_path: Path) -> None:
    cluster = RestartableCluster(tmp_path, plan("async", workers=1))
    lease(cluster.workers[0])
    cluster.workers[0].say(m.Leave("an error"))
    cluster.server.close()
    server = closed_server(1)
    open_up(server, plan("async", workers=1), Durable(tmp_path, job="another", resume=True))
    assert lease(Worker(server, 0, 1)) == (0, 16)
    server.close()


OPERATIONS = st.one_of(
    st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 3)),
    st.tuples(st.just("reach"), st.integers(0, 1), st.booleans()),
    st.tuples(st.sampled_from(["die", "snapshot"])),
)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.lists(OPERATIONS, max_size=15))
def test_any_history_of_leases_survives_restarts(
    tmp_path_factory: pytest.TempPathFactory, operations: list[Any]
) -> None:
    cluster = RestartableCluster(tmp_path_factory.mktemp("kept"), plan("async"))
    received = [0, 0]
    for name, *arguments in operations:
        if name == "ask":
            worker, number = arguments
            reply = lease(
                cluster.workers[worker], min(number, received[worker]), batches=1 + number
            )
            received[worker] += reply not in (None, (0, 0)) and number >= received[worker]
        elif name == "reach":
            worker, gives_back = arguments
            reached = max(0, received[worker] - 1), 0
            cluster.workers[worker].say(m.LeaseProgress(0, 1, reached, gives_back))
        elif name == "snapshot":
            assert cluster.durability.snapshot()
        else:
            before = cluster.server._membership.shard_queue.queue.state()
            cluster.restart()
            assert cluster.server._membership.shard_queue.queue.state().turns == before.turns
    cluster.close()


# ShardQueue.cut: a turn ends early, and the next one has exactly the records that are left.


def test_a_cut_turn_ends_with_its_leases_and_leaves_the_rest() -> None:
    queue = ShardQueue(2)
    assert (queue.deal(0, ask()), queue.deal(1, ask())) == ((0, 16), (16, 32))
    assert queue.may_cut(0)
    queue.cut(0)
    assert not queue.may_cut(0)
    # worker 0 has finished its range, and worker 1 has not
    assert queue.deal(0, ask(1, (1, 0), waits=True)) is None
    assert queue.left(0, 1) == []
    assert queue.deal(1, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.deal(0, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.left(0, 1) == [(32, 96)]
    assert queue.remaining(0, 1) == [(32, 96)]
    assert queue.is_unleased(0, 2)
    assert queue.deal(1, ask(turn=2, whole=[(32, 96)])) == (32, 48)
    assert not queue.is_unleased(0, 2)


def test_a_late_worker_learns_what_a_cut_turn_left() -> None:
    """It took no part in the turn, and must not take the epoch for over."""
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.cut(0)
    assert queue.deal(0, ask(1, (1, 0), waits=True)) == NOTHING
    assert queue.deal(0, ask(turn=2, whole=[(16, 96)], back=2)) == (16, 32)
    assert queue.deal(1, ask()) == NOTHING
    assert queue.left(0, 1) == [(16, 96)]


def test_a_cut_turn_that_is_finished_leaves_nothing() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask(whole=[(0, 8)], batches=1))
    queue.cut(0)
    queue.reach(0, LeaseProgress(0, 1, (0, 4)))
    assert queue.left(0, 1) == [(4, 8)]


def test_records_that_a_worker_gives_back_are_left_over() -> None:
    queue = ShardQueue(2)
    queue.deal(0, ask())
    queue.deal(1, ask())
    queue.cut(0)
    queue.reach(1, LeaseProgress(0, 1, (0, 20), gives_back=True))
    queue.reach(0, LeaseProgress(0, 1, (1, 0)))
    assert queue.left(0, 1) == [(20, 96)]


def test_a_worker_that_waits_gets_records_in_the_next_turn_where_steps_are_common() -> None:
    queue = ShardQueue(2)
    queue.cuts_for_waiting = True
    whole: dict[str, Any] = {"whole": [(0, 8)], "batches": 1}
    assert (queue.deal(0, ask(**whole)), queue.deal(1, ask(**whole))) == ((0, 4), (4, 8))
    assert queue.deal(0, ask(1, (1, 0), waits=True, **whole)) is None
    queue.release(1)
    assert queue.deal(0, ask(1, (1, 0), waits=True, **whole)) == NOTHING
    assert queue.left(0, 1) == [(4, 8)]


def test_a_place_keeps_nothing_of_its_former_worker() -> None:
    queue = ShardQueue(2, 3)
    queue.deal(1, ask())
    queue.release(1)
    queue.join(1)
    assert queue.deal(1, ask()) == (0, 16)


def test_ranges_are_cut_for_the_workers_that_train() -> None:
    whole: dict[str, Any] = {"whole": [(0, 96)], "batches": 99}
    few, many = ShardQueue(1, 8), ShardQueue(1, 8)
    for worker in range(1, 8):
        many.join(worker)
    assert few.deal(0, ask(**whole)) == (0, 48)
    assert many.deal(0, ask(**whole)) == (0, 8)


@settings(max_examples=200)
@given(data=st.data())
def test_every_record_is_leased_once_whatever_is_cut(data: st.DataObject) -> None:
    """Workers finish ranges in any order; the queue is cut, saved and restored at any time."""
    queue, length = ShardQueue(3), 40
    turn, number, reached, whole = (
        dict.fromkeys(range(3), v) for v in (1, 0, (0, 0), [(0, length)])
    )
    hand: dict[int, tuple[int, int]] = {}
    trained: list[int] = []
    active = {0, 1, 2}
    while active:
        event = data.draw(st.sampled_from(["ask", "ask", "cut", "restore"]))
        if event == "cut" and queue.may_cut(0):
            queue.cut(0)
        elif event == "restore":
            state = msgspec.json.decode(msgspec.json.encode(queue.state()), type=ShardQueueState)
            queue = ShardQueue(3)
            queue.restore(state)
        worker = data.draw(st.sampled_from(sorted(active)))
        if worker in hand:
            start, stop = hand.pop(worker)
            trained += range(start, stop)
            number[worker] += 1
            reached[worker] = number[worker], 0
        request = ask(
            number[worker],
            reached[worker],
            turn=turn[worker],
            back=turn[worker],
            whole=whole[worker],
            batches=1,
            waits=True,
        )
        dealt = queue.deal(worker, request)
        if dealt == NOTHING:
            left = queue.left(0, turn[worker])
            if not left:
                active.discard(worker)
                continue
            turn[worker] += 1
            number[worker], reached[worker], whole[worker] = 0, (0, 0), left
        elif dealt is not None:
            hand[worker] = dealt
    assert sorted(trained) == list(range(length))


def test_a_turn_in_which_no_worker_could_join_is_not_cut_again() -> None:
    queue = ShardQueue(2)
    queue.admissions.skip((0, 1))
    queue.deal(0, ask())
    assert not queue.may_cut(0)
    queue.deal(0, ask(turn=2, back=2))
    assert queue.may_cut(0)


def test_a_worker_that_has_left_its_loop_early_is_in_a_later_turn() -> None:
    """The rest of the cut turn takes nothing from that turn."""
    queue = ShardQueue(2)
    queue.deal(0, ask(turn=10))
    queue.deal(1, ask(turn=10))
    queue.cut(0)
    queue.reach(1, LeaseProgress(0, 10, (0, 20), gives_back=True))
    later = ask(turn=20, epoch=1, back=20)
    assert queue.deal(1, later) == (0, 16)
    assert queue.deal(0, ask(1, (1, 0), turn=10, waits=True)) == NOTHING
    assert queue.deal(0, ask(turn=11, whole=queue.left(0, 10))) == (20, 36)
    assert queue.deal(1, later) == (0, 16)


# Admissions: a turn is held until all workers that join there are known to all servers.


TURN = (0, 3)


def test_a_turn_is_held_from_the_state_to_the_last_server() -> None:
    admissions = Admissions()
    assert not admissions.hold(TURN, 0.0)
    assert admissions.wait(4, 0) is None
    assert admissions.hold(TURN, 0.0)
    assert admissions.wants_state(TURN)
    admissions.offer(TURN)
    assert not admissions.wants_state(TURN)
    assert admissions.wait(4, 0) == TURN
    assert admissions.enter(4, TURN)
    assert admissions.hold(TURN, 0.0)
    admissions.entered(4)
    assert not admissions.hold(TURN, 0.0)
    admissions.begin(TURN)
    assert admissions.wait(5, 0) is None


def test_a_worker_enters_only_at_the_turn_whose_state_it_has() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert not admissions.enter(4, TURN)
    admissions.offer(TURN)
    assert not admissions.enter(4, (0, 2))
    assert not admissions.enter(5, TURN)
    assert admissions.enter(4, TURN)
    # the reply may be lost
    assert admissions.enter(4, TURN)


def test_only_turns_of_its_loader_wait_for_a_worker() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert not admissions.hold((1, 1), 0.0)
    assert admissions.hold((0, 1), 0.0)


def test_a_turn_begins_without_a_state_after_a_while() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    assert admissions.hold(TURN, 10.0)
    assert admissions.hold(TURN, 10.0 + HOLD_S)
    assert not admissions.hold(TURN, 10.1 + HOLD_S)
    assert admissions.hold((0, 4), 11.0 + HOLD_S)


def test_a_turn_begins_at_once_where_no_worker_can_join() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    admissions.skip(TURN)
    assert not admissions.hold(TURN, 0.0)
    assert admissions.hold((0, 4), 0.0)


def test_no_turn_waits_for_a_worker_that_is_lost() -> None:
    admissions = Admissions()
    admissions.wait(4, 0)
    admissions.wait(5, 0)
    admissions.offer(TURN)
    admissions.enter(4, TURN)
    admissions.forget(4)
    admissions.forget(5)
    assert not admissions.hold(TURN, 0.0)
    assert admissions.entering == []

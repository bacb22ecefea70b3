# SPDX-License-Identifier: Apache-2.0
"""Loaders of simulated workers that share a shard queue."""

import gc
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data import queued
from tests.data.simulated import (
    Announced,
    Numbers,
    Ragged,
    Stream,
    in_processes,
    numbers_in,
    plain,
    single,
)
from torch.utils.data import DataLoader

from fleetlight.data.queue.client import PARTS, QueueOptions
from fleetlight.errors import CheckpointError, ConfigError
from fleetlight.ps.server.shard_queue.shard_queue import ShardQueue


@pytest.fixture(autouse=True)
def workers_end() -> Iterator[None]:
    yield
    queued.end_all()


@pytest.mark.slow
@in_processes
def test_one_worker_reads_all_in_order(processes: dict[str, Any]) -> None:
    [worker] = queued.workers_of(1, lambda: plain(shuffle=True, **processes))
    other = single(plain(shuffle=True))
    for _ in range(2):
        assert list(worker.epoch()) == [numbers_in(batch) for batch in other]
        # only the queue knows which range is next
        assert worker.upcoming[1] is not None
        assert all(b in (None, r) for b, r in zip(worker.upcoming, worker.read, strict=True))
        worker.read.clear()
        worker.upcoming.clear()
    assert (worker.loader.epoch, worker.loader.consumed) == (2, 0)


@pytest.mark.slow
@in_processes
def test_a_faster_worker_reads_more(processes: dict[str, Any]) -> None:
    fast, slow = queued.workers_of(2, lambda: plain(length=60, shuffle=True, **processes))
    first = slow.epoch()
    next(first)
    with pytest.raises(queued.WaitsError):
        list(fast.epoch())
    # all records except those leased to the other worker
    assert 2 <= 15 - len(fast.read) <= 6
    list(first)
    assert queued.records(fast, slow) == list(range(60))


def test_each_batch_counts_fully_and_the_last_may_be_short() -> None:
    [worker] = queued.workers_of(1, lambda: plain(length=6))
    list(worker.epoch())
    shares = [share for share in worker.shares if share is not None]
    assert [(share.mine, share.total, share.consumed) for share in shares] == [(4, 4, 4), (2, 2, 6)]
    one, _ = queued.workers_of(2)
    next(one.epoch())
    assert one.shares[1][:2] == (4, 8)


def test_drop_last_drops_the_short_batch() -> None:
    [worker] = queued.workers_of(1, lambda: plain(length=6, drop_last=True))
    assert list(worker.epoch()) == [[0, 1, 2, 3]]


def test_batches_of_a_batch_sampler_stay_whole() -> None:
    workers = queued.workers_of(2, lambda: DataLoader(Numbers(30), batch_sampler=Ragged()))
    queued.run(workers)
    assert sorted(batch for worker in workers for batch in worker.read) == sorted(Ragged())


def test_a_worker_reports_one_step_less_than_the_servers_have() -> None:
    """Its next incarnation repeats the last step."""
    worker, _ = queued.workers_of(2, lambda: plain(length=80))
    epoch = worker.epoch()
    for _ in range(5):
        next(epoch)
    # reported with the request for the fifth batch
    assert worker.client.queue.remaining(0, PARTS) == [(8, 80)]
    epochs = []
    for state in worker.states[2:]:
        later = queued.Worker(worker.client.queue, 0, 2, lambda: plain(length=80))
        later.loader.cursor.resume(pickle.loads(pickle.dumps(state)))
        epochs.append(later.epoch())
        assert next(epochs[-1]) == worker.read[state["consumed"] // 4]


def test_records_of_unacknowledged_pushes_are_not_done() -> None:
    worker, _ = queued.workers_of(2, lambda: plain(length=80))
    for _ in itertools.islice(worker.loader, 7):
        worker.client.steps_done += 1
    assert (
        worker.client.acknowledged == worker.client.steps_done
    )  # acknowledged after the last step, and given back
    queue = worker.client.queue
    assert queue.remaining(0, PARTS) == [(28, 80)]
    another, _ = queued.workers_of(2, lambda: plain(length=80))
    iterator = iter(another.loader)
    for _ in range(7):
        next(iterator)
        another.client.steps_done += 1
    assert another.client.queue.remaining(0, PARTS) == [(0, 80)]


@pytest.mark.parametrize("announce", [None, Announced()], ids=["", "one_ahead"])
@pytest.mark.parametrize("merged", [1, 3])
def test_a_restarted_worker_resumes_in_its_own_ranges(merged: int, announce: Any) -> None:
    """At each batch, also if a step merges several."""
    for died in range(1, 13):
        queue = ShardQueue(2)
        worker, other = (
            queued.Worker(queue, index, 2, lambda: plain(length=60), announce=announce)
            for index in range(2)
        )
        epoch, others = iter(worker.loader), other.epoch()
        next(others)
        mark, kept = worker.loader.state_dict(), 0
        for batch in range(died):
            worker.read.append(numbers_in(next(epoch)))
            if batch % merged == 0:
                mark, kept = worker.states[-1], batch
            if batch % merged == merged - 1:
                worker.client.steps_done = worker.client.acknowledged = worker.client.steps_done + 1
        # it reads the batches of its last step again; an unmade step had no batch
        later = queued.Worker(queue, 0, 2, lambda: plain(length=60), announce=announce)
        later.loader.cursor.resume(mark)
        assert later.loader.epoch == 0
        again = later.epoch()
        assert [next(again) for _ in range(died - kept)] == worker.read[kept:died]
        queued.continue_epochs([others, again], [other, later])
        del worker.read[kept:]
        assert queued.records(worker, later, other) == list(range(60))
        del epoch


def test_a_worker_restarted_between_epochs_rereads_its_last_batches() -> None:
    queue = ShardQueue(2)
    one, other = (queued.Worker(queue, n, 2, lambda: plain(length=16)) for n in range(2))
    queued.run([one, other])
    epochs = [one.epoch(), other.epoch()]
    for epoch in epochs:
        next(epoch)
    for state, batch in zip(one.states[:-1], one.read[:-1], strict=True):
        later = queued.Worker(queue, 0, 2, lambda: plain(length=16))
        later.loader.cursor.resume(state)
        assert later.loader.epoch == 0
        epochs.append(later.epoch())
        assert next(epochs[-1]) == batch


def test_other_workers_read_returned_records() -> None:
    one, other = queued.workers_of(2, lambda: plain(length=60))
    for _, _ in zip(range(3), one.epoch(), strict=False):
        pass
    gc.collect()
    assert "give back" in one.client.calls
    list(other.epoch())
    assert queued.records(one, other) == list(range(60))
    # the next iteration reads the next epoch
    assert one.loader.epoch == 0
    next(one.epoch())
    assert one.loader.epoch == 1


@pytest.mark.slow
@in_processes
@pytest.mark.parametrize("batches", [3, 2])
def test_the_next_incarnation_skips_returned_records(
    batches: int, processes: dict[str, Any]
) -> None:
    """A worker leaves its loop and is killed before its next step: its saved position is old."""
    queue = ShardQueue(2)
    one, other = (
        queued.Worker(queue, n, 2, lambda: plain(length=60, **processes), range_batches=4)
        for n in range(2)
    )
    epoch = one.epoch()
    for _ in range(batches):
        next(epoch)
    one.client.steps_done += 1
    del epoch
    gc.collect()
    assert one.client.calls[-2:] == ["give back", "resume"]
    rest = other.epoch()
    next(rest)
    # the new incarnation reads the batch of its last step again and does not leave the loop
    later = queued.Worker(queue, 0, 2, lambda: plain(length=60, **processes), range_batches=4)
    later.loader.cursor.resume(pickle.loads(pickle.dumps(one.states[-1])))
    again = later.epoch()
    assert next(again) == one.read.pop()
    queued.continue_epochs([rest, again], [other, later])
    assert queued.records(one, later, other) == list(range(60))


def test_a_restarted_loop_gives_back_its_ranges() -> None:
    one, other = queued.workers_of(2, lambda: plain(length=60))
    first = one.epoch()
    next(first)
    second = one.epoch()
    next(second)
    list(other.epoch())
    assert queued.records(other) == list(range(4, 60))
    with pytest.raises(ConfigError, match="restarted while it was being iterated"):
        next(first)


@pytest.mark.slow
def test_an_iteration_continues_with_returned_records() -> None:
    for processes in ({}, {"num_workers": 2}):
        one, other = queued.workers_of(2, lambda p=processes: plain(length=40, **p))
        kept = other.epoch()
        next(kept)
        seen = one.epoch()
        for _ in range(10 - 6 if processes else 10 - 2):
            next(seen)
        kept.close()
        del kept
        gc.collect()
        list(seen)
        assert queued.records(one, other) == list(range(40))


def test_a_waiting_worker_reads_returned_records_in_the_same_turn() -> None:
    one, other = queued.workers_of(2, lambda: plain(length=40))
    kept = other.epoch()
    next(kept)

    def give_back() -> bool:
        kept.close()
        gc.collect()
        return "give back" in other.client.calls

    one.client.others = give_back
    list(one.epoch())
    assert queued.records(one, other) == list(range(40))
    calls = [call for call in one.client.calls if not call.startswith("deal")]
    assert calls == ["reopen", "resume"]


def test_a_returned_batch_is_read_again() -> None:
    one, other = queued.workers_of(2, lambda: plain(length=40))
    batches = iter(one.loader)
    next(batches)
    again = numbers_in(next(batches))
    one.loader.cursor.put_back()
    one.loader.source.give_back()
    list(other.epoch())
    assert set(again) < set(queued.records(other))
    blocks = single(plain(length=40))
    batches = iter(blocks)
    next(batches)
    again = numbers_in(next(batches))
    blocks.cursor.put_back()
    later = single(plain(length=40))
    later.load_state_dict(blocks.state_dict())
    assert numbers_in(next(iter(later))) == again


def test_iterating_without_steps_reads_every_record() -> None:
    """As in a validation loop: at its end all records are done."""
    workers = queued.workers_of(2)
    for epoch in range(3):
        queued.run(workers, steps=False)
        assert queued.records(*workers) == sorted([*range(30)] * (epoch + 1))


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 40))
def test_a_checkpoint_holds_all_unread_records(
    data: Any, number: int, later: int, length: int
) -> None:
    """Saved several times within an epoch, and loaded by any number of workers."""
    turns = st.lists(st.integers(0, 5), max_size=12)
    workers, read = queued.workers_of(number, lambda: plain(length=length)), list[int]()
    for _ in range(3):
        iterators = [worker.epoch() for worker in workers]
        queued.continue_epochs(iterators, workers, data.draw(turns))
        state = saved(workers)
        read += queued.records(*workers)
        left = [r for start, stop in state["left"] or [] for r in range(start, stop)]
        assert state["consumed"] == (length - len(left) if state["left"] is not None else 0)
        for iterator in iterators:
            iterator.close()  # type: ignore[attr-defined]
        workers = queued.workers_of(later, lambda: plain(length=length))
        for worker in workers:
            worker.loader.load_state_dict(state)
        if workers[0].loader.epoch == 1:
            break
    else:
        queued.run(workers)
        read += queued.records(*workers)
    assert sorted(read) == list(range(length))


def saved(workers: list[queued.Worker]) -> dict[str, Any]:
    """Saves as `save_persistables` does."""
    for worker in workers:
        worker.loader.source.report()
    return pickle.loads(pickle.dumps(workers[0].loader.cursor.shared_state()))  # type: ignore[no-any-return]


def test_a_checkpoint_between_epochs_starts_the_next() -> None:
    workers = queued.workers_of(2)
    queued.run(workers)
    state = saved(workers)
    assert (state["epoch"], state["left"], state["consumed"]) == (1, None, 0)
    [one] = queued.workers_of(1)
    one.loader.load_state_dict(state)
    assert (one.loader.epoch, len(list(one.epoch()))) == (1, 8)


def test_after_the_last_batch_the_epoch_is_done() -> None:
    [worker] = queued.workers_of(1)
    epoch = worker.epoch()
    for _ in range(8):
        next(epoch)
    [other] = queued.workers_of(1)
    other.loader.load_state_dict(saved([worker]))
    assert other.loader.epoch == 1


def test_a_queue_resumes_from_a_position_in_blocks() -> None:
    blocks = single(plain(drop_last=True))
    iterator = iter(blocks)
    next(iterator)
    workers = queued.workers_of(2, lambda: plain(drop_last=True))
    for worker in workers:
        worker.loader.load_state_dict(blocks.state_dict())
    queued.run(workers)
    assert queued.records(*workers) == list(range(4, 28))
    fresh = single(plain())
    [worker] = queued.workers_of(1)
    worker.loader.load_state_dict(fresh.state_dict())
    assert queued.records(worker) == []
    list(worker.epoch())
    assert queued.records(worker) == list(range(30))


def test_a_position_in_ranges_does_not_become_blocks() -> None:
    workers = queued.workers_of(2)
    blocks = single(plain())
    blocks.load_state_dict(saved(workers))
    assert (blocks.epoch, blocks.consumed) == (0, 0)
    next(workers[1].epoch())
    next(workers[0].epoch())
    with pytest.raises(CheckpointError, match=r"in several ranges; load it .*deal='queue'"):
        blocks.load_state_dict(saved(workers))
    stream = single(DataLoader(Stream(30), batch_size=4))
    with pytest.raises(CheckpointError, match="got the position of a stream"):
        workers[0].loader.load_state_dict(stream.state_dict())


def test_a_queue_has_no_length() -> None:
    [worker] = queued.workers_of(1)
    with pytest.raises(TypeError, match=r"no length: .*len\(loader\.dataset\)"):
        len(worker.loader)
    assert worker.loader.samples_per_step is None
    assert worker.loader.settings()["deal"] == "queue"


@pytest.mark.parametrize(
    ("make", "facts", "text"),
    [
        (lambda: DataLoader(Stream(9), 4), {}, "which a stream does not have; leave deal out"),
        (lambda: DataLoader(Numbers(9), batch_size=None), {}, "no automatic batching"),
        (plain, {"range_batches": 0}, "got range_batches=0, expected a whole number from 1"),
        (plain, {"range_batches": 1.5}, r"got range_batches=1\.5"),
    ],
)
def test_loaders_that_a_queue_cannot_serve_are_refused(make: Any, facts: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        queued.workers_of(1, make, **facts)


def test_a_queue_refuses_a_tail() -> None:
    with pytest.raises(ConfigError, match="got deal='queue' and tail='pad', but there is no block"):
        single(
            plain(), tail="pad", queue=QueueOptions(queued.LocalQueueClient(ShardQueue(1), 0), 4)
        )


def test_a_sampler_with_a_new_order_each_time_is_logged(caplog: Any) -> None:
    class ChangingSampler(Ragged):
        times = 0

        def __iter__(self) -> Iterator[list[int]]:
            self.times += 1
            yield [self.times]

        def __len__(self) -> int:
            return 1

    one, _ = queued.workers_of(2, lambda: DataLoader(Numbers(30), batch_sampler=ChangingSampler()))
    next(one.epoch())
    assert "gives a different order each time it is iterated" in caplog.text

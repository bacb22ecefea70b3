# SPDX-License-Identifier: Apache-2.0
"""Positions, iterations and settings of a loader that simulated workers share."""

from typing import Any

import pytest
import torch
from tests.data.observing import Observing
from tests.data.simulated import (
    Announced,
    Numbers,
    Ragged,
    Stream,
    Workers,
    counting,
    in_processes,
    numbers_in,
    plain,
    single,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from fleetlight.data import ShardLoader
from fleetlight.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.slow

# --- positions


def indexed(**settings: Any) -> DataLoader[Any]:
    return plain(shuffle=True, **settings)


def streamed(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Stream(60, split=True), batch_size=4, **settings)


def batched(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(30), batch_sampler=Ragged(), **settings)


@in_processes
@pytest.mark.parametrize("make", [indexed, streamed, batched])
def test_resuming_is_exact_at_every_step(make: Any, processes: dict[str, Any]) -> None:
    def workers() -> Workers:
        return Workers(lambda: make(**processes), 2)

    original = workers()
    epochs = [original.epoch(), original.epoch(), original.epoch()]
    # loading processes start slowly, so test fewer steps with them
    every = 1 if not processes else 3
    for done in range(1, len(epochs[1]) + 1, every):
        before = workers()
        before.epoch()
        assert before.epoch(done) == epochs[1][:done]
        after = workers().load(before.loaders[1].state_dict())
        assert after.epoch() == (epochs[1][done:] or epochs[2])


@pytest.mark.parametrize("announce", [Announced(), None], ids=["one_ahead", ""])
@pytest.mark.parametrize("tail", ["pad", "join", "drop"])
def test_resuming_is_exact_with_each_tail(tail: str, announce: Any) -> None:
    """A batch loaded ahead counts only after it is handed out."""
    for make in (indexed, streamed, batched):
        original = Workers(make, 2, tail=tail)
        whole, second = original.epoch(), original.epoch()
        for done in range(len(whole) + 1):
            before = Workers(make, 2, tail=tail, announce=announce)
            before.epoch(done)
            after = Workers(make, 2, tail=tail).load(before.loaders[0].state_dict())
            assert after.epoch() == (whole[done:] or second)


@pytest.mark.parametrize("processes", [2, 0])
@pytest.mark.parametrize("make", [indexed, streamed, batched])
@pytest.mark.parametrize("number", [3, 1])
def test_resuming_with_other_workers_loses_and_repeats_nothing(
    number: int, make: Any, processes: int
) -> None:
    everything = sorted(counting(Workers(make, 1).epoch()))
    for done in (1, 3):
        before = Workers(lambda: make(num_workers=processes), 2)
        first = counting(before.epoch(done))
        after = Workers(lambda: make(num_workers=processes), number)
        rest = counting(after.load(before.loaders[0].state_dict()).epoch())
        assert sorted(first + rest) == everything


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    for make in (indexed, streamed, lambda: streamed(num_workers=2)):
        before = Workers(make, 2)
        before.epoch()
        after = Workers(make, 2).load(before.loaders[0].state_dict())
        assert after.loaders[0].epoch == 1
        assert after.epoch() == before.epoch()


def test_a_position_carries_its_seed() -> None:
    before = Workers(indexed, 2, seed=4)
    whole = Workers(indexed, 2, seed=4).epoch()
    before.epoch(1)
    assert Workers(indexed, 2, seed=99).load(before.loaders[0].state_dict()).epoch() == whole[1:]


def test_a_position_counts_records_handed_out_not_loaded() -> None:
    loader = single(plain(num_workers=2, prefetch_factor=3))
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    assert loader.state_dict() == {"epoch": 0, "seed": 0, "order": "in sequence", "consumed": 8}
    assert loader.consumed == 8


def test_a_stream_needs_the_same_number_of_loading_processes() -> None:
    before = Workers(lambda: streamed(num_workers=2), 1)
    before.epoch(1)
    state = before.loaders[0].state_dict()
    with pytest.raises(CheckpointError, match=r"saved with 2 loading processes, .* has 1"):
        single(streamed()).load_state_dict(state)
    unused = Workers(lambda: streamed(num_workers=2), 1).loaders[0].state_dict()
    single(streamed()).load_state_dict(unused)


def drawn(draws: int) -> DataLoader[Any]:
    return plain(sampler=RandomSampler(Numbers(30), replacement=True, num_samples=draws))


def in_batches(size: int) -> DataLoader[Any]:
    sampler = BatchSampler(SequentialSampler(Numbers(30)), size, drop_last=False)
    return DataLoader(Numbers(30), batch_sampler=sampler)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("saved", "other", "texts"),
    [
        (plain(shuffle=True), plain(), ("30 records, shuffled", "in sequence")),
        (plain(shuffle=True), plain(shuffle=True, length=31), ("30 records", "31 records")),
        (drawn(20), drawn(30), (r"RandomSampler\(20 records\)", r"RandomSampler\(30 records\)")),
        (in_batches(2), in_batches(3), (r"BatchSampler\(batch_size=2\) of", "batch_size=3")),
    ],
)
def test_a_position_within_an_epoch_of_another_order_is_refused(
    saved: DataLoader[Any], other: DataLoader[Any], texts: tuple[str, str]
) -> None:
    before, after = single(saved), single(other)
    at_start = before.state_dict()
    next(iter(before))
    state = before.state_dict()
    with pytest.raises(
        CheckpointError, match=f"in the order '{texts[0]}.* has the order .*{texts[1]}"
    ):
        after.load_state_dict(state)
    # nothing is lost where nothing is read
    after.load_state_dict(at_start)


def test_an_incomplete_position_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lacks \['consumed', 'order', 'seed'\]"):
        single(indexed()).load_state_dict({"epoch": 1})
    with pytest.raises(CheckpointError, match=r"lacks \['streams', 'turn'\]"):
        single(streamed()).load_state_dict(single(indexed()).state_dict())


def test_a_position_in_more_records_than_are_left_is_refused() -> None:
    """It looks like the end of an epoch."""
    before = single(plain(shuffle=True, length=30))
    for _ in zip(range(4), before, strict=False):
        pass
    with pytest.raises(CheckpointError, match=r"'30 records, shuffled', .* '12 records, shuffled'"):
        single(plain(shuffle=True, length=12)).load_state_dict(before.state_dict())


# --- iterations


@in_processes
def test_an_abandoned_iteration_is_followed_by_the_next_epoch(processes: dict[str, Any]) -> None:
    for make in (indexed, streamed):
        whole = Workers(make, 2)
        whole.epoch()
        second = sorted(counting(whole.epoch()))
        workers = Workers(lambda make=make: make(**processes), 2)  # type: ignore[misc]
        workers.epoch(1)
        assert sorted(counting(workers.epoch())) == second
        assert workers.loaders[0].epoch == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "restart",
    [
        lambda loader: next(iter(loader)),
        lambda loader: loader.set_epoch(0),
        lambda loader: loader.load_state_dict(loader.state_dict()),
    ],
)
def test_an_outdated_iteration_raises(restart: Any) -> None:
    loader = single(plain())
    old = iter(loader)
    next(old)
    restart(loader)
    consumed = loader.consumed
    with pytest.raises(ConfigError, match="restarted while it was being iterated; for two"):
        next(old)
    assert loader.consumed == consumed


def test_an_unused_iterator_starts_no_epoch() -> None:
    loader = single(plain())
    iter(loader)
    assert numbers_in(next(iter(loader))) == [0, 1, 2, 3]
    assert loader.epoch == 0


def test_set_epoch_starts_that_epoch() -> None:
    workers = Workers(indexed, 2)
    epochs = [workers.epoch() for _ in range(3)]
    for epoch in (2, 0, 0, 1):
        for loader in workers.loaders:
            loader.set_epoch(epoch)
        assert workers.epoch() == epochs[epoch]


def test_set_epoch_after_loading_keeps_the_position_in_that_epoch() -> None:
    before = Workers(indexed, 1)
    whole = Workers(indexed, 1).epoch()
    before.epoch(2)
    for epoch, expected in ((0, whole[2:]), (1, None)):
        after = Workers(indexed, 1).load(before.loaders[0].state_dict())
        after.loaders[0].set_epoch(epoch)
        rounds = after.epoch()
        assert rounds == expected if expected else len(rounds) == len(whole)


# --- the loader itself


def test_a_sharded_loader_keeps_the_settings_of_the_original() -> None:
    def collate(records: list[int]) -> dict[str, list[int]]:
        return {"x": records}

    dataset, generator = Numbers(30), torch.Generator()
    original = DataLoader(
        dataset,
        batch_size=4,
        collate_fn=collate,
        generator=generator,
        num_workers=2,
        prefetch_factor=5,
        persistent_workers=True,
        timeout=30,
        pin_memory=True,
        worker_init_fn=print,
        multiprocessing_context="fork",
    )
    loader = single(original)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is dataset
    assert loader.collate_fn is collate
    assert loader.generator is generator
    for name in (
        "batch_size",
        "num_workers",
        "prefetch_factor",
        "persistent_workers",
        "timeout",
        "pin_memory",
        "worker_init_fn",
        "multiprocessing_context",
    ):
        assert getattr(loader, name) == getattr(original, name)
    assert (loader.worker, loader.workers, loader.tail) == (0, 1, "join")


@in_processes
def test_collate_fn_is_used_for_records_and_streams(processes: dict[str, Any]) -> None:
    for dataset in (Numbers(6), Stream(6, split=True)):
        assert sum(single(DataLoader(dataset, batch_size=3, collate_fn=sum, **processes))) == 15


def test_samples_per_step_is_the_global_batch() -> None:
    assert Workers(indexed, 3).loaders[0].samples_per_step == 12
    assert Workers(streamed, 3).loaders[0].samples_per_step == 12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [2, 1])
def test_loaders_that_cannot_be_sharded_are_refused(number: int) -> None:
    def refused(loader: Any, why: str, **settings: Any) -> None:
        with pytest.raises(ConfigError, match=why):
            single(loader, workers=number, **settings)

    distributed_sampler = DistributedSampler(Numbers(8), num_replicas=2, rank=0)
    refused(plain(sampler=distributed_sampler), "has a DistributedSampler and is sharded already")
    sampler = BatchSampler(distributed_sampler, 2, False)
    refused(DataLoader(Numbers(8), batch_sampler=sampler), "DistributedSampler")
    refused(DataLoader(Numbers(8), batch_size=None), "no automatic batching")
    refused(DataLoader(Stream(8), batch_size=None), "yields ready batches")
    refused([1, 2], "got a list, expected a torch DataLoader")
    refused(single(plain()), "fleet.shard returned")
    refused(plain(), "tail='cut', expected one of join, drop, pad", tail="cut")


def test_a_list_of_indices_may_be_a_sampler() -> None:
    loader = plain(sampler=[3, 1, 2])
    assert counting(Workers(lambda: loader, 2).epoch()) == [3, 1, 2]
    batches = BatchSampler(SequentialSampler(range(4)), 2, False)
    in_order = DataLoader(Numbers(4), batch_sampler=batches)
    assert counting(Workers(lambda: in_order, 1).epoch()) == [0, 1, 2, 3]


# --- one batch ahead


def test_the_next_batch_is_announced_before_each_is_handed_out() -> None:
    announced = Announced()
    loader = single(plain(2, 5), announce=announced)
    handed: list[list[int]] = []
    for batch in loader:
        handed.append(numbers_in(batch))
        assert announced.batches[-1][0] == handed[-1]
        assert loader.consumed == min(2 * len(handed), 6)
    assert announced.batches == [[[0, 1], [2, 3]], [[2, 3], [4]], [[4]]]
    announced.active = False
    assert [numbers_in(batch) for batch in loader] == handed
    assert len(announced.batches) == 3


def test_an_unreadable_record_fails_its_own_batch_only() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Any:
            if index == 3:
                raise OSError("record 3")
            return super().__getitem__(index)

    iterator = iter(single(DataLoader(Broken(6), batch_size=2), announce=Announced()))
    assert numbers_in(next(iterator)) == [0, 1]
    with pytest.raises(OSError, match="record 3"):
        next(iterator)


# --- between two batches


def paused(loader: DataLoader[Any], **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    """A loader, and its position at each possible interruption of the training."""
    interruptions: list[dict[str, Any]] = []
    sharded = single(loader, between=lambda: interruptions.append(sharded.state_dict()), **settings)
    return sharded, interruptions


def test_an_epoch_may_be_interrupted_before_each_batch() -> None:
    loader, interruptions = paused(plain(4, 10))
    assert len(list(loader)) == 3
    assert [(p["epoch"], p["consumed"]) for p in interruptions] == [(0, 0), (0, 4), (0, 8)]
    interruptions.clear()
    next(iter(loader))
    assert [(p["epoch"], p["consumed"]) for p in interruptions] == [(1, 0)]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("announce", [Announced(), None])
@pytest.mark.parametrize("make", [indexed, streamed, batched])
def test_resuming_after_an_interruption_gives_the_rest(make: Any, announce: Any) -> None:
    loader, interruptions = paused(make(), announce=announce)
    epoch = [numbers_in(batch) for batch in loader]
    assert len(interruptions) == len(epoch)
    for number, position in enumerate(interruptions):
        again = single(make())
        again.load_state_dict(position)
        assert again.epoch == 0
        assert [numbers_in(batch) for batch in again] == epoch[number:]


def test_resuming_within_an_epoch_draws_no_random_number() -> None:
    loader = single(plain(4, 10))
    loader.load_state_dict({"epoch": 0, "seed": 0, "order": "in sequence", "consumed": 4})
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    next(iter(loader))
    assert torch.equal(torch.rand(1), expected)


# --- resuming without the script's help


class CallRecorder:
    """Records the calls of a loader."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_iteration(self) -> None:
        self.calls.append("begins")

    def before_batch(self, position: Any) -> None:
        self.calls.append((position["epoch"], position["consumed"]))


def followed(follow: CallRecorder) -> ShardLoader:
    return ShardLoader(
        DataLoader(Numbers(8), batch_size=2),
        worker=0,
        workers=2,
        seed=0,
        tail="join",
        observer=Observing(follow=follow),
    )


def test_an_observer_gets_the_position_before_each_batch() -> None:
    follow = CallRecorder()
    loader = followed(follow)
    for _ in range(2):
        list(loader)
    assert follow.calls == ["begins", (0, 0), (0, 4), "begins", (1, 0), (1, 4)]
    later = followed(CallRecorder())
    later.cursor.resume({**loader.state_dict(), "epoch": 0, "consumed": 4})
    assert later.epoch == 0
    assert numbers_in(next(iter(later))) == [4, 5]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("begin", [list, lambda loader: loader.set_epoch(0)])
def test_a_script_that_restarts_at_the_first_epoch_gets_an_error(begin: Any) -> None:
    loader = followed(CallRecorder())
    loader.cursor.resume({**loader.state_dict(), "epoch": 2, "consumed": 4})
    with pytest.raises(ConfigError, match=r"resumes in epoch 2, .*range\(loader\.epoch, epochs\)"):
        begin(loader)
    assert loader.epoch == 2
    assert [numbers_in(batch) for batch in loader] == [[4, 5]]


def test_a_script_that_sets_the_epoch_resumes_in_it() -> None:
    loader = followed(CallRecorder())
    loader.cursor.resume({**loader.state_dict(), "epoch": 2, "consumed": 4})
    loader.set_epoch(2)
    assert loader.epoch == 2
    assert [numbers_in(batch) for batch in loader] == [[4, 5]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("read", [1, 0, 2])
def test_a_restarted_worker_repeats_a_left_loop_and_resumes_others(read: int) -> None:
    loader = followed(CallRecorder())
    states = []
    for _, _batch in zip(range(read), loader, strict=False):
        assert loader.cursor.is_being_read
        states.append(loader.cursor.resume_state())
    assert not loader.cursor.is_being_read
    later = followed(CallRecorder())
    later.cursor.resume(loader.cursor.resume_state(), must_be_asked=False)
    assert list(map(numbers_in, later)) == list(map(numbers_in, loader))
    assert later.epoch == loader.epoch
    for number, state in enumerate(states):
        later.cursor.resume(state, must_be_asked=False)
        rest = [[0, 1], [4, 5]][number + 1 :] or [[0, 1], [4, 5]]
        assert [numbers_in(batch) for batch in later] == rest


def test_records_after_a_position_are_known() -> None:
    loader = followed(CallRecorder())
    for batch in loader:
        assert loader.source.records_after({"consumed": loader.consumed - 4}) == numbers_in(batch)

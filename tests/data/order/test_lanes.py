# SPDX-License-Identifier: Apache-2.0
"""`Lanes`: every record once, in equal steps, and what is left after any step."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fleetlight.data.order.blocks import Blocks, Interval
from fleetlight.data.order.lanes import LanePart, Lanes

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=12)
workers = st.sampled_from([1, 2, 3, 5])
batches = st.integers(1, 9)


def pieces_of(lengths: Sequence[int]) -> list[Interval]:
    return [(sum(lengths[:n]), sum(lengths[: n + 1])) for n in range(len(lengths))]


def parts_of(
    pieces: Sequence[Interval], batch: int, count: int, tail: str = "join", skip: int = 0
) -> list[list[LanePart]]:
    """The parts of each worker."""
    found = []
    for worker in range(count):
        lanes = Lanes(pieces, batch, count, tail)
        lanes.skip(skip)
        found.append(list(lanes.parts(worker)))
    return found


def records(parts: Sequence[LanePart]) -> Counter[int]:
    return Counter(
        place for part in parts if part.mine for one in part.intervals for place in range(*one)
    )


@given(lengths, batches, workers)
def test_every_record_counts_once(sizes: list[int], batch: int, count: int) -> None:
    every = parts_of(pieces_of(sizes), batch, count)
    assert sum((records(parts) for parts in every), Counter()) == Counter(range(sum(sizes)))
    assert {len(parts) for parts in every} == {Blocks(sum(sizes), batch, count).steps()}
    for step in zip(*every, strict=True):
        assert {part.total for part in step} == {sum(part.mine for part in step)}


@given(lengths, batches, workers, st.sampled_from(["drop", "pad"]))
def test_other_tails_have_as_many_steps_as_blocks(
    sizes: list[int], batch: int, count: int, tail: str
) -> None:
    every = parts_of(pieces_of(sizes), batch, count, tail)
    assert {len(parts) for parts in every} == {Blocks(sum(sizes), batch, count, tail).steps()}
    for part in (part for parts in every for part in parts):
        assert sum(high - low for low, high in part.intervals) == part.mine == batch
    least = 1 if tail == "pad" else 0
    read = sum((records(parts) for parts in every), Counter())
    assert all(least <= read[place] for place in range(sum(sizes)))
    assert tail == "pad" or max(read.values(), default=1) == 1


@given(lengths, batches, workers, st.lists(st.tuples(batches, workers, st.integers(0, 9))))
def test_other_workers_share_what_is_left(
    sizes: list[int], batch: int, count: int, stops: list[tuple[int, int, int]]
) -> None:
    left, read = pieces_of(sizes), Counter[int]()
    for size, number, steps in [*stops, (batch, count, sum(sizes))]:
        for parts in parts_of(left, size, number):
            read += records(parts[:steps])
        lanes = Lanes(left, size, number, "join")
        lanes.skip(steps)
        left = lanes.left()
    assert read == Counter(range(sum(sizes)))
    assert left == []


@given(lengths, batches, workers, st.integers(0, 9))
def test_same_workers_continue_as_if_they_had_not_stopped(
    sizes: list[int], batch: int, count: int, steps: int
) -> None:
    whole = parts_of(pieces_of(sizes), batch, count)
    rest = parts_of(pieces_of(sizes), batch, count, skip=steps)
    assert [parts[steps:] for parts in whole] == rest


@given(lengths, batches, workers)
def test_workers_share_windows_only_at_the_end(sizes: list[int], batch: int, count: int) -> None:
    pieces = pieces_of(sizes)
    every = parts_of(pieces, batch, count)
    lanes = Lanes(pieces, batch, count, "join")
    while steps := lanes._refill():
        lanes._advance(steps)
    shared = {place for low, high in lanes.left() for place in range(low, high)}
    # each lane has less than a batch and one window
    assert len(shared) <= count * (batch + max(sizes))
    owners: dict[int, set[int]] = {}
    for worker, parts in enumerate(every):
        for place in records(parts):
            if place not in shared:
                window = next(n for n, one in enumerate(pieces) if one[0] <= place < one[1])
                owners.setdefault(window, set()).add(worker)
    assert all(len(own) == 1 for own in owners.values())

# SPDX-License-Identifier: Apache-2.0
"""Which worker gets which record: properties over all sizes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetlight.data.order.blocks import BlockPart, Blocks, padded
from fleetlight.errors import ConfigError

lengths, sizes, counts = st.integers(0, 200), st.integers(1, 9), st.integers(1, 9)


def positions(part: BlockPart) -> list[int]:
    return list(range(part.start, part.start + part.mine))


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_joined_parts_lose_and_repeat_nothing(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    seen = [p for w in range(n) for part in blocks.parts(w) for p in positions(part)]
    assert sorted(seen) == list(range(length))


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_joined_fillers_are_one_uncounted_record(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    for worker in range(n):
        for part in blocks.parts(worker):
            assert 0 <= part.start < part.stop <= length
            assert part.stop - part.start == max(1, part.mine)
            assert part.mine <= batch


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_a_joined_block_is_shared_evenly(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "join")
    for step in zip(*(blocks.parts(w) for w in range(n)), strict=True):
        mine = [part.mine for part in step]
        assert {part.total for part in step} == {sum(mine)}
        assert max(mine) - min(mine) <= 1


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_dropping_omits_the_short_block_only(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "drop")
    parts = [part for w in range(n) for part in blocks.parts(w)]
    seen = sorted(p for part in parts for p in positions(part))
    assert seen == list(range(length - length % (batch * n)))
    assert all(part.mine == batch and part.total == batch * n for part in parts)


@settings(deadline=None)
@given(lengths, sizes, counts)
def test_padding_repeats_the_first_records(length: int, batch: int, n: int) -> None:
    blocks = Blocks(length, batch, n, "pad")
    order = list(range(length))
    rounds = zip(*(blocks.parts(w) for w in range(n)), strict=True)
    seen = [r for step in rounds for part in step for r in padded(order, part)]
    assert len(seen) == -(-length // (batch * n)) * batch * n
    assert seen == [i % length for i in range(len(seen))]
    assert all(p.mine == batch and p.total == batch * n for w in range(n) for p in blocks.parts(w))


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "drop", "pad"]), st.integers(0, 200))
def test_all_workers_make_the_same_steps(
    length: int, batch: int, n: int, tail: str, consumed: int
) -> None:
    blocks = Blocks(length, batch, n, tail)
    assert {len(list(blocks.parts(w, consumed))) for w in range(n)} == {blocks.steps(consumed)}


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "pad"]))
def test_step_i_is_batch_i_of_one_process(length: int, batch: int, n: int, tail: str) -> None:
    many, one = Blocks(length, batch, n, tail), Blocks(length, batch * n, 1, tail)
    for step, whole in zip(
        zip(*(many.parts(w) for w in range(n)), strict=True), one.parts(0), strict=True
    ):
        together = [p for part in step for p in positions(part)]
        assert together == positions(whole)


@settings(deadline=None)
@given(st.data(), lengths, sizes, counts, sizes, counts)
def test_resuming_with_other_workers_loses_and_repeats_nothing(
    data: st.DataObject, length: int, batch: int, n: int, new_batch: int, m: int
) -> None:
    before, after = Blocks(length, batch, n), Blocks(length, new_batch, m)
    done = data.draw(st.integers(0, before.steps()))
    first = [p for w in range(n) for part in list(before.parts(w))[:done] for p in positions(part)]
    rest = [p for w in range(m) for part in after.parts(w, done * before.block)
            for p in positions(part)]  # fmt: skip
    assert sorted(first + rest) == list(range(length))


@settings(deadline=None)
@given(lengths, sizes, counts, st.sampled_from(["join", "drop", "pad"]))
def test_resuming_with_the_same_workers_is_exact(
    length: int, batch: int, n: int, tail: str
) -> None:
    blocks = Blocks(length, batch, n, tail)
    for worker in range(n):
        parts = list(blocks.parts(worker))
        for done in range(len(parts) + 1):
            assert list(blocks.parts(worker, done * blocks.block)) == parts[done:]


def test_a_short_block_is_split_evenly() -> None:
    blocks = Blocks(length=5, batch=2, workers=3)
    assert [blocks.part(0, w) for w in range(3)] == [
        BlockPart(0, 2, 2, 5),
        BlockPart(2, 4, 2, 5),
        BlockPart(4, 5, 1, 5),
    ]
    assert Blocks(length=1, batch=2, workers=2).part(0, 1) == BlockPart(0, 1, 0, 1)


def test_an_unknown_tail_is_refused() -> None:
    with pytest.raises(ConfigError, match="tail='cut', expected one of join, drop, pad"):
        Blocks(1, 1, 1, "cut")

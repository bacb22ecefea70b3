# SPDX-License-Identifier: Apache-2.0
"""Routes across hosts: what leaders exchange, groups of the hierarchy, and its pieces."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.collective.rounding import rounded
from tests.workers import run_workers
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.codecs.error_feedback import ErrorFeedback
from fleetlight.collective.routes import hierarchy
from fleetlight.collective.routes.exchange import (
    AllGatherExchange,
    Exchange,
    GroupRotation,
    MessagePool,
    PlainExchange,
    TwoShotExchange,
)
from fleetlight.collective.routes.hierarchy import Hierarchy
from fleetlight.collective.routes.levels import (
    described,
    group_with,
    groups_of,
    hosts_of,
    levels_of,
)
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.route_segments import (
    SegmentPlace,
    SegmentStates,
    chunk_size,
    spans_of,
)
from fleetlight.collective.stamp import GradientStamp, Position
from fleetlight.fleet.job import current
from fleetlight.roles.members import MemberHello

#: several pieces, of which the last is too small for three chunks
PIECES = (2000, 1000, 40)
PARTS = (ParameterSlice("a", 1500), ParameterSlice("b", 1540))
ROUNDS = 3


def test_returned_messages_are_reused() -> None:
    messages = MessagePool()
    one, other = messages.take(2, 8), messages.take(2, 8)
    assert one.data_ptr() != other.data_ptr()
    messages.give_back(one)
    again = messages.take(3, 4)
    assert again.data_ptr() == one.data_ptr()
    assert again.shape == (3, 4)
    assert messages.take(1, 8).data_ptr() != other.data_ptr()


def test_the_pool_uses_the_best_fit_and_frees_outgrown_memory() -> None:
    messages = MessagePool()
    small, large = messages.take(1, 8), messages.take(1, 32)
    messages.give_back(large, small)
    addresses = small.data_ptr(), large.data_ptr()
    assert messages.take(2, 4).data_ptr() == addresses[0]
    assert messages.take(2, 5).data_ptr() == addresses[1]
    # growing messages leave no unused memory
    for length in range(50, 60):
        messages.give_back(messages.take(1, length))
    assert [len(memory) for memory in messages._free] == [59]


def groups(count: int) -> list[Any]:
    group = current().group
    return group.acquire((tuple(range(group.size)),), count)  # type: ignore[union-attr]


def make_exchange(kind: str) -> tuple[Exchange, ErrorFeedback | None]:
    """An exchange of this kind; coded ones also have error feedback."""
    turns = GroupRotation(groups(2))
    if kind in ("plain", "bf16"):
        return PlainExchange(turns, torch.bfloat16 if kind == "bf16" else None), None
    compression = rounded(divisible=kind == "two shots")
    if kind == "gathered":
        return AllGatherExchange(turns, compression), compression.residuals
    return TwoShotExchange(turns, GroupRotation(groups(1)), compression), compression.residuals


def values_of(index: int, round_: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * round_ + index)
    return torch.randn(sum(PIECES), generator=generator)


def summed(kind: str) -> tuple[list[Tensor], Tensor]:
    """The totals of each round, and the final residual of this worker."""
    index, totals = current().group.index, []
    exchange, feedback = make_exchange(kind)
    for round_ in range(ROUNDS):
        bucket, place, shots = values_of(index, round_), SegmentPlace(PARTS), []
        for piece in bucket.split(list(PIECES)):
            shots.append(exchange.start(piece, place))
            place = place.after(piece.numel())
        for shot in shots:
            shot.advance()
        for shot in shots:
            shot.wait()
        totals.append(bucket)
    kept = [feedback.of(kind, PARTS) for kind in ("owed", "owed again")] if feedback else []
    residual = sum(kept, torch.zeros(sum(PIECES)))
    exchange.close()
    return totals, residual


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("kind", "workers"),
    [("two shots", 3), ("plain", 2), ("bf16", 2), ("gathered", 2), ("gathered", 3)],
    ids=["two-shots-3", "plain", "bf16", "gathered-2", "gathered-3"],
)
def test_totals_plus_residuals_are_the_sum(kind: str, workers: int) -> None:
    results = run_workers(summed, workers, kind)
    true = [torch.stack([values_of(i, r) for i in range(workers)]).sum(0) for r in range(ROUNDS)]
    for totals, _ in results:
        for total, first, right in zip(totals, results[0][0], true, strict=True):
            # bit for bit
            assert torch.equal(total, first)
            digits = 1e-6 if kind == "plain" else 0.06
            torch.testing.assert_close(total, right, rtol=0, atol=digits)
    if "bf16" not in kind:
        sent = torch.stack(results[0][0]).sum(0)
        residual = torch.stack([mine for _, mine in results]).sum(0)
        assert kind == "plain" or residual.abs().max() > 1e-4
        torch.testing.assert_close(sent + residual, torch.stack(true).sum(0), rtol=0, atol=1e-5)


# Which parameters the values of a piece belong to, and their residuals.

SHORT_PARTS = (ParameterSlice("a", 5), ParameterSlice("b", 1), ParameterSlice("c", 4))


def test_a_piece_may_cut_parameters() -> None:
    assert spans_of(SegmentPlace(SHORT_PARTS, 3), 5) == (
        ("a", 3, 0, 2),
        ("b", 0, 2, 3),
        ("c", 0, 3, 5),
    )
    assert spans_of(SegmentPlace(SHORT_PARTS, 7), 2) == (("c", 1, 0, 2),)
    assert spans_of(SegmentPlace(SHORT_PARTS, 10), 0) == ()


@given(sizes=st.lists(st.integers(1, 20), min_size=1), size=st.integers(1, 30))
def test_each_value_of_each_piece_belongs_to_one_parameter(sizes: list[int], size: int) -> None:
    parts = tuple(ParameterSlice(str(i), n) for i, n in enumerate(sizes))
    expected = [(name, k) for name, n in parts for k in range(n)]
    found, place = [], SegmentPlace(parts)
    for values in torch.arange(sum(sizes)).split(size):
        spans = spans_of(place, len(values))
        assert [s.start for s in spans] == [0, *(s.stop for s in spans[:-1])]
        found += [(s.name, s.at + k) for s in spans for k in range(s.stop - s.start)]
        place = place.after(len(values))
    assert found == expected


@given(count=st.integers(0, 5000), among=st.integers(2, 9), grain=st.sampled_from([1, 7, 256]))
def test_chunks_cover_all_values(count: int, among: int, grain: int) -> None:
    size = chunk_size(count, among, grain)
    assert size % grain == 0
    assert count <= among * size < count + among * grain


def segments(error_feedback: bool = True) -> tuple[SegmentStates, ErrorFeedback]:
    compression = rounded(error_feedback=error_feedback)
    return SegmentStates(compression), compression.residuals


def test_residuals_of_a_segment_are_views() -> None:
    states, kept = segments()
    residual = states.at(SegmentPlace(SHORT_PARTS, 3), 5).residual
    again = states.sum_segment(SegmentPlace(SHORT_PARTS, 3), 5).residual
    assert residual is not None
    assert again is not None
    residual.fill_(1.0)
    again.fill_(2.0)
    assert kept.of("owed", SHORT_PARTS).tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert kept.of("owed again", SHORT_PARTS).tolist() == [0, 0, 0, 2, 2, 2, 2, 2, 0, 0]


def test_without_error_feedback_there_is_no_residual() -> None:
    states, kept = segments(error_feedback=False)
    assert states.at(SegmentPlace(SHORT_PARTS), 10).residual is None
    assert states.sum_segment(SegmentPlace(SHORT_PARTS), 10).residual is None
    assert states.at(SegmentPlace(SHORT_PARTS), 10).velocity is None
    assert not kept.state()


def test_a_codec_with_momentum_gets_its_velocity() -> None:
    compression = rounded()
    compression.codec.has_velocity = True
    states = SegmentStates(compression)
    velocity = states.at(SegmentPlace(SHORT_PARTS, 1), 2).velocity
    assert velocity is not None
    velocity.fill_(1.0)
    assert compression.residuals.of("velocity", SHORT_PARTS).tolist() == [
        0,
        1,
        1,
        0,
        0,
        0,
        0,
        0,
        0,
        0,
    ]


# Groups of the hierarchy: every worker is in one group, and one worker per host crosses hosts.


def hellos(hosts: list[int]) -> dict[int, MemberHello]:
    """Workers on numbered hosts."""
    return {
        index: MemberHello(
            kind="worker", index=index, address=f"10.0.0.{host}", hostname=f"node{host}", pid=index
        )
        for index, host in enumerate(hosts)
    }


placed = st.lists(st.integers(0, 4), min_size=1, max_size=16)


@given(placed, st.integers(0, 6))
def test_inner_groups_partition_the_workers_of_each_host(hosts: list[int], inner: int) -> None:
    groups = groups_of(hellos(hosts), inner)
    assert sorted(index for group in groups for index in group) == list(range(len(hosts)))
    for group in groups:
        assert len({hosts[index] for index in group}) == 1
        assert group == sorted(group)
        assert inner == 0 or len(group) <= inner
    if inner == 0:
        assert groups == hosts_of(hellos(hosts))


@given(placed, st.integers(0, 6))
def test_each_level_has_one_leader_per_group(hosts: list[int], inner: int) -> None:
    left = set(range(len(hosts)))
    levels = levels_of(hellos(hosts), inner)
    for level in levels:
        members = [index for group in level for index in group]
        assert sorted(members) == sorted(left)
        left = {group[0] for group in level}
        across = [group for group in level if len({hosts[index] for index in group}) > 1]
        for group in across:
            assert len({hosts[index] for index in group}) == len(group)
    assert len(left) == 1
    if levels:
        assert len(levels[-1]) == 1
        assert all(any(len(group) > 1 for group in level) for level in levels)


def test_two_hosts_form_two_levels_in_any_worker_order() -> None:
    assert levels_of(hellos([0, 0, 1, 1])) == [[[0, 1], [2, 3]], [[0, 2]]]
    assert levels_of(hellos([0, 1, 0, 1])) == [[[0, 2], [1, 3]], [[0, 1]]]
    assert levels_of(hellos([0, 1, 1])) == [[[0], [1, 2]], [[0, 1]]]


def test_small_inner_groups_are_summed_per_host_first() -> None:
    levels = levels_of(hellos([0, 0, 0, 0, 1, 1, 1, 1]), 2)
    assert levels == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2], [4, 6]], [[0, 4]]]
    assert levels_of(hellos([0] * 5), 2) == [[[0, 1], [2, 3], [4]], [[0, 2, 4]]]


def test_flat_topologies_have_at_most_one_level() -> None:
    assert levels_of(hellos([0])) == []
    assert levels_of(hellos([0, 1, 2])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0])) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 3) == [[[0, 1, 2]]]
    assert levels_of(hellos([0, 0, 0]), 1) == [[[0, 1, 2]]]
    # a group never spans two hosts
    assert levels_of(hellos([0, 0, 1, 1]), 4) == levels_of(hellos([0, 0, 1, 1]))


def test_group_with_finds_the_group_of_a_worker() -> None:
    first, second = levels_of(hellos([0, 0, 1, 1]))
    assert [group_with(index, first) for index in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [list(group_with(index, second)) for index in range(4)] == [[0, 2], [], [0, 2], []]


def test_the_levels_are_described() -> None:
    assert described(levels_of(hellos([0, 0, 1, 1]))) == "2 groups of 2, then 2 leaders"
    uneven = described(levels_of(hellos([0, 0, 0, 1]), 2))
    assert uneven == "3 groups of 1 to 2, then 2 groups of 1 to 2, then 2 leaders"


# The hierarchical route: pieces overlap on the way up, totals come down, failures are raised.

STAMP = GradientStamp(Position(1, 7), 9)


class Sent:
    """An all-reduce of the leaders in flight."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.waited = False

    def wait(self) -> None:
        self.waited = True
        if self.tensor.dtype != torch.uint8:
            self.tensor.mul_(10)


class Leaders:
    """A process group of leaders that records its tensors."""

    def __init__(self, error: Exception | None = None) -> None:
        self.sent: list[Sent] = []
        self.has_sent = threading.Event()
        self._error = error

    def allreduce(self, tensors: list[Tensor]) -> Sent:
        (tensor,) = tensors
        if self._error is not None and tensor.dtype != torch.uint8:
            raise self._error
        self.sent.append(Sent(tensor))
        if tensor.dtype != torch.uint8:
            self.has_sent.set()
        return self.sent[-1]


class Doubling:
    """A level whose leader is this worker; the other member has equal values."""

    def __init__(self, calls: list[str], name: str) -> None:
        self._calls, self._name = calls, name
        self._sums: list[Tensor] = []

    def up(self, tensor: Tensor) -> Tensor | None:
        self._calls.append(f"{self._name} up")
        self._sums.append(tensor * 2 if tensor.dtype != torch.uint8 else tensor.clone())
        return self._sums[-1]

    def down(self, tensor: Tensor) -> None:
        self._calls.append(f"{self._name} down")
        tensor.copy_(self._sums.pop(0))

    def end_round(self) -> None:
        assert not self._sums
        self._calls.append(f"{self._name} end")

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self._calls.append(f"{self._name} closed")


def route(levels: list[Any], leaders: list[Any]) -> Hierarchy:
    return Hierarchy(1, 2, levels, PlainExchange(GroupRotation(leaders)))


def test_a_tensor_passes_all_levels_up_and_down() -> None:
    calls: list[str] = []
    tree = route([Doubling(calls, "a"), Doubling(calls, "b")], [Leaders()])
    tensor = torch.ones(2, 3)
    future = tree.start(Bucket(0, tensor), STAMP)
    tree.finish()
    assert future.done()
    assert torch.equal(tensor, torch.full((2, 3), 40.0))
    assert tree.stamps() == {0: GradientStamp(Position(0, 0), 0), 1: STAMP}
    assert tree.stamps() == {}
    # stamps take the same path
    assert calls[:-2] == ["a up", "b up"] * 2 + ["b down", "a down"] * 2
    tree.close()
    assert calls[-4:] == ["a end", "b end", "a closed", "b closed"]


def test_a_round_ends_once_after_repeated_waits() -> None:
    calls: list[str] = []
    tree = route([Doubling(calls, "a")], [Leaders()])
    tree.finish()
    tree.start(Bucket(0, torch.ones(3)), STAMP)
    tree.finish()
    tree.finish()
    tree.close()
    assert calls.count("a end") == 1


def test_pieces_are_sent_before_the_wait() -> None:
    leaders = Leaders()
    tree = route([Doubling([], "a")], [leaders])
    tree.start(Bucket(0, torch.ones(3)), STAMP)
    # backward would continue now
    assert leaders.has_sent.wait(timeout=60)
    assert not any(sent.waited for sent in leaders.sent)
    tree.finish()
    assert all(sent.waited for sent in leaders.sent)
    tree.close()


def test_large_tensors_are_cut_and_process_groups_rotate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 64)
    one, other = Leaders(), Leaders()
    tree = route([Doubling([], "a")], [one, other])
    tensors = [torch.ones(50), torch.ones(0), torch.ones(7, dtype=torch.float64)]
    futures = [tree.start(Bucket(i, tensor), STAMP) for i, tensor in enumerate(tensors)]
    tree.finish()
    assert all(future.done() for future in futures)
    assert all(bool((tensor == 20).all()) for tensor in tensors)
    sizes = [[sent.tensor.numel() for sent in leaders.sent] for leaders in (one, other)]
    # the stamps of two workers are 40 bytes
    assert sizes == [[40, 16, 2], [16, 16, 7]]
    tree.close()


class RecordingExchange:
    """An exchange that records its calls; its sums are 100 times as large."""

    def __init__(self) -> None:
        self.places: list[SegmentPlace] = []
        self.calls: list[str] = []

    def start(self, tensor: Tensor, place: SegmentPlace) -> RecordedShot:
        self.places.append(place)
        self.calls.append("start")
        return RecordedShot(self, tensor)

    def close(self) -> None:
        self.calls.append("close")


class RecordedShot:
    def __init__(self, by: RecordingExchange, tensor: Tensor) -> None:
        self._by, self._tensor = by, tensor

    def advance(self) -> None:
        self._by.calls.append("continue")

    def wait(self) -> None:
        self._by.calls.append("wait")
        self._tensor.mul_(100)


def test_codable_tensors_use_the_coded_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hierarchy, "PIECE_BYTES", 64)
    leaders, recording = Leaders(), RecordingExchange()
    tree = Hierarchy(1, 2, [Doubling([], "a")], PlainExchange(GroupRotation([leaders])), recording)  # type: ignore[list-item]
    parts = (ParameterSlice("w", 20), ParameterSlice("v", 20))
    plain, other = torch.ones(3), torch.ones(40)
    tree.start(Bucket(0, plain), STAMP)
    tree.start(Bucket(1, other, parts), STAMP)
    tree.finish()
    assert plain.tolist() == [20.0] * 3
    assert other.tolist() == [200.0] * 40
    assert recording.places == [
        SegmentPlace(parts, 0),
        SegmentPlace(parts, 16),
        SegmentPlace(parts, 32),
    ]
    # all pieces are sent before the first wait
    assert recording.calls[-3:] == ["wait"] * 3
    tree.close()
    assert recording.calls[-1] == "close"


def test_a_follower_sends_nothing_across() -> None:
    class Follower(Doubling):
        def up(self, tensor: Tensor) -> Tensor | None:
            super().up(tensor)
            return None

    tree = route([Follower([], "a")], [])
    tensor = torch.ones(3)
    tree.start(Bucket(0, tensor), STAMP)
    tree.finish()
    assert torch.equal(tensor, torch.full((3,), 2.0))
    tree.close()


def test_a_failure_on_the_way_up_is_raised_by_every_finish() -> None:
    tree = route([], [Leaders(RuntimeError("connection closed"))])
    for _ in range(2):
        future = tree.start(Bucket(0, torch.ones(3)), STAMP)
        with pytest.raises(RuntimeError, match="connection closed"):
            tree.finish()
        assert future.done()
    tree.close()


def test_closing_during_a_round_ends_the_thread() -> None:
    class Stuck(Doubling):
        def __init__(self) -> None:
            super().__init__([], "stuck")
            self.entered, self.free = threading.Event(), threading.Event()

        def up(self, tensor: Tensor) -> Tensor | None:
            self.entered.set()
            assert self.free.wait(timeout=60)
            raise RuntimeError("interrupted")

        def interrupt(self) -> None:
            self.free.set()

    stuck = Stuck()
    tree = route([stuck], [])
    tree.start(Bucket(0, torch.ones(3)), STAMP)
    assert stuck.entered.wait(timeout=60)
    tree.close()
    assert not tree._thread.is_alive()

# SPDX-License-Identifier: Apache-2.0
"""The hierarchical route: pieces overlap on the way up, totals come down, failures are raised."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetlight.collective.buckets import ParameterSlice
from fleetlight.collective.routes import hierarchy
from fleetlight.collective.routes.exchange import GroupRotation, PlainExchange
from fleetlight.collective.routes.hierarchy import Hierarchy
from fleetlight.collective.routes.route import Bucket
from fleetlight.collective.routes.route_segments import SegmentPlace
from fleetlight.collective.stamp import GradientStamp, Position

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
